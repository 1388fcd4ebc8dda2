"""Simulated Byzantine agents: label flipping, Gaussian messages, free riders.

They follow the protocol otherwise: their messages are clipped and noisy like all others.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pdsl.gradients.clipping import LocalGradients
from pdsl.settings import AttackSettings
from pdsl.utils.errors import PdslError
from pdsl.utils.random import Streams

Kind = Literal["label-flip", "gaussian", "free-rider"]
Attackers = Mapping[int, Kind]  # attacking agents and their attack; all other agents are honest


def draw_attackers(settings: AttackSettings, agents: int, streams: Streams) -> Attackers:
    """Draw the attacking agents from the run's seed; each has one kind of attack."""
    counts: dict[Kind, int] = {
        "label-flip": settings.label_flip,
        "gaussian": settings.gaussian,
        "free-rider": settings.free_rider,
    }
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    if len(kinds) > agents:
        raise PdslError(f"[attack] asks for {len(kinds)} agents, but the graph has {agents}; try fewer")
    order = streams.generator("rogues").permutation(agents)[: len(kinds)].tolist()
    return dict(zip(order, kinds, strict=True))


@dataclass(frozen=True)
class AttackedGradients:
    """Gradients of the agents, where Gaussian attackers send a random vector and free riders send zero."""

    local: LocalGradients
    attackers: Attackers
    streams: Streams

    def gradients(self, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None) -> Tensor:
        g = self.local.gradients(t, agents, x, step, teachers)
        requests: Counter[int] = Counter()
        for row, agent in enumerate(agents.tolist()):
            requests[agent] += 1
            if self.attackers.get(agent) == "gaussian":
                g[row] = self._random(t, agent, step, requests[agent], g.shape[1])
            elif self.attackers.get(agent) == "free-rider":
                g[row] = 0
        return g

    def _random(self, t: int, agent: int, step: int, nth: int, d: int) -> Tensor:
        """Random vector of norm C, a new one for each request of the round."""
        direction: Tensor = torch.from_numpy(
            self.streams.generator(f"rogue.{step}.{nth}", agent, t).standard_normal(d, dtype=np.float32)
        )
        scaled: Tensor = direction * (self.local.C / direction.norm())
        return scaled
