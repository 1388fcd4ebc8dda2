"""Momentum tracking (Takezawa et al., TMLR 2023)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from pdsl.algorithms.base import Algorithm, Metrics, Round
from pdsl.privacy import Release
from pdsl.topology import Graph


@dataclass(frozen=True)
class State:
    x: Tensor  # [m, d] models
    u: Tensor  # [m, d] momenta
    c: Tensor  # [m, d] correction: an agent's momentum minus the mean over all agents


class MomentumTracking(Algorithm[State]):
    """Local momentum, corrected so that all agents move along the mean momentum."""

    name: ClassVar[str] = "momentum-tracking"
    paper: ClassVar[str] = "Takezawa et al., TMLR 2023"
    rule: ClassVar[str] = "u_i ← β u_i + ĝ_i,  x_i ← Σ_j ω_ij (x_j − γ (u_j − c_j)),  c_i ← Σ_j ω_ij (c_j − u_j) + u_i"
    base_rate: ClassVar[float] = 0.25

    momentum: float = Field(0.5, ge=0, lt=1, description="β")

    def init(self, x0: Tensor) -> State:
        return State(x0, torch.zeros_like(x0), torch.zeros_like(x0))

    def step(self, state: State, r: Round) -> tuple[State, Metrics]:
        x, c, engine = state.x, state.c, r.engine
        u = self.momentum * state.u + r.own_noisy_gradients(x)
        x = engine.mix(x - r.learning_rate * (u - c))
        c = engine.mix(c - u) + u
        return State(x, u, c), {}

    def noise_gain(self, graph: Graph) -> float:
        return 1 / (1 - self.momentum)

    def sends(self, graph: Graph, noise_multiplier: float) -> int:
        return 2  # x̂, c − u

    def releases(self, members: int) -> Release:
        return Release(messages=1)
