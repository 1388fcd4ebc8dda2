"""Checks of the noise: σ, distribution, independence and arithmetic, by coordinate, layer, message, agent, round."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from pdsl.auditing import reference
from pdsl.auditing.replay import Message
from pdsl.auditing.report import FALSE_ALARM, Finding, Verdict, conclude
from pdsl.privacy import Noise
from pdsl.training.experiment import Experiment
from pdsl.utils.random import purpose

MAX_LAG = 16  # distance between coordinates whose correlation is tested
MAX_PAIRED = 400  # messages compared with each other
MAX_REFERENCE = 4_000_000  # noise values recomputed from the definition
QUANTILES = 200  # of two messages' sorted noise, compared to find permutations of the same noise


def check_noise(noise: Noise, messages: Sequence[Message], tensors: Sequence[int], covered: str) -> Iterator[Finding]:
    """Check the noise of recorded messages. `tensors`: sizes of the model's parameter tensors."""
    if not messages or not all(noise.sigma):
        yield Finding("σ of the noise", Verdict.FAIL, "an agent's σ is 0, or no message was sent")
        return
    scale = torch.tensor([noise.sigma_of(m.maker, m.peer) for m in messages], dtype=torch.float64)
    unit = torch.stack([m.noise for m in messages]) / scale[:, None]  # [messages, d]
    yield _check_sigma(messages, unit, tensors, covered)
    yield _check_distribution(unit)
    yield _check_within(unit)
    yield _check_between(messages, unit)
    yield _check_against_data(messages, unit)
    yield _check_lattice(messages, scale.tolist())
    yield _check_arithmetic(noise, messages)


def _tail(chi2: float, degrees: float) -> float:
    """Two-sided p-value of a χ² statistic."""
    from scipy import stats

    return float(2 * min(stats.chi2.cdf(chi2, degrees), stats.chi2.sf(chi2, degrees)))


def _check_sigma(messages: Sequence[Message], unit: Tensor, tensors: Sequence[int], covered: str) -> Finding:
    """Test σ by χ²: overall, per agent, edge, round, parameter tensor and coordinate."""
    square = unit.square()
    by_message = square.sum(1)
    groups: dict[str, list[int]] = {"all messages": list(range(len(messages)))}
    for n, m in enumerate(messages):
        groups.setdefault(f"agent {m.maker}", []).append(n)
        groups.setdefault(f"round {m.round}", []).append(n)
        groups.setdefault(f"message {m.nth} of step {m.step}", []).append(n)
        groups.setdefault(f"agent {m.maker} to {m.peer}", []).append(n)
    d = unit.shape[1]
    sums = {name: (float(by_message[rows].sum()), d * len(rows)) for name, rows in groups.items()}
    starts = np.cumsum([0, *tensors])
    sums |= {
        f"parameter tensor {n}": (float(square[:, a:b].sum()), len(messages) * int(b - a))
        for n, (a, b) in enumerate(pairwise(starts))
    }
    problems = [
        f"{name}: the noise has {math.sqrt(chi2 / degrees):.4f} times the claimed σ"
        for name, (chi2, degrees) in sums.items()
        if _tail(chi2, degrees) < FALSE_ALARM / len(sums)
    ]
    by_coordinate = square.sum(0)
    for extreme in (by_coordinate.argmin(), by_coordinate.argmax()):
        chi2 = float(by_coordinate[extreme])
        if _tail(chi2, len(messages)) < FALSE_ALARM / d:
            ratio = math.sqrt(chi2 / len(messages))
            problems.append(f"coordinate {int(extreme)}: the noise has {ratio:.4f} times the claimed σ")
    groups_tested = "per agent, edge, round, parameter tensor and coordinate"
    return conclude("σ of the noise", problems, f"{len(messages)} messages of {covered}; χ² {groups_tested}")


def _check_distribution(unit: Tensor) -> Finding:
    """Test normality (Kolmogorov–Smirnov), counts in the tails, means, and repeated values."""
    from scipy import stats

    values = unit.flatten().numpy()
    problems = []
    p = float(stats.kstest(values[:: max(1, len(values) // 200_000)], "norm").pvalue)
    if p < FALSE_ALARM:
        problems.append(f"not a normal distribution: p = {p:.1e}")
    magnitude = np.abs(values)
    for limit in (0.01, 0.1, 1.0, 2.0, 3.0, 4.0, 5.0):
        expected, found = 2 * float(stats.norm.sf(limit)), int((magnitude > limit).sum())
        if stats.binomtest(found, len(values), expected).pvalue < FALSE_ALARM / 7:
            problems.append(
                f"{found} of {len(values):,} values beyond {limit:g} σ, expected {len(values) * expected:.1f}"
            )
    if magnitude.max() > 12:
        problems.append(f"a value at {magnitude.max():.1f} σ")
    means = unit.mean(1) * math.sqrt(unit.shape[1])  # one per message: standard normal
    if _tail(float(means.square().sum()), len(means)) < FALSE_ALARM:
        problems.append("the noise of a message has a component shared by all its coordinates")
    per_coordinate = unit.mean(0) * math.sqrt(len(unit))
    if _tail(float(per_coordinate.square().sum()), unit.shape[1]) < FALSE_ALARM:
        problems.append("the noise of a coordinate does not have mean zero, or is shared by several messages")
    problems += _repeats(values)
    return conclude("noise is Gaussian", problems, f"{len(values):,} values, p = {p:.2g}; tails to 5 σ, repeats")


def _repeats(values: "np.typing.NDArray[np.float64]") -> list[str]:
    """Test for too few bits: the number of equal values on a grid of 2^-14 σ."""
    some = values[:: max(1, len(values) // 200_000)]
    grid = np.round(some * 2**14)
    _, counts = np.unique(grid, return_counts=True)
    pairs = float((counts * (counts - 1) / 2).sum())
    expected = len(some) * (len(some) - 1) / 2 / (2 * math.sqrt(math.pi)) / 2**14
    if abs(pairs - expected) > 6 * math.sqrt(expected) + 0.02 * expected + 5:
        return [f"{pairs:.0f} pairs of equal values, expected {expected:.0f}: the noise has too few bits"]
    return []


def _check_within(unit: Tensor) -> Finding:
    """Test the coordinates of a message for correlation."""
    from scipy import stats

    M, d = unit.shape
    problems = []
    limit = stats.norm.isf(FALSE_ALARM / (2 * MAX_LAG + 4) / 2)
    tested = {f"coordinates {lag} apart": (unit[:, lag:], unit[:, :-lag]) for lag in range(1, min(MAX_LAG, d - 1) + 1)}
    half = d // 2
    tested["the first and the second half"] = (unit[:, :half], unit[:, half : 2 * half])
    tested["coordinates and the reversed message"] = (unit[:, :half], unit.flip(1)[:, :half])
    if d > 3 * MAX_LAG:
        tested["squares of neighbouring coordinates"] = (
            (unit[:, 1:].square() - 1) / math.sqrt(2), (unit[:, :-1].square() - 1) / math.sqrt(2),
        )  # fmt: skip
    for name, (a, b) in tested.items():
        if a.numel() == 0:
            continue
        z = float((a * b).sum()) / math.sqrt(a.numel())
        if abs(z) > limit * (1.3 if "squares" in name else 1.0):
            problems.append(f"{name} of a message are correlated: {z / math.sqrt(a.numel()):.3f}")
    if M >= 30 and d <= 3000:  # pairs of coordinates that are correlated in every message
        correlation = (unit.T @ unit) / M
        correlation.fill_diagonal_(0)
        worst = float(correlation.abs().max())
        if worst > stats.norm.isf(FALSE_ALARM / (d * (d - 1))) / math.sqrt(M) * (1 + 8 / math.sqrt(M)):
            at = int(correlation.abs().argmax())
            problems.append(f"coordinates {at // d} and {at % d} share noise: correlation {worst:.2f}")
    return conclude("noise within a message", problems, f"{M} messages of {d:,} numbers, no correlation")


def _check_between(messages: Sequence[Message], unit: Tensor) -> Finding:
    """Test messages for shared noise: as it is, negated, shifted, reversed, permuted, or cancelled by a sum."""
    from scipy import stats

    at = _spread(len(messages), MAX_PAIRED)
    chosen, some = [messages[n] for n in at], unit[at]
    M, d = some.shape
    pairs = max(1, M * (M - 1) // 2)
    limit = stats.norm.isf(FALSE_ALARM / pairs / 8) / math.sqrt(d)
    variants = {"": some, ", reversed": some.flip(1), ", shifted": some.roll(1, 1), ", shifted back": some.roll(-1, 1)}
    problems = []
    for how, other in variants.items():
        correlation = (some @ other.T) / d
        if how:
            correlation = torch.triu(correlation, 1) + torch.tril(correlation, -1)
        for n, m in torch.nonzero(torch.triu(correlation.abs(), 1) > limit).tolist()[:3]:
            problems.append(
                f"{_pair(chosen[n], chosen[m])} share noise{how}: {float(correlation[n, m]):.2f} correlated"
            )
    ranks = torch.linspace(0, d - 1, min(d, QUANTILES)).long()
    for how, ordered in (("", some), (", negated", -some)):
        a, b = some.sort(1).values[:, ranks], ordered.sort(1).values[:, ranks]
        close = torch.cdist(a, b, p=math.inf) < 2.0**-12 if d >= 20 else torch.zeros(M, M, dtype=torch.bool)
        for n, m in torch.nonzero(torch.triu(close, 1)).tolist()[:3]:
            problems.append(f"{_pair(chosen[n], chosen[m])} have the same noise, permuted{how}")
    problems += _dependent(chosen, some)
    return conclude("noise is never shared", problems, f"{pairs:,} pairs of messages, also moved and permuted")


def _spread(count: int, maximum: int) -> list[int]:
    """At most `maximum` of `count` indices, evenly spaced from the first to the last."""
    if count <= maximum:
        return list(range(count))
    return sorted({round(i * (count - 1) / max(1, maximum - 1)) for i in range(maximum)})


def _dependent(messages: Sequence[Message], unit: Tensor) -> list[str]:
    """Messages whose noise cancels in a sum: their Gram matrix has a small eigenvalue."""
    groups: dict[tuple[int, int], list[int]] = {}
    for n, m in enumerate(messages):
        groups.setdefault((m.maker, m.round), []).append(n)
    if len(messages) < unit.shape[1] / 2:
        groups[-1, -1] = list(range(len(messages)))
    problems = []
    for rows in groups.values():
        k, d = len(rows), unit.shape[1]
        if 2 <= k < d / 2:
            gram = unit[rows] @ unit[rows].T / d
            edge = (1 - math.sqrt(k / d)) ** 2
            smallest = float(torch.linalg.eigvalsh(gram)[0])
            if smallest < 0.5 * edge - 8 / math.sqrt(d) * edge:
                first = messages[rows[0]]
                problems.append(f"a weighted sum of {k} messages, some of agent {first.maker}, has almost no noise")
    return problems


def _pair(a: Message, b: Message) -> str:
    return f"messages of agents {a.maker} and {b.maker} (to {a.peer} and {b.peer}, rounds {a.round} and {b.round})"


def _check_against_data(messages: Sequence[Message], unit: Tensor) -> Finding:
    """Test that noise does not depend on the gradient it is added to."""
    from scipy import stats

    problems = []
    clean = torch.stack([m.clipped for m in messages])
    norms = clean.norm(dim=1, keepdim=True)
    direction = torch.where(norms > 0, clean / norms, 0.0)
    along = (unit * direction).sum(1)[norms[:, 0] > 0]
    if len(along):
        p = _tail(float(along.square().sum()), len(along))
        z = float(along.sum()) / math.sqrt(len(along))
        if p < FALSE_ALARM or abs(z) > stats.norm.isf(FALSE_ALARM / 2):
            problems.append(
                f"noise along the gradient has {float(along.square().mean()) ** 0.5:.3f} times the claimed σ"
            )
    zero = clean == 0
    for name, where in (("exactly zero", zero), ("not zero", ~zero)):
        count = int(where.sum())
        if count and _tail(float(unit[where].square().sum()), count) < FALSE_ALARM:
            ratio = math.sqrt(float(unit[where].square().mean()))
            problems.append(f"where the gradient is {name} the noise has {ratio:.3f} times the claimed σ")
    return conclude(
        "noise is independent of the data", problems, f"{len(along)} messages, along the gradient and where it is zero"
    )


def _check_lattice(messages: Sequence[Message], sigmas: Sequence[float]) -> Finding:
    """Check that every number sent is a multiple of the public step, with uniform low bits."""
    problems = []
    residues = np.zeros(16, dtype=np.int64)
    for m, sigma in zip(messages, sigmas, strict=True):
        steps = m.noisy.double() / 2.0 ** (math.floor(math.log2(sigma)) - 16)
        if not bool((steps == steps.round()).all()):
            problems.append(f"a message of agent {m.maker} in round {m.round} is not on the lattice of its σ")
            break
        small = steps[steps.abs() < 2**23].to(torch.int64)
        residues += np.bincount((small % 16).numpy(), minlength=16)
    expected = residues.sum() / 16
    if not problems and expected > 50:
        chi2 = float(((residues - expected) ** 2 / expected).sum())
        if _tail(chi2, 15) < FALSE_ALARM:
            problems.append("the last four bits of messages are not uniform")
    return conclude(
        "messages are on the lattice", problems, f"{len(messages)} messages are multiples of 2^(⌊log2 σ⌋−16)"
    )


def _check_arithmetic(noise: Noise, messages: Sequence[Message]) -> Finding:
    """Check that every message is the gradient plus the noise that `reference` draws from the key."""
    budget, problems, checked = MAX_REFERENCE, [], 0
    for n in _order(len(messages)):
        if budget <= 0:
            break
        checked += 1
        m = messages[n]
        budget -= len(m.noisy)
        if not _is_as_documented(noise, m):
            problems.append(
                f"the message of agent {m.maker} to {m.peer} in round {m.round} is not gradient + lattice noise"
            )
    return conclude("noise is the documented sampler's", problems, f"{checked} messages recomputed, every number")


def _order(count: int) -> list[int]:
    """All indices: the first, the last, then the others in random order."""
    shuffled = np.random.default_rng(count).permutation(count).tolist()
    return list(dict.fromkeys([0, count - 1, *shuffled]))


def _is_as_documented(noise: Noise, m: Message) -> bool:
    sigma = noise.sigma_of(m.maker, m.peer)
    name = purpose("noise", m.step, m.nth)
    z, exponent = reference.lattice_noise(len(m.noisy), sigma, noise.streams, name, m.maker, m.round, m.peer)
    steps = (m.clipped * 2.0**-exponent).round().cpu().numpy()
    want = np.rint((steps + z) / 2.0**16) * 2.0 ** (exponent + 16)
    return bool((want.astype(np.float32) == m.noisy.cpu().numpy()).all())


def check_every_round(e: Experiment, noise: Noise, messages: Sequence[Message], total: int) -> Finding:
    """Check that the noise of every round, added to zero gradients, is as documented."""
    if not all(noise.sigma):
        return Finding("noise of every round", Verdict.FAIL, "an agent's σ is 0")
    draws = sorted({(m.step, m.nth, m.maker, m.peer) for m in messages})
    affordable = max(len(draws), MAX_REFERENCE // e.network.num_parameters)
    chosen = [(t, draw) for t in range(1, total + 1) for draw in draws]
    if len(chosen) > affordable:  # one message of every round first
        order = np.random.default_rng(total).permutation(len(draws)).tolist()
        turns = [
            [(t, draws[order[(t + turn) % len(draws)]]) for t in range(1, total + 1)] for turn in range(len(draws))
        ]
        chosen = [pair for turn in turns for pair in turn][:affordable]
    problems = []
    zero = torch.zeros(1, e.network.num_parameters, dtype=torch.float64)
    for t, (step, nth, maker, peer) in chosen:
        noisy = noise.add(t, torch.tensor([maker]), torch.tensor([peer]), zero.clone(), step, nth)[0].cpu()
        if not _is_as_documented(noise, Message(t, step, nth, maker, peer, zero[0], noisy)):
            problems.append(f"round {t}: the noise of agent {maker} for {peer} is not as documented")
    covered = len({t for t, _ in chosen})
    return conclude("noise of every round", problems, f"{len(chosen)} messages of {covered} of {total} rounds")
