"""Add an algorithm: settings, a first state, a step. Here decentralised SGD, x_i ← Σ_j ω_ij x_j − γ ĝ_i."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

import pdsl


@dataclass(frozen=True)
class State:
    x: Tensor  # [agents, d], a row per agent


class DSGD(pdsl.Algorithm):
    name: ClassVar[str] = "my-dsgd"

    def init(self, x0: Tensor) -> State:
        return State(x0)

    def step(self, state: State, r: pdsl.Round) -> tuple[State, pdsl.Metrics]:
        g_hat = r.own_noisy_gradients(state.x)
        return State(r.engine.mix(state.x) - r.learning_rate * g_hat), {}

    def releases(self, members: int) -> pdsl.Release:
        return pdsl.Release(messages=1)  # one noisy gradient a round; what it goes into is post-processing


if __name__ == "__main__":
    result = pdsl.train(data="digits", graph=pdsl.ring(10), algorithm=DSGD(), rounds=60)
    print(f"accuracy {result.accuracy:.3f} over agents, {result.accuracy_of_mean:.3f} for the mean model")
