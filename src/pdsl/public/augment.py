"""Variants of public images: small random rotations, scalings, shifts and mirror images."""

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

MAX_ANGLE = math.radians(12)
MAX_SCALE = 0.1  # images are scaled by 1 ± 0.1
MAX_SHIFT = 0.08  # of the side of an image


def augment(images: Tensor, mirror: bool, generator: np.random.Generator) -> Tensor:
    """A random variant of each image [n, channels, height, width]."""
    n = len(images)
    angle, scale, across, down = (
        torch.from_numpy(generator.uniform(-limit, limit, n))
        for limit in (MAX_ANGLE, MAX_SCALE, 2 * MAX_SHIFT, 2 * MAX_SHIFT)  # coordinates run from -1 to 1
    )
    sign = torch.from_numpy(generator.choice([1.0, -1.0], n)) if mirror else torch.ones(n, dtype=torch.float64)
    cosine, sine = torch.cos(angle) * (1 + scale), torch.sin(angle) * (1 + scale)
    rows = [torch.stack([sign * cosine, -sine, across], 1), torch.stack([sign * sine, cosine, down], 1)]
    grid = affine_grid(torch.stack(rows, 1).float(), list(images.shape), align_corners=False)
    return grid_sample(images, grid.to(images.device), padding_mode="border", align_corners=False)
