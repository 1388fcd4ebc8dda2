"""Shares against equations 19 and 20, and what evidence makes of them."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from pdsl.settings import ShapleySettings
from pdsl.shapley.coalitions import exact, members
from pdsl.shapley.trust import (
    EVIDENCE_FIELDS,
    FULL_TRUST_Z,
    MAX_CHANCE_HARM,
    MIN_VARIANCE,
    NO_TRUST_Z,
    individual_effect,
    shares,
    trust,
    update_evidence,
)

NOISE = 0.3 * np.random.default_rng(1).normal(size=(30, 3))


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


def values_of(own: NDArray[np.float64]) -> NDArray[np.float64]:
    """The Shapley values of the game in which a coalition is worth the mean of its members' own effects."""
    plan = exact(len(own))
    return plan.phi(np.array([own[members(s)].mean() if s else 0.0 for s in plan.coalitions]), len(own))


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8))
def test_by_itself_undoes_what_the_others_do_to_a_value(own: list[float]) -> None:
    assert individual_effect(values_of(np.array(own))) == pytest.approx(own, abs=1e-9)


def test_a_little_harm_is_seen_beside_a_great_one() -> None:
    own = np.array([1.0, 1.0, -0.5, -20.0])
    phi = values_of(own)
    assert phi[2] > 0 > individual_effect(phi)[2]
    noisy = own + 0.5 * np.random.default_rng(1).normal(size=(30, 4))
    assert trust(evidence([values_of(row).tolist() for row in noisy])).tolist() == [1, 1, 0, 0]


def evidence(
    rounds: list[list[float]], memory: float = 0.9, alone: list[list[float]] | None = None
) -> NDArray[np.float64]:
    """Evidence of rounds with these φ; the values of messages alone are those of a mean of effects, if not given."""
    known = np.zeros((len(rounds[0]), EVIDENCE_FIELDS))
    for n, phi in enumerate(rounds):
        own = individual_effect(np.array(phi)) if alone is None else np.array(alone[n])
        known = update_evidence(known, np.array(phi), own, memory)
    return known


def test_all_count_alike_until_there_is_evidence() -> None:
    assert (trust(evidence([[3.0, -5.0, 1.0]])) == 1).all()
    assert (trust(evidence([[3.0, -5.0, 1.0]] * 2)) == 1).all()
    assert trust(evidence([[3.0, -5.0, 1.0]] * 3)).tolist() == [1, 0, 1]


def test_who_hurts_by_chance_counts_like_the_others_and_who_hurts_for_sure_counts_nothing() -> None:
    means = np.array([1.0, 0.5, 0.0, -2.0])
    found = []
    for seed in range(30):
        noises = np.random.default_rng(seed).normal(size=(60, 4))
        known = evidence([values_of(means + noise).tolist() for noise in noises], 0.97)
        found.append(trust(known))
    assert (np.array(found)[:, :2] == 1).all()
    assert np.array(found)[:, 2].mean() > 0.5
    assert (np.array(found)[:, 3] == 0).all()
    share = shares(np.zeros(4), ShapleySettings(floor=0.1), known)
    assert share.sum() == pytest.approx(1)
    assert share[3] == pytest.approx(0.1 / 4)


def test_contribution_is_equal_shares_without_harm_and_minmax_of_the_trusted_with_harm() -> None:
    phi = np.array([0.1, 0.4, 0.2, 0.5])
    contribution = ShapleySettings(weighting="contribution")
    harmless = evidence([[1.0, 1.0, 1.0, 1.0]] * 5)
    assert shares(phi, contribution, harmless).tolist() == [0.25] * 4
    harmful = evidence([[1.0, 1.0, 1.0, -5.0]] * 5)
    assert trust(harmful).tolist() == [1, 1, 1, 0]
    assert shares(phi, contribution, harmful) == pytest.approx([0, 0.75, 0.25, 0])  # (φ − 0.1) of the trusted
    assert shares(phi, ShapleySettings(weighting="evidence"), harmful) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])


def test_contribution_with_equal_values_has_equal_shares_of_the_trusted() -> None:
    harmful = evidence([[1.0, 1.0, 1.0, -5.0]] * 5)
    found = shares(np.full(4, 0.3), ShapleySettings(weighting="contribution"), harmful)
    assert found == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])


def test_a_free_rider_next_to_a_harmful_member_has_no_share() -> None:
    harmful = evidence([[1.0, 1.0, 1.0, -5.0]] * 5)
    signals = (np.array([1.0, 1.0, 0.0, 1.0]), np.full(4, 0.01))
    found = shares(np.array([0.1, 0.4, 0.9, 0.5]), ShapleySettings(weighting="contribution"), harmful, signals)
    assert found == pytest.approx([0, 1, 0, 0])


@given(arrays(np.float64, (7, 3), elements=st.floats(-1e6, 1e6)), st.floats(0.05, 0.99))
def test_trust_is_t_of_the_weighted_mean_cut_to_one_and_nought(phi: NDArray[np.float64], memory: float) -> None:
    own = np.array([individual_effect(row) for row in phi])
    sizes = np.abs(own).mean(1)
    weights = sizes * memory ** np.arange(6, -1, -1.0)
    found = trust(evidence(phi.tolist(), memory))
    assert ((found >= 0) & (found <= 1)).all()
    n = weights.sum() ** 2 / max((weights**2).sum(), 1e-300)
    if sizes.min() > 1e-3 and sizes.max() < 5 * sizes.min() and abs(n - 2) > 1e-6:  # so that none is too heavy
        x = own / sizes[:, None]
        mean = np.average(x, axis=0, weights=weights)
        variance = np.average((x - mean) ** 2, axis=0, weights=weights)
        error = np.sqrt(np.maximum(variance, MIN_VARIANCE) / max(n - 1, 1))
        z = -mean / error * np.maximum(1, -mean / MAX_CHANCE_HARM)
        expected = np.clip((NO_TRUST_Z - z) / (NO_TRUST_Z - FULL_TRUST_Z), 0, 1) if n >= 2 else np.ones(3)
        assert found[variance > 1e-6] == pytest.approx(expected[variance > 1e-6], abs=1e-4)


def test_the_unit_of_values_does_not_matter() -> None:
    rounds = np.random.default_rng(1).normal(size=(9, 4))
    assert trust(evidence(rounds.tolist())) == pytest.approx(trust(evidence((1e-9 * rounds).tolist())))


def test_rounds_in_which_little_happens_say_little() -> None:
    """Late in training some honest member is below zero in every round; what it did before counts more."""
    early = [values_of(np.array([1.0, 0.5, -1.0]) + noise).tolist() for noise in NOISE[:8]]
    late = [values_of(0.01 * (np.array([1.0, -1.0, -1.0]) + noise)).tolist() for noise in NOISE[8:]]
    assert trust(evidence(early + late, 0.97)).tolist() == [1, 1, 0]


def test_a_message_that_ruins_every_coalition_does_not_take_the_others_with_it() -> None:
    """v(S) = −20 with the liar in S: the others' values are tiny, and by themselves they seem to hurt as well."""
    plan = exact(6)
    rng = np.random.default_rng(1)
    rounds, alone = [], []
    for _ in range(10):
        own = 0.01 * (1 + rng.normal(size=6))
        alone.append([*own[:5].tolist(), -20.0])
        v = [-20.0 if s >> 5 else (own[members(s)].mean() if s else 0.0) for s in plan.coalitions]
        rounds.append(plan.phi(np.array(v), 6).tolist())
    known = evidence(rounds, 0.97, alone)
    assert not trust(known).any()
    assert shares(np.zeros(6), ShapleySettings(), known) == pytest.approx([0.2] * 5 + [0])


def test_one_round_cannot_decide_about_everybody() -> None:
    """Whoever makes one round large does not outweigh all others with it."""
    honest = [values_of(np.array([1.0, 0.5, 0.2]) + noise).tolist() for noise in NOISE[:10]]
    attack = values_of(np.array([-1.0, -1.0, -1e6])).tolist()
    assert trust(evidence([*honest, attack], 0.97))[:2].tolist() == [1, 1]
    first = evidence([attack, *honest[:3]], 0.97)
    assert (trust(first) == 1).all()  # one round outweighs all others: nothing can be said yet


def test_no_step_is_taken_along_messages_that_all_do_harm() -> None:
    rounds = [values_of(np.array([-1.0, -0.8, -0.6]) + 0.1 * noise).tolist() for noise in NOISE]
    known = evidence(rounds, 0.97)
    assert shares(np.zeros(3), ShapleySettings(floor=0), known).tolist() == [0, 0, 0]
    assert shares(np.zeros(3), ShapleySettings(floor=0.3), known) == pytest.approx([0.1] * 3)


@pytest.mark.parametrize(("k", "ruinous"), [(k, m) for k in range(2, 13) for m in range(1, k // 2 + 1)])
def test_ruinous_messages_leave_the_others_trusted_in_any_neighbourhood(k: int, ruinous: int) -> None:
    phi = np.zeros(k)
    phi[-ruinous:] = -20.0 / ruinous  # v(S) = −20 for every coalition with one of the last members, else 0
    alone = np.where(phi < 0, -20.0, 0.0)
    known = evidence([phi.tolist()] * 10, 0.97, [alone.tolist()] * 10)
    honest = k - ruinous
    assert shares(np.zeros(k), ShapleySettings(), known) == pytest.approx([1 / honest] * honest + [0] * ruinous)


def test_values_of_nought_are_no_evidence() -> None:
    assert (trust(evidence([[0.0, 0.0]] * 9)) == 1).all()


def test_uniform_weighting_looks_at_no_values() -> None:
    assert (shares(np.array([0.0, 1.0, 5.0, 2.0]), ShapleySettings(weighting="uniform", floor=0)) == 0.25).all()


def test_a_floor_of_one_is_uniform_and_half_lies_between() -> None:
    phi = np.array([0.0, 1.0, 3.0])
    assert shares(phi, minmax(1.0)) == pytest.approx([1 / 3] * 3)
    assert shares(phi, minmax(0.0)) == pytest.approx([0, 1 / 4, 3 / 4])
    assert shares(phi, minmax(0.5)) == pytest.approx([1 / 6, 1 / 8 + 1 / 6, 3 / 8 + 1 / 6])
