"""Simulated Byzantine agents: label flipping, Gaussian messages, free riders, echoes and duplicates.

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
from pdsl.privacy import Noise
from pdsl.settings import AttackSettings
from pdsl.topology import Graph
from pdsl.utils.errors import PdslError
from pdsl.utils.random import Streams

Kind = Literal["label-flip", "gaussian", "free-rider", "echo", "duplicate"]
Attackers = Mapping[int, Kind]  # attacking agents and their attack; all other agents are honest
OWN_BATCH = 1000  # added to the local step, so that a duplicate draws other batches than its victim


def draw_attackers(settings: AttackSettings, agents: int, streams: Streams) -> Attackers:
    """Draw the attacking agents from the run's seed; each has one kind of attack."""
    counts: dict[Kind, int] = {
        "label-flip": settings.label_flip,
        "gaussian": settings.gaussian,
        "free-rider": settings.free_rider,
        "echo": settings.echo,
        "duplicate": settings.duplicate,
    }
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    if len(kinds) > agents:
        raise PdslError(f"[attack] asks for {len(kinds)} agents, but the graph has {agents}; try fewer")
    order = streams.generator("rogues").permutation(agents)[: len(kinds)].tolist()
    return dict(zip(order, kinds, strict=True))


def find_victim(attackers: Attackers, graph: Graph, agent: int) -> int:
    """The agent whose messages or records an attacker uses: its first honest neighbour. PdslError if it has none."""
    honest = (other for other in graph.neighbourhood(agent).tolist() if other not in attackers)
    found: int | None = next(honest, None)
    if found is None:
        raise PdslError(f"[attack] agent {agent} has no honest neighbour to copy from; try fewer attackers")
    return found


@dataclass(frozen=True)
class AttackedGradients:
    """Gradients of the agents, with those of attackers replaced.

    Gaussian attackers send a random vector, free riders zero. An echo sends the message that its victim sent to it in
    the round before. A duplicate computes gradients on the records of its victim, in batches of its own.
    """

    local: LocalGradients
    attackers: Attackers
    streams: Streams
    noise: Noise
    graph: Graph

    def gradients(self, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None) -> Tensor:
        g = self.local.gradients(t, agents, x, step, teachers)
        requests: Counter[int] = Counter()
        for row, agent in enumerate(agents.tolist()):
            requests[agent] += 1
            match self.attackers.get(agent):
                case "gaussian":
                    g[row] = self._random(t, agent, step, requests[agent], g.shape[1])
                case "free-rider":
                    g[row] = 0
                case "echo":
                    g[row] = self._echo(t, agent, x[row : row + 1])
                case "duplicate":
                    victim = torch.tensor([find_victim(self.attackers, self.graph, agent)])
                    g[row] = self.local.gradients(t, victim, x[row : row + 1], step + OWN_BATCH)[0]
        return g

    def _echo(self, t: int, agent: int, x: Tensor) -> Tensor:
        """The victim's message to the attacker in the round before, at its present model; zero in round 1."""
        if t == 1:
            return torch.zeros_like(x[0], dtype=torch.float64)
        victim, own = (torch.tensor([a]) for a in (find_victim(self.attackers, self.graph, agent), agent))
        return self.noise.add(t - 1, victim, own, self.local.gradients(t - 1, victim, x))[0]

    def _random(self, t: int, agent: int, step: int, nth: int, d: int) -> Tensor:
        """Random vector of norm C, a new one for each request of the round."""
        direction: Tensor = torch.from_numpy(
            self.streams.generator(f"rogue.{step}.{nth}", agent, t).standard_normal(d, dtype=np.float32)
        )
        scaled: Tensor = direction * (self.local.C / direction.norm())
        return scaled
