"""Rounds run again by the code that ran them, with everything they do recorded."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from pdsl.auditing.recorders import (
    Asked,
    Message,
    RecordingEngine,
    RecordingGradients,
    RecordingNoise,
    ReplacedGradients,
    ReplayedGradients,
    ReplayedNoise,
    digest,
)
from pdsl.privacy import Noise
from pdsl.randomness import SecretStreams
from pdsl.train import Apparatus, Experiment, advanced, distances, first_state, state_tensors

FIRST_ROUNDS = 4  # from the start; all of a run that is
SHORT = 1_500_000  # numbers in all its messages
SAMPLED_ROUNDS = 3  # besides, at the last known state: the last round and others that a fixed seed chooses
MAX_NUMBERS = 40_000_000  # in all recorded messages


@dataclass(frozen=True)
class Start:
    """A state from which a round can be run again."""

    after: int  # its round
    state: Any


@dataclass(frozen=True)
class ReplayedRound:
    t: int
    in_place: bool  # from the state that the run itself had; else at another, to examine the round's randomness
    messages: list[Message]
    asked: list[Asked]
    sent: list[str]  # digests of all that the engine was given
    before: Any
    after: Any
    facts: dict[str, Any]
    consensus: float


@dataclass(frozen=True)
class Replay:
    rounds: list[ReplayedRound]
    total: int  # rounds of the run
    problems: list[str] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        return [message for r in self.rounds for message in r.messages]

    @property
    def covered(self) -> str:
        """The examined rounds, in words."""
        return f"rounds {', '.join(str(r.t) for r in self.rounds)} of {self.total}"


def replay(e: Experiment, parts: Apparatus, total: int, starts: Sequence[Start] = ()) -> Replay:
    """Run the first rounds again from the start, those after each known state, and a sample of the others.

    The sample is run at the last known state, since the states before it are gone: batches, clipping, noise and
    counts of a round can be examined there as well.
    """
    per_round = e.network.d * sum(m.messages * m.steps for m in e.mechanisms or ())
    affordable = max(2, MAX_NUMBERS // max(1, per_round))
    rounds: list[ReplayedRound] = []
    state = first_state(e)
    first = total if per_round * total <= SHORT else FIRST_ROUNDS
    for t in range(1, min(total, first, affordable) + 1):
        rounds.append(run_again(e, parts, t, state, in_place=True))
        state = rounds[-1].after
    last = len(rounds)
    problems = []
    known = {start.after: start.state for start in starts}
    for after, kept in known.items():
        if last <= after < total:
            rounds.append(run_again(e, parts, after + 1, kept, in_place=True))
            state = rounds[-1].after
    for r in rounds:
        if r.in_place and r.t in known and state_digest(r.after) != state_digest(known[r.t]):
            problems.append(f"round {r.t} run again ends in another state than the run's own")
    done = {r.t for r in rounds}
    generator = torch.Generator().manual_seed(total)
    order = [total, *(1 + torch.randperm(total, generator=generator)).tolist()]
    sample = [t for t in dict.fromkeys(order) if t not in done][:SAMPLED_ROUNDS]
    for t in sorted(sample)[: max(0, affordable - len(rounds))]:
        rounds.append(run_again(e, parts, t, state, in_place=False))
    return Replay(rounds, total, problems)


def run_again(e: Experiment, parts: Apparatus, t: int, state: Any, in_place: bool) -> ReplayedRound:
    messages: list[Message] = []
    asked: list[Asked] = []
    sent: list[str] = []
    honest = parts.round(t)
    gradients = RecordingGradients(unmetered(honest.owners), asked)
    noise = RecordingNoise.around(parts.noise, messages)
    after, facts = _advance(e, parts, t, state, noise, gradients, sent)
    consensus = fmean(distances(after.x, e.engine.mean(after.x)))
    return ReplayedRound(t, in_place, messages, asked, sent, state, after, facts, consensus)


def run_replaced(e: Experiment, parts: Apparatus, r: ReplayedRound, scale: float) -> tuple[dict[str, Tensor], Any, Any]:
    """Run a recorded round with its noisy messages, other gradients and another secret: state, facts, messages."""
    sent: list[str] = []
    other = with_other_secret(parts)
    noise = ReplayedNoise.of(other.noise, r.messages)
    state, facts = _advance(e, other, r.t, r.before, noise, ReplacedGradients(scale), sent)
    return state_tensors(state), facts, sent


def run_on_other_records(e: Experiment, other: Apparatus, r: ReplayedRound) -> tuple[Any, Any]:
    """State and facts after a recorded round with its noisy messages, and gradients of other records."""
    honest = other.round(r.t)
    noise = ReplayedNoise.of(other.noise, r.messages)
    return _advance(e, other, r.t, r.before, noise, unmetered(honest.owners), [])


def run_with_other_noise(e: Experiment, parts: Apparatus, r: ReplayedRound) -> Any:
    """The state after a recorded round with its clean gradients and other noise."""
    sent: list[str] = []
    gradients = ReplayedGradients.of(r.asked)
    return _advance(e, parts, r.t, r.before, with_other_secret(parts).noise, gradients, sent)[0]


def with_other_secret(parts: Apparatus) -> Apparatus:
    """The same public streams, and other bits for noise and batches."""
    e = parts.experiment
    streams = SecretStreams(e.config.seed, hashlib.sha256(e.bond.context).digest())
    batches = replace(e.batches, streams=streams)
    return replace(
        parts,
        noise=replace(parts.noise, streams=streams),
        owners=replace(parts.owners, batches=batches),
        experiment=replace(e, streams=streams, batches=batches),
    )


def _advance(
    e: Experiment, parts: Apparatus, t: int, state: Any, noise: Noise, gradients: Any, sent: list[str]
) -> tuple[Any, Any]:
    made = parts.round(t, noise, gradients)
    return advanced(e.config, state, replace(made, engine=RecordingEngine.around(made.engine, sent)))


def unmetered(owners: Any) -> Any:
    """The gradients inside a meter's wrapper."""
    return getattr(owners, "of", owners)


def state_digest(state: Any) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in state_tensors(state).items()}
