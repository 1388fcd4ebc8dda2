"""Agents that spoil what they send, for experiments: who learns anyway, and what the weights make of them.

They keep to the protocol: what they send is clipped, and noise is added to it, as to anybody's.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pdsl.errors import PdslError
from pdsl.gradients import Owners
from pdsl.randomness import Streams
from pdsl.settings import RogueSettings

Kind = Literal["flipped", "noise", "idle"]
Rogues = Mapping[int, Kind]  # agents and what they do; everybody else is honest


def drawn(settings: RogueSettings, agents: int, streams: Streams) -> Rogues:
    """Which agents are rogues: drawn by the run's seed, one kind each."""
    kinds: list[Kind] = (
        ["flipped"] * settings.flipped + ["noise"] * settings.noise + ["idle"] * settings.idle  # type: ignore[assignment]
    )
    if len(kinds) > agents:
        raise PdslError(f"[rogue] asks for {len(kinds)} agents, but the graph has {agents}; try fewer")
    order = streams.generator("rogues").permutation(agents)[: len(kinds)].tolist()
    return dict(zip(order, kinds, strict=True))


def flipped(labels: Tensor, classes: int) -> Tensor:
    """Every label turned into the one at the other end: 0 into 9, 1 into 8."""
    return classes - 1 - labels


@dataclass(frozen=True)
class Spoiled:
    """The agents' gradients, but for those of rogues that do not send any: they send a random vector, or zero."""

    owners: Owners
    rogues: Rogues
    streams: Streams

    def gradients(self, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None) -> Tensor:
        g = self.owners.gradients(t, agents, x, step, teachers)
        asked: Counter[int] = Counter()
        for row, agent in enumerate(agents.tolist()):
            asked[agent] += 1
            if self.rogues.get(agent) == "noise":
                g[row] = self._random(t, agent, step, asked[agent], g.shape[1])
            elif self.rogues.get(agent) == "idle":
                g[row] = 0
        return g

    def _random(self, t: int, agent: int, step: int, nth: int, d: int) -> Tensor:
        """As long as clipping lets a message be; another for each who asks."""
        direction: Tensor = torch.from_numpy(
            self.streams.generator(f"rogue.{step}.{nth}", agent, t).standard_normal(d, dtype=np.float32)
        )
        scaled: Tensor = direction * (self.owners.C / direction.norm())
        return scaled
