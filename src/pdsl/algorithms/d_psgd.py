"""D-PSGD: decentralised parallel stochastic gradient descent (Lian et al., NeurIPS 2017)."""

from typing import ClassVar

from torch import Tensor

from pdsl.algorithms.base import Algorithm, Metrics, Round
from pdsl.algorithms.base import Models as State
from pdsl.privacy import Release


class DPSGD(Algorithm[State]):
    """A step along the agent's own gradient, then gossip."""

    name: ClassVar[str] = "d-psgd"
    paper: ClassVar[str] = "Lian et al., NeurIPS 2017"
    rule: ClassVar[str] = "x_i ← Σ_j ω_ij (x_j − γ ĝ_j)"

    def init(self, x0: Tensor) -> State:
        return State(x0)

    def step(self, state: State, r: Round) -> tuple[State, Metrics]:
        x = state.x
        g_hat = r.own_noisy_gradients(x)
        return State(r.engine.mix(x - r.learning_rate * g_hat)), {}

    def releases(self, members: int) -> Release:
        return Release(messages=1)
