"""Testers of a mechanism that is only sampled: does it keep the privacy that is claimed for it?

In the style of DP-Auditorium (Kong et al. 2023). Both get samples of the mechanism's output at two neighbouring inputs,
learn on one half of them what tells the two apart, and bound on the other half how far apart they are at least. They
never blame an honest mechanism, but for the chance that is asked for; they need not find every fault.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]
CHANCE = 1e-6  # of blaming an honest mechanism
CLIPS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)  # largest log-likelihood ratios that the Rényi tester tries


@dataclass(frozen=True)
class Verdict:
    """What the divergence of the two outputs is at least, next to what it may be at most."""

    at_least: float
    claimed: float

    @property
    def passed(self) -> bool:
        return self.at_least <= self.claimed


def gaussian_delta(sigma: float, sensitivity: float, epsilon: float) -> float:
    """δ(ε) of a Gaussian mechanism: Balle and Wang 2018, Theorem 8."""
    m = sensitivity / sigma
    return float(stats.norm.cdf(m / 2 - epsilon / m) - math.exp(epsilon) * stats.norm.cdf(-m / 2 - epsilon / m))


def gaussian_renyi(sigma: float, sensitivity: float, alpha: float) -> float:
    """Rényi divergence of order α of a Gaussian mechanism."""
    return alpha * sensitivity**2 / (2 * sigma**2)


def hockey_stick(one: Floats, other: Floats, epsilon: float, delta: float, chance: float = CHANCE) -> Verdict:
    """Whether (ε, δ) holds: P(S) − e^ε·Q(S) ≤ δ for the most telling event S that was learnt, either way round.

    one, other: [samples, d] at the two inputs. Bounds of P(S) and Q(S) are Clopper and Pearson's.
    """
    return Verdict(max(_event(p, q, epsilon, chance / 2) for p, q in ((one, other), (other, one))), delta)


def renyi(one: Floats, other: Floats, alpha: float, divergence: float, chance: float = CHANCE) -> Verdict:
    """Whether the Rényi divergence of order α > 1 is at most `divergence`, either way round.

    For every function g of the output, D_α(P‖Q) ≥ α/(α−1)·ln E_P[e^{(α−1)g}] − ln E_Q[e^{αg}], with equality for the
    log-likelihood ratio (Birrell et al. 2021). g is learnt and clipped, which makes both means ones of bounded numbers:
    their bounds are Maurer and Pontil's (2009, Theorem 4).
    """
    return Verdict(max(_variational(p, q, alpha, chance / 2) for p, q in ((one, other), (other, one))), divergence)


def _event(p: Floats, q: Floats, epsilon: float, chance: float) -> float:
    (p_learn, p_test), (q_learn, q_test) = _halves(p), _halves(q)
    score = _log_likelihood_ratio(p_learn, q_learn)
    cuts = np.sort(np.concatenate([score(p_learn), score(q_learn)]))
    telling = _share_from(score(p_learn), cuts) - math.exp(epsilon) * _share_from(score(q_learn), cuts)
    cut = cuts[int(np.argmax(telling))]
    hits, misses = int((score(p_test) >= cut).sum()), int((score(q_test) < cut).sum())
    at_most = 1 - _clopper_pearson(misses, len(q_test), chance / 2)
    return _clopper_pearson(hits, len(p_test), chance / 2) - math.exp(epsilon) * at_most


def _variational(p: Floats, q: Floats, alpha: float, chance: float) -> float:
    (p_learn, p_test), (q_learn, q_test) = _halves(p), _halves(q)
    score = _log_likelihood_ratio(p_learn, q_learn)

    def bound(p_half: Floats, q_half: Floats, clip: float) -> float:
        up, down = np.clip(score(p_half), -clip, clip), np.clip(score(q_half), -clip, clip)
        low = _mean_at_least(np.exp((alpha - 1) * up), 0.0, math.exp((alpha - 1) * clip), chance / 2)
        high = -_mean_at_least(-np.exp(alpha * down), -math.exp(alpha * clip), 0.0, chance / 2)
        return -math.inf if low <= 0 else alpha / (alpha - 1) * math.log(low) - math.log(high)

    clip = max(CLIPS, key=lambda c: bound(p_learn, q_learn, c))
    return bound(p_test, q_test, clip)


def _halves(samples: Floats) -> tuple[Floats, Floats]:
    return samples[::2], samples[1::2]


def _log_likelihood_ratio(p: Floats, q: Floats) -> Callable[[Floats], Floats]:
    """ln dP/dQ as if both were normal with one covariance: linear in the output."""
    covariance = np.atleast_2d(np.cov(np.concatenate([p - p.mean(0), q - q.mean(0)]), rowvar=False))
    ridge = 1e-9 * np.trace(covariance) / len(covariance)  # for coordinates without noise
    weights = np.linalg.solve(covariance + ridge * np.eye(len(covariance)), p.mean(0) - q.mean(0))
    middle = (p.mean(0) + q.mean(0)) / 2
    return lambda x: np.asarray((x - middle) @ weights)


def _share_from(values: Floats, cuts: Floats) -> Floats:
    """The share of values at each cut or above."""
    return 1 - np.searchsorted(np.sort(values), cuts, side="left") / len(values)


def _clopper_pearson(hits: int, n: int, chance: float) -> float:
    """The lower end of the confidence interval of a probability."""
    return float(stats.beta.ppf(chance, hits, n - hits + 1)) if hits else 0.0


def _mean_at_least(values: Floats, low: float, high: float, chance: float) -> float:
    """The lower end of the confidence interval of the mean of independent numbers within low … high."""
    n, log = len(values), math.log(2 / chance)
    error = math.sqrt(2 * float(values.var(ddof=1)) * log / n) + 7 * (high - low) * log / (3 * (n - 1))
    return float(values.mean()) - error
