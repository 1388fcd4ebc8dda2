"""The paper's two CNNs, small ones, a user's own module; and a module as one flat vector.

An agent's model is a row x_i of length d. `Network` holds the module's shape and hands out replicas: copies whose
parameters are views into one flat buffer, so that loading a row is a single copy. A replica belongs to one thread.
"""

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from pdsl.errors import PdslError
from pdsl.imports import import_object
from pdsl.randomness import Streams
from pdsl.settings import ModelSettings

MIXES_RECORDS = nn.modules.batchnorm._BatchNorm
ALIGNED = 16  # numbers: 64 bytes
EVALUATION_BLOCK = 250  # records per forward pass: few calls for two workers to take turns at, and memory stays small


class MaxPool(nn.Module):
    """2×2 max pooling, channels last: the same numbers as nn.MaxPool2d(2), many times faster on a CPU.

    Where no gradient will be asked for, nobody needs to know which of the four was the largest.
    """

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        if torch.is_grad_enabled():
            return nn.functional.max_pool2d(x, 2)
        x = x[:, :, : x.shape[2] // 2 * 2, : x.shape[3] // 2 * 2]
        rows = torch.maximum(x[:, :, ::2], x[:, :, 1::2])
        return torch.maximum(rows[:, :, :, ::2], rows[:, :, :, 1::2])


class AlignedLinear(nn.Linear):
    """A linear layer that computes with widths rounded up to a multiple of 16, by zeros.

    Where rows begin at any address, a matrix product may round a row by its place among the others; so padded, every
    record is rounded alike, in any batch.
    """

    @classmethod
    def replace(cls, layer: nn.Module) -> None:
        """Make a plain linear layer of another width an aligned one, with the same parameters."""
        if type(layer) is nn.Linear and (layer.in_features % ALIGNED or layer.out_features % ALIGNED):
            layer.__class__ = cls

    def forward(self, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled():  # evaluation on public records may round as it likes
            return super().forward(input)
        columns, rows = -self.in_features % ALIGNED, -self.out_features % ALIGNED
        weight = nn.functional.pad(self.weight, (0, columns, 0, rows))
        y = nn.functional.linear(nn.functional.pad(input, (0, columns)), weight)[..., : self.out_features]
        return y if self.bias is None else y + self.bias


class RMSNorm(nn.Module):
    """A record's features divided by the root of their mean square. Nothing to learn, and records do not mix.

    Gradients of different records then have norms alike, so that clipping takes less away.
    """

    def forward(self, x: Tensor) -> Tensor:
        mean_square = x.square().mean(dim=tuple(range(1, x.ndim)), keepdim=True)
        return x * torch.rsqrt(mean_square + 1e-5)


class Centred(RMSNorm):
    """A record's feature maps (or features), each less its own mean, over the root of the mean square of all of them.

    How bright a map is overall says little, and would be the largest part of every record's gradient.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(dim=(2, 3) if x.ndim == 4 else 1, keepdim=True))


class Flatten(nn.Module):
    """A record's numbers in the order (row, column, channel): feature maps already lie so, and nothing is moved."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.permute(0, 2, 3, 1) if x.ndim == 4 else x).flatten(1)


class Tanh(nn.Module):
    """tanh as 2/(1 + e^−2x) − 1: one rounding apart from torch.tanh, and three times faster."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(2 * x) * 2 - 1 if torch.is_grad_enabled() else (2 * x).sigmoid_().mul_(2).sub_(1)


ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": Tanh}
NORMS: dict[str, tuple[list[type[nn.Module]], list[type[nn.Module]]]] = {  # of feature maps; of the features at the end
    "none": ([], []),
    "rms": ([RMSNorm], []),
    "centred": ([Centred], [Centred]),
}


def _convolutions(shape: torch.Size, channels: tuple[int, int], kernel: int, s: ModelSettings) -> list[nn.Module]:
    """Two same-size convolutions, each followed by 2×2 max pooling.

    Pooling comes before the norm, if there is one, and before the activation: both activations are increasing, so the
    result is the same as with the paper's order, at a quarter of the cost.
    """
    act = _activation(s)
    norm, of_features = ([kind() for kind in kinds] for kinds in NORMS[s.norm])
    first, second = channels
    return [
        _unbiased(nn.Conv2d(shape[0], first, kernel, padding=kernel // 2)),
        MaxPool(),
        *norm,
        act(),
        _unbiased(nn.Conv2d(first, second, kernel, padding=kernel // 2)),
        MaxPool(),
        *norm,
        act(),
        Flatten(),
        *of_features,
    ]


def _activation(s: ModelSettings) -> type[nn.Module]:
    """tanh suffers less from noise than relu, unless feature maps are normed: then relu learns faster."""
    return ACTIVATIONS[s.activation or ("tanh" if s.norm == "none" else "relu")]


def _unbiased(layer: nn.Conv2d) -> nn.Conv2d:
    """A black image says nothing, and starts with features of zero."""
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


def _classifier(features: int, classes: int) -> nn.Linear:
    """The last layer. At zero all classes are equally likely: there is no first opinion for noisy steps to unlearn."""
    layer = nn.Linear(features, classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def mnist_cnn(shape: torch.Size, classes: int, s: ModelSettings) -> nn.Module:
    """Paper, Section VI-A: two 3×3 convolutions, each with 2×2 max pooling, then one fully connected layer."""
    channels = s.channels or (16, 32)
    features = channels[1] * (shape[1] // 4) * (shape[2] // 4)
    return nn.Sequential(*_convolutions(shape, channels, 3, s), _classifier(features, classes))


def cifar10_cnn(shape: torch.Size, classes: int, s: ModelSettings) -> nn.Module:
    """Paper, Section VI-A: two 5×5 convolutions, each with 2×2 max pooling, then two fully connected layers."""
    channels, hidden = s.channels or (32, 64), s.hidden or 128
    features = channels[1] * (shape[1] // 4) * (shape[2] // 4)
    return nn.Sequential(
        *_convolutions(shape, channels, 5, s),
        nn.Linear(features, hidden),
        _activation(s)(),
        _classifier(hidden, classes),
    )


def digits_cnn(shape: torch.Size, classes: int, s: ModelSettings) -> nn.Module:
    """The MNIST network, narrow enough for 8×8 images."""
    return mnist_cnn(shape, classes, s.model_copy(update={"channels": s.channels or (8, 16)}))


def softmax(shape: torch.Size, classes: int, s: ModelSettings) -> nn.Module:
    """Softmax regression: convex, so that theory can be checked on it."""
    return nn.Sequential(Flatten(), _classifier(shape.numel(), classes))


def mlp(shape: torch.Size, classes: int, s: ModelSettings) -> nn.Module:
    """One hidden layer."""
    hidden = s.hidden or 64
    return nn.Sequential(
        Flatten(), nn.Linear(shape.numel(), hidden), ACTIVATIONS[s.activation or "tanh"](), _classifier(hidden, classes)
    )


MODELS: dict[str, Callable[[torch.Size, int, ModelSettings], nn.Module]] = {
    "mnist-cnn": mnist_cnn,
    "cifar10-cnn": cifar10_cnn,
    "digits-cnn": digits_cnn,
    "softmax": softmax,
    "mlp": mlp,
}
DEFAULT_MODEL = {"digits": "softmax", "mnist": "mnist-cnn", "fashion-mnist": "mnist-cnn", "cifar10": "cifar10-cnn"}


def build(settings: ModelSettings, data: str, shape: torch.Size, classes: int, streams: Streams) -> nn.Module:
    """The module that `settings` names, initialised from the run's seed and from nothing else."""
    name = DEFAULT_MODEL.get(data, "mlp") if settings.name == "auto" else settings.name
    seed = int(streams.generator("init").integers(2**63))
    with torch.random.fork_rng(devices=[]):
        # a user's file may seed or draw when it is first imported
        factory = import_object(name, "model.name") if ":" in name else None
        torch.manual_seed(seed)
        if name in MODELS:
            if "cnn" in name and (len(shape) != 3 or min(shape[1:]) < 4):
                raise PdslError(
                    f"model.name={name} takes images of at least 4×4 pixels with channels, not records of shape"
                    f" {tuple(shape)}; try model.name=mlp"
                )
            return MODELS[name](shape, classes, settings)
        if factory is not None:
            return _made(name, factory)
    raise PdslError(f"model.name: no model '{name}'; choose {', '.join(MODELS)}, or give package.module:callable")


def _made(path: str, factory: object) -> nn.Module:
    if not callable(factory):
        raise PdslError(f"model.name={path}: it cannot be called; give a function or class that makes the module")
    try:
        module = factory()
    except TypeError as e:
        raise PdslError(f"model.name={path}: calling it without arguments failed: {e}") from e
    if not isinstance(module, nn.Module):
        raise PdslError(f"model.name={path} gave a {type(module).__name__}, not a torch.nn.Module")
    return module


class Replica:
    """A copy of the module for one thread. `flat` and the module's parameters are the same memory."""

    def __init__(self, module: nn.Module, device: torch.device):
        self.module = copy.deepcopy(module).to(device).eval()
        for layer in self.module.modules():
            AlignedLinear.replace(layer)
        parameters = list(self.module.parameters())
        self.flat = torch.cat([p.detach().reshape(-1) for p in parameters])
        at = 0
        for p in parameters:
            p.data = self.flat[at : at + p.numel()].view(p.shape)
            at += p.numel()
        self.parameters = parameters
        self.state = _state(self.module)

    def load(self, x: Tensor) -> nn.Module:
        """The module with parameters x [d]."""
        self.flat.copy_(x)
        return self.module


def _state(module: nn.Module) -> dict[str, object]:
    """A fingerprint of everything a module could remember between calls: buffers and attributes of all its layers."""
    own = vars(nn.Module()).keys() - {"_buffers"}
    return {
        f"{name}.{key}".lstrip("."): _fingerprint(value)
        for name, layer in module.named_modules()
        for key, value in vars(layer).items()
        if key not in own
    }


def _fingerprint(value: object, depth: int = 3) -> object:
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        return value
    if depth and isinstance(value, Mapping):
        return [(key, _fingerprint(item, depth - 1)) for key, item in value.items()]
    if depth and isinstance(value, list | tuple | set | frozenset | deque):
        return [_fingerprint(item, depth - 1) for item in value]
    return id(value)


class Network:
    """A module's architecture. Evaluates any flat vector of parameters; safe to use from several threads.

    The module runs in evaluation mode: dropout is off (the noise plays its part, and a global random generator would
    make runs unrepeatable). BatchNorm takes the statistics of the batch at hand and is refused where records must
    not mix.
    """

    def __init__(self, module: nn.Module, device: str = "cpu"):
        self.device = torch.device(device)
        if any(nn.parameter.is_lazy(t) for t in (*module.parameters(), *module.buffers())):
            raise PdslError("the model has lazy layers without parameters yet; run it once on a batch first")
        self.module = copy.deepcopy(module).eval()
        for layer in self.module.modules():
            if isinstance(layer, nn.modules.batchnorm._NormBase):
                layer.running_mean = layer.running_var = layer.num_batches_tracked = None
            if getattr(layer, "inplace", False):
                setattr(layer, "inplace", False)  # noqa: B010  gradients look at a layer's output after the next has run
        self.d = sum(p.numel() for p in self.module.parameters())
        if self.d == 0:
            raise PdslError("the model has no parameters to train")
        if any(p.dtype != torch.float32 for p in self.module.parameters()):
            raise PdslError("the model's parameters must all be float32; try model.float()")
        if not all(p.requires_grad for p in self.module.parameters()):
            raise PdslError(
                "the model has frozen parameters, which noise and gossip would change; try register_buffer for them"
            )
        self._local = threading.local()

    @property
    def mixes_records(self) -> str | None:
        """The name of a layer through which one record's values reach another's, if there is one."""
        return next((type(m).__name__ for m in self.module.modules() if isinstance(m, MIXES_RECORDS)), None)

    def start(self) -> Tensor:
        """The module's own parameters as a flat vector x⁰ [d]."""
        return torch.cat([p.detach().reshape(-1) for p in self.module.parameters()]).to(self.device)

    def elsewhere(self) -> Tensor:
        """A model x [d] unlike the first: a last layer that starts at zero hides the gradients of all before it."""
        x = self.start()
        return x + 0.05 * torch.arange(self.d, device=x.device).sin()

    def replica(self) -> Replica:
        """This thread's replica."""
        if not hasattr(self._local, "replica"):
            self._local.replica = Replica(self.module, self.device)
        return self._local.replica  # type: ignore[no-any-return]

    def check_state(self) -> None:
        """PdslError if a buffer or an attribute of this thread's replica is not as it was when the replica was made."""
        replica = self.replica()
        now = _state(replica.module)
        if now != replica.state:
            changed = next(key for key in now.keys() | replica.state.keys() if now.get(key) != replica.state.get(key))
            raise PdslError(
                f"the model keeps state between calls: '{changed.replace('._buffers', ' (a buffer)')}' changes in"
                " forward, so one record's gradient depends on others; take it out of forward"
            )

    @torch.no_grad()
    def logits(self, x: Tensor, inputs: Tensor) -> Tensor:
        """Outputs [n, classes] of the model with parameters x [d]."""
        module = self.replica().load(x)
        blocks = torch.tensor_split(inputs, -(-len(inputs) // EVALUATION_BLOCK))  # even: BatchNorm refuses one record
        return torch.cat([module(channels_last(block)) for block in blocks])

    def check(self, inputs: Tensor, classes: int) -> None:
        """Run the model once, so that a misfit is found before anything is written."""
        try:
            out = self.logits(self.start(), inputs[:2].to(self.device))
        except (RuntimeError, TypeError, ValueError, IndexError) as e:
            first_line = next(iter(str(e).splitlines()), type(e).__name__)
            raise PdslError(f"the model does not take records of shape {tuple(inputs.shape[1:])}: {first_line}") from e
        if out.ndim != 2 or out.shape[1] < classes:
            raise PdslError(
                f"the model gives outputs of shape {tuple(out.shape[1:])} for a record; {classes} classes need"
                f" a vector of at least {classes} scores"
            )

    def to_module(self, x: Tensor) -> nn.Module:
        """A stand-alone module with parameters x [d]."""
        module = copy.deepcopy(self.module)
        nn.utils.vector_to_parameters(x.detach().cpu(), module.parameters())
        return module

    def shapes(self) -> Iterator[tuple[str, torch.Size]]:
        """Names and shapes of the parameters, in the order of the flat vector."""
        return ((name, p.shape) for name, p in self.module.named_parameters())


def channels_last(inputs: Tensor) -> Tensor:
    """Images laid out as (row, column, channel), which CPU kernels like best; other records as they are.

    `to` sets the strides of a one-channel image too, which `contiguous` would pass as it is; a convolution looks at
    them to choose the layout of its answer.
    """
    if inputs.ndim != 4:
        return inputs
    return inputs.to(memory_format=torch.channels_last)


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Share of records whose largest score is their label's."""
    return (logits.argmax(-1) == labels).double().mean().item()
