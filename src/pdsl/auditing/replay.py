"""Replay of rounds by the code that ran them, with every gradient and message recorded."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Self, cast

import torch
from torch import Tensor

from pdsl.algorithms.base import Metrics
from pdsl.engine.base import Engine, Replies, ReplyFn
from pdsl.privacy import Noise
from pdsl.privacy.metering import GradientSource, MeteredGradients
from pdsl.training.evaluation import distances
from pdsl.training.experiment import Experiment
from pdsl.training.trainer import State, Trainer, initial_state, run_round, state_tensors
from pdsl.utils.random import SecretStreams

FIRST_ROUNDS = 4  # rounds replayed from the start; a short run is replayed completely
SHORT = 1_500_000  # numbers in all messages of a short run
SAMPLED_ROUNDS = 3  # further rounds replayed at the last known state: the last round, and others by a fixed seed
MAX_NUMBERS = 40_000_000  # in all recorded messages


@dataclass(frozen=True)
class Start:
    """A saved state, from which the next round can be replayed."""

    after: int  # its round
    state: State


@dataclass(frozen=True)
class Message:
    """One noisy vector and the clipped gradient in it."""

    round: int
    step: int  # local step; each has its own batch
    nth: int  # index among the messages on one batch to one peer
    maker: int
    peer: int
    clipped: Tensor  # [d] float64, before the noise
    noisy: Tensor  # [d] float32, as sent

    @property
    def noise(self) -> Tensor:
        return self.noisy.double() - self.clipped


@dataclass(frozen=True)
class RecordedGradient:
    """A clipped gradient, and the model at which it was computed."""

    round: int
    step: int
    agent: int
    x: Tensor  # [d]
    teacher: Tensor | None
    clipped: Tensor  # [d]


@dataclass(frozen=True)
class ReplayedRound:
    """A replayed round: states before and after, and everything in between."""

    t: int
    in_place: bool  # started from the run's own state; otherwise from another, to examine the round's randomness
    messages: list[Message]
    gradients: list[RecordedGradient]
    sent: list[str]  # digests of everything passed to the engine
    before: State
    after: State
    metrics: Metrics
    consensus: float


@dataclass(frozen=True)
class Replay:
    """All replayed rounds of a run."""

    rounds: list[ReplayedRound]
    total: int  # rounds of the run
    problems: list[str] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        return [message for r in self.rounds for message in r.messages]

    @property
    def covered(self) -> str:
        """The replayed rounds in words."""
        return f"rounds {', '.join(str(r.t) for r in self.rounds)} of {self.total}"


def replay(e: Experiment, trainer: Trainer, total: int, starts: Sequence[Start] = ()) -> Replay:
    """Replay the first rounds, the round after each saved state, and a sample of the others.

    The sample is replayed at the last known state, because the states before it are gone. Batches, clipping, noise and
    counts of a round can be examined at any state.
    """
    per_round = e.network.num_parameters * sum(m.messages * m.steps for m in e.mechanisms or ())
    affordable = max(2, MAX_NUMBERS // max(1, per_round))
    rounds: list[ReplayedRound] = []
    state = initial_state(e)
    first = total if per_round * total <= SHORT else FIRST_ROUNDS
    for t in range(1, min(total, first, affordable) + 1):
        rounds.append(replay_round(e, trainer, t, state, in_place=True))
        state = rounds[-1].after
    last = len(rounds)
    problems = []
    known = {start.after: start.state for start in starts}
    for after, saved in known.items():
        if last <= after < total:
            rounds.append(replay_round(e, trainer, after + 1, saved, in_place=True))
            state = rounds[-1].after
    for r in rounds:
        if r.in_place and r.t in known and state_digest(r.after) != state_digest(known[r.t]):
            problems.append(f"round {r.t} replayed ends in a state that differs from the saved one")
    done = {r.t for r in rounds}
    generator = torch.Generator().manual_seed(total)
    order = [total, *(1 + torch.randperm(total, generator=generator)).tolist()]
    sample = [t for t in dict.fromkeys(order) if t not in done][:SAMPLED_ROUNDS]
    for t in sorted(sample)[: max(0, affordable - len(rounds))]:
        rounds.append(replay_round(e, trainer, t, state, in_place=False))
    return Replay(rounds, total, problems)


def replay_round(e: Experiment, trainer: Trainer, t: int, state: State, in_place: bool) -> ReplayedRound:
    """Run round t from `state` and record it."""
    messages: list[Message] = []
    gradients: list[RecordedGradient] = []
    sent: list[str] = []
    source = RecordingGradients(_unmetered(trainer.round(t).local), gradients)
    after, metrics = _advance(e, trainer, t, state, RecordingNoise.wrap(trainer.noise, messages), source, sent)
    consensus = fmean(distances(after.x, e.engine.mean(after.x)))
    return ReplayedRound(t, in_place, messages, gradients, sent, state, after, metrics, consensus)


def replay_with_gradients(
    e: Experiment, trainer: Trainer, r: ReplayedRound, scale: float
) -> tuple[State, Metrics, list[str]]:
    """Replay a round with its noisy messages, artificial gradients and another secret: state, metrics, digests."""
    sent: list[str] = []
    other = _with_other_secret(trainer)
    noise = ReplayedNoise.of(other.noise, r.messages)
    state, metrics = _advance(e, other, r.t, r.before, noise, ArtificialGradients(scale), sent)
    return state, metrics, sent


def replay_with_records(e: Experiment, other: Trainer, r: ReplayedRound) -> tuple[State, Metrics]:
    """Replay a round with its noisy messages and the gradients of another trainer's records: state and metrics."""
    noise = ReplayedNoise.of(other.noise, r.messages)
    return _advance(e, other, r.t, r.before, noise, _unmetered(other.round(r.t).local), [])


def replay_with_noise(e: Experiment, trainer: Trainer, r: ReplayedRound) -> State:
    """Replay a round with its clean gradients and other noise: the state after it."""
    source = ReplayedGradients(iter(r.gradients))
    return _advance(e, trainer, r.t, r.before, _with_other_secret(trainer).noise, source, [])[0]


def state_digest(state: State) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in state_tensors(state).items()}


def digest(x: Tensor) -> str:
    return hashlib.sha256(x.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def _with_other_secret(trainer: Trainer) -> Trainer:
    """Copy with the same public streams and other random bits for noise and batches."""
    e = trainer.experiment
    streams = SecretStreams(e.config.seed, hashlib.sha256(e.seal.context).digest())
    batches = replace(e.batches, streams=streams)
    return replace(
        trainer,
        noise=replace(trainer.noise, streams=streams),
        local=replace(trainer.local, batches=batches),
        experiment=replace(e, streams=streams, batches=batches),
    )


def _advance(
    e: Experiment, trainer: Trainer, t: int, state: State, noise: Noise, source: GradientSource, sent: list[str]
) -> tuple[State, Metrics]:
    r = trainer.round(t, noise, source)
    return run_round(e.config, state, replace(r, engine=RecordingEngine.wrap(r.engine, sent)))


def _unmetered(source: GradientSource) -> GradientSource:
    """The gradient source inside a meter's wrapper."""
    return source.inner if isinstance(source, MeteredGradients) else source


# Wrappers that record or replace the parts of a round


@dataclass(frozen=True)
class RecordingNoise(Noise):
    """Wrap a run's noise and record every message."""

    inner: Noise = field(kw_only=True)
    messages: list[Message] = field(kw_only=True)

    @classmethod
    def wrap(cls, noise: Noise, messages: list[Message]) -> Self:
        scale = noise.sigma_scale
        return cls(noise.sigma, noise.streams, noise.workers, sigma_scale=scale, inner=noise, messages=messages)

    def add(self, t: int, makers: Tensor, peers: Tensor, g: Tensor, step: int = 0, nth: int = 0) -> Tensor:
        clipped = g.clone()
        noisy = self.inner.add(t, makers, peers, g, step, nth)
        for e in range(len(g)):
            message = Message(t, step, nth, int(makers[e]), int(peers[e]), clipped[e].double(), noisy[e].clone())
            self.messages.append(message)
        return noisy


@dataclass(frozen=True)
class RecordingGradients:
    """Wrap a run's gradients and record each of them."""

    inner: GradientSource
    recorded: list[RecordedGradient]

    def gradients(self, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None) -> Tensor:
        g = self.inner.gradients(t, agents, x, step, teachers)
        for row, agent in enumerate(agents.tolist()):
            teacher = None if teachers is None else teachers[row].clone()
            self.recorded.append(RecordedGradient(t, step, agent, x[row].clone(), teacher, g[row].clone()))
        return g


@dataclass(frozen=True)
class ArtificialGradients:
    """Gradients that depend on no record: zeros, or large numbers."""

    scale: float

    def gradients(self, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None) -> Tensor:
        wave = torch.arange(x.shape[1], dtype=torch.float64, device=x.device).mul_(1.7 + t).cos_()
        return self.scale * wave.repeat(len(x), 1)


@dataclass(frozen=True)
class ReplayedGradients:
    """Recorded clean gradients, in their order."""

    recorded: Iterator[RecordedGradient]

    def gradients(self, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None) -> Tensor:
        return torch.stack([next(self.recorded).clipped.clone() for _ in agents])


@dataclass(frozen=True)
class ReplayedNoise(Noise):
    """Recorded noisy messages, whatever the gradients are."""

    noisy: dict[tuple[int, int, int, int, int], Tensor] = field(kw_only=True)  # (round, step, nth, maker, peer)

    @classmethod
    def of(cls, noise: Noise, messages: list[Message]) -> Self:
        noisy = {(m.round, m.step, m.nth, m.maker, m.peer): m.noisy for m in messages}
        return cls(noise.sigma, noise.streams, noise.workers, sigma_scale=noise.sigma_scale, noisy=noisy)

    def add(self, t: int, makers: Tensor, peers: Tensor, g: Tensor, step: int = 0, nth: int = 0) -> Tensor:
        ends = zip(makers.tolist(), peers.tolist(), strict=True)
        return torch.stack([self.noisy[t, step, nth, maker, peer] for maker, peer in ends])


class RecordingEngine:
    """Wrap an engine and record a digest of everything that is sent."""

    def __init__(self, engine: Engine, sent: list[str]):
        self._engine, self._sent = engine, sent

    @classmethod
    def wrap(cls, engine: Engine, sent: list[str]) -> Engine:
        return cast(Engine, cls(engine, sent))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def deliver(self, x: Tensor) -> Tensor:
        return self._engine.deliver(self._record("deliver", x))

    def reply(self, v: Tensor) -> Tensor:
        return self._engine.reply(self._record("reply", v))

    def mix(self, x: Tensor) -> Tensor:
        return self._engine.mix(self._record("mix", x))

    def request(self, x: Tensor, answer: ReplyFn) -> Iterator[Replies]:
        def recorded(makers: Tensor, peers: Tensor, rows: Tensor) -> Tensor:
            return self._record("answer", answer(makers, peers, rows))

        return self._engine.request(self._record("request", x), recorded)

    def _record(self, kind: str, x: Tensor) -> Tensor:
        self._sent.append(f"{kind} {tuple(x.shape)} {digest(x)}")
        return x
