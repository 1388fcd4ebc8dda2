"""Privacy accounting: from the messages of an agent to one (ε, δ) for all rounds.

A `Mechanism` describes the messages of one round as data. The functions here turn (mechanism, rounds) pairs into ε.
The stated ε comes from privacy loss distributions (PLD) of `dp_accounting`; Rényi DP is the cross-check.

Guarantee: take two datasets of one agent that differ in one record, and an adversary who knows the data and noise of
all other agents and sees every message of this agent. Then the messages of all rounds together are
(ε, δ)-differentially private.

| batches             | neighbouring data differ in | a round is                            |
|---------------------|-----------------------------|---------------------------------------|
| Poisson with rate q | a record added or removed   | PoissonSampled(q, Gaussian(σ/(√k·Δ))) |
| Poisson, q = 1      | a record added or removed   | Gaussian(σ/(√k·Δ))                    |
| fixed size          | a record replaced           | Gaussian(σ/(√k·Δ)), Δ of a replaced one |

The k messages of a round are one event, not k: they share a batch, so a record is in all of them or in none. If message
n has its own σ_n, 1/√(Σ 1/σ_n²) replaces σ/√k.
"""

import itertools
import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any, Self

from pdsl.privacy.discrete_gaussian import MASS_ERROR
from pdsl.utils.errors import PdslError

# Grid of privacy losses: points per standard deviation of one round's loss, and the maximum number of points of one
# round's distribution. FINE overstates ε by about 0.02 %, COARSE by 0.1 %; more for q so small that the maximum binds.
Grid = tuple[int, int]
FINE: Grid = (30, 100_000)
COARSE: Grid = (12, 20_000)  # for curves
MAX_INTERVAL = 0.02  # of the grid
MIN_INTERVAL = 1e-9  # of the grid; float64 cannot separate losses on a finer one
MAX_COMPOSED = 2_000_000  # points in the distribution of all rounds
MAX_TRUNCATED = 1e-6  # share of δ assigned to truncated tails, whose loss counts as infinite
# δ that float64 rounding can lose per composed round. Measured over 1,000 random compositions, the FFT lost at most
# 2.1·2⁻⁵³ a round, and the curve of a single round was at most 2.1·2⁻⁵³ too low. This is four times their sum.
ROUNDING = 2e-15
MAX_ROUNDING = 0.1  # share of δ that rounding may lose; beyond it RDP is used
MAX_ROUNDS = 200_000  # one FFT composes this many in about a second; beyond it RDP is used
ZERO_NOISE = 1e-6  # noise multipliers below this count as 0
MIN_NOISE, MAX_NOISE = 0.01, 100_000  # noise multipliers that a grid of losses can resolve
MIN_TARGET, MAX_TARGET = 1e-3, 1e3  # total ε accepted by `calibrate`
CLOSE_ENOUGH = 0.999  # calibration stops at this share of the target ε, or of the noise multiplier
DOUBLING = 100  # rounds; a curve is computed every round up to 2·DOUBLING, then every 2, 4, …


@dataclass(frozen=True)
class Mechanism:
    """Messages of one agent in one round: `messages` noisy vectors computed on one batch, `steps` times."""

    sigma: float  # standard deviation of the noise on each message, before `sigma_scale`
    sensitivity: float  # Δ of one message
    messages: int  # k
    steps: int = 1  # K, local steps per round, each on its own batch
    rate: float | None = None  # Poisson rate q; None: fixed-size batches, no amplification
    sigma_scale: tuple[float, ...] = ()  # factor on σ for each message; empty: all 1
    dimension: int = 0  # numbers in a message, to account for the noise sampler's error; 0 leaves it out

    def __post_init__(self) -> None:
        _need(0 <= self.sigma < math.inf, "sigma", self.sigma, "0 or more", "1")
        _need(0 < self.sensitivity < math.inf, "sensitivity", self.sensitivity, "more than 0", "max_grad_norm / batch")
        _need(self.messages >= 1, "messages", self.messages, "1 or more", "the size of the neighbourhood")
        _need(self.steps >= 1, "steps", self.steps, "1 or more", "1")
        _need(self.rate is None or 0 < self.rate <= 1, "rate", self.rate, "above 0 and at most 1", "batch / samples")
        object.__setattr__(self, "sigma_scale", tuple(self.sigma_scale))  # JSON has lists
        count = len(self.sigma_scale)
        _need(count in (0, self.messages), "number of sigma_scale factors", count, "0 or one per message", "0")
        for factor in self.sigma_scale:
            _need(0 < factor < math.inf, "sigma_scale", factor, "more than 0", "1")

    @classmethod
    def from_noise_multiplier(
        cls, noise_multiplier: float, sensitivity: float, messages: int, steps: int = 1, rate: float | None = None
    ) -> Self:
        """Mechanism with σ = z·√k·Δ."""
        return cls(noise_multiplier * math.sqrt(messages) * sensitivity, sensitivity, messages, steps, rate)

    @property
    def noise_multiplier(self) -> float:
        """z = σ/(√k·Δ): the noise relative to the effect of one record on all k messages together.

        If message n has its own σ_n, 1/z² = Σ (Δ/σ_n)², because a record moves message n by Δ/σ_n standard deviations.
        """
        k = math.fsum(factor**-2 for factor in self.sigma_scale) if self.sigma_scale else self.messages
        return self.sigma / (math.sqrt(k) * self.sensitivity)

    @property
    def sigmas(self) -> tuple[float, ...]:
        """σ of each of the k messages."""
        return tuple(self.sigma * factor for factor in self.sigma_scale or (1.0,) * self.messages)


Spent = tuple[tuple[Mechanism, int], ...]  # (mechanism, number of rounds)
Part = tuple[float, float, int]  # noise multiplier, rate (1 without sampling), number of steps


def epsilon(spent: Spent, delta: float) -> float:
    """Total ε at `delta` of all rounds spent, by PLD.

    Guarantee: an upper bound on the ε of the composition. It is about 0.05 % above the true value, up to 1 % for rates
    under 0.001 or where δ is barely large enough for PLD. The RDP values are some per cent to a few times too large.

    | spent                                     | ε                                                        |
    |-------------------------------------------|----------------------------------------------------------|
    | nothing                                   | 0                                                        |
    | a round with σ = 0, or z under 1e-6       | infinite                                                 |
    | no sampling anywhere                      | exact: n Gaussians are one with noise multiplier z/√n;   |
    |                                           | rounded up by 1e-9 of it and 1e-11                       |
    | sampled, z under 0.01                     | RDP's: it is in the thousands                            |
    | sampled, n steps in all, δ ≥ 2e-14·n      | PLD's at δ − 2e-15·n, the most that rounding can lose    |
    | sampled, δ under 2e-14·n                  | RDP's: the rounding error of an FFT is too large for δ   |
    | sampled, more than 200,000 steps          | RDP's: an FFT would be slow                              |
    """
    return _total(_parts(spent), _checked(delta)) + 2 * MASS_ERROR * _numbers(spent)


def _numbers(spent: Spent) -> int:
    """Number of noise values drawn. Each contributes the sampler's relative error, on both datasets."""
    return sum(m.dimension * m.messages * m.steps * rounds for m, rounds in spent)


def epsilon_rdp(spent: Spent, delta: float) -> float:
    """Total ε by Rényi DP: a cross-check that shares no numerical step with `epsilon`.

    Guarantee: an upper bound, looser than PLD's. σ = 0 in any round gives infinity; nothing spent gives 0.
    """
    return _rdp(_parts(spent), _checked(delta))


@lru_cache(maxsize=1024)
def calibrate(target_epsilon: float, delta: float, rounds: int, rate: float | None, steps: int = 1) -> float:
    """Smallest noise multiplier z, to 0.1 %, with which `rounds` rounds spend at most `target_epsilon` in total.

    Guarantee: `epsilon` of these rounds with z is at most the target, and at least 0.985 of it.

    | request                                        | result                                              |
    |------------------------------------------------|-----------------------------------------------------|
    | ε outside 0.001 … 1000, or no round            | PdslError                                           |
    | no sampling                                    | exact, for every z                                  |
    | with sampling, a z above 100,000               | PdslError                                           |
    | with sampling, a z under 0.01                  | PdslError: so little noise protects nothing         |
    """
    inside = MIN_TARGET <= target_epsilon <= MAX_TARGET
    _need(inside, "target_epsilon", target_epsilon, f"{MIN_TARGET} to {MAX_TARGET:.0f}", "1")
    _need(rounds >= 1, "rounds", rounds, "1 or more", "100")

    def spends(z: float) -> float:
        return epsilon(((Mechanism(z, 1.0, 1, steps, rate), rounds),), delta)

    if not _sampled(rate):
        return analytic_sigma(target_epsilon, delta) * math.sqrt(rounds * steps) * (1 + 1e-6)  # exact, rounded up
    low = high = 1.0
    while spends(high) > target_epsilon:
        low, high = high, 2 * high
        if high > MAX_NOISE:
            raise PdslError(
                f"target_epsilon={target_epsilon} over {rounds} rounds takes a noise multiplier above {MAX_NOISE:,};"
                " try fewer rounds, a smaller sample_rate or a larger target_epsilon"
            )
    while spends(low) <= target_epsilon:
        low, high = low / 2, low
        if low < MIN_NOISE:
            raise PdslError(
                f"target_epsilon={target_epsilon} is so large that a noise multiplier of {high:.2g} spends only"
                f" {spends(high):.3g} in {rounds} rounds; try a smaller target_epsilon, or a smaller delta"
            )
    for attempt in itertools.count(1):
        if spends(high) >= CLOSE_ENOUGH * target_epsilon or high / low <= 1 / CLOSE_ENOUGH:
            break
        share = 0.5
        if attempt % 3 and spends(high) > 0 and spends(low) < math.inf:  # ε is nearly a power of z
            aim = (1 + CLOSE_ENOUGH) / 2 * target_epsilon
            share = math.log(spends(low) / aim) / math.log(spends(low) / spends(high))
        z = low * (high / low) ** share
        low, high = (low, z) if spends(z) <= target_epsilon else (z, high)
    return high


def epsilon_by_round(mechanism: Mechanism, rounds: int, delta: float) -> list[float]:
    """ε after 1, 2, …, `rounds` rounds; non-decreasing, and the last value is `epsilon`.

    Guarantee: each value is an upper bound. Up to 200 rounds each value is computed, about 0.1 % above the true one.
    Beyond, one round in 2, 4, … (at most 1 % apart) is computed, and the rounds before it take its value.
    """
    at = [1] if rounds else []
    while at and at[-1] < rounds:
        at.append(min(rounds, at[-1] + 2 ** int(math.log2(max(1, at[-1] // DOUBLING)))))
    values = epsilon_at(mechanism, at, delta)
    gaps = [b - a for a, b in zip([0, *at], at, strict=False)]
    return [value for value, gap in zip(values, gaps, strict=True) for _ in range(gap)]


def epsilon_at(mechanism: Mechanism, at: Sequence[int], delta: float) -> list[float]:
    """ε after each number of rounds in `at`, ascending and above 0; non-decreasing, and the last value is `epsilon`.

    Guarantee: each value is an upper bound, about 0.1 % above the true one, 1 % for rates under 0.001.
    """
    values = zip(_walk(mechanism, tuple(at), _checked(delta)), at, strict=True)
    return [value + 2 * MASS_ERROR * _numbers(((mechanism, t),)) for value, t in values]


def classic_sigma(epsilon: float, delta: float) -> float:
    """σ/Δ that makes one release (ε, δ)-private by the classic bound √(2 ln(1.25/δ))/ε.

    Guarantee: holds for ε of at most 1 (Dwork and Roth 2014, Theorem A.1); a larger ε is refused.
    """
    _need(0 < epsilon <= 1, "epsilon", epsilon, "above 0 and at most 1 for the classic bound", "analytic_sigma")
    return math.sqrt(2 * math.log(1.25 / _checked(delta))) / epsilon


def analytic_sigma(epsilon: float, delta: float) -> float:
    """Smallest σ/Δ that makes one release (ε, δ)-private: the analytic Gaussian mechanism, for any ε above 0.

    Guarantee: exact (Balle and Wang 2018, Theorem 8).
    """
    _need(0 < epsilon < math.inf, "epsilon", epsilon, "more than 0", "1")
    with _quiet() as library:
        return float(library.get_sigma_gaussian(epsilon, _checked(delta)))


def _need(holds: bool, name: str, value: float | None, allowed: str, advice: str) -> None:
    if not holds:
        raise PdslError(f"{name}={value} in the privacy accounting must be {allowed}; try {advice}")


def _checked(delta: float) -> float:
    _need(0 < delta < 1, "delta", delta, "between 0 and 1", "1e-5")
    return delta


def _sampled(rate: float | None) -> bool:
    return rate is not None and rate < 1


@contextmanager
def _quiet() -> Iterator[Any]:
    """Import dp_accounting, which takes seconds, and silence its warnings.

    The warnings are about skipped Rényi orders and logarithms of zero probabilities; dp_accounting handles both.
    """
    import dp_accounting
    import numpy as np

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger = logging.getLogger("absl")
    logger.addFilter(is_error)  # a filter, because threads that set and restore a level would disturb each other
    try:
        with np.errstate(all="ignore"):
            yield dp_accounting
    finally:
        logger.removeFilter(is_error)


def _parts(spent: Spent) -> tuple[Part, ...]:
    """Group equal mechanisms; combine all unsampled ones into one Gaussian."""
    sampled: Counter[tuple[float, float]] = Counter()
    precision = 0.0  # Σ 1/z² of the unsampled steps
    for mechanism, rounds in spent:
        _need(rounds >= 0, "rounds", rounds, "0 or more", "0")
        z, n = mechanism.noise_multiplier, rounds * mechanism.steps
        if n == 0:
            continue
        if z < ZERO_NOISE:
            return ((0.0, 1.0, 1),)
        if mechanism.rate is not None and _sampled(mechanism.rate):
            # rounded down to ten digits, so that agents whose z differ by a rounding error share one computation
            down = float(f"{min(z, MAX_NOISE) * (1 - 1e-9):.10g}")
            sampled[down, mechanism.rate] += n
        else:
            precision += n * (1 / z) ** 2
    parts = [(z, q, n) for (z, q), n in sorted(sampled.items())]
    if precision:
        parts.append((1 / math.sqrt(precision), 1.0, 1))
    return tuple(parts)


@lru_cache(maxsize=4096)
def _total(parts: tuple[Part, ...], delta: float) -> float:
    if not parts:
        return 0.0
    if any(z == 0 for z, _, _ in parts):
        return math.inf
    if all(q == 1 for _, q, _ in parts):
        ((z, _, _),) = parts
        with _quiet() as library:
            exact = float(library.get_epsilon_gaussian(z, delta))  # within 1e-12, above or below
        return exact * (1 + 1e-9) + 1e-11 if exact else 0.0
    if not _composable(parts, delta):
        return _rdp(parts, delta)
    cut = MAX_TRUNCATED * delta / sum(n for _, _, n in parts)
    interval = _interval(parts, cut, FINE)
    with _quiet():
        plds = [_distribution(z, q, interval, cut).self_compose(n, tail_mass_truncation=cut) for z, q, n in parts]
        total = reduce(lambda a, b: a.compose(b, tail_mass_truncation=cut), plds)
        return float(total.get_epsilon_for_delta(delta - _rounding(parts)))


@lru_cache(maxsize=1024)
def _rdp(parts: tuple[Part, ...], delta: float) -> float:
    if not parts:
        return 0.0
    if any(z == 0 for z, _, _ in parts):
        return math.inf
    with _quiet() as library:
        accountant = library.rdp.RdpAccountant()
        for z, q, n in parts:
            gaussian = library.GaussianDpEvent(z)
            accountant.compose(gaussian if q == 1 else library.PoissonSampledDpEvent(q, gaussian), n)
        return float(accountant.get_epsilon(delta))


@lru_cache(maxsize=64)
def _walk(mechanism: Mechanism, at: tuple[int, ...], delta: float) -> tuple[float, ...]:
    """`epsilon_at`: each distribution is the previous one composed with the rounds in between.

    This takes at most one more FFT per round than composing all at once, and loses no more to rounding.
    """
    if not at:
        return ()
    totals = [_parts(((mechanism, t),)) for t in at]
    last = _total(totals[-1], delta)
    if not _sampled(mechanism.rate) or last == math.inf or not _composable(totals[-1], delta):
        return _monotone([_total(total, delta) for total in totals], last)

    ((z, q, n),) = totals[-1]
    cut = MAX_TRUNCATED * delta / n
    one = _distribution(z, q, _interval(((z, q, n),), cut, COARSE), cut)
    values = []
    total = None
    between: dict[int, Any] = {}  # number of steps → their distribution
    with _quiet():
        for before, t, parts in zip((0, *at), at, totals, strict=False):
            gap = (t - before) * mechanism.steps
            if gap not in between:
                between[gap] = one.self_compose(gap, tail_mass_truncation=cut)
            total = between[gap] if total is None else total.compose(between[gap], tail_mass_truncation=cut)
            values.append(float(total.get_epsilon_for_delta(delta - _rounding(parts))))
    return _monotone(values, last)


def _monotone(values: list[float], last: float) -> tuple[float, ...]:
    """Running maximum of upper bounds, capped by the bound for all rounds: still upper bounds."""
    largest = 0.0
    bounds = []
    for value in values[:-1]:
        largest = min(max(largest, value), last)
        bounds.append(largest)
    return (*bounds, last)


def _composable(parts: tuple[Part, ...], delta: float) -> bool:
    """Whether an FFT on a grid of losses composes the parts accurately enough for this δ."""
    n = sum(n for _, _, n in parts)
    exact = _rounding(parts) <= MAX_ROUNDING * delta
    return n <= MAX_ROUNDS and exact and all(q == 1 or z >= MIN_NOISE for z, q, _ in parts)


def _rounding(parts: tuple[Part, ...]) -> float:
    """Upper bound on the δ lost to rounding in the composition of all parts."""
    return ROUNDING * sum(n for _, _, n in parts)


def _distribution(z: float, q: float, interval: float, cut: float) -> Any:
    """Privacy loss distribution of one step, discretised pessimistically, for a record added and for one removed."""
    with _quiet() as library:
        return library.pld.privacy_loss_distribution.from_gaussian_mechanism(
            z,
            sampling_prob=q,
            value_discretization_interval=interval,
            log_mass_truncation_bound=math.log(cut),
            use_connect_dots=True,
        )


def _interval(parts: tuple[Part, ...], cut: float, grid: Grid) -> float:
    """Grid interval: fine enough for the narrowest loss distribution, coarse enough for the widest."""
    resolution, points = grid
    tail = math.sqrt(-2 * math.log(cut))  # standard deviations at which a normal is truncated, rounded up
    narrow, wide = MAX_INTERVAL, MIN_INTERVAL
    for z, q, n in parts:
        # A step's loss has a standard deviation of about q·√(e^{1/z²} - 1) for small q/z; otherwise at most 1/z within
        # each half of the mixture and √q/(2z²) between them. Its maximum is ln(1 - q + q·e^a), a at the tail.
        small = q * math.sqrt(math.expm1(min(1 / z**2, 100)))
        a = (tail * z + 1.5) / z**2
        reach = a if a > 100 else math.log1p(q * math.expm1(a))
        composed = 2 * tail * math.sqrt(n) * min(small, 1 / z + math.sqrt(q) / (2 * z**2))
        narrow = min(narrow, small / resolution, 1 / z / resolution)
        wide = max(wide, reach / points, composed / MAX_COMPOSED)
    return max(narrow, wide)
