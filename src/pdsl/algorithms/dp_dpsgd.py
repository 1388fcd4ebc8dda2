"""DP-DPSGD: A(DP)²SGD, asynchronous decentralised SGD with differential privacy (Xu, Zhang, Wang, TPAMI 2022).

Without staleness it is D-PSGD with noisy gradients. With staleness τ, what a neighbour sent may be up to τ rounds old.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from pdsl.algorithms.base import Algorithm, Facts, Round
from pdsl.engine.base import weighted_sums
from pdsl.privacy import Release


@dataclass(frozen=True)
class State:
    x: Tensor  # [m, d] models
    past: Tensor  # [m, τ, d] what each agent had ready to send in the last τ rounds, newest first


class DPDPSGD(Algorithm):
    """A step along the own noisy gradient, then gossip over what has arrived."""

    name: ClassVar[str] = "dp-dpsgd"
    paper: ClassVar[str] = "Xu, Zhang, Wang, TPAMI 2022"
    rule: ClassVar[str] = "x_i ← Σ_j ω_ij x̂_j(t − τ_ij),  x̂_j = x_j − γ ĝ_j,  τ_ij ≤ τ, τ_ii = 0"

    learning_rate: float = Field(1.0, gt=0, description="γ")
    staleness: int = Field(0, ge=0, description="τ, most rounds by which a neighbour's model is late; 0: synchronous")

    def init(self, x0: Tensor) -> State:
        return State(x0, x0[:, None].repeat(1, self.staleness, 1))

    def step(self, state: State, r: Round) -> tuple[State, Facts]:
        x, engine = state.x, r.engine
        x_hat = x - self.learning_rate * r.own_noisy_gradients(x)
        if self.staleness == 0:
            return State(engine.mix(x_hat), state.past), {}

        ready = torch.cat([x_hat[:, None], state.past], dim=1)  # [m, τ+1, d]
        late = self._late(r)
        sent = ready[engine.receiver - engine.agents.start, late]  # each edge's receiver sends to the edge's sender
        x = weighted_sums(engine.reply(sent), engine.omega, engine.offsets)
        rounds_late = engine.gather(late[engine.receiver != engine.sender].tolist())
        return State(x, ready[:, :-1]), {"late": sum(rounds_late) / len(rounds_late)}

    def _late(self, r: Round) -> Tensor:  # [E]
        """By how many rounds each message is late, all equally likely; one's own is at hand."""
        edges = zip(r.engine.receiver.tolist(), r.engine.sender.tolist(), strict=True)
        return torch.tensor(
            [0 if i == j else r.streams.generator("late", i, r.t, j).integers(self.staleness + 1) for i, j in edges]
        )

    def releases(self, members: int) -> Release:
        return Release(messages=1)
