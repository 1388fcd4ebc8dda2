"""Patch features: whitened patches of public images as filters, a two-sided rectifier, and pooling.

Coates and Ng, "Learning feature representations with k-means", 2012, with random patches instead of centroids.
"""

import numpy as np
import torch
from torch import Tensor, nn

from pdsl.settings import PublicSettings
from pdsl.utils.errors import PdslError

SAMPLED = 100_000  # patches of Q from which the whitening is estimated
CONTRAST = 0.05  # added to a patch's variance; inputs have variance about 1
REGULARISATION = 0.1  # of the whitening, in units of the mean eigenvalue
THRESHOLD = 1.0  # of the rectifier
MIN_VARIANCE = 1e-12  # of normalised patches, whose variance is about 1 unless they are constant
MIN_NORM = 0.3  # of a whitened patch that becomes a filter, relative to the median
MIN_SCATTERED = 7  # pixels, the smallest side that scattering can extend by reflection
CHUNK = 160  # filters at once: their responses to an image fit into a core's cache


class PatchFeatures(nn.Module):
    """Mean rectified responses of filters over a grid of regions: [n, channels, h, w] → [n, features].

    A patch p is normalised to mean 0 and contrast 1, whitened, and compared with each filter. The response r gives
    relu(r - 1) and relu(-r - 1), averaged over the positions of each region. With `mirror`, the filters come in
    mirrored pairs, and the features are the mean over an image and its mirror image, at no further cost.

    Images are processed one at a time, so the features of an image do not depend on other records.
    """

    filters: Tensor  # [patch size, filters], whitening included
    offset: Tensor  # [filters] response of the mean patch
    regions: Tensor  # [regions, positions] averages over positions

    def __init__(self, shape: torch.Size, settings: PublicSettings):
        super().__init__()
        check_images(shape, settings)
        self.shape, self.side, self.grid = shape, settings.patch, settings.pool
        self.mirror = uses_mirror(settings, shape)
        count = settings.filters + settings.filters % 2 if self.mirror else settings.filters
        self.register_buffer("filters", torch.zeros(shape[0] * self.side**2, count))
        self.register_buffer("offset", torch.zeros(count))
        self.register_buffer("regions", _regions(shape[1] - self.side + 1, shape[2] - self.side + 1, self.grid))

    @property
    def features(self) -> int:
        """Number of features of a record."""
        columns = self.grid / 2 if self.mirror else self.grid
        return round(2 * self.filters.shape[1] * self.grid * columns)

    def fit(self, images: Tensor, generator: np.random.Generator) -> None:
        """Choose whitening and filters from random patches of public images."""
        patches = self._normalise(_draw(images, self.side, SAMPLED, generator))
        mean, covariance = self._moments(patches)
        values, vectors = torch.linalg.eigh(covariance)
        if float(values.mean()) < MIN_VARIANCE:
            raise PdslError("public.features=patches: the public images have no contrast; use others, or leave it out")
        scale = (values.clamp(min=0) + REGULARISATION * values.mean()).rsqrt()
        whitening = (vectors * scale) @ vectors.T
        count = self.filters.shape[1] // 2 if self.mirror else self.filters.shape[1]
        filters = _spread((patches - mean) @ whitening, count)
        if self.mirror:
            filters = torch.cat([filters, self._mirrored(filters)])
        weights = whitening @ filters.T
        self.filters.copy_(weights)
        self.offset.copy_(-(mean @ weights))

    def _moments(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and covariance of patches; with `mirror` of mirrored ones too, so that filters stay paired."""
        mean = patches.mean(0)
        places = torch.arange(len(mean))
        places = self._mirrored(places[None])[0] if self.mirror else places
        mean = (mean + mean[places]) / 2
        covariance = (patches - mean).T @ (patches - mean) / len(patches)
        return mean, (covariance + covariance[places][:, places]) / 2

    def _mirrored(self, patches: Tensor) -> Tensor:  # [n, patch size]
        return patches.view(len(patches), -1, self.side, self.side).flip(-1).flatten(1)

    def forward(self, images: Tensor) -> Tensor:
        return torch.stack([self._of_image(image) for image in images])

    def _of_image(self, image: Tensor) -> Tensor:
        patches = nn.functional.unfold(image[None], self.side)[0].T.contiguous()
        patches = self._normalise(patches)
        pooled = []
        for weights, offset in zip(torch.split(self.filters, CHUNK, 1), torch.split(self.offset, CHUNK), strict=True):
            r = torch.addmm(offset, patches, weights)
            positive, negative = (r - THRESHOLD).clamp_(min=0), (-r - THRESHOLD).clamp_(min=0)
            pooled.append(torch.cat([self.regions @ positive, self.regions @ negative]))
        maps = torch.cat(pooled, dim=1).view(2, self.grid, self.grid, -1)  # sign, row, column, filter
        return self._average_mirrored(maps).flatten() if self.mirror else maps.flatten()

    def _average_mirrored(self, maps: Tensor) -> Tensor:
        """Mean over the image and its mirror image, without the half that is equal by symmetry.

        Mirroring an image reverses the columns and exchanges each filter with its partner.
        """
        half = maps.shape[-1] // 2
        pairs = maps.view(*maps.shape[:-1], 2, half)
        mean = (pairs + pairs.flip(2, 3)) / 2
        left = [mean[:, :, : self.grid // 2].flatten()]
        if self.grid % 2:
            left.append(mean[:, :, self.grid // 2, 0].flatten())
        return torch.cat(left)

    def _normalise(self, patches: Tensor) -> Tensor:  # [n, patch size]
        centred = patches - patches.mean(1, keepdim=True)
        return centred * (centred.square().mean(1, keepdim=True) + CONTRAST).rsqrt()


def check_images(shape: torch.Size, settings: PublicSettings) -> None:
    """Raise PdslError unless records are images that are large enough for the settings."""
    name = settings.features
    if len(shape) != 3:
        raise PdslError(
            f"public.features={name} is for images of shape (channels, height, width), not records of shape"
            f" {tuple(shape)}; leave it out"
        )
    side = min(shape[1:])
    if name == "scattering" and side < MIN_SCATTERED:
        raise PdslError(
            f"public.features=scattering needs images of at least {MIN_SCATTERED}×{MIN_SCATTERED} pixels, not"
            f" {shape[1]}×{shape[2]} pixels; leave it out"
        )
    if name == "patches" and (settings.patch > side or settings.pool > side - settings.patch + 1):
        raise PdslError(
            f"public.patch={settings.patch} with public.pool={settings.pool} is too large for images of {shape[1]}×"
            f"{shape[2]} pixels; try public.patch={max(2, side // 3)} and public.pool=2"
        )


def uses_mirror(settings: PublicSettings, shape: torch.Size) -> bool:
    """Whether features are averaged over mirror images: by default for colour images; mirrored digits differ."""
    return shape[0] == 3 if settings.mirror is None else settings.mirror


def _regions(height: int, width: int, grid: int) -> Tensor:  # [grid², height · width]
    """Averages over the regions of a grid; the regions are symmetric from left to right."""
    rows, columns = (region_averages(size, grid) for size in (height, width))
    return torch.einsum("ah,bw->abhw", rows, columns).reshape(grid * grid, height * width)


def region_averages(size: int, parts: int) -> Tensor:  # [parts, size]
    """Averages over equal parts of `size` positions; a position on the border belongs to both parts in proportion."""
    edges = torch.linspace(0, size, parts + 1, dtype=torch.float64)
    at = torch.arange(size, dtype=torch.float64)
    upper, lower = torch.minimum(edges[1:, None], at + 1), torch.maximum(edges[:-1, None], at)
    return ((upper - lower).clamp(min=0) * parts / size).float()


def _draw(images: Tensor, side: int, count: int, generator: np.random.Generator) -> Tensor:  # [count, patch size]
    """Random patches of images, in float64."""
    n, _, height, width = images.shape
    which = torch.from_numpy(generator.integers(0, n, count))
    row = torch.from_numpy(generator.integers(0, height - side + 1, count))
    column = torch.from_numpy(generator.integers(0, width - side + 1, count))
    windows = images.unfold(2, side, 1).unfold(3, side, 1)  # [n, channels, rows, columns, side, side]
    return windows[which, :, row, column].flatten(1).double()


def _spread(patches: Tensor, count: int) -> Tensor:  # [count, patch size]
    """The first patches that are not nearly constant, with norm 1; repeated if there are too few."""
    norms = patches.norm(dim=1)
    chosen = patches[norms >= MIN_NORM * norms.median()]
    chosen = chosen.repeat(-(-count // len(chosen)), 1)[:count]
    return nn.functional.normalize(chosen)
