"""Fixed feature maps: fitted on the public set, applied to each record independently."""

import copy
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor, nn

from pdsl.models.network import main_output
from pdsl.public.augment import augment
from pdsl.public.cache import cached, is_off
from pdsl.public.patches import PatchFeatures, uses_mirror
from pdsl.public.projection import Projection, UnitNorm
from pdsl.public.scattering import Scattering
from pdsl.settings import PublicSettings
from pdsl.utils.errors import PdslError
from pdsl.utils.files import PUBLIC
from pdsl.utils.imports import import_object
from pdsl.utils.inputs import Inputs, call, describe_shape, tensors_digest
from pdsl.utils.progress import report_progress
from pdsl.utils.random import Streams
from pdsl.utils.versions import versions
from pdsl.utils.workers import Workers

BUILT_IN: dict[str, type[PatchFeatures | Scattering]] = {"patches": PatchFeatures, "scattering": Scattering}
MODEL = "model"  # features are the outputs of the frozen first layers of the user's model
BLOCK = 32  # records that are projected at once, always: so a record's bits do not depend on the number of records
MAX_VARIANTS, ENOUGH = 20, 4000  # variants of each public image, and images after which there are no further ones
FORMAT = 3  # of the feature maps: part of the key in the cache
CHECKED_PLACES = (0, 1, BLOCK // 2, BLOCK - 1)  # of a block, at which the features of a record are compared
USER_ERRORS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError)


class Own(nn.Module):
    """A user's function or module as a feature map."""

    def __init__(self, function: Callable[..., object]):
        super().__init__()
        self.function = function.eval() if isinstance(function, nn.Module) else function

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        return main_output(self.function(*inputs, **named)).flatten(1)


class Chain(nn.Sequential):
    """Layers in a row; the first may take several inputs."""

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        first, *rest = self
        x: Tensor = first(*inputs, **named)
        for layer in rest:
            x = layer(x)
        return x


_recent: deque[tuple[Inputs, str, Tensor]] = deque(maxlen=3)  # inputs, digest of the map, features: of one run


@dataclass(frozen=True, eq=False)
class FeatureMap:
    """A fitted feature map: an extractor and a projection to unit vectors."""

    module: nn.Module = field(repr=False)
    size: int  # features of a record
    digest: str
    variants: tuple[Tensor, Tensor] | None = field(default=None, repr=False)  # features of public variants; records
    path: Path | None = None  # its file in the cache

    def join(self, head: nn.Module) -> Chain:
        """The feature map followed by a model of its features."""
        return join(copy.deepcopy(self.module).cpu(), head)

    def __call__(self, inputs: Inputs, workers: Workers, device: str = "cpu", text: str = "features") -> Tensor:
        """Features [n, size] of records."""
        return extract(self.module, inputs, workers, device, text)

    def cached(self, inputs: Inputs, workers: Workers, device: str, text: str) -> Tensor:
        """Features [n, size] of records, from the cache if they were computed before."""
        for known, digest, features in tuple(_recent):  # runs of a sweep in one process share their training data
            if known is inputs and digest == self.digest and not is_off():
                return features
        key = f"{self.digest} {tensors_digest([inputs])} {device}"
        found = cached("features", key, lambda: {"features": self(inputs, workers, device, text)})[0]["features"]
        _recent.append((inputs, self.digest, found))
        return found


def join(features: nn.Module, head: nn.Module) -> Chain:
    """A feature map followed by a model of its features."""
    return Chain(OrderedDict(features=features, head=head))


def build_map(
    settings: PublicSettings, shape: torch.Size, components: int, backbone: nn.Module | None = None, size: int = 0
) -> Chain:
    """The layers of a feature map, not fitted. `size`: features of a user's own extractor; `components`: 0 for all."""
    extractor: PatchFeatures | Scattering | Own
    if (kind := BUILT_IN.get(settings.features)) is not None:
        extractor = kind(shape, settings)
        size = extractor.features
    else:
        extractor = Own(backbone if backbone is not None else _import(settings.features))
    last = Projection(size, components) if components else UnitNorm()
    return Chain(extractor, last)


def fit_features(
    settings: PublicSettings,
    public: Inputs,
    workers: Workers,
    device: str = "cpu",
    backbone: nn.Module | None = None,
    code: str = "",
) -> FeatureMap:
    """Fit the feature map of the settings to the inputs of the public set, which alone determine it.

    `code`: digest of the user's own extractor, which is part of the key in the cache. Its outputs for some public
    records are too, because they tell more than the code: it may read its weights from a file.
    """
    if settings.features not in BUILT_IN:
        own = build_map(settings, _shape(public), 0, backbone)[0]
        check_independence(own, public)
        code += tensors_digest([extract(own, public[:BLOCK], workers, device, "features")])
    elif isinstance(public, Tensor) and not public.is_floating_point():
        raise PdslError(f"public.features={settings.features} takes floats, not {public.dtype}; give x.float() / 255")
    relevant = settings.model_dump(mode="json", exclude={"start"})
    key = f"{FORMAT} {relevant} {tensors_digest([public])} {code} {device} {versions()['torch']}"

    def compute() -> dict[str, Tensor]:
        layers, raw, record = _fit(settings, public, workers, device, backbone)
        features = _project(layers[1], raw)
        stored = {f"map.{name}": tensor.cpu() for name, tensor in layers.state_dict().items()}
        return stored | {"variants": features, "record": record}

    found, _ = cached("map", key, compute)
    weights = {name.removeprefix("map."): t for name, t in found.items() if name.startswith("map.")}
    module = load_map(settings, public, weights, backbone)
    variants = found["variants"], found["record"]
    digest = sha256(
        f"{tensors_digest([weights[name] for name in sorted(weights)])} {relevant} {code}".encode()
    ).hexdigest()
    _, path = cached("weights", digest, lambda: weights, PUBLIC)  # a run directory has a link to it
    return FeatureMap(module, variants[0].shape[1], digest, variants, path)


def load_map(
    settings: PublicSettings, shape_of: Inputs, weights: dict[str, Tensor], backbone: nn.Module | None = None
) -> Chain:
    """A fitted feature map from its tensors."""
    size, components = weights["1.matrix"].shape if "1.matrix" in weights else (0, 0)
    layers = build_map(settings, _shape(shape_of), components, backbone, size)
    try:
        layers.load_state_dict(weights)
    except RuntimeError as e:
        raise PdslError(
            "the stored feature map does not fit its settings or the given model; pass the run's own"
        ) from e
    return layers.eval().requires_grad_(False)


def _fit(
    settings: PublicSettings, public: Inputs, workers: Workers, device: str, backbone: nn.Module | None
) -> tuple[Chain, Tensor, Tensor]:
    """Layers, and raw features of the public records and their variants with the record of each."""
    generator = Streams(0).generator("public/features")
    draft = build_map(settings, _shape(public), 0, backbone)
    extractor = draft[0]
    images = [public]
    if settings.features in BUILT_IN:
        assert isinstance(public, Tensor)
        if isinstance(extractor, PatchFeatures):
            extractor.fit(public, generator)
        mirror = uses_mirror(settings, public.shape[1:])
        images += [augment(public, mirror, generator) for _ in range(count_variants(len(public)))]
    raw = torch.cat([extract(extractor, x, workers, device, "features of the public set") for x in images])
    if not bool(torch.isfinite(raw).all()):
        raise PdslError("public.features: some features of public records are infinite or undefined; mend the function")
    size = raw.shape[1]
    components = min(settings.components, size, len(raw) - 1)
    layers = build_map(settings, _shape(public), components, backbone, size)
    layers[0] = extractor
    if isinstance(projection := layers[1], Projection):
        report_progress("principal components of the public set", 0, 1)
        projection.fit(raw, settings.whitening)
        report_progress("principal components of the public set", 1, 1)
    return layers, raw, torch.arange(len(public)).repeat(len(images))


def count_features(settings: PublicSettings, shape: torch.Size, records: int) -> int:
    """Features of a record by a built-in map that is fitted on so many public images."""
    size = BUILT_IN[settings.features](shape, settings).features
    rows = records * (1 + count_variants(records))
    return min(settings.components or size, size, rows - 1) if settings.components else size


def count_own_features(settings: PublicSettings, inputs: Inputs, records: int, backbone: nn.Module | None) -> int:
    """Features of a record by a user's extractor whose projection is fitted on so many public records."""
    extractor = build_map(settings, _shape(inputs), 0, backbone)[0]
    size = _features_of(extractor, inputs, torch.arange(len(inputs))).shape[1]
    return min(settings.components, size, records - 1) if settings.components else size


def count_variants(records: int) -> int:
    """Variants of each public image: the fewer images, the more."""
    return min(MAX_VARIANTS, ENOUGH // records)


@torch.no_grad()
def extract(module: nn.Module, inputs: Inputs, workers: Workers, device: str, text: str) -> Tensor:
    """Outputs [n, size] of a module in blocks of BLOCK records, the last one filled up."""
    n, module = len(inputs), module.to(device).eval()
    starts = range(0, n, BLOCK)
    done = [0]

    def one(start: int) -> Tensor:
        rows = torch.arange(start, start + BLOCK).clamp(max=n - 1)
        out = main_output(call(module, inputs[rows].to(device)))[: n - start]
        done[0] += 1
        if done[0] % 16 == 0 or done[0] == len(starts):
            report_progress(text, done[0], len(starts))
        return out.float().cpu()

    return torch.cat(workers.map(one, starts))


@torch.no_grad()
def _project(layer: nn.Module, raw: Tensor) -> Tensor:
    parts = torch.split(raw, BLOCK)
    return torch.cat([layer(nn.functional.pad(part, (0, 0, 0, BLOCK - len(part))))[: len(part)] for part in parts])


@torch.no_grad()
def check_independence(extractor: nn.Module, public: Inputs) -> None:
    """Raise PdslError unless the features of a record are the same whatever other records are in its block.

    Records at several places keep theirs, while all others are exchanged. A record that moves to another place has
    the same features, up to rounding.
    """
    rows = torch.arange(BLOCK) % len(public)
    others = (rows + 1) % len(public)
    features = _features_of(extractor, public, rows)
    for place in CHECKED_PLACES:
        mixed = torch.where(torch.arange(BLOCK) == place, rows, others)
        if not torch.equal(_features_of(extractor, public, mixed)[place], features[place]):
            raise PdslError(
                "public.features: the features of a record depend on the other records of its block, or are random;"
                " make the function deterministic, a record at a time"
            )
    moved = _features_of(extractor, public, rows.roll(1))
    if not torch.allclose(moved[1:], features[:-1], rtol=1e-3, atol=1e-3 * float(features.abs().max())):
        raise PdslError("public.features: the features of a record depend on its place in a block; make them its own")


def _features_of(extractor: nn.Module, public: Inputs, rows: Tensor) -> Tensor:
    """Outputs of a user's extractor for some public records; PdslError if they are not finite features of each."""
    try:
        found = main_output(call(extractor, public[rows]))
    except USER_ERRORS as e:
        line = next(iter(str(e).splitlines()), type(e).__name__)
        raise PdslError(f"public.features: it does not accept records of shape {describe_shape(public)}: {line}") from e
    if len(found) != len(rows):
        raise PdslError(f"public.features: it returns {len(found)} rows for {len(rows)} records; return one for each")
    if not bool(torch.isfinite(found).all()):
        raise PdslError("public.features: some features of public records are infinite or undefined; mend the function")
    return found


def split_frozen(model: nn.Module | None) -> tuple[nn.Module, nn.Module]:
    """A copy of the frozen first layers of a user's model, and the rest."""
    layers = list(model.children()) if isinstance(model, nn.Sequential) else []
    frozen = 0
    while frozen < len(layers) and not any(p.requires_grad for p in layers[frozen].parameters()):
        frozen += 1
    if not any(True for layer in layers[:frozen] for _ in layer.parameters()):
        raise PdslError(
            "public.features=model: give a torch.nn.Sequential whose first layers are frozen (requires_grad=False)"
        )
    return copy.deepcopy(nn.Sequential(*layers[:frozen])), nn.Sequential(*layers[frozen:])


def _import(path: str) -> Callable[..., object]:
    if ":" not in path:
        raise PdslError(
            f"public.features={path}: choose none, {', '.join(BUILT_IN)}, {MODEL}, or give package.module:callable"
        )
    found = import_object(path, "public.features")
    if not callable(found):
        raise PdslError(f"public.features={path}: it is not callable; give a function of a block of records")
    return found


def _shape(inputs: Inputs) -> torch.Size:
    return inputs.shape[1:] if isinstance(inputs, Tensor) else torch.Size()
