"""MSPD: the multi-step primal-dual method for convex objectives (Scaman et al., NeurIPS 2018).

Agents hold a dual variable that pulls their models together; accelerated gossip is the network's part of a round, and
several gradient steps on a proximal problem the agent's own.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from pdsl.algorithms.base import Algorithm, Facts, Round
from pdsl.algorithms.gossip import accelerated, chebyshev_omega
from pdsl.graph import Graph
from pdsl.privacy import Release


@dataclass(frozen=True)
class State:
    x: Tensor  # [m, d] models
    before: Tensor  # [m, d] the models a round ago
    y: Tensor  # [m, d] dual variables, which sum to zero over the agents


class MSPD(Algorithm):
    """Dual ascent on disagreement, then M steps towards the proximal point."""

    name: ClassVar[str] = "mspd"
    paper: ClassVar[str] = "Scaman et al., NeurIPS 2018"
    rule: ClassVar[str] = "y ← y − σ (I − P_K(W)) (2x − x(before)); M times: z ← m/(m+2) z − 2/(m+2) (γ (ĝ(z) − y) − x)"

    learning_rate: float = Field(1.0, gt=0, description="γ")
    dual_rate: float = Field(0.5, gt=0, le=1, description="σ·γ: how fast the dual variables follow disagreement")
    local_steps: int = Field(2, ge=1, description="M, gradient steps of a round")
    gossip_steps: int = Field(2, ge=1, description="K, rounds of gossip")

    def init(self, x0: Tensor) -> State:
        return State(x0, x0, torch.zeros_like(x0))

    def step(self, state: State, r: Round) -> tuple[State, Facts]:
        x, gamma = state.x, self.learning_rate
        ahead = 2 * x - state.before
        omega = chebyshev_omega(r.graph.spectral_gap)
        apart = ahead - accelerated(r.engine, ahead, self.gossip_steps, omega)
        y = state.y - self.dual_rate / gamma * apart
        z = x
        for m in range(self.local_steps):
            towards = gamma * r.own_noisy_gradients(z, step=m) - gamma * y - x
            z = m / (m + 2) * z - 2 / (m + 2) * towards
        return State(z, x, y), {}

    def sends(self, graph: Graph, noise_multiplier: float) -> int:
        return self.gossip_steps

    def releases(self, members: int) -> Release:
        return Release(messages=1, steps=self.local_steps)
