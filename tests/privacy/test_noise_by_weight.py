"""Noise by the weight of an edge: as private as the same on all, and no more of it in a mean on any graph."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsl import topology
from pdsl.algorithms import ALGORITHMS
from pdsl.auditing import Finding, Verdict
from pdsl.auditing import audit_experiment as audit
from pdsl.config import validate
from pdsl.peer.ledger import PeerLedger
from pdsl.privacy import Ledger, Mechanism, by_weight, epsilon
from pdsl.privacy.noise import Noise
from pdsl.privacy.statement import adversaries
from pdsl.topology import Graph
from pdsl.training.experiment import Experiment, prepare
from pdsl.training.trainer import CompletedRound, rounds
from tests.helpers.refusals import refused

pytestmark = pytest.mark.slow

UNEVEN = [topology.star(6), topology.line(5), topology.grid(12), topology.bipartite(10)]


def experiment(**algorithm: Any) -> Experiment:
    values = {
        "rounds": 3,
        "graph": {"kind": "star", "agents": 4},
        "model": {"name": "softmax"},
        "batch": {"size": 24},
        "algorithm": {"name": "pdsl", **algorithm},
        "privacy": {"target_epsilon": 3.0},
        "engine": {"workers": 1},
    }
    return prepare(validate(values, "test"))


weights = st.lists(st.floats(0.01, 1), min_size=1, max_size=9).map(lambda w: np.array(w) / sum(w))


@given(weights)
def test_precisions_are_as_the_weights_and_add_up_to_those_of_equal_messages(omega: np.ndarray) -> None:
    k, sigma_scale = len(omega), by_weight(omega) or (1.0,) * len(omega)
    assert sum(s**-2 for s in sigma_scale) == pytest.approx(k)
    assert [s**-2 / k for s in sigma_scale] == pytest.approx(omega, rel=1e-6)
    assert sum((w * s) ** 2 for w, s in zip(omega, sigma_scale, strict=True)) == pytest.approx(1 / k)  # σ²/k in a mean


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=9), st.floats(0.1, 5), st.floats(0.01, 2))
def test_a_round_is_one_gaussian_of_all_messages_over_their_own_sigma(
    sigma_scale: list[float], sigma: float, delta: float
) -> None:
    m = Mechanism(sigma, delta, len(sigma_scale), sigma_scale=tuple(sigma_scale))
    moved = math.sqrt(sum((delta / s) ** 2 for s in m.sigmas))  # by one record, in deviations
    assert m.noise_multiplier == pytest.approx(1 / moved)


def test_stretch_must_fit_the_messages() -> None:
    for wrong in [(1.0,), (1.0, 0.0), (1.0, -1.0), (1.0, math.inf), (1.0, math.nan)]:
        with refused("sigma_scale"):
            Mechanism(1.0, 1.0, 2, sigma_scale=wrong)


@pytest.mark.parametrize("graph", UNEVEN, ids=lambda g: g.name)
def test_any_graph_has_the_noise_of_the_full_one_in_the_mean(graph: Graph) -> None:
    """Noise of (1/M)·Σ_i Σ_j ω_ij ĝ_ji, agents having Δ = 1 and z = 1: M agents that send one message each have 1/M."""
    pdsl = ALGORITHMS["pdsl"]()
    releases = [pdsl.releases_in(graph, i) for i in range(graph.agents)]
    variance = 0.0
    for i, release in enumerate(releases):
        own = graph.omega[graph.offsets[i] : graph.offsets[i + 1]]  # W is symmetric: what others give i's messages
        sigmas = math.sqrt(release.messages) * np.array(release.sigma_scale or np.ones(release.messages))
        variance += float(((own * sigmas) ** 2).sum())
    assert variance / graph.agents**2 == pytest.approx(1 / graph.agents)


@pytest.mark.parametrize("graph", [topology.ring(7), topology.full(5)], ids=lambda g: g.name)
def test_where_all_weigh_the_same_all_messages_are_alike(graph: Graph) -> None:
    assert not any(ALGORITHMS["pdsl"]().releases_in(graph, i).sigma_scale for i in range(graph.agents))


def test_all_agents_spend_the_same_with_one_sigma_or_several() -> None:
    for e in (experiment(), experiment(noise="equal")):
        assert e.mechanisms is not None
        spent = [epsilon(((m, 3),), 1e-5) for m in e.mechanisms]
        assert max(spent) <= 3.0
        assert min(spent) >= 0.985 * 3.0


def test_a_sigma_that_was_asked_for_is_everybodys() -> None:
    values = {"graph": {"kind": "star"}, "algorithm": {"name": "pdsl"}, "privacy": {"mode": "noise", "sigma": 0.5}}
    e = prepare(validate(values, "test"))
    assert e.mechanisms is not None
    assert all(m.sigmas == (0.5,) * m.messages for m in e.mechanisms)


def findings(e: Experiment) -> dict[str, Finding]:
    steps: list[CompletedRound] = list(rounds(e))
    ledger = steps[-1].ledger
    assert ledger is not None
    found = audit(e, ledger, [step.row for step in steps], ledger.epsilon_per_agent)
    return {finding.check: finding for finding in found}


def test_the_audit_passes_it() -> None:
    assert {f.verdict for f in findings(experiment()).values()} == {Verdict.PASS}


def test_the_audit_sees_noise_that_went_to_the_wrong_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    """All factors are there, so that an agent's messages have the right noise in the mean, but on other edges."""
    e = experiment()
    honest = Noise.add

    def swapped(self: Noise, *given: Any, **named: Any) -> Any:
        turned = [dict(zip(of, [*of.values()][::-1], strict=True)) for of in self.sigma_scale]
        return honest(Noise(self.sigma, self.streams, self.workers, sigma_scale=turned), *given, **named)

    monkeypatch.setattr(Noise, "add", swapped)
    assert findings(e)["σ of the noise"].verdict is Verdict.FAIL


def test_the_ledger_comes_back_from_its_file() -> None:
    e = experiment()
    ledger = list(rounds(e))[-1].ledger
    assert ledger is not None and e.mechanisms is not None
    assert Ledger.from_json(ledger.to_json(costs=True), "here") == ledger
    hub, leaf = e.mechanisms[0], e.mechanisms[1]
    assert not hub.sigma_scale  # it gives its four members ¼ each
    assert leaf.sigma_scale  # ¼ for the hub, ¾ for itself
    assert set(adversaries(ledger).values()) == {ledger.epsilon}


def test_an_account_charges_each_neighbour_its_own_noise() -> None:
    sigma_scale = (1.5, 0.5, 2.0)
    mechanism = Mechanism(0.05, 0.01, 3, rate=0.1, sigma_scale=sigma_scale)
    account = PeerLedger(1e-5, 8.0, mechanism, ALGORITHMS["pdsl"](), 100, 1, (0, 1, 4), {})
    assert account.mechanism_with(frozenset({0, 4})) == mechanism
    assert account.mechanism_with(frozenset({4})).sigmas == pytest.approx([0.025, 0.1])
    assert account.mechanism_with(frozenset()).sigmas == pytest.approx([0.025])
    spent = account.charge(1, 1, frozenset({4}))
    assert account.restore(spent.to_json(list("abcde")).encode(), "here") == spent
    with refused("not this organisation's ledger"):
        PeerLedger(1e-5, 8.0, mechanism, ALGORITHMS["pdsl"](), 100, 1, (0, 1), {}).restore(
            spent.to_json(list("abcde")).encode(), "here"
        )
