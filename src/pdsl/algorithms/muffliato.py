"""MUFFLIATO: one noisy step, then gossip until the agents agree (Cyffers, Even, Bellet, Massoulié, NeurIPS 2022)."""

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from pdsl.algorithms.base import Algorithm, Metrics, Round
from pdsl.algorithms.base import Models as State
from pdsl.algorithms.mixing import accelerated_gossip, gossip_steps_to_agree, graph_omega
from pdsl.privacy import Release
from pdsl.topology import Graph


class Muffliato(Algorithm[State]):
    """A noisy gradient step, then K steps of accelerated gossip without noise."""

    name: ClassVar[str] = "muffliato"
    paper: ClassVar[str] = "Cyffers et al., NeurIPS 2022"
    rule: ClassVar[str] = "x ← P_K(W) (x − γ ĝ),  P_K Chebyshev's polynomial of gossip, K ≈ λ^(−1/2) ln n"

    gossip_steps: int | None = Field(
        None, ge=1, description="K; default ⌈λ^(−1/2) ln(n·max(1/4, σ²)/σ²)⌉, 1 if λ = 1 or on a schedule"
    )

    def init(self, x0: Tensor) -> State:
        return State(x0)

    def step(self, state: State, r: Round) -> tuple[State, Metrics]:
        x_hat = state.x - r.learning_rate * r.own_noisy_gradients(state.x)
        K = self.sends(r.graph, r.noise_multiplier)
        return State(accelerated_gossip(r.engine, x_hat, K, graph_omega(r.graph))), {"gossip_steps": K}

    def sends(self, graph: Graph, noise_multiplier: float) -> int:
        return self.gossip_steps or gossip_steps_to_agree(graph, noise_multiplier)

    def releases(self, members: int) -> Release:
        return Release(messages=1)  # gossip is post-processing
