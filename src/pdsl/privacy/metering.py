"""Only the declared messages leave: gradients, noisy messages and local steps are counted as they are taken.

An algorithm's `releases` is what its ε is computed from. The meter compares it with what the algorithm takes in every
round, before anything is sent: a message too many, noise drawn twice, a gradient changed after it was clipped or sent
without noise is an error that names the algorithm and the count.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from torch import Tensor

from pdsl.engine.base import Answer, Answers, Engine
from pdsl.errors import PdslError
from pdsl.privacy.mechanism import Noise

Batch = tuple[int, int]  # an agent and its local step


class Declared(NamedTuple):
    """The release of an agent in a round that its ledger is charged for."""

    messages: int
    steps: int


class _Clean(NamedTuple):
    """Clipped gradients that have no noise yet."""

    rows: Tensor
    version: int
    agents: list[int]
    step: int


@dataclass
class Meter:
    """The counts of one round."""

    algorithm: str
    t: int
    declared: Mapping[int, Declared]  # of the agents here
    messages: Counter[Batch] = field(default_factory=Counter)
    drawn: set[tuple[int, int, int, int]] = field(default_factory=set)  # maker, peer, step, nth
    clean: _Clean | None = None  # the gradients that were taken last
    bare: bool = False  # gradients were taken that have no noise yet

    def take(self, rows: Tensor, agents: Tensor, t: int, step: int) -> Tensor:
        """Count clipped gradients that were computed."""
        self._need(t == self.t, f"asked for gradients of round {t} in round {self.t}")
        self.check_sendable()
        self.clean, self.bare = _Clean(rows, rows._version, agents.tolist(), step), True
        return rows

    def make_noisy(self, rows: Tensor, makers: Tensor, peers: Tensor, t: int, step: int, nth: int) -> None:
        """Count messages before their noise is drawn."""
        self._need(t == self.t, f"asked for noise of round {t} in round {self.t}")
        clean = self.clean
        same = clean is not None and rows is clean.rows and rows._version == clean.version
        self._need(
            same and clean is not None and (clean.agents, clean.step) == (makers.tolist(), step),
            "asked for noise on something else than the gradients it was given last; noise makes private only these,"
            " as they were clipped",
        )
        for maker, peer in zip(makers.tolist(), peers.tolist(), strict=True):
            self._need(
                (maker, peer, step, nth) not in self.drawn,
                f"used one noise twice (agent {maker}, peer {peer}, step {step}, nth {nth}); give each message of a"
                " batch its own nth",
            )
            self.drawn.add((maker, peer, step, nth))
            self.messages[maker, step] += 1
            self._check_most(maker, step)
        self.bare = False

    def check_sendable(self) -> None:
        """PdslError if gradients were taken that have no noise yet: the next message could contain them."""
        taken = "" if self.clean is None else f"{len(self.clean.agents)} gradients in round {self.t}"
        self._need(
            not self.bare,
            f"took {taken} and made none of them noisy; a gradient without noise is not declared, and must not be used",
        )

    def finish(self) -> None:
        """PdslError unless every agent made as many messages on as many batches as were declared."""
        self.check_sendable()
        for agent, (messages, steps) in self.declared.items():
            made = [count for (maker, _), count in sorted(self.messages.items()) if maker == agent]
            self._need(
                made == [messages] * steps,
                f"made {_per_batch(made)} noisy messages of agent {agent} in round {self.t}, but its `releases`"
                f" declares {_per_batch([messages] * steps)}; declare what it makes",
            )

    def _check_most(self, agent: int, step: int) -> None:
        messages, steps = self.declared.get(agent, (0, 0))
        made, batches = self.messages[agent, step], len({s for maker, s in self.messages if maker == agent})
        self._need(
            made <= messages and batches <= steps,
            f"makes {made} noisy messages on batch {batches} of agent {agent} in round {self.t}, but its `releases`"
            f" declares {_per_batch([messages] * steps)}, so its ε would be too small; declare what it makes",
        )

    def _need(self, holds: bool, problem: str) -> None:
        if not holds:
            raise PdslError(f"algorithm {self.algorithm} {problem}")


def _per_batch(counts: list[int]) -> str:
    """Messages on each batch of a round, like 3 or 2 + 2."""
    return " + ".join(map(str, counts)) or "no"


@dataclass(frozen=True)
class MeteredGradients:
    """Gradients, counted."""

    of: Any  # has `gradients` (see `algorithms.base.Objectives`)
    meter: Meter

    def gradients(self, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None) -> Tensor:
        return self.meter.take(self.of.gradients(t, agents, x, step, teachers), agents, t, step)


@dataclass(frozen=True)
class MeteredNoise(Noise):
    """Noise, counted before it is drawn."""

    of: Noise = field(kw_only=True)
    meter: Meter = field(kw_only=True)

    @classmethod
    def counting(cls, noise: Noise, meter: Meter) -> "MeteredNoise":
        return cls(noise.sigma, noise.streams, noise.workers, stretch=noise.stretch, of=noise, meter=meter)

    def add(self, t: int, makers: Tensor, peers: Tensor, g: Tensor, step: int = 0, nth: int = 0) -> Tensor:
        self.meter.make_noisy(g, makers, peers, t, step, nth)
        return self.of.add(t, makers, peers, g, step, nth)


class MeteredEngine:
    """An engine that sends nothing while a gradient without noise is about."""

    def __init__(self, engine: Engine, meter: Meter):
        self._engine, self._meter = engine, meter

    @classmethod
    def guarding(cls, engine: Engine, meter: Meter) -> Engine:
        return cast(Engine, cls(engine, meter))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def deliver(self, x: Tensor) -> Tensor:
        self._meter.check_sendable()
        return self._engine.deliver(x)

    def reply(self, v: Tensor) -> Tensor:
        self._meter.check_sendable()
        return self._engine.reply(v)

    def ask(self, x: Tensor, answer: Answer) -> Iterator[Answers]:
        self._meter.check_sendable()
        return self._engine.ask(x, answer)

    def mix(self, x: Tensor) -> Tensor:
        self._meter.check_sendable()
        return self._engine.mix(x)
