"""Def-KT: mutual knowledge transfer (Li, Li, Varshney, IEEE IoT Journal 2022).

Models are not averaged. Each agent receives one neighbour's model; then the two models are trained on the agent's
records and on each other's predictions.
"""

import math
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from pdsl.algorithms.base import Algorithm, Metrics, Round
from pdsl.algorithms.base import Models as State
from pdsl.privacy import Release
from pdsl.tasks import MultiClass, Task
from pdsl.topology import Graph
from pdsl.utils.errors import PdslError


class DefKT(Algorithm[State]):
    """K steps of mutual distillation between the agent's model and a visiting model; one of the two is kept."""

    name: ClassVar[str] = "def-kt"
    paper: ClassVar[str] = "Li, Li, Varshney, IoT Journal 2022"
    rule: ClassVar[str] = "z_i = x_j of one neighbour; K times: x ← x − γ ĝ(x taught by z), z ← z − γ ĝ(z taught by x)"
    gossips: ClassVar[bool] = False
    base_rate: ClassVar[float] = 0.5

    local_steps: int = Field(2, ge=1, description="K")
    keep: Literal["visitor", "own"] = Field("visitor", description="the model that is kept")

    def init(self, x0: Tensor) -> State:
        return State(x0)

    def step(self, state: State, r: Round) -> tuple[State, Metrics]:
        x, gamma = state.x, r.learning_rate
        z = r.engine.deliver(x)[self._draw_partners(r)]
        for k in range(self.local_steps):
            g_x = r.own_noisy_gradients(x, step=k, nth=0, teachers=z)
            g_z = r.own_noisy_gradients(z, step=k, nth=1, teachers=x)
            x, z = x - gamma * g_x, z - gamma * g_z
        return State(z if self.keep == "visitor" else x), {}

    def _draw_partners(self, r: Round) -> Tensor:  # [m]
        """Draw, for each agent, the edge of this round's visiting model, uniformly over its neighbours."""
        chosen = []
        for i, (a, b) in zip(r.engine.agents, pairwise(r.engine.offsets), strict=True):
            # on a schedule an agent may have no neighbour in a round; then its own model visits
            others = [e for e in range(a, b) if r.engine.sender[e] != i] or [a]
            chosen.append(others[int(r.streams.generator("partner", i, r.t).integers(len(others)))])
        return torch.tensor(chosen)

    def check_task(self, task: Task) -> None:
        if not isinstance(task, MultiClass) or task.loss is not None:
            raise PdslError(
                f"algorithm def-kt distils class probabilities, so it needs a multiclass task with its own loss, not"
                f" {task.kind}; choose another algorithm"
            )

    def noise_gain(self, graph: Graph) -> float:
        return math.sqrt(2 * graph.agents)  # of two messages one is a step, and models are not averaged

    def releases(self, members: int) -> Release:
        return Release(messages=2, steps=self.local_steps)  # gradients of two models on one batch
