"""Models as data: descriptions of layers, their checks and limits, and hostile descriptions."""

import json
import random
import resource
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import pdsl
from pdsl.gradients.vetted import is_vetted
from pdsl.models import architecture
from pdsl.models.architecture import MAX_DEPTH, MAX_LAYERS, MAX_PARAMETERS, build, describe, parse, trace
from pdsl.models.layer_types import LAYER_TYPES
from pdsl.models.residual import Residual
from pdsl.models.weights import pack_weights
from pdsl.utils.errors import PdslError
from tests.helpers.refusals import refused

BACKBONE = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, bias=False), nn.BatchNorm2d(4), nn.ReLU()).requires_grad_(False)
EXAMPLES: list[tuple[nn.Sequential, tuple[int, ...]]] = [
    (nn.Sequential(nn.Flatten(), nn.Linear(12, 5, bias=False), nn.Tanh(), nn.Dropout(), nn.Linear(5, 3)), (3, 4)),
    (
        nn.Sequential(
            nn.Conv2d(1, 4, (3, 1), padding="same"),
            nn.GroupNorm(2, 4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2, ceil_mode=True),
            Residual(nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.GELU("tanh")),
            Residual(nn.AvgPool2d(2), nn.Conv2d(4, 6, 1), shortcut=nn.Conv2d(4, 6, 2, stride=2)),
            nn.AdaptiveAvgPool2d((1, 2)),
            nn.Flatten(),
            nn.Linear(12, 10),
        ),
        (1, 8, 8),
    ),
    (nn.Sequential(BACKBONE, nn.Flatten(), nn.Linear(36, 2)), (1, 8, 8)),
    (
        nn.Sequential(nn.Conv1d(3, 4, 3, dilation=2), nn.InstanceNorm1d(4, affine=True), nn.ELU(2.0), nn.Flatten()),
        (3, 9),
    ),
    (
        nn.Sequential(nn.Embedding(20, 6, padding_idx=0), nn.LayerNorm(6, bias=False), nn.Flatten(), nn.Linear(30, 2)),
        (5,),
    ),
]


@pytest.mark.parametrize(("module", "shape"), EXAMPLES)
def test_a_described_module_is_built_with_the_same_function_and_frozen_parts(
    module: nn.Sequential, shape: tuple[int, ...]
) -> None:
    layers = parse(json.loads(json.dumps(describe(module))))
    traced = trace(layers, shape)
    again = build(layers)
    again.load_state_dict(dict(zip(again.state_dict(), module.state_dict().values(), strict=True)))
    integers = architecture.takes_integers(layers)
    x = torch.randint(0, 20, (3, *shape)) if integers else torch.randn(3, *shape)
    with torch.no_grad():
        expected = module.eval()(x)
        assert torch.equal(again.eval()(x), expected)
    assert traced.output == tuple(expected.shape[1:])
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in module.parameters()]
    assert traced.trained == sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert traced.frozen == sum(p.numel() for p in module.parameters() if not p.requires_grad)


def test_a_simulation_trains_the_head_of_frozen_layers_from_a_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = nn.Linear(64, 16).requires_grad_(False)
    module = nn.Sequential(nn.Flatten(), first, nn.Tanh(), nn.Linear(16, 10))
    path = tmp_path / "weights.safetensors"
    path.write_bytes(pack_weights(module))
    settings: dict[str, Any] = {"layers": describe(module), "weights_path": str(path)}
    result = pdsl.train(settings, "digits", graph="full", rounds=2, baselines="none", out=tmp_path / "run")
    same = pdsl.train(module, "digits", graph="full", rounds=2, baselines="none")
    assert result.summary["models_sha256"] == same.summary["models_sha256"]
    loaded = pdsl.load(tmp_path / "run").model
    assert isinstance(loaded, nn.Sequential) and torch.equal(loaded[1].weight, first.weight)
    with refused("set model.weights_path"):
        pdsl.train({"layers": describe(module)}, "digits", rounds=1)
    with refused("SHA-256 differs"):
        pdsl.train({**settings, "weights_sha256": "0" * 64}, "digits", rounds=1)
    path.write_bytes(pack_weights(nn.Sequential(nn.Linear(2, 2))))
    with refused("is not in the model"):
        pdsl.train(settings, "digits", rounds=1)


def test_every_layer_type_treats_records_alone() -> None:
    """All types are vetted, or frozen normalisation by stored statistics."""
    values = {"kernel_size": 2, "output_size": 2, "normalized_shape": [2]}
    for name, kind in LAYER_TYPES.items():
        arguments = {argument: values.get(argument, 2) for argument in kind.required}
        frozen = {"frozen": True} if kind.must_be_frozen else {}
        module = build(parse([{"type": name, **arguments, **frozen}]))
        assert is_vetted(module) or kind.must_be_frozen, name
    assert is_vetted(nn.Sequential(Residual(nn.ReLU())))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Linear(2, 2), "give a torch.nn.Sequential"),
        (nn.Sequential(nn.LSTM(3, 3)), "type LSTM cannot be described"),
        (nn.Sequential(nn.BatchNorm1d(3)), "mixes records unless it is frozen"),
        (nn.Sequential(nn.Embedding(5, 3, max_norm=1.0)), "arguments that a description cannot hold"),
        (nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect")), "arguments that a description"),
        (nn.Sequential(nn.Flatten(2)), "arguments that a description cannot hold"),
        (nn.Sequential(*[nn.Linear(2, 2)] * 2), "share a weight"),
    ],
)
def test_modules_that_cannot_be_described_are_refused(module: nn.Module, reason: str) -> None:
    with refused(reason):
        describe(module)


def test_a_partly_frozen_layer_and_a_hook_are_refused() -> None:
    layer = nn.Linear(2, 2)
    layer.weight.requires_grad_(False)
    with refused("freeze all or none"):
        describe(nn.Sequential(layer))
    hooked = nn.Sequential(nn.Linear(2, 2))
    hooked[0].register_forward_hook(lambda *_: None)
    with refused("hook"):
        describe(hooked)


def _linear(**changes: object) -> dict[str, object]:
    return {"type": "Linear", "in_features": 4, "out_features": 4, **changes}


@pytest.mark.parametrize(
    ("description", "reason"),
    [
        ([], "not a list of 1 to"),
        ("os.system('touch x')", "not a list"),
        ([{"type": "os.system"}], "no layer type"),
        ([{"type": "__import__"}], "no layer type"),
        ([{"type": "Linear"}], "needs in_features"),
        ([_linear(device="cuda")], "no argument 'device'"),
        ([_linear(in_features=True)], "whole number"),
        ([_linear(in_features=4.0)], "whole number"),
        ([_linear(out_features=10**18)], "whole number"),
        ([_linear(in_features="4")], "whole number"),
        ([_linear(frozen=1)], "true or false"),
        ([{"type": "LeakyReLU", "negative_slope": float("nan")}], "a number from"),
        ([{"type": "BatchNorm1d", "num_features": 4}], "mixes records"),
        ([{"type": "Residual", "layers": [_linear(out_features=5)]}], "make them equal"),
        ([{"type": "Residual"}], "has no layers"),
        ([{"type": "LayerNorm", "normalized_shape": [2, 4]}], "over records"),
        ([{"type": "Conv1d", "in_channels": 2, "out_channels": 2, "kernel_size": 1}], "records with 2 axes"),
        ([{"type": "Embedding", "num_embeddings": 3, "embedding_dim": 2}, {"type": "Flatten"}, _linear()], "fails for"),
        ([_linear(), {"type": "Embedding", "num_embeddings": 3, "embedding_dim": 2}], "cannot take floats"),
        ([_linear(out_features=10**7), {"type": "Linear", "in_features": 10**7, "out_features": 10**7}], "are allowed"),
        ([_linear()] * (MAX_LAYERS + 1), "not a list of 1 to"),
        ([{"type": "Sequential", "layers": [_linear()] * 600}] * 2, "layers; use at most"),
    ],
)
def test_wrong_descriptions_are_refused_in_one_line(description: object, reason: str) -> None:
    with refused(reason):
        trace(parse(description), (4,))


def test_deep_descriptions_are_refused() -> None:
    description: list[Any] = [_linear()]
    for _ in range(5000):
        description = [{"type": "Sequential", "layers": description}]
    with refused(f"more than {MAX_DEPTH} deep"):
        parse(description)


@pytest.mark.parametrize(
    "layer",
    [
        {"type": "AdaptiveAvgPool2d", "output_size": 65_536},
        {"type": "Conv2d", "in_channels": 1, "out_channels": 65_536, "kernel_size": 1, "padding": 255},
        {"type": "Conv2d", "in_channels": 1, "out_channels": 1, "kernel_size": 255, "padding": 255},
        {"type": "MaxPool2d", "kernel_size": 255, "padding": 127, "stride": 1},
    ],
)
def test_a_layer_that_would_need_much_memory_is_refused_without_it(layer: dict[str, object]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with refused("are allowed"):
        trace(parse([layer] * 12), (1, 512, 512))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


class Mutator:
    """Random valid descriptions with random faults."""

    def __init__(self, seed: int):
        self.pick = random.Random(seed)
        self.examples = [describe(module) for module, _ in EXAMPLES]

    def value(self, depth: int = 0) -> object:
        leaves = [0, 1, 2, 3, -1, 255, 65_536, 10**7, 10**30, 0.5, float("inf"), float("nan"), True, None, "", "same"]
        leaves += ["Linear", "Residual", "os:system", "__class__", "x" * 500, b"", {}, [], [1, 2], [10**9] * 3]
        options = [lambda: self.pick.choice(leaves), lambda: self.pick.randint(-5, 70_000)]
        if depth < 3:
            options += [
                lambda: [self.value(depth + 1) for _ in range(self.pick.randint(0, 4))],
                lambda: {self.key(): self.value(depth + 1) for _ in range(self.pick.randint(0, 4))},
                self.layer,
            ]
        return self.pick.choice(options)()

    def key(self) -> str:
        known = [argument for kind in LAYER_TYPES.values() for argument in kind.arguments]
        return self.pick.choice(["type", "layers", "shortcut", "frozen", "__init__", "forward", "device", *known])

    def layer(self) -> dict[str, object]:
        name = self.pick.choice([*LAYER_TYPES, "Residual", "Sequential"])
        kind = LAYER_TYPES.get(name)
        sizes = [1, 2, 4, 8, 255, 65_536, 10**7]
        arguments = {
            a: self.pick.choice(sizes) for a in ([] if kind is None else kind.arguments) if self.pick.random() < 0.7
        }
        return {
            "type": name,
            "frozen": self.pick.random() < 0.3,
            **arguments,
            **({} if kind else {"layers": [_linear()]}),
        }

    def description(self) -> object:
        layers = json.loads(json.dumps(self.pick.choice(self.examples)))
        for _ in range(self.pick.randint(1, 4)):
            place = self.pick.randrange(len(layers))
            change = self.pick.randrange(5)
            if change == 0:
                layers.insert(place, self.layer())
            elif change == 1 and isinstance(layers[place], dict):
                layers[place][self.key()] = self.value()
            elif change == 2 and isinstance(layers[place], dict) and layers[place]:
                layers[place][self.pick.choice(list(layers[place]))] = self.value()
            elif change == 3:
                layers[place] = self.value()
            else:
                layers = [{"type": self.pick.choice(["Residual", "Sequential"]), "layers": layers}, self.layer()]
        return layers


@pytest.mark.parametrize("seed", range(3))
def test_fuzz_hostile_descriptions_allocate_nothing_and_are_refused_in_one_line(seed: int) -> None:
    """2,000 descriptions: each is refused, or is a model within the limits. Only meta tensors are created."""
    mutator, accepted, slowest = Mutator(seed), 0, 0.0
    empty, devices = torch.empty, set()

    def recording_empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        devices.add(made.device.type)
        return made

    with patch.object(torch, "empty", recording_empty):
        for _ in range(2000):
            description, shape = mutator.description(), mutator.pick.choice([(1, 8, 8), (3, 4), (5,), (3, 9), (4,)])
            start = time.monotonic()
            try:
                traced = trace(parse(description), shape)
            except PdslError as e:
                assert "\n" not in str(e) and len(str(e)) < 2000
            else:
                accepted += 1
                assert traced.trained + traced.frozen <= MAX_PARAMETERS
            slowest = max(slowest, time.monotonic() - start)
    assert devices <= {"meta"} and 0 < accepted < 1900 and slowest < 2.0
