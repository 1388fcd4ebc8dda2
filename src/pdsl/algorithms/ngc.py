"""NGC: neighbourhood gradient clustering (Aketi, Kodge, Roy, TMLR 2023)."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from pdsl.algorithms.base import Algorithm, Facts, Round
from pdsl.algorithms.states import ModelsAndMomenta as State
from pdsl.engine.base import weighted_sums
from pdsl.graph import Graph
from pdsl.privacy import Release


class NGC(Algorithm):
    """A mean of both kinds of cross-gradients, with Nesterov's momentum."""

    name: ClassVar[str] = "ngc"
    paper: ClassVar[str] = "Aketi, Kodge, Roy, TMLR 2023"
    rule: ClassVar[str] = "x_i ← Σ_j ω_ij (x_j − γ (g̃_j + β u_j)),  g̃_i = Σ_j ω_ij (α ĝ_ji + (1 − α) ĝ_ij)"

    learning_rate: float = Field(0.5, gt=0, description="γ")
    momentum: float = Field(0.5, ge=0, lt=1, description="β")
    data_variant: float = Field(
        0.5, ge=0, le=1, description="α: weight of my model's gradients on neighbours' data; the rest: theirs on mine"
    )

    def init(self, x0: Tensor) -> State:
        return State(x0, torch.zeros_like(x0))

    def step(self, state: State, r: Round) -> tuple[State, Facts]:
        x, u, engine = state.x, state.u, r.engine
        alpha, beta = self.data_variant, self.momentum
        x_j = engine.deliver(x)
        g_hat_ij = r.noisy_gradients(x_j)  # model-variant: neighbours' models on my data, noisy as they are sent
        g_hat_ji = engine.reply(g_hat_ij)  # data-variant: my model on neighbours' data
        g = weighted_sums(alpha * g_hat_ji + (1 - alpha) * g_hat_ij, engine.omega, engine.offsets)
        u = beta * u + g
        return State(engine.mix(x - self.learning_rate * (g + beta * u)), u), {}

    def sends(self, graph: Graph, noise_multiplier: float) -> int:
        return 3  # x, ĝ, x̂

    def releases(self, members: int) -> Release:
        return Release(messages=members)
