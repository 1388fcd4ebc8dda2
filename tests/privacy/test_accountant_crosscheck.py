"""Stated ε against bounds by another method and against another library. benchmarks/accountant.py is the long form."""

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy import integrate, optimize, stats

from pdsl.privacy.accounting import Mechanism, epsilon, epsilon_at, epsilon_by_round, epsilon_rdp
from tests.oracles import digits
from tests.oracles.losses import epsilon_bounds, one_round_delta
from tests.oracles.spendings import Point, draw, opacus_epsilon

pytestmark = pytest.mark.slow

ABOVE = 0.005  # relative excess over the true ε, for rates above 0.002
TINY = [(1.0, 0.02, 1.1e-14), (1.0, 0.02, 5e-14), (1.0, 0.02, 1e-13), (1.0, 0.02, 1e-12), (0.7, 0.1, 3e-14)]


def total(z: float, q: float, rounds: int, delta: float) -> float:
    return epsilon(((Mechanism(z, 1.0, 1, rate=q), rounds),), delta)


@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-13])
@pytest.mark.parametrize(("z", "q"), [(0.6, 0.05), (1.0, 0.02), (2.0, 0.7), (8.0, 0.3)])
def test_bounds_of_one_round_enclose_its_forty_digits(z: float, q: float, delta: float) -> None:
    bounds, exact = epsilon_bounds([(z, q, 1)], delta), digits.epsilon(z, q, delta)
    assert bounds.lower <= exact <= bounds.upper <= bounds.lower * (1 + 1e-5)


@pytest.mark.parametrize("delta", [1e-2, 1e-7, 1e-15])
@pytest.mark.parametrize(("z", "n"), [(0.5, 3), (3.0, 50), (40.0, 3000)])
def test_bounds_of_gaussian_rounds_enclose_their_closed_form(z: float, n: int, delta: float) -> None:
    def excess(e: float) -> float:
        m = math.sqrt(n) / z
        return float(stats.norm.cdf(m / 2 - e / m) - math.exp(e) * stats.norm.cdf(-m / 2 - e / m)) / delta - 1

    bounds = epsilon_bounds([(z, 1.0, n)], delta)
    exact = optimize.brentq(excess, 0, 200) if excess(0) > 0 else 0.0
    assert bounds.lower <= exact <= bounds.upper <= bounds.lower * (1 + 5e-5)


@pytest.mark.parametrize("delta", [1e-4, 1e-9])
@pytest.mark.parametrize(("one", "other"), [((1.0, 0.1), (1.0, 0.1)), ((0.8, 0.05), (3.0, 1.0))])
def test_bounds_of_two_rounds_enclose_their_integral(
    one: tuple[float, float], other: tuple[float, float], delta: float
) -> None:
    """δ(ε) = E[δ₁(ε − L₂)], L₂ the loss of the second round, for a record removed, which costs more here."""
    (z, q), (z2, q2) = one, other

    def first(e: float) -> float:
        if math.exp(e) <= 1 - q:
            return -math.expm1(e)
        x = z**2 * math.log((math.exp(e) - 1 + q) / q) + 0.5
        out = stats.norm.sf(x / z)
        return float((1 - q) * out + q * stats.norm.sf((x - 1) / z) - math.exp(e) * out)

    def composed(e: float) -> float:
        def integrand(x: float) -> float:
            density = (1 - q2) * stats.norm.pdf(x, 0, z2) + q2 * stats.norm.pdf(x, 1, z2)
            return float(density) * first(e - math.log1p(q2 * math.expm1((x - 0.5) / z2**2)))

        cuts = np.linspace(-8 * z2, 1 + 8 * z2, 9)
        return math.fsum(integrate.quad(integrand, a, b, epsabs=0, epsrel=1e-9)[0] for a, b in pairwise(cuts))

    bounds = epsilon_bounds([(z, q, 1), (z2, q2, 1)], delta)
    assert composed(bounds.lower) >= delta * (1 - 1e-6)
    assert composed(bounds.upper) <= delta * (1 + 1e-6)
    assert bounds.upper <= bounds.lower * (1 + 5e-5)


def test_bounds_are_zero_where_delta_alone_covers_everything() -> None:
    assert epsilon_bounds([(1.0, 0.001, 1)], 0.01).upper == 0
    assert one_round_delta(1.0, 0.001, 0.0) < 0.01


@pytest.mark.parametrize(("z", "q", "delta"), TINY)
def test_one_round_at_a_tiny_delta_is_no_less_than_its_forty_digits(z: float, q: float, delta: float) -> None:
    exact = digits.epsilon(z, q, delta)
    assert exact <= total(z, q, 1, delta) <= 1.2 * exact


@pytest.mark.parametrize(("z", "delta"), [(1.0, 1e-15), (3.0, 1e-5), (5e4, 1e-6), (5.115e4, 1.07e-6), (7e4, 1e-8)])
def test_a_round_without_sampling_is_no_less_than_its_forty_digits(z: float, delta: float) -> None:
    exact = digits.epsilon(z, 1.0, delta)
    assert exact <= epsilon(((Mechanism(z, 1.0, 1), 1),), delta) <= exact * (1 + 1e-8) + 2e-11


@pytest.mark.parametrize(
    ("z", "q", "rounds", "delta"), [(1.1, 0.01, 50, 1e-12), (0.8, 0.05, 20, 4.1e-13), (1.0, 0.1, 300, 6.1e-12)]
)
def test_rounds_at_a_tiny_delta_are_no_less_than_the_lower_bound(z: float, q: float, rounds: int, delta: float) -> None:
    bounds = epsilon_bounds([(z, q, rounds)], delta)
    assert bounds.lower <= total(z, q, rounds, delta) <= 1.01 * bounds.upper


def test_rounds_whose_delta_is_lost_in_rounding_are_left_to_rdp() -> None:
    spent = ((Mechanism(1.1, 1.0, 1, rate=0.01), 51),)
    assert epsilon(spent, 1e-12) == epsilon_rdp(spent, 1e-12) >= epsilon_bounds([(1.1, 0.01, 51)], 1e-12).lower


@pytest.mark.parametrize(("z", "q", "delta"), [(1.0, 0.005, 3.3e-13), (0.7, 0.005, 1e-11)])
def test_a_curve_at_a_tiny_delta_is_nowhere_less_than_the_lower_bound(z: float, q: float, delta: float) -> None:
    m, at = Mechanism(z, 1.0, 1, rate=q), [1, 2, 4, 8, 16]
    by_round = epsilon_by_round(m, at[-1], delta)
    for t, found in zip(at, epsilon_at(m, at, delta), strict=True):
        lower = epsilon_bounds([(z, q, t)], delta, resolution=100).lower
        assert lower <= found <= 1.02 * lower
        assert lower <= by_round[t - 1] <= 1.02 * lower


@pytest.mark.parametrize("delta", [1e-5, 1e-6])
def test_taking_rounding_off_delta_costs_less_than_a_millionth_at_ordinary_deltas(delta: float) -> None:
    """δ is smaller by 2e-15 per round; ε falls with ln δ at a slope of at most 1 (usually a tenth)."""
    z, q, rounds = 1.5, 0.04, 1000
    less = delta * (1 - 2e-15 * rounds / delta)
    assert 1 <= total(z, q, rounds, less) / total(z, q, rounds, delta) <= 1 + 1e-6


POINTS = list(draw(25, seed=1))


@pytest.mark.parametrize("point", POINTS, ids=range(len(POINTS)))
def test_a_random_spending_lies_between_the_bounds(point: Point) -> None:
    bounds = epsilon_bounds(point.rounds, point.delta, resolution=40)
    ours = epsilon(point.spent, point.delta)
    assert ours >= bounds.lower
    assert ours <= bounds.upper * (1 + ABOVE) or ours == epsilon_rdp(point.spent, point.delta)


def test_random_spendings_agree_with_opacus() -> None:
    pytest.importorskip("opacus")
    compared = 0
    for point in POINTS[:10]:
        ours = epsilon(point.spent, point.delta)
        theirs = opacus_epsilon(point.rounds, point.delta, ours)
        if theirs is not None and theirs > 0.1:
            assert ours == pytest.approx(theirs, rel=ABOVE)
            compared += 1
    assert compared >= 4
