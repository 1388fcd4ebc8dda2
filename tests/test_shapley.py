"""Plans against games with known values and the axioms; shares against equations 19 and 20; v(S) by plain torch."""

import copy
import itertools
import random
import threading
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from scipy.stats import chisquare
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from pdsl.models import Network
from pdsl.parallel import Workers
from pdsl.randomness import Streams
from pdsl.settings import ShapleySettings
from pdsl.shapley import (
    EXACT_LIMIT,
    LEAST_VARIANCE,
    Plan,
    Validation,
    draw_orders,
    exact,
    members,
    monte_carlo,
    remembered,
    shares,
    trust,
)
from tests.oracles import literal
from tests.oracles.games import GAMES, Game, Value, airport
from tests.refusals import refused

Floats = NDArray[np.float64]


def valued(plan: Plan, value: Value, players: int) -> Floats:
    return plan.phi(np.array([value(frozenset(members(s))) for s in plan.coalitions]), players)


def every_order(k: int) -> NDArray[np.int64]:  # [k!, k]
    return np.array(list(itertools.permutations(range(k))), dtype=np.int64)


def table(values: list[float]) -> Value:
    """A game given by its value for each bit mask."""
    return lambda S: values[sum(1 << j for j in S)]


# Plans


@pytest.mark.parametrize("game", GAMES, ids=lambda g: g.name)
def test_exact_gives_the_known_values(game: Game) -> None:
    assert valued(exact(game.players), game.value, game.players) == pytest.approx(game.shapley, abs=1e-12)


@pytest.mark.parametrize("game", GAMES, ids=lambda g: g.name)
def test_monte_carlo_over_all_permutations_is_exact(game: Game) -> None:
    plan = monte_carlo(every_order(game.players))
    assert valued(plan, game.value, game.players) == pytest.approx(game.shapley, abs=1e-12)


def test_exact_still_holds_at_its_limit() -> None:
    """The airport game's closed form: each step of the runway is split among those who need it."""
    k = EXACT_LIMIT
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


def plans(k: int, seed: int) -> list[Plan]:
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


# Shares


def minmax(floor: float) -> ShapleySettings:
    return ShapleySettings(weighting="minmax", floor=floor)


wild = st.one_of(
    st.floats(-1e300, 1e300),
    st.sampled_from([0.0, -0.0, 5e-324, 1e-300, -1e-300, 1e-17, 0.1, 1 / 3, 1e300, -1e300]),
)


@settings(deadline=None, max_examples=300)
@given(phi=st.lists(wild, min_size=1, max_size=12), floor=st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0])))
def test_shares_are_shares_whatever_the_values(phi: list[float], floor: float) -> None:
    k = len(phi)
    share = shares(np.array(phi), minmax(floor))
    assert np.isfinite(share).all()
    assert share.sum() == pytest.approx(1, abs=1e-12)
    assert (share >= floor / k * (1 - 1e-15) - 1e-300).all()  # below that, numbers have fewer digits
    for a, b in itertools.permutations(range(k), 2):
        if phi[a] <= phi[b]:
            assert share[a] <= share[b]


@settings(deadline=None, max_examples=100)
@given(phi=st.lists(st.fractions(-1, 1, max_denominator=2000), min_size=2, max_size=9))
def test_shares_without_a_floor_are_equations_19_and_20(phi: list[Fraction]) -> None:
    low, high = min(phi), max(phi)
    found = shares(np.array([float(p) for p in phi]), minmax(0.0))
    if low == high:  # 0/0
        assert (found == 1 / len(phi)).all()
        return
    phi_hat = [(p - low) / (high - low) for p in phi]
    assert found == pytest.approx([float(p / sum(phi_hat)) for p in phi_hat], abs=1e-9)


@pytest.mark.parametrize("floor", [0.0, 0.3, 1.0])
def test_equal_values_share_equally(floor: float) -> None:
    for value in (0.0, -0.25, 1e-300, 1e300):
        assert (shares(np.full(5, value), minmax(floor)) == 0.2).all()


def evidence(rounds: list[list[float]], memory: float = 0.9) -> NDArray[np.float64]:
    known = np.zeros((len(rounds[0]), 3))
    for phi in rounds:
        known = remembered(known, np.array(phi), memory)
    return known


def test_all_count_alike_until_there_is_evidence() -> None:
    assert (trust(evidence([[3.0, -5.0, 1.0]]), 0.9) == 1).all()
    assert (trust(evidence([[3.0, -5.0, 1.0]] * 2), 0.9) == 1).all()
    assert trust(evidence([[3.0, -5.0, 1.0]] * 3), 0.9).tolist() == [1, 0, 1]


def test_who_hurts_by_chance_counts_like_the_others_and_who_hurts_for_sure_counts_nothing() -> None:
    generator = np.random.default_rng(1)
    means = np.array([1.0, 0.5, 0.0, -2.0])
    known = evidence((means + generator.normal(size=(60, 4))).tolist())
    found = trust(known, 0.9)
    assert found[:2].tolist() == [1, 1]
    assert found[2] > 0.5
    assert found[3] == 0
    share = shares(np.zeros(4), ShapleySettings(floor=0.1), known)
    assert share.sum() == pytest.approx(1)
    assert share[3] == pytest.approx(0.1 / 4)


@given(arrays(np.float64, (7, 3), elements=st.floats(-1e6, 1e6)), st.floats(0.05, 0.99))
def test_trust_is_t_of_the_mean_cut_to_one_and_nought(phi: NDArray[np.float64], memory: float) -> None:
    known = np.zeros((3, 3))
    for row in phi:
        known = remembered(known, row, memory)
    found = trust(known, memory)
    assert ((found >= 0) & (found <= 1)).all()
    if memory > 1 - 1 / 7:  # a running mean so far
        sizes = np.abs(phi).mean(1, keepdims=True)
        relative = np.divide(phi, sizes, out=np.zeros_like(phi), where=sizes > 0)
        n = min(7, (1 + memory) / (1 - memory))
        error = np.sqrt(np.maximum(relative.var(0), LEAST_VARIANCE) / (n - 1))
        assert found == pytest.approx(np.clip((3 + relative.mean(0) / error) / 2, 0, 1), abs=1e-6)


def test_the_size_of_values_does_not_matter_only_how_members_compare() -> None:
    rounds = np.random.default_rng(1).normal(size=(9, 4))
    sizes = 10.0 ** -np.arange(9)[:, None]
    assert evidence(rounds.tolist()) == pytest.approx(evidence((rounds * sizes).tolist()))


def test_where_nobody_is_trusted_all_count_alike() -> None:
    known = evidence([[-1.0, -1.0]] * 9)
    assert shares(np.array([-1.0, -1.0]), ShapleySettings(floor=0), known).tolist() == [0.5, 0.5]


def test_values_of_nought_are_no_evidence() -> None:
    assert (trust(evidence([[0.0, 0.0]] * 9), 0.9) == 1).all()


def test_uniform_weighting_looks_at_no_values() -> None:
    assert (shares(np.array([0.0, 1.0, 5.0, 2.0]), ShapleySettings(weighting="uniform", floor=0)) == 0.25).all()


def test_a_floor_of_one_is_uniform_and_half_lies_between() -> None:
    phi = np.array([0.0, 1.0, 3.0])
    assert shares(phi, minmax(1.0)) == pytest.approx([1 / 3] * 3)
    assert shares(phi, minmax(0.0)) == pytest.approx([0, 1 / 4, 3 / 4])
    assert shares(phi, minmax(0.5)) == pytest.approx([1 / 6, 1 / 8 + 1 / 6, 3 / 8 + 1 / 6])


# The value function, on Q


class Counting(Network):
    """Counts the models it evaluates."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.evaluated = 0
        self._lock = threading.Lock()

    def logits(self, x: Tensor, inputs: Tensor) -> Tensor:
        with self._lock:
            self.evaluated += 1
        return super().logits(x, inputs)


def mlp() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def softmax() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 3))


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_accuracy(**settings: object) -> ShapleySettings:
    return ShapleySettings.model_validate({"value": "accuracy", **settings})


QUESTIONS = normal(0, 90, 4)
ANSWERS = torch.arange(90) % 3


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers(2) as pool:
        yield pool


def public_set(module: nn.Module, workers: Workers) -> tuple[Validation, Counting]:
    network = Counting(module)
    return Validation(network, QUESTIONS, ANSWERS, Streams(11), workers), network


def models(d: int, agents: int, k: int, seed: int = 3) -> tuple[Tensor, list[Tensor]]:
    """Agents' models [m, d], and k candidates each [k, d], far enough apart to answer differently."""
    x = normal(seed, agents, d)
    return x, [x[i] + normal(seed + 1 + i, k, d) for i in range(agents)]


def accuracy(module: nn.Module, x: Tensor) -> Fraction:
    """By plain torch."""
    model = copy.deepcopy(module)
    vector_to_parameters(x, model.parameters())
    with torch.no_grad():
        return Fraction(int((model(QUESTIONS).argmax(dim=1) == ANSWERS).sum()), len(ANSWERS))


@pytest.mark.parametrize("empty", ["model", "zero"])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_coalition_is_worth_its_mean_models_accuracy(k: int, empty: str, workers: Workers) -> None:
    module = mlp()
    Q, network = public_set(module, workers)
    x, candidates = models(network.d, 2, k)
    settings = by_accuracy(estimator="exact", empty=empty)
    for i, valuation in enumerate(Q.contributions(1, [0, 1], x, candidates, settings)):
        v_empty = accuracy(module, x[i]) if empty == "model" else Fraction(0)

        def v(S: frozenset[int], i: int = i, v_empty: Fraction = v_empty) -> Fraction:
            return accuracy(module, candidates[i][sorted(S)].mean(0)) if S else v_empty

        oracle = literal.exact_shapley(range(k), v)
        assert valuation.phi == pytest.approx([float(oracle[j]) for j in range(k)], abs=1e-12)
        assert valuation.coalitions == 2**k


def loss(module: nn.Module, x: Tensor) -> float:
    """By plain torch."""
    model = copy.deepcopy(module).double()
    vector_to_parameters(x.double(), model.parameters())
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(QUESTIONS.double()), ANSWERS))


@pytest.mark.parametrize("estimator", ["exact", "fast"])
def test_worth_may_be_minus_the_loss(estimator: str, workers: Workers) -> None:
    module = softmax()  # linear, so that 'fast' is exact too
    Q, network = public_set(module, workers)
    x, candidates = models(network.d, 1, 4)
    (valuation,) = Q.contributions(1, [0], x, candidates, ShapleySettings(estimator=estimator, value="loss"))

    def v(S: frozenset[int]) -> Fraction:
        return -Fraction(loss(module, candidates[0][sorted(S)].mean(0) if S else x[0]))

    oracle = literal.exact_shapley(range(4), v)
    assert valuation.phi == pytest.approx([float(oracle[j]) for j in range(4)], abs=3e-6)


def test_a_message_that_ruins_the_model_is_worth_little_but_finite(workers: Workers) -> None:
    Q, network = public_set(mlp(), workers)
    x, (candidates,) = models(network.d, 1, 3)
    candidates[1] = torch.nan
    for estimator in ("exact", "fast"):
        (valuation,) = Q.contributions(1, [0], x, [candidates], ShapleySettings(estimator=estimator, value="loss"))
        assert np.isfinite(valuation.phi).all()
        assert valuation.phi.argmin() == 1


@pytest.mark.parametrize(("k", "other"), [(3, "exact"), (7, "exact"), (12, "montecarlo")])
def test_fast_is_true_for_a_model_linear_in_its_parameters(k: int, other: str, workers: Workers) -> None:
    """Its logits are linear too, so the logits of a mean are the mean of logits; both draw the same permutations."""
    Q, network = public_set(softmax(), workers)
    x, candidates = models(network.d, 2, k)
    fast, true = (
        Q.contributions(4, [0, 1], x, candidates, by_accuracy(estimator=estimator, permutations=5))
        for estimator in ("fast", other)
    )
    for a, b in zip(fast, true, strict=True):
        assert np.ptp(b.phi) > 0.01
        assert a.phi == pytest.approx(b.phi, abs=1e-12)


def test_fast_evaluates_each_member_once(workers: Workers) -> None:
    Q, network = public_set(mlp(), workers)
    x, candidates = models(network.d, 2, 7)
    Q.contributions(1, [0, 1], x, candidates, by_accuracy(estimator="fast", empty="zero"))
    assert network.evaluated == 2 * 7


def test_auto_is_exact_up_to_5_members_and_fast_beyond(workers: Workers) -> None:
    Q, network = public_set(mlp(), workers)
    for k, estimator, evaluated, coalitions in [(5, "exact", 31 + 1, 32), (6, "fast", 6 + 1, 64)]:
        network.evaluated = 0
        x, candidates = models(network.d, 1, k)
        [valuation] = Q.contributions(1, [0], x, candidates, by_accuracy(estimator="auto"))
        assert (valuation.estimator, network.evaluated, valuation.coalitions) == (estimator, evaluated, coalitions)


@pytest.mark.parametrize("estimator", ["montecarlo", "fast"])
def test_beyond_10_members_permutations_are_looked_at(estimator: str, workers: Workers) -> None:
    Q, network = public_set(softmax(), workers)
    x, candidates = models(network.d, 1, 11)
    settings = by_accuracy(estimator=estimator, permutations=3)
    [valuation] = Q.contributions(1, [0], x, candidates, settings)
    assert 11 + 1 <= valuation.coalitions <= 3 * 11 + 1
    expected = valuation.coalitions - 1 if estimator == "montecarlo" else 11
    assert network.evaluated == expected + 1
    # Efficiency holds for any permutations, so it tells v of the whole coalition from outside.
    whole = accuracy(softmax(), candidates[0].mean(0)) - accuracy(softmax(), x[0])
    assert valuation.phi.sum() == pytest.approx(float(whole), abs=1e-12)


def test_permutations_differ_between_agents_and_rounds_and_come_again(workers: Workers) -> None:
    Q, network = public_set(mlp(), workers)
    x, [candidates, _] = models(network.d, 2, 8)
    settings = by_accuracy(estimator="montecarlo", permutations=2)

    def phi(t: int, agent: int) -> list[float]:
        return Q.contributions(t, [agent], x[:1], [candidates], settings)[0].phi.tolist()

    assert phi(1, 0) == phi(1, 0)
    assert phi(1, 0) != phi(2, 0)
    assert phi(1, 0) != phi(1, 1)


def test_exact_is_refused_beyond_its_limit(workers: Workers) -> None:
    Q, network = public_set(softmax(), workers)
    x, candidates = models(network.d, 1, EXACT_LIMIT + 1)
    with refused("shapley.estimator=exact", "15 members", "montecarlo or fast"):
        Q.contributions(1, [0], x, candidates, by_accuracy(estimator="exact"))
    assert network.evaluated == 0


def test_uniform_weighting_evaluates_nothing(workers: Workers) -> None:
    Q, network = public_set(mlp(), workers)
    x, candidates = models(network.d, 2, 3)
    valuations = Q.contributions(1, [0, 1], x, candidates, ShapleySettings(weighting="uniform"))
    assert network.evaluated == 0
    assert [v.coalitions for v in valuations] == [0, 0]
    assert [v.phi.tolist() for v in valuations] == [[0.0] * 3] * 2


@pytest.mark.parametrize(("estimator", "each"), [("exact", 2**3 - 1), ("fast", 3)])
def test_equal_candidates_are_evaluated_once(estimator: str, each: int, workers: Workers) -> None:
    """Agents 0 and 2 hold the same candidates, agents 0 and 1 the same model; v(∅) still is everybody's own."""
    Q, network = public_set(mlp(), workers)
    x, [a, b, _] = models(network.d, 3, 3)
    x[1] = x[0]
    candidates = [a, b, a.clone()]
    together = Q.contributions(1, range(3), x, candidates, by_accuracy(estimator=estimator))
    assert network.evaluated == 2 * each + 2
    for i in range(3):
        [alone] = Q.contributions(1, [i], x[i : i + 1], [candidates[i]], by_accuracy(estimator=estimator))
        assert together[i].phi.tolist() == alone.phi.tolist()
    assert together[0].phi.tolist() != together[2].phi.tolist()  # v(∅) differs


def test_the_same_member_twice_is_worth_the_same(workers: Workers) -> None:
    Q, network = public_set(mlp(), workers)
    x, [c] = models(network.d, 1, 4)
    c[3] = c[1]
    [valuation] = Q.contributions(1, [0], x, [c], by_accuracy(estimator="fast"))
    assert valuation.phi[3] == valuation.phi[1]


def test_neighbourhoods_may_differ_in_size(workers: Workers) -> None:
    Q, network = public_set(mlp(), workers)
    x, [a, b] = models(network.d, 2, 6)
    valuations = Q.contributions(1, [0, 1], x, [a, b[:2]], by_accuracy())
    assert [(v.estimator, len(v.phi)) for v in valuations] == [("fast", 6), ("exact", 2)]


def test_a_part_of_the_public_set_is_the_same_for_all_agents_and_another_each_round(workers: Workers) -> None:
    module = mlp()
    Q, network = public_set(module, workers)
    x, [candidates] = models(network.d, 1, 3)
    x = x.repeat(2, 1)
    by_round = []
    for t in (1, 2):
        settings = by_accuracy(estimator="exact", sample=20, empty="zero")
        a, b = Q.contributions(t, [0, 1], x, [candidates, candidates.clone()], settings)
        assert a.phi.tolist() == b.phi.tolist()
        whole = a.phi.sum() * 20  # v(N) in records of the part, by efficiency
        assert whole == pytest.approx(round(whole), abs=1e-9)
        by_round.append(a.phi.tolist())
    assert by_round[0] != by_round[1]


@pytest.mark.parametrize("sample", [len(ANSWERS), 10 * len(ANSWERS)])
def test_a_part_as_large_as_the_public_set_is_all_of_it(sample: int, workers: Workers) -> None:
    Q, network = public_set(mlp(), workers)
    x, candidates = models(network.d, 1, 3)
    part, all_of_it = (Q.contributions(1, [0], x, candidates, by_accuracy(sample=n))[0] for n in (sample, None))
    assert part.phi.tolist() == all_of_it.phi.tolist()


def test_the_part_is_worth_what_its_records_say(workers: Workers) -> None:
    """The mean over many rounds' parts is the value on all of Q."""
    Q, network = public_set(softmax(), workers)
    x, candidates = models(network.d, 1, 1)
    found = [Q.contributions(t, [0], x, candidates, by_accuracy(sample=30, empty="zero"))[0].phi[0] for t in range(300)]
    p = float(accuracy(softmax(), candidates[0][0]))
    without_replacement = (90 - 30) / (90 - 1)
    assert np.mean(found) == pytest.approx(p, abs=5 * np.sqrt(p * (1 - p) / 30 * without_replacement / 300))
