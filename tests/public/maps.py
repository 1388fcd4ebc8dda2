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
