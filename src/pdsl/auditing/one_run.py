"""Lower bound on ε from correct guesses of canaries in one run, or in several.

In a run, m coins decide which canaries are present. An adversary sees all messages of the agent and guesses n of the
coins; n is fixed beforehand. C of the guesses are correct. There are R such runs with independent randomness.

Guarantee: if the mechanism is (ε, δ)-private for all pairs of a `Profile`, `refutes` is True with probability at most
1 − confidence, for any adversary and any dependence between the canaries of a run.

1. *One run.* Fix a canary j and all other coins. The event "j is guessed to be s, and at least a of the other guesses
   are correct" depends on the output alone. Let P be its probability if coin j is s, and Q if it is not. Then
   P ≤ e^ε·Q + δ for every pair. Average over j, s and all coins, let p_i be the probability of C = i, and let F(x) be
   the minimum of e^ε·x + δ over the pairs:

       Σ_{i > a} i·p_i / m  ≤  F( Σ_{i ≥ a} (n − i)·p_i / m )    for every a

   (Mahloujifar, Melis and Chaudhuri 2024, "Auditing f-differential privacy in one run". With one pair per profile it
   is the setting of Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run".)
2. *Correct guesses in one run.* Moving probability from c + 1, c + 2, … to c, and all but τ of it from c to c − 1,
   violates no inequality. So if P[C ≥ c] = τ is possible, it is possible with all of τ at c. Then p_{c−1}, p_{c−2}, …
   must be as large as their inequalities require. They need not be larger, because any excess at i can move to i − 1.
   If the sum exceeds 1, then P[C ≥ c] < τ.
3. *Correct guesses in several runs.* Let p* be the outcome of step 2 for c = n, with the τ for which the sum is 1. If
   inequality a is not tight and p_a > 0, a little of p_a can move to a + 1 and as much to a − 1 (from p_0: only to 1).
   That violates no inequality and decreases the mean of no convex increasing function of C. In p* every inequality a
   is tight or p_a = 0. So p* maximises the mean of every such function, and so does the sum S* of R independent draws
   from p*. One such function is max(0, S − b), and P[S ≥ c] ≤ E max(0, S* − b)/(c − b) for every b < c.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from pdsl.privacy.accounting import Mechanism, calibrate, epsilon

CONFIDENCE = 0.9999  # of a lower bound
MAX_CLAIM = 50.0  # ε; larger claims are planned as this one, because they promise nothing
MAX_NOISE, MIN_NOISE = 32.0, 1 / 8  # of the mechanisms on the ladder, relative to the claimed noise
RUNG = 1.02  # ratio of the noise of consecutive mechanisms on the ladder
PAIRS = 120  # (ε, δ) pairs of a profile
MIN_DELTA = 1e-7  # of a profile
TAIL = 5.2  # standard deviations beyond which a normal has probability MIN_DELTA
MAX_GUESSES = 400  # per run, if there are several runs
SIMULATIONS = 8  # of the claimed mechanism, to choose the number of guesses
CHOICES = 10  # candidate numbers of guesses

Floats = NDArray[np.float64]
Coins = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Profile:
    """Privacy profile of a mechanism: it is (ε, δ)-private for each of these pairs.

    δ is the mean of the values for a record added and a record removed, if they differ.
    """

    shrinkage: Floats  # e^−ε
    deltas: Floats

    @cached_property
    def least(self) -> float:
        """Smallest δ of all pairs."""
        return float(self.deltas.min())

    @cached_property
    def rest(self) -> Floats:
        """δ of each pair above the smallest."""
        return self.deltas - self.least


@dataclass(frozen=True)
class Design:
    """Number of runs, of canaries per run, and of guesses per run."""

    runs: int
    canaries: int
    guesses: int


def refutes(profile: Profile, design: Design, right: int, confidence: float = CONFIDENCE) -> bool:
    """Whether a total of `right` correct guesses refutes the profile."""
    R, m, n, tau = design.runs, design.canaries, design.guesses, 1 - confidence
    as_one_run = _greedy(profile, R * m, R * n, right, tau, tau * right / (R * m) - profile.least)
    if math.fsum(as_one_run) > 1:
        return True
    return R > 1 and _tail_bound(_largest(profile, m, n), R, right) < tau


def _greedy(profile: Profile, m: int, n: int, c: int, tau: float, beyond: float, enough: float = 1.0) -> list[float]:
    """τ at c, and the smallest p_{c−1}, p_{c−2}, … that it requires, until the sum exceeds `enough`.

    beyond: τ·c/m, the left side of the inequality, without the smallest δ of all pairs.
    """
    p, total, wrong = [tau], tau, tau * (n - c) / m
    rest, shrinkage = profile.rest, profile.shrinkage
    lines = np.empty_like(rest)
    for i in range(c - 1, -1, -1):
        np.multiply(np.subtract(beyond, rest, out=lines), shrinkage, out=lines)
        needed = float(np.maximum.reduce(lines))  # F⁻¹
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
    """p*: probabilities of 0, …, n correct guesses in a run."""
    from scipy.optimize import brentq

    free = min(1.0, profile.least * m / n)  # part of τ; the rest can be very small and determines all other p

    def probabilities(log_rest: float) -> list[float]:
        rest = math.exp(log_rest)
        return _greedy(profile, m, n, n, free + rest, rest * n / m, enough=math.inf)

    root = -math.inf
    if free < 1:
        root = brentq(lambda log_rest: math.log(math.fsum(probabilities(log_rest))), -700, 0, xtol=1e-13)
    p: Floats = np.array(probabilities(root)[::-1])
    p[-1] += max(0.0, 1 - p.sum())  # rounding error, on the safe side
    return p


def _tail_bound(p: Floats, runs: int, c: int) -> float:
    """Upper bound on the probability of c or more correct guesses over all runs."""
    maximum = (len(p) - 1) * runs
    size = 2 ** math.ceil(math.log2(maximum + 1))
    total = np.maximum(np.fft.irfft(np.fft.rfft(p, size) ** runs, size)[: maximum + 1], 0)
    above = np.cumsum(np.cumsum(total[::-1]))[::-1]  # at i: E max(0, S* − i + 1)
    return float((above[1 : c + 1] / np.arange(c, 0, -1)).min(initial=1.0))


@dataclass(frozen=True)
class Ladder:
    """The claimed mechanism with more and with less noise: each rung is less private than the one before."""

    mechanism: Mechanism  # as claimed: k messages of sensitivity Δ are one of sensitivity 1 with noise z
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
        """First rung that is less private than the claim."""
        return math.floor(math.log(MAX_NOISE, RUNG)) + 1

    def at(self, rung: int) -> Mechanism:
        return replace(self.mechanism, sigma=self.mechanism.sigma * MAX_NOISE / RUNG**rung)

    def profile(self, rung: int) -> Profile:
        m = self.at(rung)
        return _profile(m.sigma, m.rate or 1.0, self.rounds * m.steps)

    def lower_bound(self, design: Design, right: int, confidence: float = CONFIDENCE) -> float:
        """ε of the least private rung that `right` correct guesses refute; 0 if they refute none."""
        low, high = -1, self.rungs  # low is refuted, or -1; high is not refuted, or past the end
        while high - low > 1:
            middle = (low + high) // 2
            refuted = refutes(self.profile(middle), design, right, confidence)
            low, high = (middle, high) if refuted else (low, middle)
        return epsilon(((self.at(low), self.rounds),), self.delta) if low >= 0 else 0.0


@lru_cache(maxsize=1024)
def _profile(z: float, rate: float, steps: int) -> Profile:
    """Pairs from ε = 0 to MIN_DELTA of `steps` Gaussians with noise multiplier z, sampled at this rate."""
    if rate < 1:
        return _sampled_profile(z, rate, steps)
    from scipy.special import log_ndtr, ndtr

    mu = math.sqrt(steps) / z
    epsilons = np.linspace(0, mu**2 / 2 + TAIL * mu, PAIRS)
    deltas = ndtr(mu / 2 - epsilons / mu) - np.exp(epsilons + log_ndtr(-mu / 2 - epsilons / mu))
    return Profile(np.exp(-epsilons), np.maximum(deltas, 0))


def _sampled_profile(z: float, rate: float, steps: int) -> Profile:
    """Profile of Poisson-sampled Gaussians by their privacy loss distribution, rounded up."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    cut = MIN_DELTA / 1000
    spread = min(rate * math.sqrt(math.expm1(min(1 / z**2, 100))), 1 / z)  # standard deviation of one step's loss
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
        epsilons = np.linspace(0, composed.get_epsilon_for_delta(MIN_DELTA), PAIRS)
        # without these private attributes, the larger δ of both sides is used
        sides = [getattr(composed, side, composed) for side in ("_pmf_remove", "_pmf_add")]
        deltas = np.mean([side.get_delta_for_epsilon(epsilons.tolist()) for side in sides], axis=0)
    return Profile(np.exp(-epsilons), deltas)


def log_ratios(signal: Floats, rate: float) -> Floats:
    """Log-likelihood ratios of present and absent for a record drawn at rate q: log(1 − q + q·e^signal)."""
    if rate == 1:
        return signal
    small = np.log1p(rate * np.expm1(np.minimum(signal, 30)))
    return np.where(signal > 30, signal + math.log(rate), small)


def count_right(scores: Floats, coins: Coins, design: Design) -> int:
    """Number of correct guesses, if in each run the largest |scores| are guessed by their sign."""
    by_run = scores.reshape(design.runs, -1)
    chosen = np.argsort(-np.abs(by_run), axis=1, kind="stable")[:, : design.guesses]
    return int(np.take_along_axis((by_run > 0) == coins.reshape(by_run.shape), chosen, axis=1).sum())


@dataclass(frozen=True)
class AuditPlan:
    """Designs chosen before the run."""

    designs: tuple[Design, ...]
    ideal: float  # lower bound expected if the mechanism is exactly as claimed


def lower_bound(ladder: Ladder, designs: Sequence[Design], right: Sequence[int], confidence: float) -> float:
    """Largest of the bounds by several designs, which share the error probability equally."""
    each = 1 - (1 - confidence) / len(designs)
    return max(ladder.lower_bound(design, n, each) for design, n in zip(designs, right, strict=True))


@lru_cache(maxsize=64)
def plan(ladder: Ladder, runs: int, canaries: int, seed: int) -> AuditPlan:
    """Choose the numbers of guesses from simulations of the claimed mechanism, independently of the run.

    There are two designs. One is best if everything is as claimed. The other has few guesses, for the case that a few
    coordinates have no noise at all: a quarter more guesses than refute the claim if all are correct.
    """
    rng = np.random.default_rng([seed, 1])
    maximum = canaries if runs == 1 else min(canaries, MAX_GUESSES)
    each = 1 - (1 - CONFIDENCE) / 2
    designs = [Design(runs, canaries, n) for n in sorted({round(n) for n in np.geomspace(1, maximum, CHOICES)})]
    few = _fewest(ladder.profile(ladder.above), runs * canaries, each)
    simulated = [_simulate(ladder, runs * canaries, rng) for _ in range(SIMULATIONS)]

    def expected(design: Design) -> int:
        return int(np.mean([count_right(scores, coins, design) for scores, coins in simulated]))

    best = max(designs, key=lambda design: (ladder.lower_bound(design, expected(design), each), design.guesses))
    chosen = (best, few)
    return AuditPlan(chosen, lower_bound(ladder, chosen, [expected(design) for design in chosen], CONFIDENCE))


def _fewest(profile: Profile, count: int, confidence: float) -> Design:
    """A quarter more guesses than the fewest that refute the profile if all are correct."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if refutes(profile, Design(1, count, middle), middle, confidence) else (middle, high)
    return Design(1, count, min(count, math.ceil(1.25 * high)))


def _simulate(ladder: Ladder, count: int, rng: np.random.Generator) -> tuple[Floats, Coins]:
    """Scores of canaries under the claimed mechanism, and their coins."""
    z, rate, steps = ladder.mechanism.sigma, ladder.mechanism.rate or 1.0, ladder.rounds * ladder.mechanism.steps
    if rate == 1:
        z, steps = z / math.sqrt(steps), 1
    coins = rng.random(count) < 0.5
    scores: Floats = np.zeros(count)
    for _ in range(steps):
        drawn = coins & (rng.random(count) < rate)
        scores += log_ratios((rng.standard_normal(count) + drawn / z) / z - 1 / (2 * z**2), rate)
    return scores, coins
