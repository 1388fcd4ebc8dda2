"""Canary attack: the bound is valid, close to a correct claim, and above the claim if there is a fault."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.stats import binom, norm

from benchmarks.one_run_audit import FAULTS, Settings, experiment, less_noise, settings
from pdsl.algorithms import ALGORITHMS
from pdsl.auditing import one_run
from pdsl.auditing.canaries import CanaryResult, attack, canary_finding
from pdsl.auditing.one_run import Design, Ladder, Profile, count_right, plan, refutes
from pdsl.auditing.report import Verdict
from pdsl.privacy import Mechanism
from pdsl.utils.errors import PdslError

pytestmark = pytest.mark.slow

COUNT = 3_000


def gaussian(mu: float) -> Profile:
    """Profile of one Gaussian whose means differ by mu."""
    return Ladder(Mechanism(1 / mu, 1.0, 1), 1, 1e-5).profile(round(math.log(one_run.MAX_NOISE, one_run.RUNG)))


def pairs(*known: tuple[float, float]) -> Profile:
    epsilons, deltas = np.array(known).T
    return Profile(np.exp(-epsilons), deltas)


# Statistics


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("right", [60, 75, 90, 98, 100])
def test_without_delta_right_guesses_are_binomial(epsilon: float, right: int) -> None:
    likely = binom.sf(right - 1, 100, 1 / (1 + math.exp(-epsilon)))
    assert refutes(pairs((epsilon, 0.0)), Design(1, 500, 100), right, 0.95) == (likely < 0.05)


def steinke(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """Theorem 5.2 of Steinke, Nasr and Jagielski: an upper bound on the probability of v or more correct guesses."""
    q = 1 / (1 + math.exp(-epsilon))
    below = np.cumsum(binom.pmf(np.arange(v - 1, -1, -1), r, q)) / np.arange(1, v + 1)
    return float(binom.sf(v - 1, r, q) + 2 * m * delta * below.max())


@pytest.mark.parametrize("delta", [1e-5, 1e-3])
@pytest.mark.parametrize(("m", "r", "v"), [(1_000, 100, 90), (5_000, 500, 400), (5_000, 40, 40)])
def test_one_pair_refutes_as_much_as_theirs(m: int, r: int, v: int, delta: float) -> None:
    epsilons = np.arange(0, 6, 0.01)
    theirs = max((e for e in epsilons if steinke(m, r, v, e, delta) < 0.05), default=0.0)
    ours = max((e for e in epsilons if refutes(pairs((e, delta)), Design(1, m, r), v, 0.95)), default=0.0)
    assert ours >= theirs - 0.02


def test_the_worst_distribution_is_the_worst() -> None:
    """Linear programming finds no larger mean of a convex increasing function than that of p*."""
    m, n = 30, 8
    for profile in (gaussian(0.8), gaussian(2.0), pairs((0.5, 0.01), (1.5, 1e-4))):
        i = np.arange(n + 1)
        lines = [
            (np.where(i > a, i, 0) - np.where(i >= a, n - i, 0) / shrinkage, m * delta)
            for a in range(n)
            for shrinkage, delta in zip(profile.shrinkage, profile.deltas, strict=True)
        ]
        A, b = np.array([line for line, _ in lines]), np.array([limit for _, limit in lines])
        worst = one_run._largest(profile, m, n)
        assert worst.sum() == pytest.approx(1)
        for value in (i, i**2, np.exp(i / 2), np.maximum(0, i - 5)):
            best = linprog(-value, A_ub=A, b_ub=b, A_eq=np.ones((1, n + 1)), b_eq=[1.0], method="highs")
            assert worst @ value == pytest.approx(-best.fun, rel=1e-5)


@pytest.mark.parametrize("rate", [None, 0.1])
def test_more_noise_is_refuted_more_easily(rate: float | None) -> None:
    """On every rung p* sums to 1, and guesses that refute a rung refute all rungs before it."""
    ladder = Ladder.around(Mechanism(4.0, 1.0, 1, rate=rate), 5, 1e-5)
    rungs = range(0, ladder.rungs, 30)
    for n in (1, 20, 100):
        assert all(one_run._largest(ladder.profile(rung), 100, n).sum() == pytest.approx(1, abs=1e-4) for rung in rungs)
    for right in (6_100, 6_600, 12_000):
        refuted = [refutes(ladder.profile(rung), Design(200, 100, 60), right) for rung in rungs]
        assert refuted == sorted(refuted, reverse=True)


def most(profile: Profile, design: Design) -> int:
    """Smallest number of correct guesses that refutes at 95 %."""
    low, high = -1, design.runs * design.guesses + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if refutes(profile, design, middle, 0.95) else (middle, high)
    return high


@pytest.mark.parametrize("mu", [0.4, 1.0, 1.5])
@pytest.mark.parametrize("design", [Design(1, 2_000, 200), Design(40, 50, 20), Design(100, 20, 20)])
def test_a_gaussian_is_rarely_refuted(mu: float, design: Design) -> None:
    """Refuted as rarely as the confidence says; with several runs and a third less noise, usually refuted."""
    rng = np.random.default_rng(1)

    def right(mu: float) -> int:
        coins = rng.random(design.runs * design.canaries) < 0.5
        return count_right(rng.standard_normal(len(coins)) + mu * (coins - 0.5), coins, design)

    limit = most(gaussian(mu), design)
    assert sum(right(mu) >= limit for _ in range(400)) <= 20 + 3 * math.sqrt(19)
    if design.runs > 1:
        assert sum(right(1.5 * mu) >= limit for _ in range(50)) >= 35


@pytest.mark.parametrize("told", [20, 30])
@pytest.mark.parametrize("runs", [1, 20])
def test_canaries_that_show_together_are_no_refutation(runs: int, told: int) -> None:
    """With probability 0.04 several of 30 coins are revealed at once: private with ε = 0 and one coin's δ."""
    rng = np.random.default_rng(2)
    how_often = 0.04
    limit = most(pairs((0.0, how_often * told / 30)), Design(runs, 30, told))
    shown = rng.random((4_000, runs)) < how_often
    right = np.where(shown, told, rng.binomial(told, 0.5, shown.shape)).sum(1)
    assert (right >= limit).mean() < 0.05 + 3 * math.sqrt(0.05 / 4_000)


def test_more_canaries_come_closer_to_the_claim() -> None:
    ladder = Ladder.around(Mechanism(1 / 0.925, 1.0, 1), 1, 1e-5)
    ideal = [plan(ladder, runs, 50, 0).ideal for runs in (5, 40, 400)]
    assert 0 < ideal[0] < ideal[1] < ideal[2] < 4.0
    assert ideal[2] > 0.8 * 4.0


def test_profiles_are_those_of_the_accountant() -> None:
    """δ at the claimed ε is the claimed δ; with sampling, the mean of it and a smaller one."""
    from pdsl.privacy import epsilon

    for m in (Mechanism(3.0, 1.0, 1, rate=1.0), Mechanism(1.2, 1.0, 1, rate=0.2), Mechanism(1.2, 1.0, 1, rate=0.01)):
        spent = epsilon(((m, 20),), 1e-5)
        profile = one_run._profile(m.sigma, m.rate or 1.0, 20)
        at = np.interp(spent, -np.log(profile.shrinkage), np.log(profile.deltas))
        assert 0.4e-5 < math.exp(at) < 1.15e-5
    assert profile.deltas[0] == pytest.approx(2 * norm.cdf(0.5 * math.sqrt(20) * 0.01 / 1.2) - 1, rel=0.2)


# Runs


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch": {"size": 75}},
        {"batch": {"size": 75, "sampler": "fixed"}},
        {"graph": {"kind": "star"}},
        {"privacy": {"randomness": "system"}},
        {"algorithm": {"name": "d-psgd"}},
        {"algorithm": {"name": "muffliato"}, "model": {"name": "mlp", "hidden": 4}},
        {"algorithm": {"name": "def-kt"}},
    ],
    ids=str,
)
def test_honest_runs_pass(changes: Settings) -> None:
    """The bound is close to the best possible with this number of canaries."""
    found = attack(experiment(settings(4.0, 4, **changes)), count=COUNT)
    assert canary_finding(found, found.claim).verdict is Verdict.PASS, found
    assert found.claim == pytest.approx(4.0, rel=0.01)
    assert found.epsilon > 0.7 * found.ideal
    assert found.null == 0
    assert found.positive > found.claim
    assert found.epsilon < found.epsilon_95


@pytest.mark.parametrize("epsilon", [8.0, 4.0, 2.0])
def test_nearly_half_of_an_honest_claim_is_found(epsilon: float) -> None:
    """With a fifth of the default number of canaries."""
    found = attack(experiment(settings(epsilon, 5)), count=4_000)
    assert 0.45 < found.ratio < 1


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_can_be_audited(name: str) -> None:
    found = attack(experiment(settings(8.0, 2, algorithm={"name": name})), count=500)
    assert 0.1 < found.ratio < 1
    assert found.positive > found.claim


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_refuted(name: str) -> None:
    changes, fault = FAULTS[name]
    with fault():
        found = attack(experiment(settings(2.0, 6, **changes)), count=COUNT)
    assert found.epsilon > found.ideal
    if name not in (
        "one noise for all rounds",
        "message not declared",
        "no noise on the last bias",
    ):  # too few canaries
        assert canary_finding(found, found.claim).verdict is Verdict.FAIL, found


@pytest.mark.parametrize("sampler", ["poisson", "fixed"])
def test_half_the_noise_is_refuted_whatever_the_batches(sampler: str) -> None:
    with less_noise(0.5):
        found = attack(experiment(settings(2.0, 5, batch={"size": 75, "sampler": sampler})), count=COUNT)
    assert canary_finding(found, found.claim).verdict is Verdict.FAIL, found


def test_so_many_rounds_as_the_claim_covers() -> None:
    e = experiment(settings(4.0, 6))
    part = attack(e, count=500, rounds=2)
    assert (part.rounds, attack(e, count=500).rounds) == (2, 6)
    assert part.claim < 3
    assert part == attack(e, count=500, rounds=2)
    assert part != attack(e, count=500, rounds=2, seed=1)


@pytest.mark.parametrize("sigma", [0.0, 1e-6])
def test_next_to_no_noise_refutes_any_claim(sigma: float) -> None:
    e = experiment(settings(4.0, 3, privacy={"sigma": sigma}))
    found = attack(e, count=1_000)
    assert canary_finding(found, claimed=2.0).verdict is Verdict.FAIL
    assert canary_finding(found, found.claim).verdict is Verdict.INCONCLUSIVE


def test_a_few_canaries_cannot_tell() -> None:
    found = attack(experiment(settings(8.0, 3)), count=30)
    assert canary_finding(found, found.claim).verdict is Verdict.INCONCLUSIVE


def test_runs_that_cannot_be_audited_are_refused() -> None:
    for changes, reason in (
        ({"privacy": {"mode": "none", "target_epsilon": None}}, "makes no claim"),
        ({"privacy": {"clipping": "batch"}}, "mask each other"),
    ):
        with pytest.raises(PdslError, match=reason):
            attack(experiment(settings(4.0, 3, **changes)))


def test_verdicts() -> None:
    found = CanaryResult(
        agent=0, count=9, runs=1, rounds=5, epsilon=1.0, epsilon_95=1.2, claim=2.0, ideal=1.1, null=0.0, positive=3.0
    )
    changes: list[tuple[dict[str, Any], Verdict]] = [
        ({}, Verdict.PASS),
        ({"epsilon": 2.01}, Verdict.FAIL),
        ({"null": 0.1}, Verdict.FAIL),
        ({"positive": 2.0}, Verdict.INCONCLUSIVE),
        ({"positive": 2.0, "epsilon": 2.01}, Verdict.FAIL),
    ]
    for change, verdict in changes:
        assert canary_finding(replace(found, **change), 2.0).verdict is verdict
    detail = canary_finding(found, 1.99999).detail
    assert "ε ≥ 1.00 (claimed 2, ratio 0.50, expected 1.10); unused coins 0.00, without noise 3.00" in detail
