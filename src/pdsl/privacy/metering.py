"""Enforcement of the declared release: gradients, noisy messages and local steps are counted in every round.

ε is computed from an algorithm's `releases`. The meter compares it with the gradients and noise that the algorithm
requests, before anything is sent. It raises an error that names the algorithm and the count for an undeclared message,
for noise drawn twice, and for a gradient that was changed after clipping or used without noise.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

from torch import Tensor

from pdsl.engine.base import Engine, Replies, ReplyFn
from pdsl.privacy.calibration import Release
from pdsl.privacy.noise import Noise
from pdsl.utils.errors import PdslError

Batch = tuple[int, int]  # an agent and its local step


class GradientSource(Protocol):
    """Anything that computes clipped gradients, like `gradients.clipping.LocalGradients`."""

    def gradients(self, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None) -> Tensor:
        """Row e: the gradient of agents[e] at x[e], on its batch of (round, local step); [rows, d]."""


class _Clean(NamedTuple):
    """Clipped gradients without noise."""

    rows: Tensor
    version: int
    agents: list[int]
    step: int


@dataclass
class Meter:
    """Counts of one round."""

    algorithm: str
    t: int
    declared: Mapping[int, Release]  # of the agents in this process, as charged to the ledger
    messages: Counter[Batch] = field(default_factory=Counter)
    drawn: set[tuple[int, int, int, int]] = field(default_factory=set)  # maker, peer, step, nth
    clean: _Clean | None = None  # the latest gradients
    pending: bool = False  # the latest gradients have no noise yet

    def take(self, rows: Tensor, agents: Tensor, t: int, step: int) -> Tensor:
        """Register clipped gradients that were computed."""
        self._need(t == self.t, f"requested gradients of round {t} in round {self.t}; use the current round")
        self.check_sendable()
        self.clean, self.pending = _Clean(rows, rows._version, agents.tolist(), step), True
        return rows

    def make_noisy(self, rows: Tensor, makers: Tensor, peers: Tensor, t: int, step: int, nth: int) -> None:
        """Count messages before their noise is drawn."""
        self._need(t == self.t, f"requested noise of round {t} in round {self.t}; use the current round")
        clean = self.clean
        same = clean is not None and rows is clean.rows and rows._version == clean.version
        self._need(
            same and clean is not None and (clean.agents, clean.step) == (makers.tolist(), step),
            "requested noise on something other than its latest gradients, as clipped; noise protects only these, so"
            " add it before any other operation",
        )
        for maker, peer in zip(makers.tolist(), peers.tolist(), strict=True):
            self._need(
                (maker, peer, step, nth) not in self.drawn,
                f"used the same noise twice (agent {maker}, peer {peer}, step {step}, nth {nth}); give each message of"
                " a batch its own nth",
            )
            self.drawn.add((maker, peer, step, nth))
            self.messages[maker, step] += 1
            self._check_maximum(maker, step)
        self.pending = False

    def check_sendable(self) -> None:
        """Raise PdslError if there are gradients without noise, because the next message could contain them."""
        count = 0 if self.clean is None else len(self.clean.agents)
        self._need(
            not self.pending,
            f"took {count} gradients in round {self.t} without adding noise; add noise to every gradient before use",
        )

    def finish(self) -> None:
        """Raise PdslError unless every agent made the declared number of messages on the declared number of batches."""
        self.check_sendable()
        for agent, release in self.declared.items():
            made = [count for (maker, _), count in sorted(self.messages.items()) if maker == agent]
            declared = [release.messages] * release.steps
            self._need(
                made == declared,
                f"made {_per_batch(made)} noisy messages of agent {agent} in round {self.t}, but its `releases`"
                f" declares {_per_batch(declared)}; correct `releases`",
            )

    def _check_maximum(self, agent: int, step: int) -> None:
        release = self.declared.get(agent, Release(0, 0))
        made, batches = self.messages[agent, step], len({s for maker, s in self.messages if maker == agent})
        self._need(
            made <= release.messages and batches <= release.steps,
            f"makes {made} noisy messages on batch {batches} of agent {agent} in round {self.t}, but its `releases`"
            f" declares {_per_batch([release.messages] * release.steps)}, so ε would be too small; correct `releases`",
        )

    def _need(self, holds: bool, problem: str) -> None:
        if not holds:
            raise PdslError(f"algorithm {self.algorithm} {problem}")


def _per_batch(counts: list[int]) -> str:
    """Number of messages on each batch of a round, like 3 or 2 + 2."""
    return " + ".join(map(str, counts)) or "no"


@dataclass(frozen=True)
class MeteredGradients:
    """Wrap a gradient source and register its gradients with the meter."""

    inner: GradientSource
    meter: Meter

    def gradients(self, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None) -> Tensor:
        return self.meter.take(self.inner.gradients(t, agents, x, step, teachers), agents, t, step)


@dataclass(frozen=True)
class MeteredNoise(Noise):
    """Wrap a run's noise and count messages before their noise is drawn."""

    inner: Noise = field(kw_only=True)
    meter: Meter = field(kw_only=True)

    @classmethod
    def wrap(cls, noise: Noise, meter: Meter) -> "MeteredNoise":
        return cls(noise.sigma, noise.streams, noise.workers, sigma_scale=noise.sigma_scale, inner=noise, meter=meter)

    def add(self, t: int, makers: Tensor, peers: Tensor, g: Tensor, step: int = 0, nth: int = 0) -> Tensor:
        self.meter.make_noisy(g, makers, peers, t, step, nth)
        return self.inner.add(t, makers, peers, g, step, nth)


class MeteredEngine:
    """Wrap an engine and refuse to send while there are gradients without noise."""

    def __init__(self, engine: Engine, meter: Meter):
        self._engine, self._meter = engine, meter

    @classmethod
    def wrap(cls, engine: Engine, meter: Meter) -> Engine:
        return cast(Engine, cls(engine, meter))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def deliver(self, x: Tensor) -> Tensor:
        self._meter.check_sendable()
        return self._engine.deliver(x)

    def reply(self, v: Tensor) -> Tensor:
        self._meter.check_sendable()
        return self._engine.reply(v)

    def request(self, x: Tensor, answer: ReplyFn) -> Iterator[Replies]:
        self._meter.check_sendable()
        return self._engine.request(x, answer)

    def mix(self, x: Tensor) -> Tensor:
        self._meter.check_sendable()
        return self._engine.mix(x)
