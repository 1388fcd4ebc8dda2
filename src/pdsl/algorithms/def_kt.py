"""Def-KT: mutual knowledge transfer (Li, Li, Varshney, IEEE IoT Journal 2022).

Models are not averaged. A neighbour's model comes by, and it and the host's own learn from the host's records and from
each other.
"""

from itertools import pairwise
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from pdsl.algorithms.base import Algorithm, Facts, Round
from pdsl.algorithms.states import Models as State
from pdsl.privacy import Release


class DefKT(Algorithm):
    """K steps in which two models learn from the records and from each other; one of the two stays."""

    name: ClassVar[str] = "def-kt"
    paper: ClassVar[str] = "Li, Li, Varshney, IoT Journal 2022"
    rule: ClassVar[str] = "z_i = x_j of one neighbour; K times: x ← x − γ ĝ(x taught by z), z ← z − γ ĝ(z taught by x)"

    learning_rate: float = Field(0.5, gt=0, description="γ")
    local_steps: int = Field(2, ge=1, description="K")
    keep: Literal["visitor", "own"] = Field("visitor", description="the model that stays after the lesson")

    def init(self, x0: Tensor) -> State:
        return State(x0)

    def step(self, state: State, r: Round) -> tuple[State, Facts]:
        x, gamma = state.x, self.learning_rate
        z = r.engine.deliver(x)[self._partners(r)]
        for k in range(self.local_steps):
            g_x = r.own_noisy_gradients(x, step=k, nth=0, teachers=z)
            g_z = r.own_noisy_gradients(z, step=k, nth=1, teachers=x)
            x, z = x - gamma * g_x, z - gamma * g_z
        return State(z if self.keep == "visitor" else x), {}

    def _partners(self, r: Round) -> Tensor:  # [m]
        """For each agent the edge on which its visitor of this round comes, all neighbours equally likely."""
        chosen = []
        for i, (a, b) in zip(r.engine.agents, pairwise(r.engine.offsets), strict=True):
            others = [e for e in range(a, b) if r.engine.sender[e] != i]
            chosen.append(others[int(r.streams.generator("partner", i, r.t).integers(len(others)))])
        return torch.tensor(chosen)

    def releases(self, members: int) -> Release:
        return Release(messages=2, steps=self.local_steps)  # two models' gradients on one batch
