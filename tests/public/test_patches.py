"""Patch features against a literal loop over positions and filters; mirror images; rounding."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from pdsl.public.features import BLOCK, FeatureMap, extract, fit_features
from pdsl.public.patches import CONTRAST, THRESHOLD, PatchFeatures, region_averages
from pdsl.settings import PublicSettings
from pdsl.utils.workers import Workers
from tests.helpers.refusals import refused


def settings(**values: object) -> PublicSettings:
    return PublicSettings.model_validate({"features": "patches", "patch": 3, "pool": 2, "filters": 10, **values})


def images(n: int, channels: int = 1, height: int = 8, width: int = 7, seed: int = 0) -> Tensor:
    return torch.randn(n, channels, height, width, generator=torch.Generator().manual_seed(seed))


def fitted(public: Tensor, s: PublicSettings) -> PatchFeatures:
    layer = PatchFeatures(public.shape[1:], s)
    layer.fit(public, np.random.default_rng(0))
    return layer


def overlap(region: int, parts: int, size: int, position: int) -> float:
    """Length that an interval of width 1 at a position has in common with a region of size/parts."""
    low, high = region * size / parts, (region + 1) * size / parts
    return max(0.0, min(high, position + 1) - max(low, position))


def literal_maps(layer: PatchFeatures, image: Tensor, s: PublicSettings) -> Tensor:  # [sign, row, column, filter]
    """One position and one filter at a time, in float64."""
    x, side, grid = image.double(), s.patch, s.pool
    rows, columns = x.shape[1] - side + 1, x.shape[2] - side + 1
    filters, offset = layer.filters.double(), layer.offset.double()
    maps = torch.zeros(2, grid, grid, filters.shape[1], dtype=torch.float64)
    area = (rows / grid) * (columns / grid)
    for i in range(rows):
        for j in range(columns):
            patch = x[:, i : i + side, j : j + side].reshape(-1)
            patch = patch - patch.mean()
            patch = patch / math.sqrt(float(patch.square().mean()) + CONTRAST)
            for f in range(filters.shape[1]):
                r = float(patch @ filters[:, f] + offset[f])
                for a in range(grid):
                    for b in range(grid):
                        share = overlap(a, grid, rows, i) * overlap(b, grid, columns, j) / area
                        maps[0, a, b, f] += share * max(0.0, r - THRESHOLD)
                        maps[1, a, b, f] += share * max(0.0, -r - THRESHOLD)
    return maps


@pytest.mark.parametrize(("channels", "pool", "patch"), [(1, 2, 3), (3, 3, 2), (2, 1, 4)])
def test_patch_features_equal_a_loop_over_positions_and_filters(channels: int, pool: int, patch: int) -> None:
    s = settings(pool=pool, patch=patch, mirror=False, filters=7)
    layer = fitted(images(40, channels), s)
    for image in images(2, channels, seed=1):
        expected = literal_maps(layer, image, s).flatten()
        found = layer(image[None])[0]
        assert found.shape == (layer.features,)
        assert float(found.max()) > 0.01
        assert torch.allclose(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pool", [1, 2, 3])
def test_patch_features_with_mirror_are_the_mean_over_image_and_mirror_image(pool: int) -> None:
    s = settings(pool=pool, mirror=True, filters=6)
    layer = fitted(images(40, 3), s)
    image = images(1, 3, seed=1)
    found, mirrored = layer(image)[0], layer(image.flip(-1))[0]
    assert found.shape == (layer.features,)
    assert torch.allclose(found, mirrored, atol=1e-5, rtol=1e-5)
    both = (literal_maps(layer, image[0], s) + literal_maps(layer, image[0].flip(-1), s)) / 2
    every = both.flatten().sort().values.unique()  # every mean is among the features, equal ones once
    nearest = (every[:, None] - found.double()[None]).abs().min(1).values
    assert float(nearest.max()) < 1e-5
    assert not torch.allclose(layer(image.flip(-2))[0], found, atol=1e-2)  # up and down are not exchanged


@pytest.mark.parametrize("filters", [5, 6])
@pytest.mark.parametrize("pool", [1, 2, 3, 4])
def test_features_is_the_number_of_outputs(pool: int, filters: int) -> None:
    for mirror in (False, True):
        s = settings(pool=pool, filters=filters, mirror=mirror)
        layer = fitted(images(20), s)
        assert layer(images(3)).shape == (3, layer.features)


@pytest.mark.parametrize(("size", "parts"), [(6, 2), (7, 3), (5, 4), (3, 3), (2, 5)])
def test_region_averages_are_symmetric_and_sum_to_one(size: int, parts: int) -> None:
    found = region_averages(size, parts)
    expected = [[overlap(a, parts, size, i) * parts / size for i in range(size)] for a in range(parts)]
    assert torch.allclose(found, torch.tensor(expected))
    assert torch.allclose(found.sum(1), torch.ones(parts))
    assert torch.allclose(found, found.flip(0, 1), atol=1e-6)


def test_whitened_patches_of_the_public_set_have_no_correlations() -> None:
    """The whitening is that of the patches: with many directions of equal variance nothing is left to remove."""
    layer = fitted(images(200), settings(filters=9))
    filters, offset = layer.filters.double(), layer.offset.double()
    windows = images(200).unfold(2, 3, 1).unfold(3, 3, 1).flatten(4).flatten(0, 3).double()
    patches = windows - windows.mean(1, keepdim=True)
    patches = patches / (patches.square().mean(1, keepdim=True) + CONTRAST).sqrt()
    responses = patches @ filters + offset
    assert float(responses.mean(0).abs().max()) < 0.05  # the mean patch has response 0
    assert float(responses.std(0).max()) < 1.1  # filters of norm 1 on whitened patches


@pytest.mark.parametrize("n", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("components", [0, 13, 50])
def test_features_of_a_record_are_the_same_bits_in_any_block_and_order(n: int, components: int) -> None:
    with Workers(1) as workers:
        made = fit_features(settings(components=components, filters=20), images(40), workers)
        records = images(100, seed=1)
        alone = torch.cat([made(record[None], workers) for record in records[:40]])
        order = torch.randperm(100, generator=torch.Generator().manual_seed(2))[:n]
        found, known = made(records[order], workers), order < len(alone)
        assert torch.equal(found[known], alone[order[known]])


def test_features_are_the_same_bits_with_one_and_two_workers() -> None:
    found = []
    for count in (1, 2):
        with Workers(count) as workers:
            made = fit_features(settings(), images(40), workers)
            found.append(made(images(3 * BLOCK + 5, seed=1), workers))
    assert torch.equal(*found)


def test_another_record_in_the_block_changes_no_bit() -> None:
    with Workers(1) as workers:
        made: FeatureMap = fit_features(settings(components=20), images(40), workers)
        records = images(40, seed=1)
        other = records.clone()
        other[7] = 1e3
        keep = torch.arange(40) != 7
        assert torch.equal(made(records, workers)[keep], made(other, workers)[keep])
        assert torch.equal(extract(made.module, other, workers, "cpu", "")[keep], made(records, workers)[keep])


@pytest.mark.parametrize(
    ("shape", "values", "words"),
    [
        ((64,), {}, "images of shape (channels, height, width)"),
        ((8, 8), {}, "not records of shape (8, 8)"),
        ((1, 8, 8), {"patch": 9}, "public.patch=9"),
        ((1, 8, 8), {"patch": 7, "pool": 3}, "public.pool=3"),
        ((1, 3, 3), {"features": "scattering"}, "3×3 pixels"),
        ((1, 6, 20), {"features": "scattering"}, "6×20 pixels"),
    ],
)
def test_records_that_are_no_images_of_enough_pixels_are_refused(
    shape: tuple[int, ...], values: dict[str, object], words: str
) -> None:
    with Workers(1) as workers, refused("public.", words):
        fit_features(settings(**values), torch.randn(10, *shape), workers)


def test_patches_of_constant_images_are_refused() -> None:
    with Workers(1) as workers, refused("public.features=patches", "no contrast"):
        fit_features(settings(), torch.ones(20, 1, 8, 8), workers)
