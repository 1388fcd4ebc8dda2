"""MSPD: the multi-step primal-dual method for convex objectives (Scaman et al., NeurIPS 2018).

A dual variable pulls the agents' models together. A round is accelerated gossip, then several gradient steps on each
agent's proximal problem.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from pdsl.algorithms.base import Algorithm, Metrics, Round
from pdsl.algorithms.mixing import accelerated_gossip, graph_omega
from pdsl.privacy import Release
from pdsl.topology import Graph


@dataclass(frozen=True)
class State:
    x: Tensor  # [m, d] models
    before: Tensor  # [m, d] models of the previous round
    y: Tensor  # [m, d] dual variables; their sum over the agents is zero


class MSPD(Algorithm[State]):
    """Dual ascent on disagreement, then M steps towards the proximal point."""

    name: ClassVar[str] = "mspd"
    paper: ClassVar[str] = "Scaman et al., NeurIPS 2018"
    rule: ClassVar[str] = "y ← y − σ (I − P_K(W)) (2x − x(before)); M times: z ← m/(m+2) z − 2/(m+2) (γ (ĝ(z) − y) − x)"

    dual_rate: float = Field(0.5, gt=0, le=1, description="σ·γ, step size of the dual variables")
    local_steps: int = Field(2, ge=1, description="M, local gradient steps per round")
    gossip_steps: int = Field(2, ge=1, description="K, gossip steps per round")

    def init(self, x0: Tensor) -> State:
        return State(x0, x0, torch.zeros_like(x0))

    def step(self, state: State, r: Round) -> tuple[State, Metrics]:
        x, gamma = state.x, r.learning_rate
        extrapolated = 2 * x - state.before
        omega = graph_omega(r.graph)
        disagreement = extrapolated - accelerated_gossip(r.engine, extrapolated, self.gossip_steps, omega)
        y = state.y - self.dual_rate / gamma * disagreement
        z = x
        for m in range(self.local_steps):
            direction = gamma * r.own_noisy_gradients(z, step=m) - gamma * y - x
            z = m / (m + 2) * z - 2 / (m + 2) * direction
        return State(z, x, y), {}

    def noise_gain(self, graph: Graph) -> float:
        return 1 / self.local_steps  # the steps of a round are averaged

    def sends(self, graph: Graph, noise_multiplier: float) -> int:
        return self.gossip_steps

    def releases(self, members: int) -> Release:
        return Release(messages=1, steps=self.local_steps)
