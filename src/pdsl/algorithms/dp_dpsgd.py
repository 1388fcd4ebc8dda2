"""DP-DPSGD: A(DP)²SGD, asynchronous decentralised SGD with differential privacy (Xu, Zhang, Wang, TPAMI 2022).

Without staleness it is D-PSGD with noisy gradients. With staleness τ, a neighbour's model may be up to τ rounds old.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from pdsl.algorithms.base import Algorithm, Metrics, Round
from pdsl.engine.base import weighted_sums
from pdsl.privacy import Release


@dataclass(frozen=True)
class State:
    x: Tensor  # [m, d] models
    past: Tensor  # [m, τ, d] each agent's x̂ of the last τ rounds, newest first


class DPDPSGD(Algorithm[State]):
    """A step along the agent's own noisy gradient, then gossip with delayed models."""

    name: ClassVar[str] = "dp-dpsgd"
    paper: ClassVar[str] = "Xu, Zhang, Wang, TPAMI 2022"
    rule: ClassVar[str] = "x_i ← Σ_j ω_ij x̂_j(t − τ_ij),  x̂_j = x_j − γ ĝ_j,  τ_ij ≤ τ, τ_ii = 0"

    staleness: int = Field(0, ge=0, description="τ, maximum delay of a neighbour's model in rounds; 0: synchronous")

    def init(self, x0: Tensor) -> State:
        return State(x0, x0[:, None].repeat(1, self.staleness, 1))

    def step(self, state: State, r: Round) -> tuple[State, Metrics]:
        x, engine = state.x, r.engine
        x_hat = x - r.learning_rate * r.own_noisy_gradients(x)
        if self.staleness == 0:
            return State(engine.mix(x_hat), state.past), {}

        ready = torch.cat([x_hat[:, None], state.past], dim=1)  # [m, τ+1, d]
        delay = self._draw_delays(r)
        sent = ready[engine.receiver - engine.agents.start, delay]  # from each edge's receiver to its sender
        x = weighted_sums(engine.reply(sent), engine.omega, engine.offsets)
        delays = engine.gather(delay[engine.receiver != engine.sender].tolist())
        return State(x, ready[:, :-1]), {"late": sum(delays) / len(delays)}

    def _draw_delays(self, r: Round) -> Tensor:  # [E]
        """Draw the delay of each message in rounds, uniformly; an agent's own model has none."""
        edges = zip(r.engine.receiver.tolist(), r.engine.sender.tolist(), strict=True)
        return torch.tensor(
            [0 if i == j else r.streams.generator("late", i, r.t, j).integers(self.staleness + 1) for i, j in edges]
        )

    def releases(self, members: int) -> Release:
        return Release(messages=1)
