"""Checks of batches and keys: each record is drawn independently at the claimed rate, from the run's key."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdsl import topology
from pdsl.auditing import reference
from pdsl.auditing.report import FALSE_ALARM, Finding, conclude
from pdsl.data import Batches
from pdsl.models.network import Network
from pdsl.privacy import Noise
from pdsl.training.experiment import Experiment, make_seal
from pdsl.utils.inputs import negated
from pdsl.utils.random import SecretStreams, Streams
from pdsl.utils.types import JsonDict
from pdsl.utils.workers import Workers

BATCHES = 400  # per agent
MAX_CELLS = 4_000_000  # records times batches of one agent
MAX_DRAWN = 600_000  # records in recomputed batches
KEYS = 3000  # fresh keys tested for repetition and bias
Membership = NDArray[np.float64]  # [batches, records] of 0 and 1


def check_sampler(e: Experiment) -> Finding:
    """Check that records are drawn independently, at the charged rate."""
    assert e.mechanisms is not None
    batches, mechanisms = e.batches, e.mechanisms
    problems = [*_check_parts(e), *_check_rate(e), *_check_draws(e)]
    members = {}
    for i in e.engine.agents:
        if batches.sizes[i]:
            members[i] = _membership(batches, i, mechanisms[i].steps)
            problems += _check_agent(i, members[i], mechanisms[i].rate, batches)
    if mechanisms[0].rate is not None and mechanisms[0].rate < 1:
        problems += _check_agents_apart(members, mechanisms[0].rate)
    rate = "fixed-size batches" if mechanisms[0].rate is None else f"rate {mechanisms[0].rate:.4g}"
    return conclude("sampler", problems, f"{rate}; {len(members)} agents, each record, batch size, pair of batches")


def _check_parts(e: Experiment) -> list[str]:
    """Check that no record is held twice, because it would then move messages by more than Δ."""
    problems = []
    seen: dict[int, int] = {}
    for i in e.engine.agents:
        for record in e.parts[i].tolist():
            if record in seen:
                problems.append(f"record {record} is held by agent {seen[record]} and by agent {i}")
            seen[record] = i
        if len(e.parts[i]) != e.batches.sizes[i]:
            problems.append(f"agent {i} draws from {e.batches.sizes[i]} records and has {len(e.parts[i])}")
    return problems


def _check_draws(e: Experiment) -> list[str]:
    """Check the batches, or a seeded sample of them, against the ones that `reference` draws from the key."""
    assert e.mechanisms is not None
    rate = e.mechanisms[0].rate
    if rate is None:
        return []
    pairs = [
        (t, i, k)
        for t in range(1, max(e.config.rounds, BATCHES) + 1)
        for i in e.engine.agents
        for k in range(e.mechanisms[i].steps)
    ]
    order = np.random.default_rng(len(pairs)).permutation(len(pairs)).tolist()
    budget, problems = MAX_DRAWN, []
    for t, i, step in (pairs[n] for n in order):
        n = e.batches.sizes[i]
        budget -= n
        if budget < 0:
            break
        if not np.array_equal(e.batches.draw(i, t, step).numpy(), reference.batch(e.streams, n, rate, i, t, step)):
            problems.append(f"agent {i}: the batch of round {t} does not follow from the key and the rate")
    return problems


def _check_rate(e: Experiment) -> list[str]:
    """Check that the charged rate and the divisor are the public constants of the settings."""
    assert e.mechanisms is not None
    b, settings = e.batches, e.config.batch
    if settings.sampler == "fixed":
        return ["charged with amplification by sampling, which fixed-size batches do not have"] * any(
            m.rate is not None for m in e.mechanisms
        )
    published = e.data.published
    public = settings.records or (published / e.graph.agents if published else None)
    if public is None and settings.rate is None:
        # between peers it is in the plan
        public = b.records if e.streams.secret else math.fsum(b.sizes) / len(b.sizes)
    rate = settings.rate or min(1.0, settings.size / (public or 1.0))
    problems = [
        f"agent {i} is charged with rate {m.rate}, but the settings give {rate:.6g}"
        for i, m in enumerate(e.mechanisms)
        if m.rate is None or not math.isclose(m.rate, rate, rel_tol=1e-9)
    ]
    divisor = float(settings.size) if settings.rate else min(float(settings.size), public or math.inf)
    problems += [
        f"agent {i}'s sums are divided by {b.divisor(i):g}, but the settings give {divisor:g}"
        for i in e.engine.agents
        if not math.isclose(b.divisor(i), divisor, rel_tol=1e-9)
    ]
    return problems


def _membership(batches: Batches, agent: int, steps: int) -> Membership:
    """Membership of records in batches, in the order in which a run draws them."""
    n = batches.sizes[agent]
    count = max(60, min(BATCHES, MAX_CELLS // n))
    member = np.zeros((count, n))
    for b in range(count):
        member[b, batches.draw(agent, 1 + b // steps, b % steps).numpy()] = 1
    return member


def _check_agent(agent: int, member: Membership, rate: float | None, batches: Batches) -> list[str]:
    from scipy import stats

    count, n = member.shape
    sizes = member.sum(1)
    if rate is None:
        size = min(batches.settings.size, n)
        problems = [f"agent {agent}: a batch of {int(s)} records, not {size}" for s in sizes if s != size][:1]
        rate = size / n
        if rate == 1:
            return problems
    else:
        problems = []
        if rate == 1:
            return [f"agent {agent}: a record was left out at rate 1"] if not member.all() else []
        p = float(stats.binomtest(int(member.sum()), count * n, rate).pvalue)
        if p < FALSE_ALARM:
            problems.append(f"agent {agent}: records are drawn at rate {member.mean():.4f}, claimed {rate:.4f}")
        if n >= 8 and _outside(float(((sizes - n * rate) ** 2).sum()) / (n * rate * (1 - rate)), count, rate * n):
            spread = float(sizes.var())
            problems.append(
                f"agent {agent}: batch sizes have variance {spread:.3g}, Poisson sampling's {n * rate * (1 - rate):.3g}"
            )
    drawn = member.sum(0)
    statistic = float(((drawn - count * rate) ** 2).sum()) / (count * rate * (1 - rate))
    if _outside(statistic, n, rate * count):
        problems.append(f"agent {agent}: some records are drawn more often than others")
    for record in (int(drawn.argmin()), int(drawn.argmax())):
        if stats.binomtest(int(drawn[record]), count, rate).pvalue < FALSE_ALARM / n:
            problems.append(f"agent {agent}: record {record} is in {int(drawn[record])} of {count} batches")
    for apart in (1, 2):
        again = int((member[apart:] * member[:-apart]).sum())
        cells = (count - apart) * n
        # products within a batch are not independent, so the variance is taken three times as large
        z = (again / cells - rate**2) / math.sqrt(rate**2 * (1 - rate) * (1 + rate) / cells * 3)
        if abs(z) > stats.norm.isf(FALSE_ALARM):
            problems.append(f"agent {agent}: batches {apart} apart are not independent")
    problems += _check_pairs(agent, member, rate, batches)
    return problems


def _check_pairs(agent: int, member: Membership, rate: float, batches: Batches) -> list[str]:
    """Check that no two records are together in too many or too few batches."""
    from scipy import stats

    count, some = len(member), member[:, :600]
    together = some.T @ some
    n = len(together)
    if n < 2:
        return []
    fixed = batches.settings.sampler == "fixed"  # then the second of a pair has probability (B − 1)/(n − 1)
    both = rate * ((batches.settings.size - 1) / max(1, member.shape[1] - 1) if fixed else rate)
    np.fill_diagonal(together, np.nan)
    for extreme in (np.nanargmax(together), np.nanargmin(together)):
        i, j = divmod(int(extreme), n)
        found = stats.binomtest(int(together[i, j]), count, min(1.0, both)).pvalue
        if found < FALSE_ALARM / (n * (n - 1)):
            return [f"agent {agent}: records {i} and {j} are together in {int(together[i, j])} of {count} batches"]
    return []


def _outside(statistic: float, degrees: int, expected: float) -> bool:
    """Whether a χ² statistic of binomial counts is beyond chance; the limit is wider if counts are small."""
    from scipy import stats

    z = (statistic - degrees) / math.sqrt(degrees * (2 + 1 / max(expected, 0.05)))
    return bool(abs(z) > stats.norm.isf(FALSE_ALARM) * 1.2)


def _check_agents_apart(members: dict[int, Membership], rate: float) -> list[str]:
    """Check that agents draw independently of each other."""
    from scipy import stats

    problems = []
    agents = sorted(members)
    for a, b in pairwise(agents):
        rows, columns = (min(sizes) for sizes in zip(members[a].shape, members[b].shape, strict=True))
        x, y = (m[:rows, :columns] - rate for m in (members[a], members[b]))
        z = float((x * y).sum()) / (rate * (1 - rate) * math.sqrt(rows * columns))
        if abs(z) > stats.norm.isf(FALSE_ALARM / len(agents)):
            problems.append(f"agents {a} and {b} draw the same positions")
    return problems


def check_keys(e: Experiment) -> Finding:
    """Check that noise and batches depend on key, context, agent, purpose, round and peer."""
    assert e.mechanisms is not None
    streams = e.streams
    agent = e.engine.agents[0]
    problems: list[str] = []
    if (e.config.privacy.randomness == "system") != isinstance(streams, SecretStreams):
        problems.append("noise and batches do not come from the source named in the settings")
    base = _draw(streams, e.batches, agent, e.network.num_parameters)
    others: dict[str, Streams] = {"another seed": type(streams)(e.config.seed + 1)}
    if isinstance(streams, SecretStreams):
        others = {
            "another secret key": SecretStreams(e.config.seed).bind(e.seal.context),
            "another context": SecretStreams(e.config.seed, streams.key).bind(b"another" + e.seal.context),
        }
        problems += _check_entropy(streams.key)
        if (
            e.seal.secret != streams.key
            or streams.bind(e.seal.context).bits("noise", 0, 1).key != streams.bits("noise", 0, 1).key
        ):
            problems.append("noise is not derived from the secret and everything that determines a message")
    for name, other in others.items():
        drawn = _draw(other, e.batches, agent, e.network.num_parameters)
        for kind, a, b in zip(("noise", "batches"), base, drawn, strict=True):
            if _correlated(a, b):
                problems.append(f"{kind}: the same with {name}")
    problems += _check_arguments(streams) + _check_derivation(streams) + _check_context(e)
    return conclude(
        "noise and batches depend on the key", problems, f"{', '.join(others)}, agent, round, peer and purpose"
    )


def _check_entropy(key: bytes) -> list[str]:
    """Check that keys are 32 bytes of fair bits, and that none is repeated."""
    fresh = [SecretStreams(0).key for _ in range(KEYS)]
    if len(key) != 32 or len(set(fresh)) < KEYS or key in fresh:
        return ["secret keys are repeated, or are not 32 bytes"]
    bits = np.unpackbits(np.frombuffer(b"".join(fresh), dtype=np.uint8)).reshape(KEYS, -1)
    off = np.abs(bits.mean(0) - 0.5).max() * 2 * math.sqrt(KEYS)
    return ["secret keys have predictable bits"] if off > 6.5 else []


def _draw(streams: Streams, batches: Batches, agent: int, d: int) -> tuple[Tensor, Tensor]:
    """One noise vector and the batches of six rounds, drawn as in training."""
    with Workers(1) as workers:
        noise = Noise([1.0] * (agent + 1), streams, workers)
        ends = torch.tensor([agent])
        noisy = noise.add(1, ends, ends, torch.zeros(1, d, dtype=torch.float64))[0]
    drawn = replace(batches, streams=streams)
    member = torch.zeros(6, max(1, batches.sizes[agent]))
    for t in range(6):
        member[t, drawn.draw(agent, t + 1)] = 1
    return noisy, member.flatten()


def _correlated(a: Tensor, b: Tensor) -> bool:
    """Whether two vectors are equal or correlated beyond chance; False if one is constant."""
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    if float(a.norm()) == 0 or float(b.norm()) == 0:
        return False
    return float((a @ b) / (a.norm() * b.norm())) > min(0.9, 6 / math.sqrt(len(a)))


def _check_derivation(streams: Streams) -> list[str]:
    """Check that random bits are derived from the key as documented."""
    for place in (("noise", 0, 1, 2), ("noise.1.1", 3, 7, 0), ("batch", 1, 5, -1), ("batch.2.0", 0, 99, -1)):
        bits = streams.bits(*place)
        same = bits.read(64).tolist() == reference.random_words(streams, *place, 64).tolist()
        if not same or any(bits.extension(n) != reference.extension(streams, *place, n) for n in (0, 1, 10**6)):
            return [f"random bits for {place[0]} are not derived as documented"]
    return []


def _check_context(e: Experiment) -> list[str]:
    """Check that the seal depends on everything that determines a message, so a changed copy draws other noise."""
    assert e.mechanisms is not None
    config, records = e.config, (e.data.x, e.data.y)
    other_noise = [replace(m, sigma=1.5 * m.sigma) for m in e.mechanisms]
    privacy = config.privacy.model_copy(update={"max_grad_norm": 2 * config.privacy.max_grad_norm})
    module = e.network.to_module(e.network.perturbed_parameters())
    shifted = Network(module, str(e.network.device), e.task)

    def context(**changes: Any) -> bytes:
        given: JsonDict = {
            "config": config,
            "network": e.network,
            "agreed": e.mechanisms,
            "learning_rates": e.learning_rates,
            "records": records,
            "graph": e.graph,
        }
        return make_seal(streams=e.streams, **(given | changes)).context

    base = context()
    changed = {
        "another σ": context(agreed=other_noise),
        "other records": context(records=(negated(e.data.x), e.data.y)),
        "another clip": context(config=config.model_copy(update={"privacy": privacy})),
        "another seed": context(config=config.model_copy(update={"seed": config.seed + 1})),
        "another model": context(network=shifted),
        "another graph": context(graph=topology.full(e.graph.agents + 1)),
    }
    return [
        f"a copy of the run with {name} would draw the same noise" for name, other in changed.items() if other == base
    ]


def _check_arguments(streams: Streams) -> list[str]:
    """Check that random bits depend on every argument, and are the same when drawn again."""
    calls: dict[str, Callable[[], Sequence[int]]] = {
        "agent": lambda: streams.bits("noise", 1, 1, 1).read(4).tolist(),
        "round": lambda: streams.bits("noise", 0, 2, 1).read(4).tolist(),
        "peer": lambda: streams.bits("noise", 0, 1, 2).read(4).tolist(),
        "purpose": lambda: streams.bits("batch", 0, 1, 1).read(4).tolist(),
        "step": lambda: streams.bits("noise.1.0", 0, 1, 1).read(4).tolist(),
    }
    base = streams.bits("noise", 0, 1, 1).read(4).tolist()
    problems = [f"random bits do not depend on the {name}" for name, call in calls.items() if call() == base]
    if streams.bits("noise", 0, 1, 1).read(4).tolist() != base:
        problems.append("random bits differ when drawn again, so a repeated message would differ")
    return problems
