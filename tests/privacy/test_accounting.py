"""The accountant against closed forms, other libraries' published numbers, and a simulation of the privacy loss."""

import dataclasses
import importlib
import logging
import math
import subprocess
import sys
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from pdsl.privacy.accounting import (
    Mechanism,
    analytic_sigma,
    calibrate,
    classic_sigma,
    epsilon,
    epsilon_at,
    epsilon_by_round,
    epsilon_rdp,
)
from tests.helpers.refusals import refused

DELTA = 1e-5
Q = 250 / 6000
CLOSE = 0.005  # relative, to published numbers
GRID = 0.002  # relative, between two discretisations
EXACT = 1e-8  # relative, to a closed form solved for ε, which ours must not fall below
ROUNDING = 2e-15  # subtracted from δ by the accountant for each round


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import dp_accounting before any time is measured."""
    importlib.import_module("dp_accounting")


def total(z: float, rounds: int, rate: float | None = None, delta: float = DELTA, steps: int = 1) -> float:
    return epsilon(((Mechanism(z, 1.0, 1, steps, rate), rounds),), delta)


def gaussian_delta(z: float, e: float) -> float:
    """δ of one Gaussian mechanism: Balle and Wang 2018, Theorem 8."""
    return float(stats.norm.cdf(1 / (2 * z) - e * z) - math.exp(e) * stats.norm.cdf(-1 / (2 * z) - e * z))


def sampled_delta(z: float, q: float, e: float) -> float:
    """δ of one Poisson-sampled Gaussian: the larger of a record removed and a record added, each integrated exactly.

    With the record, x is drawn from P = (1-q)·N(0, z²) + q·N(1, z²), without it from N(0, z²) = O.
    """

    def above(x: float, mean: float) -> float:
        return float(stats.norm.sf((x - mean) / z))

    def crossing(ratio: float) -> float:  # where P = ratio·O
        return z**2 * math.log((ratio - 1 + q) / q) + 0.5

    x = crossing(math.exp(e))
    removed = (1 - q) * above(x, 0) + q * above(x, 1) - math.exp(e) * above(x, 0)
    if math.exp(-e) <= 1 - q:
        return removed
    x = crossing(math.exp(-e))
    added = (1 - above(x, 0)) - math.exp(e) * ((1 - q) * (1 - above(x, 0)) + q * (1 - above(x, 1)))
    return max(removed, added)


def solved(delta_of: object, delta: float) -> float:
    return float(optimize.brentq(lambda e: delta_of(e) - delta, 0, 200))  # type: ignore[operator]


# Computed with dp_accounting at an interval of 1e-4 before this module was written.
@pytest.mark.parametrize(("target", "z"), [(1, 2.416), (4, 0.993), (8, 0.731)])
def test_noise_for_a_total_over_200_sampled_rounds(target: float, z: float) -> None:
    assert calibrate(target, DELTA, 200, Q) == pytest.approx(z, rel=CLOSE)
    assert total(z, 200, Q) == pytest.approx(target, rel=CLOSE)


@pytest.mark.parametrize(
    ("sigma_of", "z", "after_200"), [(classic_sigma, 60.560, 0.860), (analytic_sigma, 37.690, 1.449)]
)
def test_one_release_and_200_without_sampling(sigma_of: object, z: float, after_200: float) -> None:
    assert sigma_of(0.08, DELTA) == pytest.approx(z, rel=1e-4)  # type: ignore[operator]
    assert total(z, 200) == pytest.approx(after_200, rel=1e-3)


# Opacus, opacus/tests/accountants_test.py at 39933879: test_rdp_accountant (2250 steps), test_prv_accountant (2249,
# since 90 // 0.04 is 2249), test_get_noise_multiplier_prv_epochs and _prv_steps (to 0.01 in ε).
def test_opacus_epsilon() -> None:
    mechanism = Mechanism(1.5, 1.0, 1, rate=0.04)
    assert epsilon_rdp(((mechanism, 2250),), DELTA) == pytest.approx(7.32911117143, rel=1e-3)
    assert epsilon(((mechanism, 2249),), DELTA) == pytest.approx(6.777395712150674, rel=CLOSE)


@pytest.mark.parametrize(("steps", "z"), [(2250, 1.34765625), (2000, 1.2915)])
def test_opacus_noise_multiplier(steps: int, z: float) -> None:
    assert calibrate(8, DELTA, steps, 0.04) == pytest.approx(z, rel=CLOSE)


@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-10])
@pytest.mark.parametrize(("z", "n"), [(0.3, 1), (1, 10), (40, 200), (300, 5000)])
def test_gaussians_compose_to_one_gaussian(z: float, n: int, delta: float) -> None:
    exact = solved(lambda e: gaussian_delta(z / math.sqrt(n), e), delta)
    assert total(z, n, None, delta) == pytest.approx(exact, rel=1e-6)
    assert total(z, n, 1.0, delta) == total(z, n, None, delta)
    nearly = total(z, n, 1 - 1e-9, delta)  # computed like sampled rounds
    most = solved(lambda e: gaussian_delta(z / math.sqrt(n), e), delta - ROUNDING * n)
    assert exact * (1 - EXACT) <= nearly <= most * (1 + GRID)


def test_mixed_rounds_compose_to_one_gaussian() -> None:
    spent = (
        (Mechanism(6.0, 2.0, 4, 3), 10),
        (Mechanism(5.0, 1.0, 1, rate=1 - 1e-9), 20),
        (Mechanism(8.0, 1.0, 1, rate=1 - 1e-10), 5),
        (Mechanism(1.0, 1.0, 1), 0),
    )
    z = 1 / math.sqrt(10 * 3 / 1.5**2 + 20 / 5**2 + 5 / 8**2)
    exact = solved(lambda e: gaussian_delta(z, e), DELTA)
    assert exact * (1 - EXACT) <= epsilon(spent, DELTA) <= exact * (1 + GRID)


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
@pytest.mark.parametrize(("z", "q"), [(0.5, 0.04), (1, 0.01), (1, 0.9), (3, 0.3), (0.2, 0.1)])
def test_one_sampled_round_has_its_closed_form(z: float, q: float, delta: float) -> None:
    exact = solved(lambda e: sampled_delta(z, q, e), delta)
    assert exact * (1 - EXACT) <= total(z, 1, q, delta) <= exact * (1 + GRID)


@pytest.mark.parametrize(("z", "q", "n", "delta"), [(1.0, 0.2, 20, 0.02), (2.0, 0.05, 50, 0.01), (0.7, 0.1, 10, 0.02)])
def test_sampled_rounds_have_the_simulated_delta(z: float, q: float, n: int, delta: float) -> None:
    """δ = E[max(0, 1 - e^{ε-L})], L the loss of n rounds with the record against n without it."""
    rng = np.random.default_rng(0)
    draws = 200_000
    loss = np.zeros(draws)
    for _ in range(n):
        x = z * rng.standard_normal(draws) + (rng.random(draws) < q)
        loss += np.log1p(q * np.expm1((2 * x - 1) / (2 * z**2)))
    exceeds = np.maximum(0, -np.expm1(np.minimum(total(z, n, q, delta) - loss, 0)))
    assert exceeds.mean() == pytest.approx(delta, abs=5 * exceeds.std() / math.sqrt(draws))


@pytest.mark.slow
@pytest.mark.parametrize(("z", "q", "n"), [(2.4, Q, 200), (0.7, 0.1, 50), (1, 0.01, 500), (5, 0.5, 100)])
def test_our_grid_is_as_good_as_a_fine_one(z: float, q: float, n: int) -> None:
    import dp_accounting  # type: ignore[import-untyped]

    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-4)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)), n)
    fine = accountant.get_epsilon(DELTA)
    assert fine * (1 - 2e-4) <= total(z, n, q) <= fine * (1 + 1e-3)


MECHANISM = st.builds(
    Mechanism,
    sigma=st.floats(1, 6),
    sensitivity=st.floats(0.5, 1),
    messages=st.integers(1, 5),
    steps=st.integers(1, 3),
    rate=st.none() | st.floats(0.02, 1),
)
ROUNDS = st.integers(1, 200)
DELTAS = st.sampled_from([1e-3, 1e-5, 1e-7])
few = settings(max_examples=15, deadline=None)


def changed(m: Mechanism, **values: object) -> Mechanism:
    return dataclasses.replace(m, **values)  # type: ignore[arg-type]


@pytest.mark.slow
@few
@given(MECHANISM, ROUNDS, DELTAS, st.floats(1.01, 3), st.integers(1, 50))
def test_monotone(m: Mechanism, rounds: int, delta: float, factor: float, more: int) -> None:
    here = epsilon(((m, rounds),), delta)
    costlier = [
        (m, rounds + more),
        (changed(m, sigma=m.sigma / factor), rounds),
        (changed(m, sensitivity=m.sensitivity * factor), rounds),
        (changed(m, messages=m.messages + more), rounds),
        (changed(m, steps=m.steps + 1), rounds),
    ]
    if m.rate is not None:
        costlier += [(changed(m, rate=min(1, m.rate * factor)), rounds), (changed(m, rate=None), rounds)]
    for other, n in costlier:
        assert epsilon(((other, n),), delta) >= here * (1 - GRID)
    assert epsilon(((m, rounds),), delta / 10) >= here * (1 - GRID)
    assert epsilon(((m, rounds), (changed(m, sigma=2 * m.sigma), 1)), delta) >= here * (1 - GRID)


@few
@given(MECHANISM, ROUNDS, DELTAS)
def test_rdp_is_never_below_pld(m: Mechanism, rounds: int, delta: float) -> None:
    assert epsilon_rdp(((m, rounds),), delta) >= epsilon(((m, rounds),), delta) * (1 - GRID)


@few
@given(MECHANISM, ROUNDS, DELTAS)
def test_splitting_changes_nothing(m: Mechanism, rounds: int, delta: float) -> None:
    whole = epsilon(((m, rounds),), delta)
    assert epsilon(((m, rounds // 2), (m, rounds - rounds // 2)), delta) == pytest.approx(whole, rel=1e-9)
    assert epsilon(((changed(m, steps=1), rounds * m.steps),), delta) == pytest.approx(whole, rel=1e-9)
    z = m.noise_multiplier
    alone = Mechanism.from_noise_multiplier(z, 0.3, 7, m.steps, m.rate)
    assert alone.noise_multiplier == pytest.approx(z, rel=1e-12)
    assert epsilon(((alone, rounds),), delta) == pytest.approx(whole, rel=1e-6)


def test_messages_of_one_batch_are_one_event() -> None:
    """Accounting k·T separately amplified messages would give 3.47 instead of 7.20."""
    k, rounds = 10, 200
    z = calibrate(7.2, DELTA, rounds, Q)
    m = Mechanism.from_noise_multiplier(z, 1.0, k, rate=Q)
    truth = epsilon(((m, rounds),), DELTA)
    wrong = epsilon(((changed(m, messages=1), k * rounds),), DELTA)
    assert truth == pytest.approx(7.2, rel=CLOSE)
    assert wrong == pytest.approx(3.47, rel=CLOSE)


@few
@given(st.floats(0.8, 4), st.floats(0.02, 0.5), st.integers(2, 10), st.integers(1, 50))
def test_separate_amplification_undercounts(z: float, q: float, k: int, rounds: int) -> None:
    m = Mechanism.from_noise_multiplier(z, 1.0, k, rate=q)
    assert epsilon(((changed(m, messages=1), k * rounds),), DELTA) <= epsilon(((m, rounds),), DELTA) * (1 + GRID)


@pytest.mark.parametrize("q", [0.01, 0.3, 0.99])
def test_fixed_batches_are_not_amplified(q: float) -> None:
    m = Mechanism(2.0, 1.0, 1)
    assert epsilon(((m, 50),), DELTA) == total(2.0, 50, 1.0) > total(2.0, 50, q)


@pytest.mark.slow
@few
@given(st.floats(0.05, 50), DELTAS, ROUNDS, st.none() | st.floats(0.02, 1), st.integers(1, 3))
def test_calibrate_and_epsilon_are_inverse(
    target: float, delta: float, rounds: int, rate: float | None, steps: int
) -> None:
    z = calibrate(target, delta, rounds, rate, steps)
    assert 0.985 * target <= total(z, rounds, rate, delta, steps) <= target
    assert total(z / 1.0011, rounds, rate, delta, steps) > target * (1 - 1e-6)


@pytest.mark.parametrize(("target", "rounds", "rate"), [(1, 200, Q), (0.1, 10000, 0.001), (100, 2250, 0.04)])
def test_calibrate_is_quick(target: float, rounds: int, rate: float) -> None:
    start = time.process_time()
    calibrate(target, DELTA, rounds, rate)
    assert time.process_time() - start < 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("z", "q", "steps"), [(2.416, Q, 1), (0.731, Q, 2), (1, 0.01, 1), (30, None, 1), (1.2, 1.0, 3)]
)
def test_by_round(z: float, q: float | None, steps: int) -> None:
    m = Mechanism(z, 1.0, 1, steps, q)
    start = time.process_time()
    curve = epsilon_by_round(m, 200, DELTA)
    assert time.process_time() - start < 3
    assert len(curve) == 200
    assert all(a <= b for a, b in pairwise(curve))
    for t in (1, 2, 17, 100, 199, 200):
        exact = total(z, t, q, DELTA, steps)
        assert exact * (1 - 1e-4) <= curve[t - 1] <= exact * (1 + CLOSE)
    assert curve[-1] == total(z, 200, q, DELTA, steps)


def test_by_round_beyond_200_takes_the_next_round_that_is_computed() -> None:
    m = Mechanism(1.5, 1.0, 1, rate=0.04)
    curve = epsilon_by_round(m, 700, DELTA)
    assert len(curve) == 700
    assert all(a <= b for a, b in pairwise(curve))
    for t in (150, 201, 333, 502, 699, 700):
        exact = total(1.5, t, 0.04)
        assert exact * (1 - 1e-4) <= curve[t - 1] <= exact * 1.01
    assert epsilon_at(m, [100, 700], DELTA) == pytest.approx([curve[99], curve[699]], rel=GRID)


def test_edges() -> None:
    noisy, silent = Mechanism(1.0, 1.0, 1, rate=0.1), Mechanism(0.0, 1.0, 1, rate=0.1)
    for account in (epsilon, epsilon_rdp):
        assert account((), DELTA) == 0
        assert account(((noisy, 0), (silent, 0)), DELTA) == 0
        assert account(((noisy, 3), (silent, 1)), DELTA) == math.inf
    assert total(1e9, 5, 0.5) == 0  # (0, δ) already holds
    for rate in (None, 0.5):
        assert total(1e-9, 1, rate) == math.inf  # counts as no noise
        assert total(1e300, 1, rate) == 0
    assert epsilon_by_round(silent, 3, DELTA) == [math.inf] * 3
    assert epsilon_by_round(noisy, 0, DELTA) == []
    assert epsilon_by_round(Mechanism(1e300, 1.0, 1), 2, DELTA) == [0, 0]


def test_what_an_fft_cannot_compose_is_left_to_rdp() -> None:
    m = Mechanism(100.0, 1.0, 1, rate=0.1)
    for spent, delta in [((m, 1_000_000), DELTA), ((m, 1000), 1e-12), ((changed(m, sigma=0.005), 1), DELTA)]:
        assert epsilon((spent,), delta) == epsilon_rdp((spent,), delta) < math.inf
    assert epsilon_at(m, [10, 1000], 1e-12) == [epsilon(((m, t),), 1e-12) for t in (10, 1000)]


@pytest.mark.parametrize("target", [0, -1, 1e-4, 1e4, math.inf, math.nan])
def test_absurd_targets(target: float) -> None:
    with refused("target_epsilon", "0.001 to 1000"):
        calibrate(target, DELTA, 10, 0.1)


@pytest.mark.slow
def test_targets_out_of_reach() -> None:
    with refused("target_epsilon=0.001", "noise multiplier above 100,000", "try"):
        calibrate(0.001, DELTA, 10**9, 0.9)
    with refused("target_epsilon=1 ", "so large", "try"):  # the record is hardly ever sampled
        calibrate(1, 0.01, 1, 0.001)


def test_refusals() -> None:
    for delta in (0, 1, -1, math.nan):
        with refused(f"delta={delta}"):
            epsilon((), delta)
    with refused("rounds=-1"):
        total(1, -1)
    with refused("rounds=0"):
        calibrate(1, DELTA, 0, None)
    with refused("analytic_sigma"):
        classic_sigma(1.5, DELTA)
    for name, value in [
        ("sigma", -1),
        ("sigma", math.nan),
        ("sensitivity", 0),
        ("messages", 0),
        ("steps", 0),
        ("rate", 0),
        ("rate", 1.1),
    ]:
        with refused(f"{name}={value}"):
            Mechanism(**{"sigma": 1.0, "sensitivity": 1.0, "messages": 1, name: value})  # type: ignore[arg-type]


def test_the_library_is_quiet_and_its_level_is_restored(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    import dp_accounting

    event = dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(20.0))
    dp_accounting.rdp.RdpAccountant().compose(event)
    assert caplog.records  # the library warns in this case
    caplog.clear()
    capfd.readouterr()
    level = logging.getLogger("absl").level
    epsilon_rdp(((Mechanism(20.0, 1.0, 1, rate=0.5), 3),), DELTA)
    assert not caplog.records
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("absl").level == level


@pytest.mark.slow
def test_importing_pdsl_does_not_import_the_library() -> None:
    code = "import pdsl.privacy.accounting, pdsl.privacy.planning, sys; print('dp_accounting' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
