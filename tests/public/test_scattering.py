"""Scattering against direct convolution with the same wavelets in space."""

import cmath
import math

import pytest
import torch
from torch import Tensor

from pdsl.public.features import extract
from pdsl.public.patches import region_averages
from pdsl.public.scattering import ANGLES, FREQUENCY, MARGIN, STEP, WIDTH, Scattering
from pdsl.settings import PublicSettings
from pdsl.utils.workers import Workers
from tests.public.test_patches import images


def layer(shape: tuple[int, int, int], **values: object) -> Scattering:
    settings = PublicSettings.model_validate({"features": "scattering", "pool": 2, "mirror": False, **values})
    return Scattering(torch.Size(shape), settings)


def on_circle(size: int) -> list[float]:
    return [at - size if at > size / 2 else at for at in range(size)]


def wavelet(height: int, width: int, scale: int, angle: float) -> Tensor:  # complex128 [h, w], pixel by pixel
    """A wave under an elliptic Gaussian, minus the multiple of the Gaussian that makes the mean zero."""
    slant, sigma = 4 / ANGLES, WIDTH * scale
    envelope = torch.zeros(height, width, dtype=torch.complex128)
    wave = torch.zeros_like(envelope)
    for i, y in enumerate(on_circle(height)):
        for j, x in enumerate(on_circle(width)):
            along = x * math.cos(angle) + y * math.sin(angle)
            across = y * math.cos(angle) - x * math.sin(angle)
            envelope[i, j] = math.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2))
            wave[i, j] = envelope[i, j] * cmath.exp(1j * FREQUENCY / scale * along)
    return (wave - envelope * wave.sum() / envelope.sum()) * slant / (2 * math.pi * sigma**2)


def bump(height: int, width: int) -> Tensor:
    values = [[math.exp(-(x**2 + y**2) / (8 * WIDTH**2)) for x in on_circle(width)] for y in on_circle(height)]
    found = torch.tensor(values, dtype=torch.complex128)
    return found / found.sum()


def convolve(image: Tensor, kernel: Tensor) -> Tensor:
    """Circular convolution as a sum of shifted images."""
    total = torch.zeros_like(kernel)
    for i in range(kernel.shape[0]):
        for j in range(kernel.shape[1]):
            total += kernel[i, j] * image.roll((i, j), (0, 1))
    return total


def extended(image: Tensor) -> Tensor:  # [h, w] → [H, W], multiples of STEP, with reflection
    at = [range(-MARGIN, size + MARGIN + -(size + 2 * MARGIN) % STEP) for size in image.shape]
    rows, columns = (
        [abs(i) if i < size else 2 * (size - 1) - i for i in along] for along, size in zip(at, image.shape, strict=True)
    )
    return image[rows][:, columns].to(torch.complex128)


def averages(of: Tensor, shape: torch.Size, pool: int) -> Tensor:
    """Blurred map at every STEP-th pixel of the image, averaged over the regions."""
    blurred = convolve(of, bump(*of.shape)).real[MARGIN::STEP, MARGIN::STEP]
    rows, columns = (size // STEP for size in shape)
    kept = blurred[:rows, :columns].float()
    return region_averages(rows, pool) @ kept @ region_averages(columns, pool).T


@pytest.mark.parametrize("size", [(8, 8), (12, 9)])
def test_zeroth_and_first_order_equal_direct_convolution(size: tuple[int, int]) -> None:
    image = images(1, 1, *size, seed=3)[0, 0]
    found = layer((1, *size))(image[None, None])[0].view(-1, 2, 2)
    x = extended(image)
    assert torch.allclose(found[0], averages(x, image.shape, 2), atol=1e-5)
    for k in (0, 1, 3, 6):
        of_angle = convolve(x, wavelet(*x.shape, 1, math.pi * k / ANGLES)).abs().to(torch.complex128)
        assert torch.allclose(found[1 + k], averages(of_angle, image.shape, 2), atol=1e-4)


def test_coarse_wavelets_equal_direct_convolution_up_to_folded_frequencies() -> None:
    """Scale 2 is computed at half the resolution, which ignores the small part of it above half the frequencies."""
    image = images(1, 1, 8, 8, seed=3)[0, 0]
    found = layer((1, 8, 8))(image[None, None])[0].view(-1, 2, 2)
    x = extended(image)
    for k in (0, 2, 5):
        of_angle = convolve(x, wavelet(*x.shape, 2, math.pi * k / ANGLES)).abs().to(torch.complex128)
        expected = averages(of_angle, image.shape, 2)
        assert torch.allclose(found[1 + ANGLES + k], expected, rtol=0.15)


@pytest.mark.parametrize(("channels", "pool"), [(1, 1), (1, 3), (3, 2)])
def test_number_of_features(channels: int, pool: int) -> None:
    made = layer((channels, 12, 12), pool=pool)
    orders = 1 + 2 * ANGLES + ANGLES * ANGLES  # second order: from the fine to the coarse scale
    assert made(images(2, channels, 12, 12)).shape == (2, channels * orders * pool**2)
    assert made.features == channels * orders * pool**2


def test_wavelets_do_not_see_a_constant_and_the_zeroth_order_is_it() -> None:
    found = layer((1, 8, 8))(torch.full((1, 1, 8, 8), 3.0))[0].view(-1, 2, 2)
    assert torch.allclose(found[0], torch.full((2, 2), 3.0), atol=1e-5)
    assert float(found[1:].abs().max()) < 1e-5


def test_a_turned_wave_is_seen_by_the_turned_wavelet() -> None:
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    for k in range(ANGLES):
        angle = math.pi * k / ANGLES
        wave = torch.cos(FREQUENCY * (x * math.cos(angle) + y * math.sin(angle)))
        found = layer((1, 16, 16), pool=1)(wave[None, None])[0]
        assert int(found[1 : 1 + ANGLES].argmax()) == k


@pytest.mark.parametrize("width", [8, 11])
def test_mirror_average_is_the_same_for_the_mirror_image(width: int) -> None:
    made, plain = layer((2, 8, width), mirror=True), layer((2, 8, width))
    image = images(1, 2, 8, width)
    assert torch.allclose(made(image), made(image.flip(-1)), atol=1e-6)
    assert torch.allclose(made(image), (plain(image) + plain(image.flip(-1))) / 2, atol=1e-6)
    assert not torch.allclose(plain(image), plain(image.flip(-1)), atol=1e-2)


def test_scattering_of_a_record_is_the_same_bits_in_any_order() -> None:
    made, records = layer((1, 8, 8)), images(40, 1, 8, 8)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    with Workers(1) as workers:
        straight, mixed = (extract(made, x, workers, "cpu", "") for x in (records, records[order]))
    assert torch.equal(straight[order], mixed)
