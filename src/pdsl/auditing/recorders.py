"""Wrappers that record, or replace, the parts a round is made of."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
from torch import Tensor

from pdsl.algorithms.base import Objectives
from pdsl.engine.base import Answer, Answers, Engine
from pdsl.privacy import Noise


@dataclass(frozen=True)
class Message:
    """One noisy vector, taken apart."""

    round: int
    step: int  # the local step, and so the batch
    nth: int  # index among the messages on one batch for one peer
    maker: int
    peer: int
    clipped: Tensor  # [d] float64, before the noise
    noisy: Tensor  # [d] float32, as it leaves

    @property
    def noise(self) -> Tensor:
        return self.noisy.double() - self.clipped


@dataclass(frozen=True)
class RecordingNoise(Noise):
    """Wrap a run's noise and record every message."""

    of: Noise = field(kw_only=True)
    messages: list[Message] = field(kw_only=True)

    @classmethod
    def around(cls, noise: Noise, messages: list[Message]) -> Self:
        return cls(noise.sigma, noise.streams, noise.workers, stretch=noise.stretch, of=noise, messages=messages)

    def add(self, t: int, makers: Tensor, peers: Tensor, g: Tensor, step: int = 0, nth: int = 0) -> Tensor:
        clipped = g.clone()
        noisy = self.of.add(t, makers, peers, g, step, nth)
        for e in range(len(g)):
            message = Message(t, step, nth, int(makers[e]), int(peers[e]), clipped[e].double(), noisy[e].clone())
            self.messages.append(message)
        return noisy


@dataclass(frozen=True)
class Asked:
    """A gradient that was computed, and at which model."""

    round: int
    step: int
    agent: int
    x: Tensor  # [d]
    teacher: Tensor | None
    clipped: Tensor  # [d] the answer


@dataclass(frozen=True)
class RecordingGradients:
    """Wrap a run's gradients and record every one."""

    of: Objectives
    asked: list[Asked]

    def gradients(self, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None) -> Tensor:
        g = self.of.gradients(t, agents, x, step, teachers)
        for row, agent in enumerate(agents.tolist()):
            teacher = None if teachers is None else teachers[row].clone()
            self.asked.append(Asked(t, step, agent, x[row].clone(), teacher, g[row].clone()))
        return g


@dataclass(frozen=True)
class ReplacedGradients:
    """Gradients of no record: zeros, or wild numbers."""

    scale: float

    def gradients(self, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None) -> Tensor:
        wave = torch.arange(x.shape[1], dtype=torch.float64, device=x.device).mul_(1.7 + t).cos_()
        return self.scale * wave.repeat(len(x), 1)


@dataclass(frozen=True)
class ReplayedGradients:
    """Clean gradients as they were recorded, in their order."""

    asked: Iterator[Asked]

    @classmethod
    def of(cls, asked: list[Asked]) -> Self:
        return cls(iter(asked))

    def gradients(self, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None) -> Tensor:
        return torch.stack([next(self.asked).clipped.clone() for _ in agents])


@dataclass(frozen=True)
class ReplayedNoise(Noise):
    """Noisy messages as they were recorded, whatever they are to be made of now."""

    noisy: dict[tuple[int, int, int, int, int], Tensor] = field(kw_only=True)  # (round, step, nth, maker, peer)

    @classmethod
    def of(cls, noise: Noise, messages: list[Message]) -> Self:
        noisy = {(m.round, m.step, m.nth, m.maker, m.peer): m.noisy for m in messages}
        return cls(noise.sigma, noise.streams, noise.workers, stretch=noise.stretch, noisy=noisy)

    def add(self, t: int, makers: Tensor, peers: Tensor, g: Tensor, step: int = 0, nth: int = 0) -> Tensor:
        ends = zip(makers.tolist(), peers.tolist(), strict=True)
        return torch.stack([self.noisy[t, step, nth, maker, peer] for maker, peer in ends])


class RecordingEngine:
    """Wrap an engine and record a digest of everything that is sent."""

    def __init__(self, engine: Engine):
        self._engine, self.sent = engine, cast(list[str], [])

    @classmethod
    def around(cls, engine: Engine, sent: list[str]) -> Engine:
        made = cls(engine)
        made.sent = sent
        return cast(Engine, made)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def deliver(self, x: Tensor) -> Tensor:
        return self._engine.deliver(self._record("deliver", x))

    def reply(self, v: Tensor) -> Tensor:
        return self._engine.reply(self._record("reply", v))

    def mix(self, x: Tensor) -> Tensor:
        return self._engine.mix(self._record("mix", x))

    def ask(self, x: Tensor, answer: Answer) -> Iterator[Answers]:
        def recorded(makers: Tensor, peers: Tensor, rows: Tensor) -> Tensor:
            return self._record("answer", answer(makers, peers, rows))

        return self._engine.ask(self._record("ask", x), recorded)

    def _record(self, what: str, x: Tensor) -> Tensor:
        self.sent.append(f"{what} {tuple(x.shape)} {digest(x)}")
        return x


def digest(x: Tensor) -> str:
    return hashlib.sha256(x.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
