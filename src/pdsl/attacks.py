"""Simulated Byzantine agents: label flipping, Gaussian messages, free riders, copies, poisoned models.

They follow the protocol otherwise: their messages are clipped and noisy like all others. An attacker on models sends
honest gradients and false rows when models and momenta are mixed.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from pdsl.engine import Engine
from pdsl.engine.base import Replies, ReplyFn
from pdsl.gradients.clipping import LocalGradients
from pdsl.privacy import Noise
from pdsl.settings import AttackSettings
from pdsl.topology import Graph
from pdsl.utils.errors import PdslError
from pdsl.utils.random import Streams

Kind = Literal[
    "label-flip",
    "gaussian",
    "free-rider",
    "echo",
    "duplicate",
    "reversed-model",
    "constant-model",
    "copied-model",
    "drifting-model",
]
Attackers = Mapping[int, Kind]  # attacking agents and their attack; all other agents are honest
OWN_BATCH = 1000  # added to the local step, so that a duplicate draws other batches than its victim

FALSE_ROWS = ("reversed-model", "constant-model", "copied-model")  # attacks on the rows that are mixed
REVERSED_TIMES = 1000.0
CONSTANT_NORM = 100.0


def draw_attackers(settings: AttackSettings, agents: int, streams: Streams) -> Attackers:
    """Draw the attacking agents from the run's seed; each has one kind of attack."""
    counts: dict[Kind, int] = {
        "label-flip": settings.label_flip,
        "gaussian": settings.gaussian,
        "free-rider": settings.free_rider,
        "echo": settings.echo,
        "duplicate": settings.duplicate,
        "reversed-model": settings.reversed_model,
        "constant-model": settings.constant_model,
        "copied-model": settings.copied_model,
        "drifting-model": settings.drifting_model,
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


class AttackedEngine:
    """Wrap an engine: attackers on models send false rows when rows are delivered or mixed."""

    def __init__(self, engine: Engine, attackers: Attackers, streams: Streams):
        self._engine, self._attackers, self._streams = engine, attackers, streams

    @classmethod
    def wrap(cls, engine: Engine, attackers: Attackers, streams: Streams) -> Engine:
        return cast(Engine, cls(engine, attackers, streams))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def deliver(self, x: Tensor) -> Tensor:
        return self._engine.deliver(self._falsify(x))

    def reply(self, v: Tensor) -> Tensor:
        return self._engine.reply(v)

    def request(self, x: Tensor, reply_fn: ReplyFn) -> Iterator[Replies]:
        return self._engine.request(x, reply_fn)

    def mix(self, x: Tensor) -> Tensor:
        """Mix false rows. An attacker keeps its own row in place of its own mean, which does not matter to others."""
        false = self._falsify(x)
        mixed = self._engine.mix(false)
        changed = (false != x).any(1)
        return torch.where(changed[:, None], x, mixed)

    def _falsify(self, x: Tensor) -> Tensor:
        """The rows that agents send. A copy is the row of the first neighbour, which an extra delivery brings."""
        kinds = [self._attackers.get(agent) for agent in self._engine.agents]
        copies = "copied-model" in self._attackers.values()
        received = self._engine.deliver(x) if copies else x
        sent = x.clone()
        for row, (agent, kind) in enumerate(zip(self._engine.agents, kinds, strict=True)):
            if kind == "reversed-model":
                sent[row] = -REVERSED_TIMES * x[row]
            elif kind == "constant-model":
                sent[row] = CONSTANT_NORM * random_direction(self._streams, agent, x)
            elif kind == "copied-model":
                edges = range(self._engine.offsets[row], self._engine.offsets[row + 1])
                first = next((e for e in edges if self._engine.sender[e] != agent), edges[0])
                sent[row] = received[first]
        return sent


def random_direction(streams: Streams, agent: int, x: Tensor) -> Tensor:
    """An attacker's random vector of norm 1, the same in all rounds."""
    drawn = torch.from_numpy(streams.generator("rogue.model", agent).standard_normal(x.shape[1], dtype=np.float32))
    unit: Tensor = (drawn / drawn.norm()).to(x)
    return unit


def shift_models(x: Tensor, agents: range, attackers: Attackers, drift: float, streams: Streams) -> Tensor:
    """The models [m, d] after a round, where those of drifting attackers are shifted by `drift`."""
    shifted = x.clone()
    for row, agent in enumerate(agents):
        if attackers.get(agent) == "drifting-model":
            shifted[row] += drift * random_direction(streams, agent, x)
    return shifted
