"""NGC: neighbourhood gradient clustering (Aketi, Kodge, Roy, TMLR 2023)."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from pdsl.algorithms.base import Algorithm, Metrics, Round
from pdsl.algorithms.base import ModelsAndMomenta as State
from pdsl.engine.base import weighted_sums
from pdsl.privacy import Release
from pdsl.topology import Graph


class NGC(Algorithm[State]):
    """Weighted mean of data-variant and model-variant cross-gradients, with Nesterov momentum."""

    name: ClassVar[str] = "ngc"
    paper: ClassVar[str] = "Aketi, Kodge, Roy, TMLR 2023"
    rule: ClassVar[str] = "x_i ← Σ_j ω_ij (x_j − γ (g̃_j + β u_j)),  g̃_i = Σ_j ω_ij (α ĝ_ji + (1 − α) ĝ_ij)"
    base_rate: ClassVar[float] = 0.5

    momentum: float = Field(0.5, ge=0, lt=1, description="β")
    data_variant: float = Field(
        0.5,
        ge=0,
        le=1,
        description="α, weight of the own model's gradients on neighbours' data; 1 − α: neighbours' models on own data",
    )

    def init(self, x0: Tensor) -> State:
        return State(x0, torch.zeros_like(x0))

    def step(self, state: State, r: Round) -> tuple[State, Metrics]:
        x, u, engine = state.x, state.u, r.engine
        alpha, beta = self.data_variant, self.momentum
        x_j = engine.deliver(x)
        g_hat_ij = r.noisy_gradients(x_j)  # model-variant: neighbours' models on own data, noisy as sent
        g_hat_ji = engine.reply(g_hat_ij)  # data-variant: own model on neighbours' data
        g = weighted_sums(alpha * g_hat_ji + (1 - alpha) * g_hat_ij, engine.omega, engine.offsets)
        u = beta * u + g
        return State(engine.mix(x - r.learning_rate * (g + beta * u)), u), {}

    def noise_gain(self, graph: Graph) -> float:
        return 1 / (1 - self.momentum)

    def sends(self, graph: Graph, noise_multiplier: float) -> int:
        return 3  # x, ĝ, x̂

    def releases(self, members: int) -> Release:
        return Release(messages=members)
