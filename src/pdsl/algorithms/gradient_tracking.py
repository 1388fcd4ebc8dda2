"""Gradient tracking (Pu and Nedić, Mathematical Programming 2021)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pdsl.algorithms.base import Algorithm, Metrics, Round
from pdsl.privacy import Release
from pdsl.topology import Graph


@dataclass(frozen=True)
class State:
    x: Tensor  # [m, d] models
    y: Tensor  # [m, d] each agent's estimate of the mean gradient over all agents
    g: Tensor  # [m, d] the last noisy gradient


class GradientTracking(Algorithm[State]):
    """A step along an estimate of the mean gradient, which gossip and gradient differences keep up to date."""

    name: ClassVar[str] = "gradient-tracking"
    paper: ClassVar[str] = "Pu, Nedić, Math. Programming 2021"
    rule: ClassVar[str] = "y_i ← y_i + ĝ_i − ĝ_i(before),  x_i ← Σ_j ω_ij (x_j − γ y_j),  y_i ← Σ_j ω_ij y_j"
    base_rate: ClassVar[float] = 0.5

    def init(self, x0: Tensor) -> State:
        return State(x0, torch.zeros_like(x0), torch.zeros_like(x0))

    def step(self, state: State, r: Round) -> tuple[State, Metrics]:
        x, engine = state.x, r.engine
        g_hat = r.own_noisy_gradients(x)
        y = state.y + g_hat - state.g
        return State(engine.mix(x - r.learning_rate * y), engine.mix(y), g_hat), {}

    def sends(self, graph: Graph, noise_multiplier: float) -> int:
        return 2  # x̂, y

    def releases(self, members: int) -> Release:
        return Release(messages=1)  # y adds one new noisy gradient; the one it subtracts was released a round ago
