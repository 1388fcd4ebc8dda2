"""What an agent's messages cost: describe them as data, then account for them.

A `Mechanism` says what leaves an agent in a round; the functions here turn (mechanism, rounds) into one (ε, δ) for all
of it. Privacy loss distributions (PLD) of `dp_accounting` give the number we state, Rényi DP a second opinion.

Guarantee: for two data sets of one agent that differ in one record, and an adversary who knows everybody else's data
and noise and sees all that this agent sends, the messages of all rounds together are (ε, δ)-differentially private.

| batches             | neighbouring data differ in | a round is                            |
|---------------------|-----------------------------|---------------------------------------|
| Poisson with rate q | a record added or removed   | PoissonSampled(q, Gaussian(σ/(√k·Δ))) |
| Poisson, q = 1      | a record added or removed   | Gaussian(σ/(√k·Δ))                    |
| fixed size          | a record replaced           | Gaussian(σ/(√k·Δ)), Δ of a replaced one |

The k messages of a round are one event, not k: they share a batch, so the record is in all of them or in none. They may
have a σ each: 1/√(Σ 1/σ_n²) then stands in the place of σ/√k.
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

from pdsl.errors import PdslError
from pdsl.privacy.discrete_gaussian import MASS_ERROR

# The grid of losses: points in a standard deviation of one round's loss, and the most points of one round's
# distribution. They give about 0.02 % and 0.1 % too much ε, more where q is so small that the second number decides.
Grid = tuple[int, int]
FINE: Grid = (30, 100_000)
COARSE: Grid = (12, 20_000)  # for curves
WIDEST = 0.02  # interval of the grid, and
NARROWEST = 1e-9  # below it float64 has no digits left to tell losses apart
MOST_COMPOSED = 2_000_000  # points of all rounds' distribution
LEFT_OVER = 1e-6  # share of δ that may go to tails which are cut off, as if their loss were infinite
# What float64 can take away from δ, for each round that is composed. The worst of 1,000 random compositions lost
# 2.1·2⁻⁵³ a round to the FFT, the worst curve of a single round is 2.1·2⁻⁵³ too low: this is four times both together.
ROUNDING = 2e-15
MOST_ROUNDING = 0.1  # of δ: where rounding may have taken away a larger share, RDP is asked instead
MOST_ROUNDS = 200_000  # that one FFT composes within a second
NO_NOISE = 1e-6  # a noise multiplier below this is taken for 0
LEAST_NOISE, MOST_NOISE = 0.01, 100_000  # noise multipliers that a grid of losses can tell apart
TARGETS = (1e-3, 1e3)  # total ε that can be asked for
ENOUGH = 0.999  # of the target ε, or of the noise multiplier, is where calibration stops
EACH = 100  # rounds in which a curve's steps double: 1 up to 2·EACH rounds, then 2, 4, …


@dataclass(frozen=True)
class Mechanism:
    """One agent's round, as data: `messages` noisy vectors computed on one batch, `steps` times in a row."""

    sigma: float  # standard deviation of the noise on each message; times `stretch`, where there is any
    sensitivity: float  # Δ of one message
    messages: int  # k
    steps: int = 1  # K compositions per round (local steps), each on a batch of its own
    rate: float | None = None  # Poisson rate q; None: fixed-size batches, no amplification
    stretch: tuple[float, ...] = ()  # a factor for each message's σ; empty: all have the same
    dimension: int = 0  # numbers in a message, for the error of the noise sampler; 0: left out of account

    def __post_init__(self) -> None:
        _need(0 <= self.sigma < math.inf, "sigma", self.sigma, "0 or more", "1")
        _need(0 < self.sensitivity < math.inf, "sensitivity", self.sensitivity, "more than 0", "max_grad_norm / batch")
        _need(self.messages >= 1, "messages", self.messages, "1 or more", "the size of the neighbourhood")
        _need(self.steps >= 1, "steps", self.steps, "1 or more", "1")
        _need(self.rate is None or 0 < self.rate <= 1, "rate", self.rate, "above 0 and at most 1", "batch / samples")
        object.__setattr__(self, "stretch", tuple(self.stretch))  # JSON has lists
        _need(len(self.stretch) in (0, self.messages), "stretch", len(self.stretch), "a factor per message", "none")
        for factor in self.stretch:
            _need(0 < factor < math.inf, "stretch", factor, "more than 0", "1")

    @classmethod
    def from_noise_multiplier(
        cls, noise_multiplier: float, sensitivity: float, messages: int, steps: int = 1, rate: float | None = None
    ) -> Self:
        """The mechanism with σ = z·√k·Δ."""
        return cls(noise_multiplier * math.sqrt(messages) * sensitivity, sensitivity, messages, steps, rate)

    @property
    def noise_multiplier(self) -> float:
        """z = σ/(√k·Δ): the noise relative to what one record does to all k messages together.

        Where each message has a σ of its own, 1/z² = Σ (Δ/σ_n)²: a record moves message n by Δ/σ_n of its own σ.
        """
        k = math.fsum(factor**-2 for factor in self.stretch) if self.stretch else self.messages
        return self.sigma / (math.sqrt(k) * self.sensitivity)

    @property
    def sigmas(self) -> tuple[float, ...]:
        """σ of each of the k messages."""
        return tuple(self.sigma * factor for factor in self.stretch or (1.0,) * self.messages)


Spent = tuple[tuple[Mechanism, int], ...]  # (mechanism, number of rounds)
Part = tuple[float, float, int]  # noise multiplier, rate (1 without sampling), how many of them


def epsilon(spent: Spent, delta: float) -> float:
    """The total ε at `delta` of everything spent, by PLD.

    Guarantee: an upper bound on the ε of the composition, about 0.05 % above it, up to 1 % for rates under 0.001
    or where δ is hardly large enough for PLD; at such δ RDP's is some per cent to a few times too much.

    | spent                                     | ε                                                        |
    |-------------------------------------------|----------------------------------------------------------|
    | nothing                                   | 0                                                        |
    | a round with σ = 0, or z under 1e-6       | infinite                                                 |
    | no sampling anywhere                      | exact: n Gaussians are one with noise multiplier z/√n;   |
    |                                           | rounded up by 1e-9 of it and 1e-11                       |
    | sampled, z under 0.01                     | RDP's: it is in the thousands                            |
    | sampled, n steps in all, δ ≥ 2e-14·n      | PLD's at δ − 2e-15·n: rounding may have taken so much    |
    | sampled, δ under 2e-14·n                  | RDP's: the rounding errors of an FFT are too much of δ   |
    | sampled, more than 200,000 steps          | RDP's: an FFT would take long                            |
    """
    return _total(_parts(spent), _checked(delta)) + 2 * MASS_ERROR * _numbers(spent)


def _numbers(spent: Spent) -> int:
    """How many noise values were drawn: each may be off by the sampler's relative error, on both data sets."""
    return sum(m.dimension * m.messages * m.steps * rounds for m, rounds in spent)


def epsilon_rdp(spent: Spent, delta: float) -> float:
    """The total ε by Rényi DP: a second opinion that shares no numerical step with `epsilon`.

    Guarantee: an upper bound, looser than PLD's; σ = 0 in any round gives infinity, nothing spent gives 0.
    """
    return _rdp(_parts(spent), _checked(delta))


@lru_cache(maxsize=1024)
def calibrate(target_epsilon: float, delta: float, rounds: int, rate: float | None, steps: int = 1) -> float:
    """The smallest noise multiplier z, to 0.1 %, for which `rounds` rounds spend at most `target_epsilon` in total.

    Guarantee: `epsilon` of these rounds with z is at most the target, and at least 0.985 of it.

    | asked for                                      | answer                                              |
    |------------------------------------------------|-----------------------------------------------------|
    | ε outside 0.001 … 1000, or no round            | PdslError                                           |
    | no sampling                                    | exact, for every z                                  |
    | with sampling, a z above 100,000               | PdslError                                           |
    | with sampling, a z under 0.01                  | PdslError: so little noise hides nothing            |
    """
    least, most = TARGETS
    _need(least <= target_epsilon <= most, "target_epsilon", target_epsilon, f"{least} to {most:.0f}", "1")
    _need(rounds >= 1, "rounds", rounds, "1 or more", "100")

    def spends(z: float) -> float:
        return epsilon(((Mechanism(z, 1.0, 1, steps, rate), rounds),), delta)

    if not _sampled(rate):
        return analytic_sigma(target_epsilon, delta) * math.sqrt(rounds * steps) * (1 + 1e-6)  # exact, rounded up
    low = high = 1.0
    while spends(high) > target_epsilon:
        low, high = high, 2 * high
        if high > MOST_NOISE:
            raise PdslError(
                f"target_epsilon={target_epsilon} over {rounds} rounds takes a noise multiplier above {MOST_NOISE:,};"
                " try fewer rounds, a smaller sample_rate or a larger target_epsilon"
            )
    while spends(low) <= target_epsilon:
        low, high = low / 2, low
        if low < LEAST_NOISE:
            raise PdslError(
                f"target_epsilon={target_epsilon} is so large that a noise multiplier of {high:.2g} spends only"
                f" {spends(high):.3g} in {rounds} rounds; try a smaller target_epsilon, or a smaller delta"
            )
    for attempt in itertools.count(1):
        if spends(high) >= ENOUGH * target_epsilon or high / low <= 1 / ENOUGH:
            break
        share = 0.5
        if attempt % 3 and spends(high) > 0 and spends(low) < math.inf:  # ε falls nearly like a power of z
            aim = (1 + ENOUGH) / 2 * target_epsilon
            share = math.log(spends(low) / aim) / math.log(spends(low) / spends(high))
        z = low * (high / low) ** share
        low, high = (low, z) if spends(z) <= target_epsilon else (z, high)
    return high


def epsilon_by_round(mechanism: Mechanism, rounds: int, delta: float) -> list[float]:
    """ε after 1, 2, …, `rounds` rounds; never falling, and the last is `epsilon`.

    Guarantee: each value is an upper bound. Up to 200 rounds each is computed, about 0.1 % above the truth; beyond,
    one round in 2, 4, … (at most 1 % apart) is, and the rounds before it take its value.
    """
    at = [1] if rounds else []
    while at and at[-1] < rounds:
        at.append(min(rounds, at[-1] + 2 ** int(math.log2(max(1, at[-1] // EACH)))))
    values = epsilon_at(mechanism, at, delta)
    gaps = [b - a for a, b in zip([0, *at], at, strict=False)]
    return [value for value, gap in zip(values, gaps, strict=True) for _ in range(gap)]


def epsilon_at(mechanism: Mechanism, at: Sequence[int], delta: float) -> list[float]:
    """ε after each number of rounds in `at`, ascending and above 0; never falling, and the last is `epsilon`.

    Guarantee: each value is an upper bound, about 0.1 % above the truth, 1 % for rates under 0.001.
    """
    values = zip(_walk(mechanism, tuple(at), _checked(delta)), at, strict=True)
    return [value + 2 * MASS_ERROR * _numbers(((mechanism, t),)) for value, t in values]


def classic_sigma(epsilon: float, delta: float) -> float:
    """σ/Δ that makes one release (ε, δ)-private by the classic bound √(2 ln(1.25/δ))/ε.

    Guarantee: holds for ε of at most 1 (Dwork and Roth 2014, Theorem A.1), so a larger one is refused.
    """
    _need(0 < epsilon <= 1, "epsilon", epsilon, "above 0 and at most 1 for the classic bound", "analytic_sigma")
    return math.sqrt(2 * math.log(1.25 / _checked(delta))) / epsilon


def analytic_sigma(epsilon: float, delta: float) -> float:
    """The least σ/Δ that makes one release (ε, δ)-private: the analytic Gaussian mechanism, for any ε above 0.

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
    """dp_accounting, which takes seconds to import, without its warnings.

    They are about Rényi orders that it leaves out, and about logarithms of probabilities that are 0; it handles both.
    """
    import dp_accounting
    import numpy as np

    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with np.errstate(all="ignore"):
            yield dp_accounting
    finally:
        logger.setLevel(level)


def _parts(spent: Spent) -> tuple[Part, ...]:
    """What was spent, alike mechanisms together; all that were not sampled are one Gaussian."""
    sampled: Counter[tuple[float, float]] = Counter()
    precision = 0.0  # Σ 1/z² of the others
    for mechanism, rounds in spent:
        _need(rounds >= 0, "rounds", rounds, "0 or more", "0")
        z, n = mechanism.noise_multiplier, rounds * mechanism.steps
        if n == 0:
            continue
        if z < NO_NOISE:
            return ((0.0, 1.0, 1),)
        if mechanism.rate is not None and _sampled(mechanism.rate):
            # down to ten digits, so that agents whose z differ by a rounding error share one computation
            down = float(f"{min(z, MOST_NOISE) * (1 - 1e-9):.10g}")
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
            exact = float(library.get_epsilon_gaussian(z, delta))  # to 1e-12, from above or below
        return exact * (1 + 1e-9) + 1e-11 if exact else 0.0
    if not _composable(parts, delta):
        return _rdp(parts, delta)
    cut = LEFT_OVER * delta / sum(n for _, _, n in parts)
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
    """`epsilon_at`: each distribution is the one before it, composed with the rounds between.

    That is at most one FFT a round more than composing them at once, and no more is lost to rounding.
    """
    if not at:
        return ()
    totals = [_parts(((mechanism, t),)) for t in at]
    last = _total(totals[-1], delta)
    if not _sampled(mechanism.rate) or last == math.inf or not _composable(totals[-1], delta):
        return _rising([_total(total, delta) for total in totals], last)

    ((z, q, n),) = totals[-1]
    cut = LEFT_OVER * delta / n
    one = _distribution(z, q, _interval(((z, q, n),), cut, COARSE), cut)
    values = []
    total = None
    between: dict[int, Any] = {}  # distribution of so many rounds
    with _quiet():
        for before, t, parts in zip((0, *at), at, totals, strict=False):
            gap = (t - before) * mechanism.steps
            if gap not in between:
                between[gap] = one.self_compose(gap, tail_mass_truncation=cut)
            total = between[gap] if total is None else total.compose(between[gap], tail_mass_truncation=cut)
            values.append(float(total.get_epsilon_for_delta(delta - _rounding(parts))))
    return _rising(values, last)


def _rising(values: list[float], last: float) -> tuple[float, ...]:
    """Upper bounds stay upper bounds under the largest before them, and under the bound of all rounds."""
    largest = 0.0
    rising = []
    for value in values[:-1]:
        largest = min(max(largest, value), last)
        rising.append(largest)
    return (*rising, last)


def _composable(parts: tuple[Part, ...], delta: float) -> bool:
    """Whether an FFT on a grid of losses composes the parts well enough for this δ."""
    n = sum(n for _, _, n in parts)
    exact = _rounding(parts) <= MOST_ROUNDING * delta
    return n <= MOST_ROUNDS and exact and all(q == 1 or z >= LEAST_NOISE for z, q, _ in parts)


def _rounding(parts: tuple[Part, ...]) -> float:
    """How much of δ rounding errors can have taken away, all parts composed."""
    return ROUNDING * sum(n for _, _, n in parts)


def _distribution(z: float, q: float, interval: float, cut: float) -> Any:
    """The privacy loss of one round, discretised pessimistically, for a record added and for one removed."""
    with _quiet() as library:
        return library.pld.privacy_loss_distribution.from_gaussian_mechanism(
            z,
            sampling_prob=q,
            value_discretization_interval=interval,
            log_mass_truncation_bound=math.log(cut),
            use_connect_dots=True,
        )


def _interval(parts: tuple[Part, ...], cut: float, grid: Grid) -> float:
    """The grid's interval: fine enough for the narrowest of the losses, coarse enough for the widest."""
    resolution, points = grid
    tail = math.sqrt(-2 * math.log(cut))  # where a standard normal is cut off, or a little beyond
    narrow, wide = WIDEST, NARROWEST
    for z, q, n in parts:
        # A round's loss has a standard deviation of about q·√(e^{1/z²} - 1) for small q/z, else of at most 1/z within
        # each half of the mixture and √q/(2z²) between them; it reaches ln(1 - q + q·e^a), a at the Gaussian's tail.
        small = q * math.sqrt(math.expm1(min(1 / z**2, 100)))
        a = (tail * z + 1.5) / z**2
        reach = a if a > 100 else math.log1p(q * math.expm1(a))
        composed = 2 * tail * math.sqrt(n) * min(small, 1 / z + math.sqrt(q) / (2 * z**2))
        narrow = min(narrow, small / resolution, 1 / z / resolution)
        wide = max(wide, reach / points, composed / MOST_COMPOSED)
    return max(narrow, wide)
