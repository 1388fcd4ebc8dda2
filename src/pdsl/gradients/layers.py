"""Layers with a formula for per-record gradients: one function per type of layer.

Each function runs a layer on tensors [n, ...] of n records, each record alone, with the same result as the layer's own
forward. It records the layer's use on the tape. Inside vmap a record has a batch of its own, usually of one: its rows
are treated like positions, and summed.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional

from pdsl.gradients.attention import attention, encoder_layer
from pdsl.gradients.convolution import Convolution, kernel_gradients
from pdsl.gradients.formulas import Gradient, Lookups, Rows
from pdsl.gradients.group_norm import Normalisation
from pdsl.gradients.linear import run_linear
from pdsl.gradients.recurrent import Recurrent, run_recurrent
from pdsl.gradients.tape import Tape
from pdsl.models.zoo import AlignedLinear, MaxPool

Parts = list[tuple[Tensor, Gradient]]
Forward = Callable[..., object]


def _linear(tape: Tape, layer: nn.Linear) -> Forward:
    return lambda input: tape.enter(partial(run_linear, tape, layer.weight, layer.bias), input)


def _embedding(tape: Tape, layer: nn.Embedding) -> Forward:
    if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
        raise NotImplementedError

    def run(ids: Tensor) -> Tensor:
        def formula(delta: Tensor) -> Parts:
            n = len(ids)
            delta, flat = delta.reshape(n, -1, delta.shape[-1]), ids.reshape(n, -1)
            if layer.padding_idx is not None:
                delta = delta.masked_fill((flat == layer.padding_idx)[..., None], 0.0)
            return [(layer.weight, Lookups(flat, delta, layer.num_embeddings))]

        return tape.record(functional.embedding(ids, layer.weight.detach()), [ids], [layer.weight], formula)

    return lambda input: tape.enter(run, input)


def _convolution(tape: Tape, layer: Convolution) -> Forward:
    axes = len(layer.kernel_size)

    def run(x: Tensor) -> Tensor:
        images = _images(tape, x, axes)
        bias = None if layer.bias is None else layer.bias.detach()
        out = layer._conv_forward(images, layer.weight.detach(), bias)

        def formula(delta: Tensor) -> Parts:
            delta = delta.reshape(len(images), *delta.shape[-axes - 1 :])
            parts: Parts = []
            if layer.weight.requires_grad:
                parts.append((layer.weight, kernel_gradients(layer, images.detach(), delta, len(x))))
            if layer.bias is not None and layer.bias.requires_grad:
                by_image = delta.sum(tuple(range(2, delta.ndim)))
                parts.append((layer.bias, Rows(by_image.view(len(x), -1, by_image.shape[1]).sum(1))))
            return parts

        return tape.record(_unmerge(out, x), [x], [layer.weight, layer.bias], formula)

    return lambda input: tape.enter(run, input)


def _images(tape: Tape, x: Tensor, axes: int) -> Tensor:
    """All images of the records as one batch [images, channels, ...]."""
    if x.ndim == axes + 2:
        return x
    if x.ndim == axes + 3 and tape.one_record_at_a_time:
        return x.flatten(0, 1)
    raise RuntimeError(f"a layer over {axes} dimensions was given records of shape {tuple(x.shape[1:])}")


def _unmerge(out: Tensor, x: Tensor) -> Tensor:
    return out if out.ndim == x.ndim else out.view(*x.shape[:2], *out.shape[1:])


def _affine(tape: Tape, layer: nn.Module, normal: Tensor, first: int) -> Tensor:
    """normal · weight + bias, whose dimensions are those of `normal` from `first` on."""
    weight, bias = cast(Tensor | None, layer.weight), cast(Tensor | None, layer.bias)
    if weight is None:
        return normal
    shape = (*weight.shape, *[1] * (normal.ndim - first - weight.ndim))
    if bias is None:
        out = normal * weight.detach().view(shape)
    else:
        out = (bias.detach().view(shape)).addcmul(normal, weight.detach().view(shape))
    summed = [axis for axis in range(1, normal.ndim) if not first <= axis < first + weight.ndim]

    def formula(delta: Tensor) -> Parts:
        def rows(g: Tensor) -> Rows:
            return Rows((g.sum(summed) if summed else g).reshape(len(delta), -1))

        parts: Parts = []
        if weight.requires_grad:
            parts.append((weight, rows(delta * normal.detach())))
        if bias is not None and bias.requires_grad:
            parts.append((bias, rows(delta)))
        return parts

    return tape.record(out, [normal], [weight, bias], formula)


def _layer_norm(tape: Tape, layer: nn.LayerNorm) -> Forward:
    axes = len(layer.normalized_shape)

    def run(x: Tensor) -> Tensor:
        if x.ndim <= axes:
            raise RuntimeError("LayerNorm over the records")
        return _affine(
            tape, layer, functional.layer_norm(x, layer.normalized_shape, None, None, layer.eps), x.ndim - axes
        )

    return lambda input: tape.enter(run, input)


def _group_norm(tape: Tape, layer: nn.GroupNorm) -> Forward:
    def run(x: Tensor) -> Tensor:
        inside = tape.one_record_at_a_time
        if x.ndim < 2 + inside:
            raise RuntimeError("GroupNorm over the records")
        normalisation = Normalisation(layer, x.flatten(0, 1) if inside else x)
        out = normalisation.output()

        def formula(delta: Tensor) -> Parts:
            gradients = normalisation.gradients(delta.flatten(0, 1) if inside else delta)
            pairs = zip((layer.weight, layer.bias), gradients, strict=True)
            return [
                (p, Rows(g.view(len(x), -1, g.shape[1]).sum(1))) for p, g in pairs if p is not None and p.requires_grad
            ]

        return tape.record(out.view(x.shape) if inside else out, [], [layer.weight, layer.bias], formula)

    return lambda input: tape.enter(run, input)


def _instance_norm(axes: int, tape: Tape, layer: nn.InstanceNorm2d) -> Forward:
    def run(x: Tensor) -> Tensor:
        images = _images(tape, x, axes)
        normal = _unmerge(functional.instance_norm(images, None, None, None, None, True, 0.0, layer.eps), x)
        return _affine(tape, layer, normal, normal.ndim - axes - 1)

    return lambda input: tape.enter(run, input)


def _recurrent(tape: Tape, layer: Recurrent) -> Forward:
    if layer.proj_size:
        raise NotImplementedError
    if not tape.one_record_at_a_time:
        raise NotImplementedError  # its batch dimension is a setting

    def forward(input: Tensor, hx: Tensor | tuple[Tensor, Tensor] | None = None) -> object:
        if not isinstance(input, Tensor):
            raise RuntimeError("packed sequences have no formula")
        alone = input.ndim == 2
        h0, c0 = hx if isinstance(hx, tuple) else (hx, None)

        def run(x: Tensor, h: Tensor | None, c: Tensor | None) -> tuple[Tensor, ...]:
            x = x[:, None] if alone else x if layer.batch_first else x.transpose(1, 2)
            h, c = (t[:, :, None] if alone and t is not None else t for t in (h, c))
            out, *last = run_recurrent(tape, layer, x, h, c)
            out = out[:, 0] if alone else out if layer.batch_first else out.transpose(1, 2)
            return out, *(t[:, :, 0] if alone else t for t in last)

        out, *last = cast(tuple[Tensor, ...], tape.enter(run, input, h0, c0))
        return out, tuple(last) if isinstance(layer, nn.LSTM) else last[0]

    return forward


def _pooling(axes: int, tape: Tape, layer: nn.Module) -> Forward:
    if getattr(layer, "return_indices", False):
        raise NotImplementedError

    def run(x: Tensor) -> Tensor:
        images = _images(tape, x, axes)
        return _unmerge(cast(Tensor, type(layer).forward(layer, images)), x)

    return lambda input: tape.enter(run, input)


def pool_first(sequence: nn.Sequential) -> Forward:
    """Forward of a sequence with max pooling before ReLU: the same numbers and derivatives, for fewer ReLUs.

    ReLU does not change which number of a window is the largest if that is positive. If not, all derivatives are zero.
    """
    layers = list(sequence)
    for place, (first, second) in enumerate(pairwise(sequence)):
        if type(first) is nn.ReLU and type(second) in MAX_POOLING and not getattr(second, "return_indices", False):
            layers[place : place + 2] = second, first

    def forward(input: Tensor) -> Tensor:
        for layer in layers:
            input = layer(input)
        return input

    return forward


# Functions (tape, layer) → forward; NotImplementedError if a layer's settings have no formula.
WITH_FORMULA: dict[type[nn.Module], Callable[[Tape, Any], Forward]] = {
    nn.Linear: _linear,
    AlignedLinear: _linear,
    nn.modules.linear.NonDynamicallyQuantizableLinear: _linear,
    nn.Embedding: _embedding,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
    nn.InstanceNorm1d: partial(_instance_norm, 1),
    nn.InstanceNorm2d: partial(_instance_norm, 2),
    nn.InstanceNorm3d: partial(_instance_norm, 3),
    nn.MultiheadAttention: attention,
    nn.TransformerEncoderLayer: encoder_layer,
    nn.GRU: _recurrent,
    nn.LSTM: _recurrent,
    nn.RNN: _recurrent,
}
MAX_POOLING = (MaxPool, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
# Layers without parameters that are much faster, or only possible, outside vmap.
POOLING: dict[type[nn.Module], int] = {
    MaxPool: 2, nn.MaxPool1d: 1, nn.MaxPool2d: 2, nn.MaxPool3d: 3, nn.AvgPool1d: 1, nn.AvgPool2d: 2, nn.AvgPool3d: 3,
    nn.AdaptiveAvgPool1d: 1, nn.AdaptiveAvgPool2d: 2, nn.AdaptiveAvgPool3d: 3,
    nn.AdaptiveMaxPool1d: 1, nn.AdaptiveMaxPool2d: 2, nn.AdaptiveMaxPool3d: 3,
}  # fmt: skip


def forward_of(tape: Tape, layer: nn.Module) -> Forward | None:
    """Forward function with a formula for this layer, or None."""
    if "forward" in vars(layer) or any(isinstance(value, Tensor) for value in vars(layer).values()):
        return None  # a replaced forward, or a weight that is computed from other parameters
    try:
        if type(layer) in WITH_FORMULA:
            return WITH_FORMULA[type(layer)](tape, layer)
        if type(layer) in POOLING and tape.one_record_at_a_time:
            return _pooling(POOLING[type(layer)], tape, layer)
    except NotImplementedError:
        pass
    return None
