"""Canaries: how much of its ε does a run give away to an adversary who sees all messages of one agent?

A canary is a record whose clipped gradient is C along one coordinate of the model, at whatever model: as much as a
record can do, and nothing that another canary does too. Each is among the agent's records or not, by a fair coin, and
is drawn into batches by the run's own sampler. The adversary knows the canaries, everybody else's records and noise,
all models and all settings, and sees every message of the agent. Other records of the agent, which it would know and
subtract, are left out. Under audit is the run's own: sampler, divisor, messages and steps of the algorithm, σ, and
the noise on every coordinate.

A run has as many canaries as an average agent has records, half of them in: batches are smaller than expected, so that
a sum that is divided by what was drawn shows. More canaries take more runs: the run itself with its own randomness, and
others like it with other keys. `one_run` says what may be concluded.
"""

import hashlib
import math
from dataclasses import dataclass, field, fields, replace
from statistics import median_low
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdsl.algorithms.base import Algorithm
from pdsl.auditing.adversary import Adversary, Message, Places
from pdsl.auditing.one_run import CONFIDENCE, Coins, Floats, Ladder, count_right, lower_bound, plan
from pdsl.auditing.report import Finding, Verdict
from pdsl.engine import Local
from pdsl.errors import PdslError
from pdsl.gradients import Owners, row_digests
from pdsl.models import Network
from pdsl.parallel import Workers
from pdsl.per_example import Kernel, PerRecord
from pdsl.privacy import Noise, epsilon
from pdsl.randomness import KEY_BYTES, SecretStreams, Streams
from pdsl.rounded import rounded_up
from pdsl.train import Apparatus, Experiment, apparatus, first_models

DEFAULT_SEED = 20240501  # of the coins
DEFAULT_CANARIES = 20_000  # at most, of all runs together
DEFAULT_ROUNDS = 2_500  # of all runs together, but for
MIN_RUNS, MAX_RUNS = 10, 200
LARGE = 300_000  # numbers in all agents' models that make a round twice as slow
MIN_FLOCK = 50  # canaries that are worth a run
UNUSED = 21  # sets of coins for the null control
LENGTH = 1e6  # of a canary's gradient before it is clipped
APART = 1e-3  # between the first models of agents: peers, who may send any model, do not send the same


@dataclass(frozen=True)
class Canaries:
    """How well an adversary who sees all of one agent's messages tells which canaries are in its data."""

    agent: int
    count: int
    runs: int
    rounds: int
    epsilon: float  # lower bound on ε at CONFIDENCE, of a mechanism shaped like the claimed one
    epsilon_95: float  # the same at 95 %, for comparison with others': chance alone takes it past a claim now and then
    claim: float  # ε of the agent over these rounds
    ideal: float  # lower bound that is to be expected where everything is as claimed
    null: float  # the same for coins that were not used, the median of some: must be 0
    positive: float  # the same with the noise off: must exceed the claim

    @property
    def ratio(self) -> float:
        """How much of the claim is accounted for by the adversary."""
        return _over(self.epsilon, self.claim)


def canaries(
    e: Experiment, agent: int = 0, count: int | None = None, rounds: int | None = None, seed: int = DEFAULT_SEED
) -> Canaries:
    """Run with canaries in an agent's data, over all rounds of the run if none are given, and bound its ε from below.

    `count` canaries, by default as many as are affordable. The number of guesses is chosen before the run.

    | asked for               | answer                                                                             |
    |-------------------------|------------------------------------------------------------------------------------|
    | Poisson batches         | a canary in or out; scores by the likelihood of a record drawn at the rate q       |
    | fixed-size batches      | a canary replaced by its opposite; always drawn, since no amplification is claimed |
    | whole-batch clipping    | PdslError: canaries share one clip and hide each other                             |
    | no noise                | PdslError: nothing is claimed                                                      |
    """
    if e.mechanisms is None:
        raise PdslError("the run has no noise and makes no claim that canaries could refute")
    if e.config.privacy.clipping == "batch":
        raise PdslError(
            "canaries cannot tell under privacy.clipping=batch: all records of a batch share one clip, so that canaries"
            " hide each other; audit a run with privacy.clipping=per-sample"
        )
    rounds = e.config.rounds if rounds is None else rounds
    runs, size = _flocks(e, agent, count, rounds)
    mechanism, delta = e.mechanisms[agent], e.config.privacy.delta
    ladder = Ladder.around(mechanism, rounds, delta)
    planned = plan(ladder, runs, size, seed)
    rng = np.random.default_rng([seed, 0])
    coins = rng.random((runs, size)) < 0.5
    noisy, clear = _scores(e, agent, coins, rounds, rng)

    def bound(scores: Floats, *sets: Coins, confidence: float = CONFIDENCE) -> float:
        right = [median_low(count_right(scores, own, design) for own in sets) for design in planned.designs]
        return lower_bound(ladder, planned.designs, right, confidence)

    return Canaries(
        agent=agent,
        count=runs * size,
        runs=runs,
        rounds=rounds,
        epsilon=bound(noisy, coins),
        epsilon_95=bound(noisy, coins, confidence=0.95),
        claim=epsilon(((mechanism, rounds),), delta),
        ideal=planned.ideal,
        null=bound(noisy, *(rng.random((UNUSED, *coins.shape)) < 0.5)),
        positive=bound(clear, coins),
    )


def canary_finding(found: Canaries, claimed: float) -> Finding:
    """The bound must not pass the claim; the controls show whether the attack has any power."""
    ratio = _over(found.epsilon, claimed)
    detail = (
        f"{found.count:,} canaries at agent {found.agent} over {found.rounds} rounds: ε ≥ {found.epsilon:.2f}"
        f" (claimed {rounded_up(claimed)}, ratio {ratio:.2f}, {found.ideal:.2f} to be expected);"
        f" unused coins {found.null:.2f}, noise off {found.positive:.2f}"
    )
    if found.epsilon > claimed or found.null > 0:
        return Finding("canaries", Verdict.FAIL, detail)
    if found.positive <= claimed:
        return Finding("canaries", Verdict.INCONCLUSIVE, f"{detail}: too weak to tell, try more canaries")
    return Finding("canaries", Verdict.PASS, detail)


def _over(bound: float, claim: float) -> float:
    return bound / claim if claim else math.inf if bound else 0.0


def _flocks(e: Experiment, agent: int, count: int | None, rounds: int) -> tuple[int, int]:
    """How many runs, and how many canaries in each: never more than an agent has records or the model coordinates."""
    records = e.batches.records if e.batches.rate is not None else e.batches.divisor(agent)
    most = max(1, min(int(records), e.network.d))
    slower = 1 + e.graph.agents * e.network.d / LARGE
    affordable = max(MIN_RUNS, min(MAX_RUNS, int(DEFAULT_ROUNDS / slower) // rounds))
    if count is None:
        return affordable, min(most, DEFAULT_CANARIES // affordable)
    runs = max(math.ceil(count / most), min(affordable, count // MIN_FLOCK), 1)
    return runs, max(1, count // runs)


# The runs


def _scores(e: Experiment, agent: int, coins: Coins, rounds: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Scores of each run's canaries by the agent's messages, and by the same messages without their noise."""
    found = []
    with Workers(1) as workers:
        parts = replace(apparatus(e, workers), engine=_Apart(e.graph))
        for n, own in enumerate(coins):
            places = _places(_sizes(e), len(own), rng)
            found.append(_run(_with_canaries(parts, agent, places, own, n), agent, places, rounds))
    noisy, clear = zip(*found, strict=True)
    return np.stack(noisy), np.stack(clear)


def _sizes(e: Experiment) -> list[int]:
    """Numbers in each parameter tensor of the model."""
    return [shape.numel() for _, shape in e.network.shapes()]


def _places(sizes: list[int], count: int, rng: np.random.Generator) -> Places:
    """Coordinates for so many canaries, equally many in each tensor that has them: none is too small to matter."""
    starts, quota, left = np.cumsum([0, *sizes]), {}, count
    for done, n in enumerate(sorted(range(len(sizes)), key=lambda n: sizes[n])):
        quota[n] = min(sizes[n], left // (len(sizes) - done))
        left -= quota[n]
    chosen = [starts[n] + rng.choice(sizes[n], k, replace=False) for n, k in quota.items()]
    return rng.permutation(np.concatenate(chosen))


class _Apart(Local):
    """Agents whose models are not mixed: that is post-processing, and no canary depends on it."""

    def mix(self, x: Tensor) -> Tensor:
        return x


def _with_canaries(parts: Apparatus, agent: int, places: Places, coins: Coins, n: int) -> Apparatus:
    """The parts of the nth run: canaries are the agent's only records, and the other agents have none."""
    e, owners = parts.experiment, parts.owners
    streams = _streams(e.streams, n)
    marks = np.arange(1, len(places) + 1)
    if e.batches.rate is None:  # a record is replaced by its opposite, and the batch is never too small
        marks = np.pad(np.where(coins, marks, -marks), (0, int(e.batches.divisor(agent)) - len(marks)))
    else:
        marks = marks[coins]
    inputs = owners.inputs[agent].new_zeros(len(marks), *owners.inputs[agent].shape[1:])
    inputs.flatten(1)[:, 0] = torch.from_numpy(marks).to(inputs)
    labels = owners.labels[agent].new_zeros(len(marks))
    sizes = [len(marks) if i == agent else 0 for i in range(e.graph.agents)]
    return replace(
        parts,
        owners=replace(
            owners,
            inputs=[inputs if i == agent else inputs[:0] for i in range(len(sizes))],
            labels=[labels if i == agent else labels[:0] for i in range(len(sizes))],
            batches=replace(e.batches, sizes=sizes, streams=streams),
            kernel=_kernel(torch.from_numpy(places).to(inputs.device)),
        ),
        noise=replace(parts.noise, streams=streams),
        experiment=replace(e, streams=streams),
    )


def _streams(streams: Streams, n: int) -> Streams:
    """The run's own randomness for the first run, and its like for the others."""
    if n == 0:
        return streams
    if isinstance(streams, SecretStreams):
        key = hashlib.blake2b(b"canaries %d" % n, key=streams.key, digest_size=KEY_BYTES).digest()
        return SecretStreams(streams.seed, key)
    return Streams(streams.seed + 1_000_003 * n)


def _kernel(places: Tensor) -> Kernel:
    """Gradients of canaries: very long, along each one's coordinate, for the run's own clip to shorten."""

    def run(network: Network, x: Tensor, inputs: Tensor, targets: Tensor) -> list[PerRecord]:
        marks = inputs.flatten(1)[:, 0].long()  # a canary's first number tells which it is
        length = LENGTH * _ways(x[None])[0] * marks.sign().double()
        at = places[(marks.abs() - 1).clamp(min=0)]
        zero = torch.zeros_like(x, dtype=torch.float64)
        return [PerRecord(length.square(), lambda factors, dropped: zero.clone().index_add_(0, at, factors * length))]

    return Kernel("canaries", 4096, 1, run, lambda network, x, inputs: network.logits(x, inputs))


def _ways(x: Tensor) -> list[int]:
    """Which way canaries point at each of these models, 1 or -1: messages with noise in common then tell.

    A record's gradient may be anything, as long as it is the same at the same model; the adversary knows the models.
    """
    return [1 - 2 * (digest[0] & 1) for digest in row_digests(x)]


@dataclass(frozen=True)
class _Planted:
    """The agent's own gradients, and which way canaries point in each; of all others zero."""

    of: Owners
    agent: int
    ways: dict[int, tuple[Tensor, list[int]]] = field(default_factory=dict)  # by the id of rows, with the rows

    def gradients(self, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None) -> Tensor:
        own = torch.nonzero(agents == self.agent)[:, 0]
        if not len(own):
            return torch.zeros_like(x)
        found = self.of.gradients(t, agents[own], x[own], step, None if teachers is None else teachers[own])
        g = found.new_zeros(len(agents), found.shape[1])
        g[own] = found
        self.ways[id(g)] = g, _ways(x[own])
        return g


@dataclass(frozen=True)
class _RecordingNoise(Noise):
    """Wrap a run's noise: record the agent's messages, and leave the others' without noise."""

    of: Noise = field(kw_only=True)
    planted: _Planted = field(kw_only=True)
    messages: dict[int, list[Message]] = field(default_factory=dict, kw_only=True)  # by local step, and so by batch

    def add(self, t: int, makers: Tensor, peers: Tensor, g: Tensor, step: int = 0, nth: int = 0) -> Tensor:
        agent = self.planted.agent
        own = torch.nonzero(makers == agent)[:, 0]
        if not len(own):
            return g
        noisy = self.of.add(t, makers[own], peers[own], g[own], step, nth)
        _, ways = self.planted.ways.get(id(g), (g, [1] * len(own)))
        for peer, way, after, before in zip(peers[own].tolist(), ways, noisy, g[own], strict=True):
            rows = (after.double().cpu().numpy(), before.double().cpu().numpy())
            self.messages.setdefault(step, []).append(Message(peer, nth, self.of.sigma_of(agent, peer), way, *rows))
        all_rows = g.to(noisy.dtype, copy=True)
        all_rows[own] = noisy
        return all_rows


def _run(parts: Apparatus, agent: int, places: Places, rounds: int) -> tuple[Floats, Floats]:
    """Scores of one run's canaries: with the noise, and without."""
    e = parts.experiment
    assert e.mechanisms is not None
    noisy, clear = (Adversary(e.mechanisms[agent], places, _sizes(e)) for _ in range(2))
    algorithm = _without_valuation(e.config.algorithm)
    state = algorithm.init(first_models(e) + APART * torch.arange(e.graph.agents, device=e.network.device)[:, None])
    settings: dict[str, Any] = {f.name: getattr(parts.noise, f.name) for f in fields(Noise)}
    for t in range(1, rounds + 1):
        planted = _Planted(replace(parts.owners, repeated={}), agent)
        ear = _RecordingNoise(**settings, of=parts.noise, planted=planted)
        state, _ = algorithm.step(state, parts.round(t, ear, planted))
        for messages in ear.messages.values():
            noisy.see(messages, [m.noisy for m in messages])
            clear.see(messages, [m.clear for m in messages])
    return noisy.scores(), clear.scores()


def _without_valuation(algorithm: Algorithm) -> Algorithm:
    """The same messages, without the time it takes to weigh them."""
    settings = getattr(algorithm, "shapley", None)
    if settings is None:
        return algorithm
    return algorithm.model_copy(update={"shapley": settings.model_copy(update={"weighting": "uniform"})})
