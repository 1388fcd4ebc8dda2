"""QG-DSGDm: quasi-global momentum (Lin, Karimireddy, Stich, Jaggi, ICML 2021)."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from pdsl.algorithms.base import Algorithm, Metrics, Round
from pdsl.algorithms.base import ModelsAndMomenta as State
from pdsl.privacy import Release
from pdsl.topology import Graph


class QGDSGDm(Algorithm[State]):
    """D-PSGD with momentum of the updates after gossip instead of the local gradients."""

    name: ClassVar[str] = "qg-dsgdm"
    paper: ClassVar[str] = "Lin et al., ICML 2021"
    rule: ClassVar[str] = "x_i ← Σ_j ω_ij (x_j − γ (β u_j + ĝ_j)),  u_i ← β u_i + (1 − β) (x_i(before) − x_i)/γ"

    momentum: float = Field(0.5, ge=0, lt=1, description="β")

    def init(self, x0: Tensor) -> State:
        return State(x0, torch.zeros_like(x0))

    def step(self, state: State, r: Round) -> tuple[State, Metrics]:
        u, gamma, beta = state.u, r.learning_rate, self.momentum
        x = r.engine.mix(state.x - gamma * (beta * u + r.own_noisy_gradients(state.x)))
        u = beta * u + (1 - beta) * (state.x - x) / gamma
        return State(x, u), {}

    def noise_gain(self, graph: Graph) -> float:
        return 1 / (1 - self.momentum)

    def releases(self, members: int) -> Release:
        return Release(messages=1)
