"""GUT: global update tracking (Aketi, Hashemi, Roy, NeurIPS 2023).

It tracks the models' updates, which neighbours can compute from the models they receive, so no second vector is sent.
With scaling μ = 1 the limit is the common optimum. With μ < 1 it is the limit of D-PSGD with step size (1 − μ)γ.
"""

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
    update: Tensor  # [m, d] last update of the neighbourhood, as a gradient: over the γ of its round
    g: Tensor  # [m, d] the last noisy gradient


class GUT(Algorithm[State]):
    """D-PSGD, corrected by the difference of the last update of the neighbourhood and the last own gradient."""

    name: ClassVar[str] = "gut"
    paper: ClassVar[str] = "Aketi, Hashemi, Roy, NeurIPS 2023"
    rule: ClassVar[str] = "x_i ← Σ_j ω'_ij (x_j − γ d_j),  d_i = ĝ_i + μ ((x_i(before) − x_i)/γ − ĝ_i(before))"

    scaling: float = Field(1.0, ge=0, le=1, description="μ, weight of the correction; the paper: 0.1 to 0.3")
    averaging: float = Field(0.5, gt=0, le=1, description="a, averaging rate of gossip: W' = I + a(W − I)")

    def init(self, x0: Tensor) -> State:
        return State(x0, torch.zeros_like(x0), torch.zeros_like(x0))

    def step(self, state: State, r: Round) -> tuple[State, Metrics]:
        x, gamma = state.x, r.learning_rate
        g_hat = r.own_noisy_gradients(x)
        d = g_hat + self.scaling * (state.update - state.g)
        x_hat = x - gamma * d
        mixed = x_hat + self.averaging * (r.engine.mix(x_hat) - x_hat)
        return State(mixed, (x - mixed) / gamma, g_hat), {}

    def releases(self, members: int) -> Release:
        return Release(messages=1)
