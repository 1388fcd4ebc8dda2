"""Canary attack: a lower bound on ε from an adversary who sees all messages of one agent.

A canary is a record whose clipped gradient has norm C along one coordinate of the model, at any model. That is the
largest effect a record can have, and no other canary shares the coordinate. A fair coin decides whether a canary is
among the agent's records. The run's own sampler draws canaries into batches. The adversary knows the canaries, the
records and noise of all other agents, all models and all settings, and sees every message of the agent. The agent's
other records are left out, because the adversary would know and subtract them. The attack tests the run's sampler,
divisor, number of messages and steps, σ, and the noise on every coordinate.

A run has as many canaries as an average agent has records, and half of them are present. So batches are smaller than
expected, which reveals a sum divided by the number of records drawn. More canaries take more runs: the run itself with
its own randomness, and copies with other keys. `one_run` derives the bound.
"""

import hashlib
import math
from dataclasses import dataclass, field, fields, replace
from statistics import median_low

import numpy as np
import torch
from torch import Tensor

from pdsl.algorithms.base import Algorithm
from pdsl.auditing.adversary import Adversary, Observation, Places
from pdsl.auditing.one_run import CONFIDENCE, Coins, Floats, Ladder, count_right, lower_bound, plan
from pdsl.auditing.report import Finding, Verdict
from pdsl.engine import LocalEngine
from pdsl.gradients.clipping import LocalGradients, row_digests
from pdsl.gradients.per_example import Block, Kernel, PerRecord
from pdsl.models.network import Network
from pdsl.privacy import Noise, epsilon
from pdsl.training.experiment import Experiment
from pdsl.training.trainer import Trainer, build_trainer, initial_models
from pdsl.utils.errors import PdslError
from pdsl.utils.format import format_epsilon
from pdsl.utils.inputs import Inputs, tensors_of
from pdsl.utils.random import KEY_BYTES, SecretStreams, Streams
from pdsl.utils.types import JsonDict
from pdsl.utils.workers import Workers

DEFAULT_SEED = 20240501  # of the coins
DEFAULT_CANARIES = 20_000  # maximum over all runs
DEFAULT_ROUNDS = 2_500  # over all runs, except that there are at least MIN_RUNS
MIN_RUNS, MAX_RUNS = 10, 200
LARGE = 300_000  # parameters of all agents' models together, with which a round takes twice as long
MIN_PER_RUN = 50  # canaries
UNUSED_SETS = 21  # of coins, for the null control
NORM = 1e6  # of a canary's gradient before clipping
OFFSET = 1e-3  # between the initial models of consecutive agents, because peers may send different models


@dataclass(frozen=True)
class CanaryResult:
    """Lower bounds on ε found by the attack, and its controls."""

    agent: int
    count: int
    runs: int
    rounds: int
    epsilon: float  # lower bound on ε at CONFIDENCE, for mechanisms shaped like the claimed one
    epsilon_95: float  # the same at 95 %, to compare with other tools; chance alone can exceed a claim
    claim: float  # ε of the agent over these rounds
    ideal: float  # lower bound expected if everything is as claimed
    null: float  # lower bound for unused coins, the median over several sets: must be 0
    positive: float  # lower bound without noise: must exceed the claim

    @property
    def ratio(self) -> float:
        """Lower bound relative to the claim."""
        return _ratio(self.epsilon, self.claim)


def attack(
    e: Experiment, agent: int = 0, count: int | None = None, rounds: int | None = None, seed: int = DEFAULT_SEED
) -> CanaryResult:
    """Run with `count` canaries in an agent's data and bound its ε from below.

    The defaults are all rounds of the run, and as many canaries as are affordable. The number of guesses is fixed
    before the run.

    | run                     | attack                                                                         |
    |-------------------------|--------------------------------------------------------------------------------|
    | Poisson batches         | a canary is present or absent; scores use the likelihood at sampling rate q    |
    | fixed-size batches      | a canary or its negative is present; always drawn, as no amplification applies |
    | whole-batch clipping    | PdslError: canaries share one clip and mask each other                         |
    | no noise                | PdslError: nothing is claimed                                                  |
    """
    if e.mechanisms is None:
        raise PdslError("the run has no noise and makes no claim that canaries could refute")
    if e.config.privacy.clipping == "batch":
        raise PdslError(
            "canaries do not work with privacy.clipping=batch, because records that share one clip mask each other;"
            " audit a run with privacy.clipping=per-sample"
        )
    rounds = e.config.rounds if rounds is None else rounds
    runs, size = _run_sizes(e, agent, count, rounds)
    mechanism, delta = e.mechanisms[agent], e.config.privacy.delta
    ladder = Ladder.around(mechanism, rounds, delta)
    planned = plan(ladder, runs, size, seed)
    rng = np.random.default_rng([seed, 0])
    coins = rng.random((runs, size)) < 0.5
    noisy, clean = _scores(e, agent, coins, rounds, rng)

    def bound(scores: Floats, *sets: Coins, confidence: float = CONFIDENCE) -> float:
        right = [median_low(count_right(scores, own, design) for own in sets) for design in planned.designs]
        return lower_bound(ladder, planned.designs, right, confidence)

    return CanaryResult(
        agent=agent,
        count=runs * size,
        runs=runs,
        rounds=rounds,
        epsilon=bound(noisy, coins),
        epsilon_95=bound(noisy, coins, confidence=0.95),
        claim=epsilon(((mechanism, rounds),), delta),
        ideal=planned.ideal,
        null=bound(noisy, *(rng.random((UNUSED_SETS, *coins.shape)) < 0.5)),
        positive=bound(clean, coins),
    )


def canary_finding(found: CanaryResult, claimed: float) -> Finding:
    """Finding of the attack: FAIL if the bound exceeds the claim, INCONCLUSIVE if the attack is too weak to tell."""
    ratio = _ratio(found.epsilon, claimed)
    detail = (
        f"{found.count:,} canaries at agent {found.agent} over {found.rounds} rounds: ε ≥ {found.epsilon:.2f}"
        f" (claimed {format_epsilon(claimed)}, ratio {ratio:.2f}, expected {found.ideal:.2f});"
        f" unused coins {found.null:.2f}, without noise {found.positive:.2f}"
    )
    if found.epsilon > claimed or found.null > 0:
        return Finding("canaries", Verdict.FAIL, detail)
    if found.positive <= claimed:
        return Finding("canaries", Verdict.INCONCLUSIVE, f"{detail}; the attack is too weak, try more canaries")
    return Finding("canaries", Verdict.PASS, detail)


def _ratio(bound: float, claim: float) -> float:
    return bound / claim if claim else math.inf if bound else 0.0


def _run_sizes(e: Experiment, agent: int, count: int | None, rounds: int) -> tuple[int, int]:
    """Number of runs, and of canaries per run: at most an agent's records, and at most the model's parameters."""
    records = e.batches.records if e.batches.rate is not None else e.batches.divisor(agent)
    maximum = max(1, min(int(records), e.network.num_parameters))
    slower = 1 + e.graph.agents * e.network.num_parameters / LARGE
    affordable = max(MIN_RUNS, min(MAX_RUNS, int(DEFAULT_ROUNDS / slower) // rounds))
    if count is None:
        return affordable, min(maximum, DEFAULT_CANARIES // affordable)
    runs = max(math.ceil(count / maximum), min(affordable, count // MIN_PER_RUN), 1)
    return runs, max(1, count // runs)


# The runs


def _scores(e: Experiment, agent: int, coins: Coins, rounds: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Scores of each run's canaries from the agent's messages, and from the same messages without noise."""
    found = []
    with Workers(1) as workers:
        trainer = replace(build_trainer(e, workers), engine=_UnmixedEngine(e.graph))
        for n, own in enumerate(coins):
            places = _places(_sizes(e), len(own), rng)
            found.append(_run(_with_canaries(trainer, agent, places, own, n), agent, places, rounds))
    noisy, clean = zip(*found, strict=True)
    return np.stack(noisy), np.stack(clean)


def _sizes(e: Experiment) -> list[int]:
    """Sizes of the model's parameter tensors."""
    return [shape.numel() for _, shape in e.network.shapes()]


def _places(sizes: list[int], count: int, rng: np.random.Generator) -> Places:
    """Random coordinates of the canaries, spread evenly over the parameter tensors, so that small ones count too."""
    starts, quota, left = np.cumsum([0, *sizes]), {}, count
    for done, n in enumerate(sorted(range(len(sizes)), key=lambda n: sizes[n])):
        quota[n] = min(sizes[n], left // (len(sizes) - done))
        left -= quota[n]
    chosen = [starts[n] + rng.choice(sizes[n], k, replace=False) for n, k in quota.items()]
    return rng.permutation(np.concatenate(chosen))


class _UnmixedEngine(LocalEngine):
    """Engine that does not mix models: mixing is post-processing, and no canary depends on it."""

    def mix(self, x: Tensor) -> Tensor:
        return x


def _with_canaries(trainer: Trainer, agent: int, places: Places, coins: Coins, n: int) -> Trainer:
    """Trainer of the nth run: canaries are the agent's only records, and the other agents have none."""
    e, local = trainer.experiment, trainer.local
    streams = _streams(e.streams, n)
    marks = np.arange(1, len(places) + 1)
    if e.batches.rate is None:  # a record is replaced by its negative, and the batch is filled up with zeros
        marks = np.pad(np.where(coins, marks, -marks), (0, int(e.batches.divisor(agent)) - len(marks)))
    else:
        marks = marks[coins]
    inputs = torch.from_numpy(marks)[:, None].float().to(e.network.device)  # the kernel reads the index only
    labels = local.labels[agent].new_zeros(len(marks), *local.labels[agent].shape[1:])
    sizes = [len(marks) if i == agent else 0 for i in range(e.graph.agents)]
    return replace(
        trainer,
        local=replace(
            local,
            inputs=[inputs if i == agent else inputs[:0] for i in range(len(sizes))],
            labels=[labels if i == agent else labels[:0] for i in range(len(sizes))],
            batches=replace(e.batches, sizes=sizes, streams=streams),
            kernel=_kernel(torch.from_numpy(places).to(inputs.device)),
        ),
        noise=replace(trainer.noise, streams=streams),
        experiment=replace(e, streams=streams),
    )


def _streams(streams: Streams, n: int) -> Streams:
    """The run's own random streams for the first run, derived ones for the others."""
    if n == 0:
        return streams
    if isinstance(streams, SecretStreams):
        key = hashlib.blake2b(b"canaries %d" % n, key=streams.key, digest_size=KEY_BYTES).digest()
        return SecretStreams(streams.seed, key)
    return Streams(streams.seed + 1_000_003 * n)


def _kernel(places: Tensor) -> Kernel:
    """Kernel of the canaries' gradients: each along its coordinate, and so long that the run clips it."""

    def run(network: Network, x: Tensor, records: Block) -> list[PerRecord]:
        marks = tensors_of(records.inputs)[0][:, 0].long()  # a canary's first number is its index
        length = NORM * _signs(x[None])[0] * marks.sign().double()
        at = places[(marks.abs() - 1).clamp(min=0)]
        zero = torch.zeros_like(x, dtype=torch.float64)
        return [
            PerRecord(
                length.square(),
                lambda factors: zero.clone().index_add_(0, at[: len(factors)], factors * length[: len(factors)]),
            )
        ]

    return Kernel("canaries", 4096, 1, run, _no_outputs)


def _no_outputs(network: Network, x: Tensor, inputs: Inputs) -> Tensor:
    """Outputs of a teacher for canaries: zeros, because a canary's gradient does not depend on its target."""
    return torch.zeros(len(inputs), max(1, network.task.outputs), device=x.device)


def _signs(x: Tensor) -> list[int]:
    """Direction of the canaries at each of these models, 1 or -1, so that messages that share noise reveal them.

    A record's gradient may be any function of the model, and the adversary knows the models.
    """
    return [1 - 2 * (digest[0] & 1) for digest in row_digests(x)]


@dataclass(frozen=True)
class _CanaryGradients:
    """Gradients of the agent's canaries with their signs, and zero for all other agents."""

    inner: LocalGradients
    agent: int
    signs: dict[int, tuple[Tensor, list[int]]] = field(default_factory=dict)  # id of rows → (rows, signs)

    def gradients(self, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None) -> Tensor:
        own = torch.nonzero(agents == self.agent)[:, 0]
        if not len(own):
            return torch.zeros_like(x)
        found = self.inner.gradients(t, agents[own], x[own], step, None if teachers is None else teachers[own])
        g = found.new_zeros(len(agents), found.shape[1])
        g[own] = found
        self.signs[id(g)] = g, _signs(x[own])
        return g


@dataclass(frozen=True)
class _ObservedNoise(Noise):
    """Wrap a run's noise: record the agent's messages, and add no noise to those of other agents."""

    inner: Noise = field(kw_only=True)
    source: _CanaryGradients = field(kw_only=True)
    messages: dict[int, list[Observation]] = field(default_factory=dict, kw_only=True)  # by local step (batch)

    def add(self, t: int, makers: Tensor, peers: Tensor, g: Tensor, step: int = 0, nth: int = 0) -> Tensor:
        agent = self.source.agent
        own = torch.nonzero(makers == agent)[:, 0]
        if not len(own):
            return g
        noisy = self.inner.add(t, makers[own], peers[own], g[own], step, nth)
        _, signs = self.source.signs.get(id(g), (g, [1] * len(own)))
        for peer, sign, after, before in zip(peers[own].tolist(), signs, noisy, g[own], strict=True):
            rows = (after.double().cpu().numpy(), before.double().cpu().numpy())
            observed = Observation(peer, nth, self.inner.sigma_of(agent, peer), sign, *rows)
            self.messages.setdefault(step, []).append(observed)
        all_rows = g.to(noisy.dtype, copy=True)
        all_rows[own] = noisy
        return all_rows


def _run(trainer: Trainer, agent: int, places: Places, rounds: int) -> tuple[Floats, Floats]:
    """Scores of one run's canaries, with noise and without."""
    e = trainer.experiment
    assert e.mechanisms is not None
    noisy, clean = (Adversary(e.mechanisms[agent], places, _sizes(e)) for _ in range(2))
    algorithm = _without_valuation(e.config.algorithm)
    state = algorithm.init(initial_models(e) + OFFSET * torch.arange(e.graph.agents, device=e.network.device)[:, None])
    settings: JsonDict = {f.name: getattr(trainer.noise, f.name) for f in fields(Noise)}
    for t in range(1, rounds + 1):
        source = _CanaryGradients(replace(trainer.local, repeated={}), agent)
        noise = _ObservedNoise(**settings, inner=trainer.noise, source=source)
        state, _ = algorithm.step(state, trainer.round(t, noise, source))
        for messages in noise.messages.values():
            noisy.observe(messages, [m.noisy for m in messages])
            clean.observe(messages, [m.clean for m in messages])
    return noisy.scores(), clean.scores()


def _without_valuation(algorithm: Algorithm) -> Algorithm:
    """Copy without Shapley valuation, which is slow and does not change the messages."""
    settings = getattr(algorithm, "shapley", None)
    if settings is None:
        return algorithm
    return algorithm.model_copy(update={"shapley": settings.model_copy(update={"weighting": "uniform"})})
