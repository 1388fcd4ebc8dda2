"""GroupNorm in any memory layout, whose backward pass also gives the per-record gradients of weight and bias.

torch's own kernel is slow for channels-last images, and pooling is slow in every other layout. The derivative at the
input needs the same sums over pixels as the gradients of weight and bias, so they are computed once.
"""

from typing import Any

import torch
from torch import Tensor, nn


class Normalisation:
    """Normalised images [n, channels, ...] of one layer; statistics are those of the groups of each image."""

    def __init__(self, layer: nn.GroupNorm, x: Tensor):
        self.x, self.groups = x, layer.num_groups
        self.pixels = tuple(range(2, x.ndim))
        self.size = x[0].numel() // self.groups  # numbers of a group
        self.weight, self.bias = (
            None if p is None else p.detach().view(-1, *(1 for _ in self.pixels)) for p in (layer.weight, layer.bias)
        )
        self.centred = x.detach() - self._mean(self._sum(x.detach()))
        self.scale = torch.rsqrt(self._mean(self._sum(self.centred.square())) + layer.eps)  # 1/deviation, by channel
        self.sums: tuple[Tensor, Tensor] | None = None

    def output(self) -> Tensor:
        """Normalised images times weight plus bias."""
        if not self.x.requires_grad:
            return self.values()
        return _Normalise.apply(self.x, self)  # type: ignore[no-any-return, no-untyped-call]

    def values(self) -> Tensor:
        """Output without derivatives."""
        scale = self._scaled(self.scale)
        return self.centred * scale if self.bias is None else torch.addcmul(self.bias, self.centred, scale)

    def gradients(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of weight and bias [n, channels], from the loss's derivative δ at the output."""
        of_weight, of_bias = self._sums(delta)
        return (of_weight * self.scale).flatten(1), of_bias.flatten(1)

    def input_gradient(self, delta: Tensor) -> Tensor:
        """Derivative of the loss at the input."""
        products, sums = self._sums(delta)
        shift = -self._mean(self._scaled(sums)) * self.scale
        slope = -self._mean(self._scaled(products)) * self.scale**3
        return torch.addcmul(shift, self.centred, slope).addcmul_(delta, self._scaled(self.scale))

    def _sums(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Σ δ·centred and Σ δ over pixels; computed once, because a pass has one δ."""
        if self.sums is None:
            self.sums = self._sum(delta * self.centred), self._sum(delta)
        return self.sums

    def _sum(self, t: Tensor) -> Tensor:
        """Sums over pixels, [n, channels, 1, ...]."""
        return t.sum(self.pixels, keepdim=True) if self.pixels else t

    def _mean(self, sums: Tensor) -> Tensor:
        """Means of the groups from sums over pixels, for each channel of the group."""
        by_group = sums.view(len(sums), self.groups, -1)
        return (by_group.sum(2, keepdim=True) / self.size).expand_as(by_group).reshape(sums.shape)

    def _scaled(self, t: Tensor) -> Tensor:
        return t if self.weight is None else t * self.weight


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, normalisation: Normalisation) -> Tensor:
        ctx.normalisation = normalisation
        return normalisation.values()

    @staticmethod
    def backward(ctx: Any, *delta: Tensor) -> tuple[Tensor, None]:
        return ctx.normalisation.input_gradient(delta[0]), None
