"""DMSGD: decentralised SGD with momentum (Yu, Jin, Yang, ICML 2019)."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from pdsl.algorithms.base import Algorithm, Metrics, Round
from pdsl.algorithms.base import ModelsAndMomenta as State
from pdsl.privacy import Release
from pdsl.topology import Graph


class DMSGD(Algorithm[State]):
    """D-PSGD with momentum; models and momenta are both mixed."""

    name: ClassVar[str] = "dmsgd"
    paper: ClassVar[str] = "Yu, Jin, Yang, ICML 2019"
    rule: ClassVar[str] = "x_i ← Σ_j ω_ij (x_j − γ û_j),  û_i = α u_i + ĝ_i,  u_i ← Σ_j ω_ij û_j"

    momentum: float = Field(0.5, ge=0, lt=1, description="α")

    def init(self, x0: Tensor) -> State:
        return State(x0, torch.zeros_like(x0))

    def step(self, state: State, r: Round) -> tuple[State, Metrics]:
        x, u = state.x, state.u
        u_hat = self.momentum * u + r.own_noisy_gradients(x)
        x_hat = x - r.learning_rate * u_hat
        return State(r.engine.mix(x_hat), r.engine.mix(u_hat)), {}

    def noise_gain(self, graph: Graph) -> float:
        return 1 / (1 - self.momentum)

    def sends(self, graph: Graph, noise_multiplier: float) -> int:
        return 2  # x̂, û

    def releases(self, members: int) -> Release:
        return Release(messages=1)
