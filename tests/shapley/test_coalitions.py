"""Plans against games with known values and the axioms."""

import itertools
import random
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chisquare

from pdsl.settings import ShapleySettings
from pdsl.shapley.coalitions import MAX_EXACT, CoalitionPlan, draw_orders, exact, members, monte_carlo
from tests.oracles import literal
from tests.oracles.games import GAMES, Game, Value, airport

Floats = NDArray[np.float64]


def valued(plan: CoalitionPlan, value: Value, players: int) -> Floats:
    return plan.phi(np.array([value(frozenset(members(s))) for s in plan.coalitions]), players)


def every_order(k: int) -> NDArray[np.int64]:  # [k!, k]
    return np.array(list(itertools.permutations(range(k))), dtype=np.int64)


def table(values: list[float]) -> Value:
    """A game given by its value for each bit mask."""
    return lambda S: values[sum(1 << j for j in S)]


@pytest.mark.parametrize("game", GAMES, ids=lambda g: g.name)
def test_exact_gives_the_known_values(game: Game) -> None:
    assert valued(exact(game.players), game.value, game.players) == pytest.approx(game.shapley, abs=1e-12)


@pytest.mark.parametrize("game", GAMES, ids=lambda g: g.name)
def test_monte_carlo_over_all_permutations_is_exact(game: Game) -> None:
    plan = monte_carlo(every_order(game.players))
    assert valued(plan, game.value, game.players) == pytest.approx(game.shapley, abs=1e-12)


def test_exact_still_holds_at_its_limit() -> None:
    """The airport game's closed form: each step of the runway is split among those who need it."""
    k = MAX_EXACT
    costs = [float(c) for c in range(1, k + 1)]
    closed = np.cumsum([1 / (k - step) for step in range(k)])
    assert valued(exact(k), airport(costs), k) == pytest.approx(closed, abs=1e-9)


@pytest.mark.parametrize("game", [g for g in GAMES if g.players > 2], ids=lambda g: g.name)
def test_monte_carlo_errs_like_one_over_the_root_of_its_permutations(game: Game) -> None:
    """One permutation's marginals have a known variance (all k! orders); the mean of R of them has it over R."""
    k, rng = game.players, np.random.default_rng(5)
    orders = every_order(k)
    single = np.stack([valued(monte_carlo(order[None]), game.value, k) for order in orders])
    variance = single.var(axis=0)
    for R in (16, 256):
        estimates = np.stack(
            [valued(monte_carlo(orders[rng.integers(len(orders), size=R)]), game.value, k) for _ in range(40)]
        )
        errors = estimates - np.array(game.shapley)
        assert (np.abs(errors) <= 6 * np.sqrt(variance / R) + 1e-9).all()
        assert (errors**2).mean(axis=0) == pytest.approx(variance / R, rel=0.9, abs=1e-12)


def orders_of(k: int, R: int, how: str, seed: int) -> NDArray[np.int64]:
    wanted = ShapleySettings.model_validate({"permutations": R, "orders": how})
    return draw_orders(k, wanted, np.random.default_rng(seed))


def test_a_circle_puts_everyone_everywhere_twice() -> None:
    orders = orders_of(7, 14, "circular", 1)
    for place in range(7):
        assert np.bincount(orders[:, place]).tolist() == [2] * 7
    assert len(monte_carlo(orders).coalitions) == 7 * 6 + 2  # arcs of every length from every member, all and nobody


@pytest.mark.parametrize("R", [1, 3, 4, 6, 8, 19])
@pytest.mark.parametrize("how", ["circular", "independent"])
def test_as_many_orders_as_asked_for_and_each_uniform(how: str, R: int) -> None:
    orders = [orders_of(4, R, how, seed) for seed in range(1200)]
    assert {o.shape for o in orders} == {(R, 4)}
    for r in {0, R // 2, R - 1}:
        counts = Counter(tuple(o[r].tolist()) for o in orders)
        assert len(counts) == 24
        assert chisquare(list(counts.values())).pvalue > 1e-6


@pytest.mark.parametrize("game", [g for g in GAMES if g.players > 3], ids=lambda g: g.name)
def test_circular_orders_are_unbiased(game: Game) -> None:
    k = game.players
    estimates = [valued(monte_carlo(orders_of(k, 8, "circular", seed)), game.value, k) for seed in range(400)]
    error = np.std(estimates, axis=0) / np.sqrt(len(estimates))
    assert (np.abs(np.mean(estimates, axis=0) - game.shapley) <= 5 * error + 1e-9).all()


@pytest.mark.parametrize(("k", "R", "most"), [(8, 16, 0.7), (12, 20, 0.8), (12, 5, 0.9), (13, 6, 0.9)])
def test_circles_err_less_where_a_coalition_is_worth_the_mean_of_its_members(k: int, R: int, most: float) -> None:
    """To first order that is what messages are: a coalition's model is the mean of its members' models."""
    worth = np.random.default_rng(2).normal(size=k)

    def mean(S: frozenset[int]) -> float:
        return float(worth[sorted(S)].mean()) if S else 0.0

    true = valued(exact(k), mean, k)
    errors = {
        how: np.mean([(valued(monte_carlo(orders_of(k, R, how, seed)), mean, k) - true) ** 2 for seed in range(120)])
        for how in ("circular", "independent")
    }
    assert np.sqrt(errors["circular"]) < most * np.sqrt(errors["independent"])


@st.composite
def games(draw: st.DrawFn, most: int = 5) -> tuple[int, list[float]]:
    k = draw(st.integers(1, most))
    worth = st.floats(-100, 100, allow_subnormal=False)
    return k, draw(st.lists(worth, min_size=2**k, max_size=2**k))


def some_orders(k: int, seed: int) -> NDArray[np.int64]:
    rng = np.random.default_rng(seed)
    return rng.permuted(np.tile(np.arange(k), (int(rng.integers(1, 8)), 1)), axis=1)


def plans(k: int, seed: int) -> list[CoalitionPlan]:
    return [exact(k), monte_carlo(some_orders(k, seed))]


@settings(deadline=None, max_examples=60)
@given(game=games(), seed=st.integers(0, 2**32 - 1))
def test_efficiency(game: tuple[int, list[float]], seed: int) -> None:
    k, v = game
    for plan in plans(k, seed):
        assert valued(plan, table(v), k).sum() == pytest.approx(v[-1] - v[0], abs=1e-9)


@settings(deadline=None, max_examples=60)
@given(game=games(), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_a_null_player_is_worth_nothing(game: tuple[int, list[float]], seed: int, data: st.DataObject) -> None:
    k, v = game
    null = data.draw(st.integers(0, k - 1))
    without = [v[mask & ~(1 << null)] for mask in range(2**k)]
    for plan in plans(k, seed):
        assert valued(plan, table(without), k)[null] == 0


@settings(deadline=None, max_examples=60)
@given(game=games(), seed=st.integers(0, 2**32 - 1), other=st.randoms(use_true_random=False))
def test_additivity(game: tuple[int, list[float]], seed: int, other: random.Random) -> None:
    k, v = game
    w = [other.uniform(-100, 100) for _ in v]
    both = [a + b for a, b in zip(v, w, strict=True)]
    for plan in plans(k, seed):
        apart = valued(plan, table(v), k) + valued(plan, table(w), k)
        assert valued(plan, table(both), k) == pytest.approx(apart, abs=1e-9)


@settings(deadline=None, max_examples=60)
@given(k=st.integers(2, 6), seed=st.integers(0, 2**32 - 1))
def test_players_of_equal_worth_get_equal_values_to_the_last_bit(k: int, seed: int) -> None:
    """Values are counts of hits, as on Q. Monte Carlo too, when the orders it is given treat the two alike."""
    rng = np.random.default_rng(seed)
    hits = rng.integers(0, 2000, size=2**k)
    for mask in range(2**k):  # players 0 and 1 made interchangeable
        if mask & 3 == 2:
            hits[mask] = hits[mask ^ 3]
    orders = some_orders(k, seed)
    swapped = np.choose(orders, [1, 0, *range(2, k)])
    for plan in (exact(k), monte_carlo(np.concatenate([orders, swapped]))):
        phi = valued(plan, table(hits.tolist()), k)
        assert phi[0] == phi[1]


def test_exact_agrees_with_equation_18_in_fractions() -> None:
    rng = np.random.default_rng(2)
    for k in range(1, 7):
        v = rng.integers(0, 60, size=2**k).tolist()
        value = table([float(Fraction(hits, 60)) for hits in v])
        literally = literal.exact_shapley(range(k), lambda S, v=v: Fraction(v[sum(1 << j for j in S)], 60))
        assert valued(exact(k), value, k) == pytest.approx([float(literally[j]) for j in range(k)], abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(k=st.integers(1, 12), R=st.integers(1, 20), seed=st.integers(0, 2**32 - 1))
def test_monte_carlo_values_each_coalition_once(k: int, R: int, seed: int) -> None:
    orders = np.random.default_rng(seed).permuted(np.tile(np.arange(k), (R, 1)), axis=1)
    plan = monte_carlo(orders)
    prefixes = {frozenset(order[:n]) for order in orders.tolist() for n in range(k + 1)}
    assert len(plan.coalitions) == len(prefixes) <= R * k + 1
    assert {frozenset(members(s)) for s in plan.coalitions} == prefixes


def test_prefixes_are_shared() -> None:
    assert set(monte_carlo(np.array([[0, 1, 2], [0, 2, 1]])).coalitions) == {0b000, 0b001, 0b011, 0b101, 0b111}
    assert len(monte_carlo(np.array([[2, 0, 1]] * 9)).coalitions) == 4
