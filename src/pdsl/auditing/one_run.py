"""From right guesses to a lower bound on ε: the statistics of canaries in one run, or in a few.

In a run, m coins decide which canaries are in the data. An adversary sees all that leaves the agent, guesses n of the
coins, and C of the guesses are right; n is fixed beforehand. So it is in each of R runs without common randomness.

Guarantee: if the mechanism is (ε, δ)-private for all pairs of a `Profile`, `refutes` says otherwise with a probability
of at most 1 − confidence, whatever the adversary does, and however much the canaries of a run depend on each other.

1. *A run.* Fix a canary j and all other coins. The event "j is guessed to be s, and a or more of the others rightly"
   depends on the output alone. So its probability P if coin j is s, and Q if it is not, satisfy P ≤ e^ε·Q + δ for every
   pair. Averaged over j, s and all coins, with p_i the probability of C = i, and F(x) the least of e^ε·x + δ:

       Σ_{i > a} i·p_i / m  ≤  F( Σ_{i ≥ a} (n − i)·p_i / m )    for every a

   (Mahloujifar, Melis and Chaudhuri 2024, "Auditing f-differential privacy in one run"; with one pair for a profile it
   is the setting of Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run").
2. *Right guesses in a run.* Probability may move from c + 1, c + 2, … to c, and all but τ of it from c to c − 1: no
   inequality is violated. So if P[C ≥ c] can be τ, it can with all of it at c. Then p_{c−1}, p_{c−2}, … must be as
   large as their inequalities ask for, and need not be larger, because what is too much at i may go to i − 1. If they
   make more than 1 in all, P[C ≥ c] is less than τ.
3. *Right guesses in several runs.* Let p* be the outcome of 2 for c = n, with the τ that makes 1 in all. Where
   inequality a is not tight and p_a is not 0, a little of p_a may go to a + 1, and as much to a − 1 (from p_0: only to
   1). No inequality is violated, and the mean of no convex increasing function of C becomes smaller. So p*, where all
   are tight or p_a is 0, has the largest mean of every such function, and so has a sum S* of R independent draws from
   p*. One such function is max(0, S − b), and P[S ≥ c] ≤ E max(0, S* − b)/(c − b) for every b < c.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from pdsl.privacy.accounting import Mechanism, calibrate, epsilon

CONFIDENCE = 0.9999  # of a lower bound: as good as never above the truth, though it comes close
MAX_CLAIM = 50.0  # ε; a larger claim says nothing, and this one stands in its place where guesses are planned
MAX_NOISE, MIN_NOISE = 32.0, 1 / 8  # of the mechanisms that are held against the guesses, in the claim's
RUNG = 1.02  # the noise of one of them over that of the next
LINES = 120  # pairs of a profile
MIN_DELTA, FARTHEST = 1e-7, 5.2  # the last δ of a profile, and where a standard normal has so much left
MAX_GUESSES = 400  # in a run, if there are several
PILOTS = 8  # simulations of the claimed mechanism, to choose how many canaries to guess
CHOICES = 10  # numbers of guesses to choose from

Floats = NDArray[np.float64]
Coins = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Profile:
    """How private a mechanism is: it is (ε, δ)-private for each of these pairs.

    Where a record that is added and one that is removed have a δ each, the mean of the two.
    """

    shrinkage: Floats  # e^−ε
    deltas: Floats

    @cached_property
    def least(self) -> float:
        """The δ that all pairs have in common."""
        return float(self.deltas.min())

    @cached_property
    def rest(self) -> Floats:
        """The rest of each δ."""
        return self.deltas - self.least


@dataclass(frozen=True)
class Design:
    """So many runs, each with so many canaries and so many guesses."""

    runs: int
    canaries: int
    guesses: int


def refutes(profile: Profile, design: Design, right: int, confidence: float = CONFIDENCE) -> bool:
    """Whether so many right guesses in all are too many for such a mechanism."""
    R, m, n, tau = design.runs, design.canaries, design.guesses, 1 - confidence
    at_once = _greedy(
        profile, R * m, R * n, right, tau, tau * right / (R * m) - profile.least
    )  # all runs taken for one
    if math.fsum(at_once) > 1:
        return True
    return R > 1 and _most_likely(_largest(profile, m, n), R, right) < tau


def _greedy(profile: Profile, m: int, n: int, c: int, tau: float, beyond: float, enough: float = 1.0) -> list[float]:
    """τ at c, and the least p_{c−1}, p_{c−2}, … that it takes, until there is more than enough in all.

    beyond: τ·c/m, the sum on the left of the inequality, without the δ that all pairs have in common.
    """
    p, total, wrong = [tau], tau, tau * (n - c) / m
    for i in range(c - 1, -1, -1):
        needed = float(((beyond - profile.rest) * profile.shrinkage).max())  # F⁻¹
        more = max(0.0, needed - wrong) * m / (n - i)
        p.append(more)
        total += more
        if total > enough:
            break
        beyond += more * i / m
        wrong += more * (n - i) / m
    return p


@lru_cache(maxsize=4096)
def _largest(profile: Profile, m: int, n: int) -> Floats:
    """p*: probabilities of 0, …, n right guesses in a run."""
    from scipy.optimize import brentq

    free = min(1.0, profile.least * m / n)  # of τ; the rest, which may be very small, decides about all others

    def all_of(log_rest: float) -> list[float]:
        rest = math.exp(log_rest)
        return _greedy(profile, m, n, n, free + rest, rest * n / m, enough=math.inf)

    root = (
        brentq(lambda log_rest: math.log(math.fsum(all_of(log_rest))), -700, 0, xtol=1e-13) if free < 1 else -math.inf
    )
    p: Floats = np.array(all_of(root)[::-1])
    p[-1] += max(0.0, 1 - p.sum())  # nothing but rounding, and at the safe end
    return p


def _most_likely(p: Floats, runs: int, c: int) -> float:
    """An upper bound on the probability that c or more guesses are right in all runs."""
    most = (len(p) - 1) * runs
    size = 2 ** math.ceil(math.log2(most + 1))
    total = np.maximum(np.fft.irfft(np.fft.rfft(p, size) ** runs, size)[: most + 1], 0)
    above = np.cumsum(np.cumsum(total[::-1]))[::-1]  # at i: E max(0, S* − i + 1)
    return float((above[1 : c + 1] / np.arange(c, 0, -1)).min(initial=1.0))


@dataclass(frozen=True)
class Ladder:
    """The claimed mechanism with more noise and with less: each rung is less private than the one before."""

    mechanism: Mechanism  # as claimed; k messages with sensitivity Δ are one with noise z and sensitivity 1
    rounds: int
    delta: float

    @classmethod
    def around(cls, claimed: Mechanism, rounds: int, delta: float) -> "Ladder":
        plain = Mechanism(claimed.noise_multiplier, 1.0, 1, claimed.steps, claimed.rate)
        if epsilon(((plain, rounds),), delta) > MAX_CLAIM:
            plain = replace(plain, sigma=calibrate(MAX_CLAIM, delta, rounds, claimed.rate, claimed.steps))
        return cls(plain, rounds, delta)

    @property
    def rungs(self) -> int:
        return math.ceil(math.log(MAX_NOISE / MIN_NOISE, RUNG))

    @property
    def above(self) -> int:
        """The first rung that is less private than the claim."""
        return math.floor(math.log(MAX_NOISE, RUNG)) + 1

    def at(self, rung: int) -> Mechanism:
        return replace(self.mechanism, sigma=self.mechanism.sigma * MAX_NOISE / RUNG**rung)

    def profile(self, rung: int) -> Profile:
        m = self.at(rung)
        return _profile(m.sigma, m.rate or 1.0, self.rounds * m.steps)

    def lower_bound(self, design: Design, right: int, confidence: float = CONFIDENCE) -> float:
        """ε of the least private rung that so many right guesses refute; 0 if they refute none."""
        low, high = -1, self.rungs  # refuted, or none; not refuted, or not there
        while high - low > 1:
            middle = (low + high) // 2
            refuted = refutes(self.profile(middle), design, right, confidence)
            low, high = (middle, high) if refuted else (low, middle)
        return epsilon(((self.at(low), self.rounds),), self.delta) if low >= 0 else 0.0


@lru_cache(maxsize=1024)
def _profile(z: float, rate: float, steps: int) -> Profile:
    """Pairs from ε = 0 to MIN_DELTA, of so many Gaussians with noise multiplier z, sampled at this rate."""
    if rate < 1:
        return _sampled(z, rate, steps)
    from scipy.special import log_ndtr, ndtr

    mu = math.sqrt(steps) / z
    epsilons = np.linspace(0, mu**2 / 2 + FARTHEST * mu, LINES)
    deltas = ndtr(mu / 2 - epsilons / mu) - np.exp(epsilons + log_ndtr(-mu / 2 - epsilons / mu))
    return Profile(np.exp(-epsilons), np.maximum(deltas, 0))


def _sampled(z: float, rate: float, steps: int) -> Profile:
    """The same by the privacy loss distribution of a Poisson-sampled Gaussian, rounded up."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    cut = MIN_DELTA / 1000
    spread = min(rate * math.sqrt(math.expm1(min(1 / z**2, 100))), 1 / z)  # of one step's loss
    reach = (6.5 * z + 0.5) / z**2
    with np.errstate(all="ignore"):
        one = pld.from_gaussian_mechanism(
            z,
            sampling_prob=rate,
            value_discretization_interval=max(spread / 12, reach / 20_000),
            log_mass_truncation_bound=math.log(cut / steps),
            use_connect_dots=True,
        )
        composed = one.self_compose(steps, tail_mass_truncation=cut)
        epsilons = np.linspace(0, composed.get_epsilon_for_delta(MIN_DELTA), LINES)
        sides = [getattr(composed, side, composed) for side in ("_pmf_remove", "_pmf_add")]  # else the larger δ of both
        deltas = np.mean([side.get_delta_for_epsilon(epsilons.tolist()) for side in sides], axis=0)
    return Profile(np.exp(-epsilons), deltas)


def log_ratios(signal: Floats, rate: float) -> Floats:
    """Log-likelihood ratios of in and out where a record is drawn at this rate: log(1 − q + q·e^signal)."""
    if rate == 1:
        return signal
    small = np.log1p(rate * np.expm1(np.minimum(signal, 30)))
    return np.where(signal > 30, signal + math.log(rate), small)


def count_right(scores: Floats, coins: Coins, design: Design) -> int:
    """In each run the largest scores are guessed to be in and the smallest out: how often that is right."""
    by_run = scores.reshape(design.runs, -1)
    chosen = np.argsort(-np.abs(by_run), axis=1, kind="stable")[:, : design.guesses]
    return int(np.take_along_axis((by_run > 0) == coins.reshape(by_run.shape), chosen, axis=1).sum())


@dataclass(frozen=True)
class Plan:
    designs: list[Design]
    ideal: float  # the bound to be expected where the mechanism is exactly the claimed one


def lower_bound(ladder: Ladder, designs: Sequence[Design], right: Sequence[int], confidence: float) -> float:
    """The largest of the bounds by several designs, each of which has its part of what may go wrong."""
    each = 1 - (1 - confidence) / len(designs)
    return max(ladder.lower_bound(design, n, each) for design, n in zip(designs, right, strict=True))


def plan(ladder: Ladder, runs: int, canaries: int, seed: int) -> Plan:
    """Choose the numbers of guesses on simulations of the claimed mechanism, without a look at the run.

    Of two designs, one is best where everything is as claimed. The other is of few guesses, for the case that little
    noise is missing, but all of it: a quarter more than refute the claim when all are right.
    """
    rng = np.random.default_rng([seed, 1])
    most = canaries if runs == 1 else min(canaries, MAX_GUESSES)
    each = 1 - (1 - CONFIDENCE) / 2
    designs = [Design(runs, canaries, n) for n in sorted({round(n) for n in np.geomspace(1, most, CHOICES)})]
    few = _fewest(ladder.profile(ladder.above), runs * canaries, each)
    simulated = [_simulated(ladder, runs * canaries, rng) for _ in range(PILOTS)]

    def expected(design: Design) -> int:
        return int(np.mean([count_right(scores, coins, design) for scores, coins in simulated]))

    best = max(designs, key=lambda design: (ladder.lower_bound(design, expected(design), each), design.guesses))
    chosen = [best, few]
    return Plan(chosen, lower_bound(ladder, chosen, [expected(design) for design in chosen], CONFIDENCE))


def _fewest(profile: Profile, count: int, confidence: float) -> Design:
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if refutes(profile, Design(1, count, middle), middle, confidence) else (middle, high)
    return Design(1, count, min(count, math.ceil(1.25 * high)))


def _simulated(ladder: Ladder, count: int, rng: np.random.Generator) -> tuple[Floats, Coins]:
    """Scores of canaries under exactly the claimed mechanism, and their coins."""
    z, rate, steps = ladder.mechanism.sigma, ladder.mechanism.rate or 1.0, ladder.rounds * ladder.mechanism.steps
    if rate == 1:
        z, steps = z / math.sqrt(steps), 1
    coins = rng.random(count) < 0.5
    scores: Floats = np.zeros(count)
    for _ in range(steps):
        drawn = coins & (rng.random(count) < rate)
        scores += log_ratios((rng.standard_normal(count) + drawn / z) / z - 1 / (2 * z**2), rate)
    return scores, coins
