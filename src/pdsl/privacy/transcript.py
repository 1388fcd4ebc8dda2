"""What left the agents, written down as it is made: for the audit."""

from dataclasses import dataclass, field
from typing import Self

from torch import Tensor

from pdsl.gradients import Owners
from pdsl.privacy.mechanism import Noise


@dataclass(frozen=True)
class Message:
    """One noisy vector, taken apart."""

    round: int
    step: int  # the local step, and so the batch
    maker: int
    peer: int
    clipped: Tensor  # before the noise
    noise: Tensor


@dataclass(frozen=True)
class Recorder(Noise):
    """A run's own noise, looked at."""

    of: Noise = field(kw_only=True)
    seen: list[Message] = field(kw_only=True)

    @classmethod
    def watching(cls, noise: Noise, seen: list[Message]) -> Self:
        return cls(noise.sigma, noise.streams, noise.workers, stretch=noise.stretch, of=noise, seen=seen)

    def add(self, t: int, makers: Tensor, peers: Tensor, g: Tensor, step: int = 0, nth: int = 0) -> Tensor:
        noisy = self.of.add(t, makers, peers, g, step, nth)
        for e in range(len(g)):
            self.seen.append(Message(t, step, int(makers[e]), int(peers[e]), g[e], (noisy[e].double() - g[e].double())))
        return noisy


@dataclass(frozen=True)
class Asked:
    """A run's own gradients; who was asked for one is written down."""

    of: Owners
    seen: list[tuple[int, int, int]]  # (round, local step, agent) of each

    def gradients(self, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None) -> Tensor:
        self.seen.extend((t, step, int(agent)) for agent in agents)
        return self.of.gradients(t, agents, x, step, teachers)
