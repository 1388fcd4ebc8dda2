"""A model as data: layers of fixed types, which are checked completely before any memory is allocated.

A description is a list of tables, which TOML and JSON can hold:

    [{"type": "Conv2d", "in_channels": 1, "out_channels": 8, "kernel_size": 3, "frozen": true},
     {"type": "Residual", "layers": [{"type": "ReLU"}]},
     {"type": "Flatten"},
     {"type": "Linear", "in_features": 288, "out_features": 10}]

`parse` checks types and arguments, `trace` shapes and sizes. `trace` builds layers on torch's device "meta", which has
shapes without memory. `build` is for descriptions that passed both. Nothing in a description is imported, evaluated or
executed: a type is a key of a fixed table.
"""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pdsl.models.layer_types import LAYER_TYPES
from pdsl.models.residual import Residual
from pdsl.utils.errors import PdslError

MAX_LAYERS = 1000  # containers included
MAX_DEPTH = 8  # of containers within containers
MAX_PARAMETERS = 10**8  # trained and frozen
MAX_OUTPUTS = 5 * 10**7  # numbers per record: outputs of all layers together, or the inputs of one convolution unfolded
MAX_PRODUCTS = 2 * 10**10  # multiplications per record, comparisons of pooling included
MAX_AXES = 8  # of a record
RECORDS = 2  # records of a trace
SEQUENTIAL, RESIDUAL = "Sequential", "Residual"
CONTAINERS = {SEQUENTIAL: ("layers",), RESIDUAL: ("layers", "shortcut")}
BUILDING_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, OverflowError, AssertionError)
DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)  # off in pdsl, so described as Identity


@dataclass(frozen=True)
class Layer:
    """A checked layer, or a container of layers."""

    type: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    frozen: bool = False
    layers: tuple["Layer", ...] = ()
    shortcut: tuple["Layer", ...] = ()

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        return f"{self.type}({arguments})"


Layers = tuple[Layer, ...]


@dataclass(frozen=True)
class TracedLayer:
    """A layer with the shape of its output for a record, and its numbers of parameters."""

    text: str
    depth: int
    output: tuple[int, ...]
    trained: int
    frozen: int


@dataclass
class Trace:
    """Sizes of a model for records of a shape."""

    layers: list[TracedLayer] = field(default_factory=list)
    trained: int = 0
    frozen: int = 0
    outputs: int = 0  # numbers per record
    products: int = 0  # multiplications per record

    @property
    def output(self) -> tuple[int, ...]:
        """Shape of the output for a record."""
        return self.layers[-1].output


def parse(description: object, where: str = "model.layers") -> Layers:
    """Check types, arguments and number of the layers of an untrusted description; PdslError at the first mistake."""
    layers = _parse_list(description, where, 1)
    if (count := sum(1 for _ in walk(layers))) > MAX_LAYERS:
        raise PdslError(f"{where}: {count} layers; use at most {MAX_LAYERS}")
    return layers


def _parse_list(description: object, where: str, depth: int) -> Layers:
    if depth > MAX_DEPTH:
        raise PdslError(f"{where:.200}: containers nested more than {MAX_DEPTH} deep; flatten the model")
    if not isinstance(description, list | tuple) or not 1 <= len(description) <= MAX_LAYERS:
        raise PdslError(f"{where:.200}: not a list of 1 to {MAX_LAYERS} layers; give tables with a type")
    return tuple(_parse_layer(values, f"{where}[{i}]", depth) for i, values in enumerate(description))


def _parse_layer(values: object, where: str, depth: int) -> Layer:
    name = values.get("type") if isinstance(values, Mapping) else None
    if not isinstance(values, Mapping) or not isinstance(name, str):
        raise PdslError(f"{where:.200}: not a table with a type, like {{type = 'ReLU'}}; correct it")
    if name in CONTAINERS:
        _refuse_others(values, {"type", *CONTAINERS[name]}, f"{where}: {name}")
        lists = {
            key: _parse_list(values[key], f"{where}.{key}", depth + 1) for key in CONTAINERS[name] if key in values
        }
        if "layers" not in lists:
            raise PdslError(f"{where:.200}: {name} has no layers; give a list of them")
        return Layer(name, layers=lists["layers"], shortcut=lists.get("shortcut", ()))
    if name not in LAYER_TYPES:
        raise PdslError(
            f"{where:.200}: no layer type {name!r:.60}; choose {', '.join(CONTAINERS)}, {', '.join(LAYER_TYPES)}"
        )
    kind, frozen = LAYER_TYPES[name], values.get("frozen", False)
    _refuse_others(values, {"type", "frozen", *kind.arguments}, f"{where}: {name}")
    if not isinstance(frozen, bool):
        raise PdslError(f"{where:.200}: frozen is true or false; correct it")
    if kind.must_be_frozen and not frozen:
        raise PdslError(f"{where:.200}: {name} mixes records unless it is frozen; use GroupNorm, or set frozen = true")
    if missing := [argument for argument in kind.required if argument not in values]:
        raise PdslError(f"{where:.200}: {name} needs {missing[0]}; add it")
    arguments = {argument: values[argument] for argument in kind.arguments if argument in values}
    for argument, value in arguments.items():
        if not (rule := kind.arguments[argument]).accepts(value):
            raise PdslError(f"{where:.200}: {name}.{argument} must be {rule.text}")
    return Layer(name, arguments, frozen)


def _refuse_others(values: Mapping[object, object], known: set[str], where: str) -> None:
    others = [key for key in values if key not in known]
    if others:
        raise PdslError(f"{where:.200} has no argument {others[0]!r:.60}; it has {', '.join(sorted(known))}")


def walk(layers: Layers) -> Iterator[Layer]:
    """All layers in order, containers before their layers."""
    for layer in layers:
        yield layer
        yield from walk(layer.layers)
        yield from walk(layer.shortcut)


def takes_integers(layers: Layers) -> bool:
    """Whether records are integers: an embedding comes before all other layers that compute."""
    first = next((layer.type for layer in walk(layers) if layer.type not in (SEQUENTIAL, "Flatten", "Identity")), "")
    return first == "Embedding"


def has_frozen(layers: Layers) -> bool:
    return any(layer.frozen for layer in walk(layers))


@torch.no_grad()
def trace(layers: Layers, shape: Sequence[int], where: str = "model.layers") -> Trace:
    """Shapes and sizes of a model for records of a shape; PdslError if they do not fit or exceed the limits.

    Guarantee: no tensor is allocated, whatever the arguments are.
    """
    dtype = torch.int64 if takes_integers(layers) else torch.float32
    x = torch.zeros(RECORDS, *shape, dtype=dtype, device="meta")
    found = Trace()
    _trace_list(layers, x, found, where, 0)
    return found


def _trace_list(layers: Layers, x: Tensor, found: Trace, where: str, depth: int) -> Tensor:
    for i, layer in enumerate(layers):
        x = _trace_layer(layer, x, found, f"{where}[{i}]", depth)
        if x.numel() == 0 or x.ndim < 2 or len(x) != RECORDS or x.ndim > MAX_AXES:
            raise PdslError(f"{where}[{i}]: {layer.type} has an output of shape {tuple(x.shape[1:])}; correct it")
        found.outputs += x.numel() // RECORDS
        _check_limits(found, f"{where}[{i}]")
    return x


def _trace_layer(layer: Layer, x: Tensor, found: Trace, where: str, depth: int) -> Tensor:
    if layer.type == SEQUENTIAL:
        return _trace_list(layer.layers, x, found, f"{where}.layers", depth)
    if layer.type == RESIDUAL:
        return _trace_residual(layer, x, found, where, depth)
    _check_input(layer, x, where)
    try:
        module = _build_layer(layer, "meta")
        parameters = sum(p.numel() for p in module.parameters())
        trained, frozen = (0, parameters) if layer.frozen else (parameters, 0)
        found.trained, found.frozen = found.trained + trained, found.frozen + frozen
        _check_limits(found, where)
        out: Tensor = module(x)
    except BUILDING_ERRORS as e:
        reason = next(iter(str(e).splitlines()), type(e).__name__)
        raise PdslError(
            f"{where}: {layer} fails for records of shape {tuple(x.shape[1:])}: {reason:.200}; correct it"
        ) from e
    if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
        per_output = module.weight[0].numel()
        found.products += out.numel() // RECORDS * per_output
        unfolded = 0 if isinstance(module, nn.Linear) else math.prod(out.shape[2:]) * per_output * module.groups
        if unfolded > MAX_OUTPUTS:
            raise PdslError(f"{where}: {layer} reads {unfolded:,} numbers per record, and {MAX_OUTPUTS:,} are allowed")
    elif "kernel_size" in layer.arguments:  # pooling compares or adds
        sizes, axes = layer.arguments["kernel_size"], x.ndim - 2
        found.products += out.numel() // RECORDS * (math.prod(sizes) if isinstance(sizes, list) else sizes**axes)
    found.layers.append(TracedLayer(str(layer), depth, tuple(out.shape[1:]), trained, frozen))
    return out


def _trace_residual(layer: Layer, x: Tensor, found: Trace, where: str, depth: int) -> Tensor:
    found.layers.append(TracedLayer("Residual", depth, tuple(x.shape[1:]), 0, 0))
    out = _trace_list(layer.layers, x, found, f"{where}.layers", depth + 1)
    if layer.shortcut:
        found.layers.append(TracedLayer("Residual, shortcut", depth, tuple(x.shape[1:]), 0, 0))
        x = _trace_list(layer.shortcut, x, found, f"{where}.shortcut", depth + 1)
    if out.shape != x.shape or out.dtype != x.dtype:
        shapes = f"{tuple(out.shape[1:])} and {tuple(x.shape[1:])}"
        raise PdslError(f"{where}: Residual adds outputs of shapes {shapes}; make them equal, or add a shortcut")
    return out


def _check_input(layer: Layer, x: Tensor, where: str) -> None:
    """Raise PdslError unless the layer would treat the first axis as records, which torch does not check."""
    axes = LAYER_TYPES[layer.type].axes
    if axes and x.ndim not in axes:
        expected = " or ".join(str(n - 1) for n in axes)
        raise PdslError(
            f"{where}: {layer.type} takes records with {expected} axes, not {tuple(x.shape[1:])}; correct it"
        )
    if layer.type == "LayerNorm" and len(layer.arguments["normalized_shape"]) >= x.ndim:
        raise PdslError(f"{where}: LayerNorm would normalise over records; shorten normalized_shape")
    if layer.arguments.get("num_features", x.shape[1]) != x.shape[1]:
        raise PdslError(f"{where}: {layer} gets {x.shape[1]} channels; correct num_features")
    integers = not x.is_floating_point()
    if layer.type not in ("Flatten", "Identity") and integers != (layer.type == "Embedding"):
        raise PdslError(
            f"{where}: {layer.type} cannot take {'integers' if integers else 'floats'}; an Embedding is first"
        )


def _check_limits(found: Trace, where: str) -> None:
    for name, value, limit in (
        ("parameters", found.trained + found.frozen, MAX_PARAMETERS),
        ("numbers per record in the outputs of its layers", found.outputs, MAX_OUTPUTS),
        ("multiplications per record", found.products, MAX_PRODUCTS),
    ):
        if value > limit:
            raise PdslError(f"{where}: the model has {value:,} {name}, and {limit:,} are allowed; make it smaller")


def build(layers: Layers, device: str = "cpu") -> nn.Sequential:
    """The module of layers that passed `trace`, initialised from torch's global generator.

    On the device "meta" nothing is allocated, so there the layers need not have passed.
    """
    return nn.Sequential(*(_build(layer, device) for layer in layers))


def _build(layer: Layer, device: str) -> nn.Module:
    if layer.type == SEQUENTIAL:
        return build(layer.layers, device)
    if layer.type == RESIDUAL:
        shortcut = build(layer.shortcut, device) if layer.shortcut else None
        return Residual(*build(layer.layers, device), shortcut=shortcut)
    return _build_layer(layer, device)


def _build_layer(layer: Layer, device: str) -> nn.Module:
    with torch.device(device):
        arguments = {name: _plain(value) for name, value in layer.arguments.items()}
        module = LAYER_TYPES[layer.type].kind(**arguments).eval()
    return module.requires_grad_(not layer.frozen)


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def describe(module: nn.Module, where: str = "model") -> list[dict[str, Any]]:
    """Description of a user's torch.nn.Sequential; PdslError if a layer is not of a known type.

    The description has no weights. Dropout becomes Identity, because pdsl runs models in evaluation mode.
    """
    if type(module) is not nn.Sequential:
        raise PdslError(f"{where}: a {type(module).__name__} cannot be described as layers; give a torch.nn.Sequential")
    ids = [id(p) for _, p in module.named_parameters(remove_duplicate=False)]
    if len(set(ids)) < len(ids):
        raise PdslError(f"{where}: two layers share a weight; give each its own")
    return [_describe(layer, f"{where}[{i}]") for i, layer in enumerate(module)]


def _describe(layer: nn.Module, where: str) -> dict[str, Any]:
    if layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer):
        raise PdslError(f"{where}: {type(layer).__name__} has a hook or a forward of its own; remove it")
    if type(layer) is nn.Sequential:
        return {"type": SEQUENTIAL, "layers": [_describe(inner, f"{where}[{i}]") for i, inner in enumerate(layer)]}
    if type(layer) is Residual:
        lists: dict[str, nn.Sequential] = {"layers": layer.body, "shortcut": layer.shortcut}
        named = {
            name: [_describe(m, f"{where}.{name}[{i}]") for i, m in enumerate(rows)] for name, rows in lists.items()
        }
        return {"type": RESIDUAL, **{name: rows for name, rows in named.items() if rows or name == "layers"}}
    if type(layer) in DROPOUT:
        return {"type": "Identity"}
    name = type(layer).__name__
    kind = LAYER_TYPES.get(name)
    if kind is None or kind.kind is not type(layer):
        raise PdslError(
            f"{where}: a layer of type {name} cannot be described; use layers of torch"
            f" ({', '.join(LAYER_TYPES)}) and pdsl.Residual, or name installed code, package.module:callable"
        )
    arguments = {argument: _argument(layer, argument) for argument in kind.arguments}
    defaults = {n: p.default for n, p in inspect.signature(kind.kind).parameters.items()}
    kept = {n: v for n, v in arguments.items() if v is not None and (n in kind.required or v != defaults[n])}
    trained = {p.requires_grad for p in layer.parameters()}
    if len(trained) == 2:
        raise PdslError(f"{where}: some parameters of {name} are frozen and others not; freeze all or none")
    described = {"type": name, **kept, **({"frozen": True} if trained == {False} else {})}
    again = _build_layer(_parse_layer(described, where, 1), "meta")
    if _text(again) != _text(layer):
        raise PdslError(f"{where}: {layer} has arguments that a description cannot hold; {again} would be built")
    return described


def _argument(layer: nn.Module, name: str) -> object:
    """Value of a constructor's argument, as plain data. Equal numbers for all axes become one."""
    value = getattr(layer, name, None)
    if name == "bias":
        return value is not None
    if isinstance(value, tuple | list):
        value = list(value)
        return value[0] if len(set(value)) == 1 and name != "normalized_shape" else value
    return value


def _text(layer: nn.Module) -> str:
    """The layer as torch prints it, without `inplace`, which has no effect on results."""
    return repr(layer).replace(", inplace=True", "").replace("inplace=True", "")
