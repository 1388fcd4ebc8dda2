"""GUT: global update tracking (Aketi, Hashemi, Roy, NeurIPS 2023).

What is tracked is the models' own updates, which neighbours know from the models they get: no second vector is sent.
With scaling μ = 1 the limit is the common optimum; with μ < 1 it is where D-PSGD with step (1 − μ)γ would end.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from pdsl.algorithms.base import Algorithm, Facts, Round
from pdsl.privacy import Release


@dataclass(frozen=True)
class State:
    x: Tensor  # [m, d] models
    before: Tensor  # [m, d] the models a round ago
    g: Tensor  # [m, d] the last gradient, noisy as it was


class GUT(Algorithm):
    """D-PSGD, corrected by how the neighbourhood's update differed from the own gradient a round ago."""

    name: ClassVar[str] = "gut"
    paper: ClassVar[str] = "Aketi, Hashemi, Roy, NeurIPS 2023"
    rule: ClassVar[str] = "x_i ← Σ_j ω'_ij (x_j − γ d_j),  d_i = ĝ_i + μ ((x_i(before) − x_i)/γ − ĝ_i(before))"

    learning_rate: float = Field(1.0, gt=0, description="γ")
    scaling: float = Field(1.0, ge=0, le=1, description="μ, how much of the correction is used; the paper: 0.1 to 0.3")
    averaging: float = Field(0.5, gt=0, le=1, description="a: gossip goes only so far, W' = I + a(W − I)")

    def init(self, x0: Tensor) -> State:
        return State(x0, x0, torch.zeros_like(x0))

    def step(self, state: State, r: Round) -> tuple[State, Facts]:
        x, gamma = state.x, self.learning_rate
        g_hat = r.own_noisy_gradients(x)
        update = (state.before - x) / gamma  # what the neighbourhood did in the last round, in units of a gradient
        d = g_hat + self.scaling * (update - state.g)
        x_hat = x - gamma * d
        return State(x_hat + self.averaging * (r.engine.mix(x_hat) - x_hat), x, g_hat), {}

    def releases(self, members: int) -> Release:
        return Release(messages=1)
