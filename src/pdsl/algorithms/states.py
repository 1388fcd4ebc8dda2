"""States that several algorithms share: a row per agent."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Models:
    x: Tensor  # [m, d] models


@dataclass(frozen=True)
class ModelsAndMomenta:
    x: Tensor  # [m, d] models
    u: Tensor  # [m, d] momenta
