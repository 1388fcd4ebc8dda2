"""NET-FLEET: local steps with recursive gradient correction (Zhang et al., MobiHoc 2022); with noise, DP-NET-FLEET.

A correction is a difference of noisy gradients, of which only one is new, so each local step is one release.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from pdsl.algorithms.base import Algorithm, Metrics, Round
from pdsl.privacy import Release
from pdsl.topology import Graph


@dataclass(frozen=True)
class State:
    x: Tensor  # [m, d] models
    v: Tensor  # [m, d] corrected directions
    g: Tensor  # [m, d] the last noisy gradient


class NetFleet(Algorithm[State]):
    """K local steps along a recursively corrected gradient, then gossip of models and directions."""

    name: ClassVar[str] = "net-fleet"
    paper: ClassVar[str] = "Zhang et al., MobiHoc 2022"
    rule: ClassVar[str] = "K times: v_i ← v_i + ĝ_i − ĝ_i(before), x_i ← x_i − γ v_i; then x and v are mixed"
    base_rate: ClassVar[float] = 0.25

    local_steps: int = Field(2, ge=1, description="K")

    def init(self, x0: Tensor) -> State:
        return State(x0, torch.zeros_like(x0), torch.zeros_like(x0))

    def step(self, state: State, r: Round) -> tuple[State, Metrics]:
        x, v, g = state.x, state.v, state.g
        for k in range(self.local_steps):
            g_hat = r.own_noisy_gradients(x, step=k)
            v = v + g_hat - g
            x = x - r.learning_rate * v
            g = g_hat
        return State(r.engine.mix(x), r.engine.mix(v), g), {}

    def sends(self, graph: Graph, noise_multiplier: float) -> int:
        return 2  # x, v

    def releases(self, members: int) -> Release:
        return Release(messages=1, steps=self.local_steps)


class DPNetFleet(NetFleet):
    """NET-FLEET with noisy gradients, as in the PDSL paper. The update is the same."""

    name: ClassVar[str] = "dp-net-fleet"
    paper: ClassVar[str] = "Zhang et al., MobiHoc 2022, with noise"
