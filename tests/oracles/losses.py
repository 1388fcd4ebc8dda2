"""ε of composed Gaussian rounds between two bounds, from the mathematics of the privacy loss; nothing of dp_accounting.

A round's outcome x has the distribution P with the record and Q without it; or the reverse: both are done. All that
counts of a round is its curve H(t) = ∫ (dP − t dQ)₊, convex in t = e^ε: the round is (ε, H(e^ε))-private.

- Composition keeps order. Two rounds have H(t) = ∫ H₁(t·dQ₂/dP₂) dP₂, so a higher H₁ gives a higher H, and the same
  for H₂. Replacing each round's curve by one above it bounds the whole from above, by one below it from below.
- A polygon in t with corners at t = e^l, l on a grid, is the curve of a discrete loss that takes the values l: the jump
  of its slope at a corner is the Q-mass there, e^l times that the P-mass. Discrete losses add up by FFT.
- Above: the chords of H. A cell's P-mass is rounded down and up to its two ends such that its Q-mass stays as it was.
- Below: the chords, lowered at each corner by as much as they can exceed H in the cells beside it. The tangents at a
  cell's ends enclose H, so that is at most a·b·(1 − e^{−h})/(a + b·e^{−h}) for P-masses a and b rounded down and up.
- An FFT errs by a share of its largest values, so the losses are tilted by e^{θl} first: then those near ε are the
  largest. What rounding, the window and the grid's ends can add or take away is bounded and counted on the safe side.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import fft, optimize
from scipy.special import ndtr, ndtri

Floats = NDArray[np.float64]
Round = tuple[float, float, int]  # noise multiplier z, Poisson rate q (1: the record is in every batch), how many

RESOLUTION = 200  # grid points in a standard deviation of a round's loss, or in its interquartile range if narrower
MOST_POINTS = 500_000  # of one round
TAILS = 1e-8  # share of δ that may be in the tails of the rounds, beyond their grids
ALIASED = 1e-17  # share of the tilted mass that may be on each side of the FFT's window
FFT_ERROR = 25 * 8 * 2.0**-53  # of up to 2²⁵ points, in the 2-norm: Higham 2002, Theorem 24.2, rounded up
SLACK = 1e-9  # share of δ for rounding in the curves of single rounds


@dataclass(frozen=True)
class Bounds:
    """What ε is at least and at most."""

    lower: float
    upper: float


@dataclass(frozen=True)
class Discrete:
    """`times` rounds, each with P-mass `mass[i]` at the loss index[i]·h and the rest, if it counts, at infinity."""

    index: NDArray[np.int64]
    mass: Floats
    infinite: float
    times: int


def epsilon_bounds(rounds: Sequence[Round], delta: float, resolution: float = RESOLUTION) -> Bounds:
    """ε at `delta` of all these rounds, for a record added or removed, whichever costs more."""
    cut = TAILS * delta / sum(n for _, _, n in rounds)
    h = _interval(rounds, cut, resolution)
    lower = upper = 0.0
    for removed in (True, False):
        both = [discrete(z, q, n, removed, h, cut) for z, q, n in rounds]
        lower = max(lower, _epsilon([below for below, _ in both], h, delta, -1))
        upper = max(upper, _epsilon([above for _, above in both], h, delta, +1))
    return Bounds(lower, upper)


def one_round_delta(z: float, q: float, epsilon: float) -> float:
    """δ of one round, in closed form; its relative error is some 1e-16 times 1/ε."""
    at = np.array([epsilon])
    both = (_above(z, q, removed, at) for removed in (True, False))
    return max(float(p[0] - math.exp(epsilon) * r[0]) for p, r in both)


def _outcome(z: float, q: float, loss: Floats) -> Floats:
    """x where ln(dP/dQ) = loss for P = (1 − q)·N(0, z²) + q·N(1, z²) and Q = N(0, z²); −∞ if all are larger."""
    ratio = np.where(loss < -0.5, np.exp(loss) - (1 - q), np.expm1(np.minimum(loss, 30)) + q)  # q·dN(1, z²)/dN(0, z²)
    with np.errstate(divide="ignore"):
        log = np.log(np.maximum(ratio, 0))
    large = loss > 30
    log[large] = loss[large] + np.log1p(-(1 - q) * np.exp(-loss[large]))
    return z**2 * (log - math.log(q)) + 0.5


def _above(z: float, q: float, removed: bool, loss: Floats) -> tuple[Floats, Floats]:
    """P- and Q-mass of losses above each of these."""
    if removed:
        x = _outcome(z, q, loss)
        out, in_ = ndtr(-x / z), ndtr((1 - x) / z)
        return (1 - q) * out + q * in_, out
    x = _outcome(z, q, -loss)
    out, in_ = ndtr(x / z), ndtr((x - 1) / z)
    return out, (1 - q) * out + q * in_


def _below(z: float, q: float, removed: bool, loss: Floats) -> tuple[Floats, Floats]:
    """P- and Q-mass of losses up to each of these: with P and Q exchanged, those above its negative."""
    r, p = _above(z, q, not removed, -loss)
    return p, r


def discrete(z: float, q: float, n: int, removed: bool, h: float, cut: float) -> tuple[Discrete, Discrete]:
    """n rounds' loss from below and from above."""
    lowest, highest = _range(z, q, removed, cut)
    index = np.arange(math.floor(lowest / h), math.ceil(highest / h) + 1)
    loss: Floats = index.astype(np.float64) * h
    (p_above, q_above), (p_below, q_below) = _above(z, q, removed, loss), _below(z, q, removed, loss)
    from_above = p_above[:-1] < 0.5  # the smaller of two tails has the more exact differences
    p = np.where(from_above, -np.diff(p_above), np.diff(p_below))
    r = np.where(from_above, -np.diff(q_above), np.diff(q_below))
    up = np.clip((p - r * np.exp(loss[:-1])) / -math.expm1(-h), 0, p)  # P-mass of a cell that is rounded up
    down = p - up

    above = np.append(down, 0) + np.insert(up, 0, 0)
    above[0] += p_below[0]

    excess = np.divide(-math.expm1(-h) * down * up, down + up * math.exp(-h), out=np.zeros_like(up), where=p > 0)
    # The last corner is one where H is at least what it is lowered by; larger losses are rounded down to it.
    last = int(np.flatnonzero(p_above - q_above * np.exp(loss) > np.insert(excess, 0, 0))[-1])
    up, down, excess, loss = up[:last], down[:last], excess[:last], loss[: last + 1]
    lowered = np.maximum(np.append(excess, 0), np.insert(excess, 0, 0))
    steeper = np.diff(lowered)
    below = np.append(down - steeper / math.expm1(h), 0) + np.insert(up - steeper / math.expm1(-h), 0, 0)
    below[-1] += p_above[last] - lowered[-1]
    below = _convex(loss, below, -1 + float(q_below[0]))
    return Discrete(index[: last + 1], below, 0.0, n), Discrete(index, above, float(p_above[-1]), n)


def _convex(loss: Floats, mass: Floats, leftmost: float) -> Floats:
    """Where lowering has left a corner that points up, the greatest convex polygon below takes its place.

    Its slopes are the isotonic regression of the polygon's, and none is less than `leftmost`, H's left of the grid.
    """
    if mass.min() >= 0:
        return mass
    beyond = np.cumsum((mass * np.exp(-loss))[::-1])[::-1]  # Q-mass at each corner and right of it: slopes, negated
    slopes = optimize.isotonic_regression(-beyond[1:], weights=np.diff(np.exp(loss))).x
    jumps = np.diff(np.maximum(slopes, leftmost), prepend=leftmost, append=0.0)
    return np.asarray(np.maximum(jumps, 0.0) * np.exp(loss))


def _loss(z: float, q: float, x: float) -> float:
    exponent = (x - 0.5) / z**2
    return exponent + math.log(q) if q == 1 or exponent > 700 else math.log1p(q * math.expm1(exponent))


def _range(z: float, q: float, removed: bool, cut: float) -> tuple[float, float]:
    """Losses outside of which a round has at most 2·`cut` of P-mass."""
    far = -float(ndtri(cut)) * z
    return (_loss(z, q, -far), _loss(z, q, 1 + far)) if removed else (-_loss(z, q, far), -_loss(z, q, -far))


def _interval(rounds: Sequence[Round], cut: float, resolution: float) -> float:
    """Rounding to a grid adds some h² to the variance of each round's loss: h is a share of the mean deviation.

    It is a larger share of the narrowest round's: where all of a loss is in one cell, the bound from below is no good.
    """
    variance, narrowest, least = 0.0, math.inf, 0.0
    for z, q, n in rounds:
        quartile = z * float(ndtri(0.75))
        deviation = min(q * math.sqrt(math.expm1(min(1 / z**2, 100))), 1 / z)
        width = min(deviation, _loss(z, q, quartile) - _loss(z, q, -quartile))
        variance += n * width**2
        narrowest = min(narrowest, width)
        lowest, highest = _range(z, q, True, cut)
        least = max(least, (highest - lowest) / MOST_POINTS)
    mean = math.sqrt(variance / sum(n for _, _, n in rounds))
    return max(min(mean / resolution, 10 * narrowest / resolution), least)


class Tilted:
    """The total of discrete losses, its P-mass at each value l times e^{θl − Λ(θ)}."""

    def __init__(self, parts: Sequence[Discrete], h: float):
        self.h = h
        self.parts = [(m.index[m.mass > 0], np.log(m.mass[m.mass > 0]), m.times) for m in parts]

    def cumulants(self, theta: float) -> tuple[float, float]:
        """Λ(θ) = ln E[e^{θl}], and its second derivative: the variance of the tilted total."""
        value = variance = 0.0
        for index, log_mass, n in self.parts:
            log = log_mass + theta * self.h * index
            top = float(log.max())
            weight = np.exp(log - top)
            total = float(weight.sum())
            mean = float(weight @ index) / total
            value += n * (top + math.log(total))
            variance += n * float(weight @ (index - mean) ** 2) / total * self.h**2
        return value, variance

    def saddle(self, delta: float) -> tuple[float, float]:
        """θ for which the tilted total lies about ε, and a bound from above on ε.

        δ(ε) = E[(1 − e^{ε−l})₊] ≤ e^{Λ(θ)−θε}·max_x (1 − e^{−x})·e^{−θx} for every θ; this is the θ of the least bound.
        """

        def bound(log_theta: float) -> float:
            theta = math.exp(log_theta)
            most = -theta * math.log1p(1 / theta) - math.log1p(theta)
            return (self.cumulants(theta)[0] + most - math.log(delta)) / theta

        steepest = math.log(0.1 / self.h)  # where the loss has a largest value, ever larger θ would single it out
        found = optimize.minimize_scalar(bound, bounds=(-12.0, steepest), method="bounded", options={"xatol": 0.02})
        return math.exp(float(found.x)), float(found.fun)

    def window(self, theta: float) -> tuple[int, int]:
        """Grid points beyond each of which the tilted total has at most ALIASED of its mass, by Chernoff's bound."""
        value, variance = self.cumulants(theta)
        ends = []
        for side in (-1, 1):
            shifts = side * np.geomspace(0.2, 20, 10) / math.sqrt(max(variance, self.h**2))
            ends.append(min((self.cumulants(theta + s)[0] - value - math.log(ALIASED)) / abs(s) for s in shifts))
        return math.floor(-ends[0] / self.h), math.ceil(ends[1] / self.h)

    def composed(self, theta: float) -> tuple[Floats, Floats, float]:
        """Total losses, their tilted mass, and how far off a sum of it can be whose weights are at most 1."""
        low, high = self.window(theta)
        size = int(fft.next_fast_len(high - low + 1, real=True))
        assert size <= 2**25
        spectrum = np.ones(size // 2 + 1, dtype=np.complex128)
        start = 0
        for index, log_mass, n in self.parts:
            log = log_mass + theta * self.h * index
            weight = np.exp(log - log.max())
            weight /= weight.sum()
            centre = round(float(weight @ index))
            spectrum *= fft.rfft(np.bincount((index - centre) % size, weight, minlength=size)) ** n
            start += n * centre
        mass = np.roll(fft.irfft(spectrum, size), (start - low) % size)
        times = sum(n for _, _, n in self.parts)
        error = 2 * ALIASED + (times + 2) * FFT_ERROR * math.sqrt(size) * float(np.linalg.norm(mass))
        return np.arange(low, low + size, dtype=np.float64) * self.h, mass, error


def _epsilon(parts: Sequence[Discrete], h: float, delta: float, side: int) -> float:
    """The least ε ≥ 0 with δ(ε) ≤ delta; each error counted as more δ (side 1) or as less (side −1)."""
    infinite = math.fsum(m.infinite * m.times for m in parts)
    tilted = Tilted(parts, h)
    theta, outside = tilted.saddle(delta)
    if outside <= 0 and infinite == 0:
        return 0.0
    value = tilted.cumulants(theta)[0]
    losses, mass, error = tilted.composed(theta)

    def excess(epsilon: float) -> float:
        start, end = np.searchsorted(losses, (epsilon, epsilon + 60 / theta))  # beyond, weights are under 1e-26
        over = losses[start:end] - epsilon
        total = float((-np.expm1(-over) * np.exp(-theta * over)) @ mass[start:end]) + side * error
        return (infinite + math.exp(value - theta * epsilon) * max(total, 0.0)) * (1 + side * SLACK) - delta

    # From the bound on ε downwards; far below, where there is no tilted mass, only the errors would be left.
    outside = max(outside, 0.0)
    while excess(outside) > 0:
        outside += 1 / theta
    inside = outside
    while excess(inside) <= 0:
        if inside == 0:
            return 0.0
        outside, inside = inside, max(inside - 1 / theta, 0.0)
    return float(optimize.brentq(excess, inside, outside, xtol=1e-14, rtol=1e-12))
