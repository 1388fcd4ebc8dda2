"""DP-ADMM: decentralised ADMM with several noisy steps on each agent's subproblem (after Huang and Gong, 2020)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from pdsl.algorithms.base import Algorithm, Metrics, Round
from pdsl.privacy import Release


@dataclass(frozen=True)
class State:
    x: Tensor  # [m, d] models
    p: Tensor  # [m, d] dual variables; their sum over the agents is zero


class DPADMM(Algorithm[State]):
    """Dual variables accumulate disagreement; K noisy steps approximate each agent's augmented problem."""

    name: ClassVar[str] = "dp-admm"
    paper: ClassVar[str] = "Huang, Gong, arXiv 2020"
    rule: ClassVar[str] = "p_i ← p_i + c Σ_j ω_ij (x_i − x_j);  K times: x_i ← x_i − γ (ĝ_i + p_i + 2c (x_i − a_i))"
    base_rate: ClassVar[float] = 0.5

    local_steps: int = Field(2, ge=1, description="K")
    penalty: float = Field(0.25, gt=0, le=1, description="γ·c, penalty on disagreement")

    def init(self, x0: Tensor) -> State:
        return State(x0, torch.zeros_like(x0))

    def step(self, state: State, r: Round) -> tuple[State, Metrics]:
        x, gamma = state.x, r.learning_rate
        c = self.penalty / gamma
        mixed = r.engine.mix(x)
        p = state.p + c * (x - mixed)
        a = (x + mixed) / 2  # halfway between the own model and the neighbourhood's mean
        for k in range(self.local_steps):
            x = x - gamma * (r.own_noisy_gradients(x, step=k) + p + 2 * c * (x - a))
        return State(x, p), {}

    def releases(self, members: int) -> Release:
        return Release(messages=1, steps=self.local_steps)
