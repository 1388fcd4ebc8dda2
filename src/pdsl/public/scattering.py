"""Scattering features: two layers of Morlet wavelets with a modulus, averaged. Nothing is learned.

Bruna and Mallat, "Invariant scattering convolution networks", 2013; scales 1 and 2, eight angles.
"""

import math

import torch
from torch import Tensor, nn

from pdsl.public.patches import check_images, region_averages, uses_mirror
from pdsl.settings import PublicSettings

ANGLES = 8
MARGIN = 4  # pixels by which an image is extended by reflection, so that its borders do not meet
STEP = 4  # pixels between two averages
WIDTH, FREQUENCY = 0.8, 3 * math.pi / 4  # of the finest wavelet, in pixels and radians per pixel


class Scattering(nn.Module):
    """Averages of |x ⋆ ψ| and ||x ⋆ ψ| ⋆ ψ'| per channel over a grid of regions: [n, channels, h, w] → [n, features].

    Wavelets of scale 1 keep the resolution of the image. Those of scale 2 are computed at half of it, because they have
    no higher frequencies.
    """

    fine: Tensor  # [angles, h, w] wavelets of scale 1, as factors of the Fourier transform
    coarse: Tensor  # [angles, h, w] of scale 2
    blur: Tensor  # [h, w]
    rows: Tensor  # averages over regions
    columns: Tensor

    def __init__(self, shape: torch.Size, settings: PublicSettings):
        super().__init__()
        check_images(shape, settings)
        self.shape, self.grid, self.mirror = shape, settings.pool, uses_mirror(settings, shape)
        height, width = (size + 2 * MARGIN + -(size + 2 * MARGIN) % STEP for size in shape[1:])
        angles = [math.pi * k / ANGLES for k in range(ANGLES)]
        self.register_buffer("fine", torch.stack([_morlet(height, width, 1, angle) for angle in angles]))
        self.register_buffer("coarse", torch.stack([_morlet(height, width, 2, angle) for angle in angles]))
        self.register_buffer("blur", torch.fft.fft2(_gaussian(height, width, 2 * WIDTH)).real.float())
        self.size = height, width
        kept = [size // STEP for size in shape[1:]]
        self.register_buffer("rows", region_averages(kept[0], settings.pool))
        self.register_buffer("columns", region_averages(kept[1], settings.pool))

    @property
    def features(self) -> int:
        """Number of features of a record."""
        maps = 1 + 2 * ANGLES + ANGLES**2
        return int(self.shape[0]) * maps * self.grid**2

    def forward(self, images: Tensor) -> Tensor:
        return torch.stack([self._of_image(image) for image in images])

    def _of_image(self, image: Tensor) -> Tensor:
        if not self.mirror:
            return self._scatter(image)
        return (self._scatter(image) + self._scatter(image.flip(-1))) / 2

    def _scatter(self, image: Tensor) -> Tensor:
        height, width = self.size
        right, below = width - image.shape[2] - MARGIN, height - image.shape[1] - MARGIN
        padded = nn.functional.pad(image, (MARGIN, right, MARGIN, below), mode="reflect")
        spectrum = torch.fft.fft2(padded)[:, None]  # [channels, 1, h, w]
        first = torch.fft.fft2(torch.fft.ifft2(spectrum * self.fine).abs())
        coarse = torch.fft.fft2(torch.fft.ifft2(_fold(spectrum * self.coarse, 2)).abs())
        second = _fold(first[:, :, None] * self.coarse, 2).flatten(1, 2)
        second = torch.fft.fft2(torch.fft.ifft2(second).abs())
        blur = _fold(self.blur, 2) * 4  # the blur has no frequencies above half the resolution
        maps = torch.cat(
            [
                self._average(spectrum, self.blur, STEP),
                self._average(first, self.blur, STEP),
                self._average(coarse, blur, STEP // 2),
                self._average(second, blur, STEP // 2),
            ],
            dim=1,
        )
        return (self.rows @ maps @ self.columns.T).flatten()

    def _average(self, spectrum: Tensor, blur: Tensor, step: int) -> Tensor:
        """Blur, take every STEP-th pixel of the image, and cut off the margin."""
        margin = MARGIN // STEP
        maps: Tensor = torch.fft.ifft2(_fold(spectrum * blur, step)).real
        return maps[..., margin : margin + self.rows.shape[1], margin : margin + self.columns.shape[1]]


def _fold(spectrum: Tensor, step: int) -> Tensor:
    """Fourier transform of every step-th pixel."""
    *rest, height, width = spectrum.shape
    return spectrum.view(*rest, step, height // step, step, width // step).mean(dim=(-4, -2))


def _offsets(size: int) -> Tensor:
    """Distance of each pixel from pixel 0, on a circle."""
    at = torch.arange(size, dtype=torch.float64)
    return torch.where(at > size / 2, at - size, at)


def _gaussian(height: int, width: int, sigma: float) -> Tensor:  # sums to 1
    y, x = torch.meshgrid(_offsets(height), _offsets(width), indexing="ij")
    bump = torch.exp(-(x**2 + y**2) / (2 * sigma**2))
    return bump / bump.sum()


def _morlet(height: int, width: int, scale: int, angle: float) -> Tensor:
    """Fourier transform of a Morlet wavelet: a wave under an elliptic Gaussian, corrected to have mean zero."""
    y, x = torch.meshgrid(_offsets(height), _offsets(width), indexing="ij")
    along, across = (
        x * math.cos(angle) + y * math.sin(angle),
        y * math.cos(angle) - x * math.sin(angle),
    )
    slant = 4 / ANGLES
    envelope = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * (WIDTH * scale) ** 2))
    wave = torch.polar(envelope, FREQUENCY / scale * along)
    wave = wave - envelope * wave.sum() / envelope.sum()
    transformed: Tensor = torch.fft.fft2(wave * slant / (2 * math.pi * (WIDTH * scale) ** 2)).real
    return transformed.float()
