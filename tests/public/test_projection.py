"""Projections against scikit-learn's PCA."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch import Tensor

from pdsl.public.projection import FLOOR, Projection, UnitNorm
from tests.helpers.refusals import refused


def correlated(n: int, features: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    latent = torch.randn(n, 6, generator=generator) * torch.tensor([5.0, 3.0, 2.0, 1.5, 1.2, 1.0])
    noise = 0.3 * torch.randn(n, features, generator=generator)
    scales = torch.rand(features, generator=generator) * 10
    return (latent @ torch.randn(6, features, generator=generator) + noise) * scales + 7


def fitted(x: Tensor, components: int, whitening: float) -> Projection:
    layer = Projection(x.shape[1], components)
    layer.fit(x, whitening)
    return layer


def before_norm(layer: Projection, x: Tensor) -> Tensor:
    return (x.double() - layer.mean.double()) @ layer.matrix.double()


def standardised(x: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    rows = x.double().numpy()
    deviation = rows.std(0)
    return (rows - rows.mean(0)) / (deviation + FLOOR * deviation.mean())


@pytest.mark.parametrize(("n", "features"), [(300, 20), (25, 60), (40, 40)])
def test_components_are_those_of_pca_up_to_sign(n: int, features: int) -> None:
    x = correlated(n, features)
    found = before_norm(fitted(x, 5, 0.0), x).numpy()
    expected = PCA(5, svd_solver="full").fit_transform(standardised(x))
    assert np.abs(np.abs(found) - np.abs(expected)).max() < 1e-3 * np.abs(expected).max()
    signs = np.sign((found * expected).sum(0))
    assert np.allclose(found * signs, expected, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize(("n", "features"), [(300, 20), (25, 60)])
@pytest.mark.parametrize("whitening", [0.0, 0.5, 1.0])
def test_whitening_is_a_power_of_the_variances(n: int, features: int, whitening: float) -> None:
    x = correlated(n, features)
    variances = before_norm(fitted(x, 8, whitening), x).square().mean(0)
    explained = PCA(8, svd_solver="full").fit(standardised(x)).explained_variance_ * (n - 1) / n
    assert np.allclose(variances.numpy(), explained ** (1 - whitening), rtol=1e-3)


def test_full_whitening_gives_all_components_the_same_variance() -> None:
    x = correlated(200, 15)
    variances = before_norm(fitted(x, 15, 1.0), x).square().mean(0)
    assert torch.allclose(variances, torch.ones(15, dtype=torch.float64), rtol=1e-3)


def test_records_have_norm_one() -> None:
    x = correlated(50, 12)
    for layer in (fitted(x, 4, 0.5), UnitNorm()):
        assert torch.allclose(layer(3 * x).norm(dim=1), torch.ones(50), atol=1e-5)


def test_a_feature_that_is_constant_on_the_public_set_stays_small() -> None:
    x = correlated(100, 10)
    x[:, 3] = 2.0
    other = x.clone()
    other[:, 3] = 2.1
    layer = fitted(x, 5, 0.5)
    assert bool(layer(other).isfinite().all())
    assert torch.allclose(layer(x), layer(other), atol=1e-4)


@pytest.mark.parametrize("n", [100, 6])
def test_private_values_of_a_constant_feature_do_not_dominate(n: int) -> None:
    """More components than directions with variance: those without are zero."""
    x = correlated(n, 10)
    x[:, 3] = 2.0
    other = x.clone()
    other[:, 3] = -50.0
    layer = fitted(x, min(10, n - 1), 0.5)
    assert torch.allclose(layer(x), layer(other), atol=1e-6)
    assert bool(layer(x).isfinite().all())


@pytest.mark.parametrize("n", [3, 8])
def test_equal_public_records_are_refused(n: int) -> None:
    with refused("public.features", "the same features"):
        fitted(torch.ones(n, 5), 2, 0.5)
