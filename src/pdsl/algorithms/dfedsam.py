"""DFedSAM and DFedSAM-MGS: local sharpness-aware steps, then gossip (Shi et al., ICML 2023)."""

import math
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from pdsl.algorithms.base import Algorithm, Metrics, Round
from pdsl.algorithms.base import Models as State
from pdsl.algorithms.mixing import gossip
from pdsl.privacy import Release
from pdsl.topology import Graph


class DFedSAM(Algorithm[State]):
    """K local sharpness-aware steps, each along the gradient at a point uphill; then gossip."""

    name: ClassVar[str] = "dfedsam"
    paper: ClassVar[str] = "Shi et al., ICML 2023"
    rule: ClassVar[str] = "K times: x_i ← x_i − γ ĝ_i(x_i + ρ ĝ_i/‖ĝ_i‖); then x ← W^Q x"
    base_rate: ClassVar[float] = 0.5

    local_steps: int = Field(2, ge=1, description="K")
    radius: float = Field(0.05, ge=0, description="ρ, distance of the point uphill; 0: plain local SGD")
    gossip_steps: int = Field(1, ge=1, description="Q, gossip steps per round")

    def init(self, x0: Tensor) -> State:
        return State(x0)

    def step(self, state: State, r: Round) -> tuple[State, Metrics]:
        x = state.x
        for k in range(self.local_steps):
            x = x - r.learning_rate * r.own_noisy_gradients(self._uphill(x, r, k), step=k)
        return State(gossip(r.engine, x, self.gossip_steps)), {}

    def _uphill(self, x: Tensor, r: Round, k: int) -> Tensor:
        """x + ρ ĝ/‖ĝ‖, with a gradient on the batch of the step itself."""
        if self.radius == 0:
            return x
        g_hat = r.own_noisy_gradients(x, step=k, nth=1)
        length: Tensor = g_hat.norm(dim=1, keepdim=True).clamp(min=1e-12)
        return x + self.radius * g_hat / length

    def noise_gain(self, graph: Graph) -> float:
        return 1.0 if self.radius == 0 else math.sqrt(2)  # of two messages one is a step

    def sends(self, graph: Graph, noise_multiplier: float) -> int:
        return self.gossip_steps

    def releases(self, members: int) -> Release:
        k = 1 if self.radius == 0 else 2  # gradients on one batch; both enter the model that is sent
        return Release(messages=k, steps=self.local_steps)


class DFedSAMMGS(DFedSAM):
    """DFedSAM with multiple gossip steps."""

    name: ClassVar[str] = "dfedsam-mgs"

    gossip_steps: int = Field(4, ge=1, description="Q, gossip steps per round")
