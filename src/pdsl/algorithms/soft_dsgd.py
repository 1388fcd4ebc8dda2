"""Soft-DSGD: gossip over links that lose packets (Ye, Liang, Li, JSTSP 2022)."""

from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from pdsl.algorithms.base import Algorithm, Metrics, Round
from pdsl.algorithms.base import Models as State
from pdsl.engine.base import weighted_sums
from pdsl.privacy import Release


class SoftDSGD(Algorithm[State]):
    """D-PSGD in which lost packets are replaced by the receiver's own parameters."""

    name: ClassVar[str] = "soft-dsgd"
    paper: ClassVar[str] = "Ye, Liang, Li, JSTSP 2022"
    rule: ClassVar[str] = "x_i ← Σ_j ω_ij (s_ij ∘ x̂_j + (1 − s_ij) ∘ x̂_i),  x̂_i = x_i − γ ĝ_i,  s_ij: arrived"
    gossips: ClassVar[bool] = False

    reliability: float = Field(0.8, gt=0, le=1, description="probability that a packet arrives")
    packet: int = Field(256, ge=1, description="parameters per packet")

    def init(self, x0: Tensor) -> State:
        return State(x0)

    def step(self, state: State, r: Round) -> tuple[State, Metrics]:
        engine = r.engine
        x_hat = state.x - r.learning_rate * r.own_noisy_gradients(state.x)
        own = x_hat[engine.receiver - engine.agents.start]
        arrived = self._draw_arrivals(r, x_hat.shape[1]).to(x_hat.device)
        x = weighted_sums(torch.where(arrived, engine.deliver(x_hat), own), engine.omega, engine.offsets)
        shares = engine.gather(arrived[engine.receiver != engine.sender].double().mean(1).tolist())
        return State(x), {"arrived": sum(shares) / len(shares)}

    def _draw_arrivals(self, r: Round, d: int) -> Tensor:  # [E, d]
        """Draw which parameters reach each edge's receiver; packets are lost independently."""
        packets = -(-d // self.packet)
        edges = zip(r.engine.receiver.tolist(), r.engine.sender.tolist(), strict=True)
        arrivals = [
            np.ones(packets, bool)
            if i == j
            else r.streams.generator("packets", i, r.t, j).random(packets) < self.reliability
            for i, j in edges
        ]
        return torch.from_numpy(np.repeat(np.stack(arrivals), self.packet, axis=1)[:, :d])

    def releases(self, members: int) -> Release:
        return Release(messages=1)
