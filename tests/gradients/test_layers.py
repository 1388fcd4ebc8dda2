"""Rewritten layers against torch's own: the same outputs and derivatives."""

import copy

import pytest
import torch
from torch import Tensor, nn

from pdsl.gradients.group_norm import Normalisation
from pdsl.gradients.layers import pool_first
from pdsl.models.zoo import MaxPool


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool1d(3, stride=1),
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True),
        nn.MaxPool2d((2, 3), dilation=2),
        nn.MaxPool3d(2),
        MaxPool(),
    ],
    ids=str,
)
def test_pooling_before_relu_changes_no_bit_of_outputs_and_derivatives(pool: nn.Module) -> None:
    axes = {nn.MaxPool1d: 1, nn.MaxPool3d: 3}.get(type(pool), 2)  # type: ignore[call-overload]
    x = (
        (normal(0, 5, 4, *[8] * axes) - 0.7).mul(2).round().requires_grad_()
    )  # ties, and windows without a positive number
    sequence = nn.Sequential(nn.Identity(), nn.ReLU(), pool, nn.Tanh())
    outputs = [sequence(x), pool_first(sequence)(x)]
    assert isinstance(outputs[1], Tensor)
    delta = normal(1, *outputs[0].shape)
    derivatives = [torch.autograd.grad(out, x, delta)[0] for out in outputs if isinstance(out, Tensor)]
    assert (outputs[0] == 0).any()
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(*derivatives)


def by_torch(layer: nn.GroupNorm, x: Tensor, delta: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Output and derivatives at input, weight and bias, one record at a time, by torch's own GroupNorm."""
    layer = copy.deepcopy(layer).to(dtype)
    rows = []
    for x_r, delta_r in zip(x.detach().to(dtype).split(1), delta.to(dtype).split(1), strict=True):
        one = x_r.clone().requires_grad_()
        out = layer(one)
        rows.append([out.detach(), *torch.autograd.grad(out, [one, *layer.parameters()], delta_r)])
    first, second, *others = zip(*rows, strict=True)
    return [torch.cat(first), torch.cat(second), *(torch.stack(g) for g in others)]


@pytest.mark.parametrize("shape", [(6,), (6, 5), (6, 4, 5), (6, 2, 3, 4)])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("last", [True, False])
def test_group_norm_is_as_exact_as_that_of_torch(
    shape: tuple[int, ...], affine: bool, offset: float, last: bool
) -> None:
    layer = nn.GroupNorm(2, 6, affine=affine)
    if affine:
        layer.weight.data, layer.bias.data = normal(2, 6), normal(3, 6)
    x, delta = normal(0, 4, *shape) + offset, normal(1, 4, *shape)
    if last:  # the memory order of channels last
        x, delta = (t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (x, delta))
    right, rounded = (by_torch(layer, x, delta, dtype) for dtype in (torch.float64, torch.float32))
    normalisation = Normalisation(layer, x.requires_grad_())
    out = normalisation.output()
    found = [out.detach(), *torch.autograd.grad(out, x, delta), *normalisation.gradients(delta)]
    for f, exact, own in zip(found[: len(right)], right, rounded, strict=True):
        assert float((f - exact).norm()) <= 1e-5 * float(exact.norm()) + 3 * float((own - exact).norm())
