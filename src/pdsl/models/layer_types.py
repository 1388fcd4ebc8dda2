"""The types of layers that a model as data may have, and the values that their arguments may have.

Each type is a layer of torch that treats every record of a batch alone, by its documented definition. Arguments are
whole numbers, numbers, flags and words within fixed limits. Arguments that are not listed keep torch's defaults.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

MAX_WIDTH = 10_000_000  # features of a linear layer, rows of an embedding
MAX_CHANNELS = 65_536
MAX_KERNEL = 255  # also of strides, paddings and dilations

Value = int | float | bool | str | list[int]
Check = Callable[[object], bool]


@dataclass(frozen=True)
class Rule:
    """Values that an argument may have."""

    accepts: Check
    text: str  # for a refusal: "a whole number from 1 to 10"


@dataclass(frozen=True)
class LayerType:
    """A type of layer with its arguments, and the number of axes of its inputs, the axis of records included."""

    kind: type[nn.Module]
    required: Mapping[str, Rule] = field(default_factory=dict)
    optional: Mapping[str, Rule] = field(default_factory=dict)
    axes: tuple[int, ...] = ()  # empty: any
    must_be_frozen: bool = False

    @property
    def arguments(self) -> dict[str, Rule]:
        return {**self.required, **self.optional}


def _is_whole(value: object, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high  # type(): True is no number


def whole(low: int, high: int) -> Rule:
    return Rule(lambda value: _is_whole(value, low, high), f"a whole number from {low:,} to {high:,}")


def wholes(low: int, high: int, count: int) -> Rule:
    """One number for all axes, or a list with a number for each axis."""

    def accepts(value: object) -> bool:
        several = isinstance(value, list) and len(value) == count and all(_is_whole(v, low, high) for v in value)
        return several or _is_whole(value, low, high)

    return Rule(accepts, f"a whole number from {low:,} to {high:,}, or a list of {count} of them")


def shape(high: int, count: int) -> Rule:
    def accepts(value: object) -> bool:
        return isinstance(value, list) and 1 <= len(value) <= count and all(_is_whole(v, 1, high) for v in value)

    return Rule(accepts, f"a list of 1 to {count} whole numbers from 1 to {high:,}")


def number(low: float, high: float) -> Rule:
    def accepts(value: object) -> bool:
        return type(value) in (int, float) and math.isfinite(value) and low <= value <= high  # type: ignore[arg-type,operator]

    return Rule(accepts, f"a number from {low:g} to {high:g}")


def word(*words: str) -> Rule:
    return Rule(lambda value: isinstance(value, str) and value in words, f"one of {', '.join(words)}")


def either(first: Rule, second: Rule) -> Rule:
    return Rule(lambda value: first.accepts(value) or second.accepts(value), f"{first.text}, or {second.text}")


FLAG = Rule(lambda value: isinstance(value, bool), "true or false")
WIDTH, CHANNELS = whole(1, MAX_WIDTH), whole(1, MAX_CHANNELS)
EPSILON = {"eps": number(1e-12, 1)}


def _convolution(kind: type[nn.Module], count: int) -> LayerType:
    sizes = wholes(1, MAX_KERNEL, count)
    return LayerType(
        kind,
        {"in_channels": CHANNELS, "out_channels": CHANNELS, "kernel_size": sizes},
        {
            "stride": sizes,
            "padding": either(wholes(0, MAX_KERNEL, count), word("same", "valid")),
            "dilation": sizes,
            "groups": CHANNELS,
            "bias": FLAG,
        },
        (count + 2,),
    )


def _pool(kind: type[nn.Module], count: int, **others: Rule) -> LayerType:
    sizes = wholes(1, MAX_KERNEL, count)
    optional = {"stride": sizes, "padding": wholes(0, MAX_KERNEL, count), "ceil_mode": FLAG, **others}
    return LayerType(kind, {"kernel_size": sizes}, optional, (count + 2,))


def _adaptive_pool(kind: type[nn.Module], count: int) -> LayerType:
    return LayerType(kind, {"output_size": wholes(1, MAX_CHANNELS, count)}, axes=(count + 2,))


def _max_pool(kind: type[nn.Module], count: int) -> LayerType:
    return _pool(kind, count, dilation=wholes(1, MAX_KERNEL, count))


def _average_pool(kind: type[nn.Module], count: int) -> LayerType:
    return _pool(kind, count, count_include_pad=FLAG)


def _instance_norm(kind: type[nn.Module], count: int) -> LayerType:
    return LayerType(kind, {"num_features": CHANNELS}, {**EPSILON, "affine": FLAG}, (count + 2,))


def _batch_norm(kind: type[nn.Module], count: int) -> LayerType:
    """It mixes records in training. Frozen, it applies stored statistics to each record."""
    axes = (2, 3) if count == 1 else (count + 2,)
    return LayerType(kind, {"num_features": CHANNELS}, EPSILON, axes, must_be_frozen=True)


def _pointwise(*kinds: type[nn.Module], **optional: Rule) -> dict[str, LayerType]:
    return {kind.__name__: LayerType(kind, optional=optional) for kind in kinds}


FAMILIES: dict[str, Callable[[type[nn.Module], int], LayerType]] = {
    "Conv": _convolution,
    "MaxPool": _max_pool,
    "AvgPool": _average_pool,
    "AdaptiveAvgPool": _adaptive_pool,
    "AdaptiveMaxPool": _adaptive_pool,
    "InstanceNorm": _instance_norm,
    "BatchNorm": _batch_norm,
}
NUMBERED = {
    f"{family}{count}d": make(getattr(nn, f"{family}{count}d"), count)
    for family, make in FAMILIES.items()
    for count in (1, 2, 3)
}
LAYER_TYPES: dict[str, LayerType] = {
    **_pointwise(nn.Identity, nn.Flatten),
    **_pointwise(nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.LogSigmoid),
    **_pointwise(nn.Softsign, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Softplus),
    **_pointwise(nn.ELU, nn.CELU, alpha=number(0.01, 100)),
    **_pointwise(nn.LeakyReLU, negative_slope=number(0, 1)),
    **_pointwise(nn.GELU, approximate=word("none", "tanh")),
    **NUMBERED,
    "Linear": LayerType(nn.Linear, {"in_features": WIDTH, "out_features": WIDTH}, {"bias": FLAG}),
    "Embedding": LayerType(
        nn.Embedding, {"num_embeddings": WIDTH, "embedding_dim": CHANNELS}, {"padding_idx": whole(0, MAX_WIDTH)}, (2, 3)
    ),
    "LayerNorm": LayerType(
        nn.LayerNorm, {"normalized_shape": shape(MAX_WIDTH, 4)}, {**EPSILON, "elementwise_affine": FLAG, "bias": FLAG}
    ),
    "GroupNorm": LayerType(
        nn.GroupNorm, {"num_groups": CHANNELS, "num_channels": CHANNELS}, {**EPSILON, "affine": FLAG}
    ),
}
