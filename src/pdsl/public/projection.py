"""Standardisation, principal components and whitening of features, fitted on the public set."""

import torch
from torch import Tensor, nn

from pdsl.utils.errors import PdslError

FLOOR = 1e-3  # smallest deviation of a feature, relative to the mean over all features
RANK = 1e-9  # components with a smaller share of the largest variance are set to 0


class Projection(nn.Module):
    """Principal components of standardised features, scaled to norm 1: [n, features] → [n, components].

    With `whitening` w, a component of variance λ is multiplied by λ^(-w/2): w = 0 leaves it as it is, and w = 1 gives
    all components the same variance. Components without variance on Q are 0, because private records could have any
    value there. Norm 1 makes the gradients of all records comparable, so that clipping removes
    little.
    """

    mean: Tensor  # [features]
    matrix: Tensor  # [features, components], standardisation and whitening included

    def __init__(self, features: int, components: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("matrix", torch.zeros(features, components))

    def fit(self, features: Tensor, whitening: float) -> None:
        """Fit to the features of public records [n, features]."""
        x = features.double()
        mean, deviation = x.mean(0), x.std(0, correction=0)
        scale = torch.where(deviation > 0, 1 / (deviation + FLOOR * deviation.mean()).clamp(min=1e-12), 0)
        values, vectors = _principal_components((x - mean) * scale, self.matrix.shape[1])
        if float(values[0]) == 0:
            raise PdslError("public.features: all public records have the same features; use others, or leave it out")
        self.mean.copy_(mean)
        floor = RANK * values[0]
        self.matrix.copy_(scale[:, None] * vectors * values.clamp(min=floor) ** (-whitening / 2) * (values > floor))

    def forward(self, features: Tensor) -> Tensor:
        projected: Tensor = (features - self.mean) @ self.matrix
        return torch.nn.functional.normalize(projected)


class UnitNorm(nn.Module):
    """Scale records to norm 1."""

    def forward(self, features: Tensor) -> Tensor:
        return torch.nn.functional.normalize(features)


def _principal_components(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Largest eigenvalues [count] of xᵀx/n and their eigenvectors [features, count], each with a positive sum.

    If there are fewer records than features, they follow from the smaller matrix x xᵀ.
    """
    n, features = x.shape
    small = n < features
    values, vectors = torch.linalg.eigh((x @ x.T if small else x.T @ x) / n)
    values, vectors = values.flip(0)[:count].clamp(min=0), vectors.flip(1)[:, :count]
    if small:
        vectors = x.T @ vectors / (values.clamp(min=RANK * values[0]) * n).sqrt()
    signs = torch.where(vectors.sum(0) < 0, -1.0, 1.0)
    return values, vectors * signs
