"""Feature maps for tests, named by import path."""

import torch
from torch import Tensor, nn

torch.manual_seed(0)
WEIGHTS = torch.randn(64, 30, generator=torch.Generator().manual_seed(0))


def random_features(images: Tensor) -> Tensor:
    return (images.flatten(1) @ WEIGHTS).relu()


def centred(images: Tensor) -> Tensor:
    """Mixes records."""
    rows = images.flatten(1)
    return rows - rows.mean(0)


def relative(images: Tensor) -> Tensor:
    """Depends on the first record of a block."""
    rows = images.flatten(1)
    return rows - rows[:1]


def cumulated(images: Tensor) -> Tensor:
    """Depends on all earlier records of a block."""
    return images.flatten(1).cumsum(0)


def placed(images: Tensor) -> Tensor:
    """Depends on the place of a record in its block."""
    return images.flatten(1) + torch.arange(len(images))[:, None]


def undefined(images: Tensor) -> Tensor:
    """NaN for some records."""
    rows = images.flatten(1)
    return torch.where(rows.sum(1, keepdim=True) > 0, rows, torch.nan)


def pieces(images: Tensor) -> Tensor:
    """Four rows for each record."""
    return images.reshape(-1, 16)


def broken(images: Tensor) -> Tensor:
    found: Tensor = {"features": images}["no such key"]
    return found


def noisy(images: Tensor) -> Tensor:
    return images.flatten(1) + torch.rand(len(images), 1)


def one_hot(tokens: Tensor) -> Tensor:
    return nn.functional.one_hot(tokens, 12).float().sum(1)


def both(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a, b, a * b], dim=1)


def squares(table: Tensor) -> Tensor:
    return torch.cat([table, table.square()], dim=1)


module = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Tanh())
number = 3
