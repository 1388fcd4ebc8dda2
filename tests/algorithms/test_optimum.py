"""Algorithms on quadratics against linear algebra: the common optimum, D-PSGD's biased limit, and what gossip does.

Optimum and limit are linear solves; the rate of agreement is an eigenvalue; accelerated gossip is a polynomial of W.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from pdsl import topology
from pdsl.algorithms import PDSL, Algorithm
from pdsl.algorithms.d_psgd import DPSGD
from pdsl.algorithms.dp_admm import DPADMM
from pdsl.algorithms.gradient_tracking import GradientTracking
from pdsl.algorithms.gut import GUT
from pdsl.algorithms.mixing import (
    accelerated_gossip,
    best_omega,
    chebyshev_omega,
    gossip_steps_to_agree,
    remaining_disagreement,
)
from pdsl.algorithms.momentum_tracking import MomentumTracking
from pdsl.algorithms.mspd import MSPD
from pdsl.algorithms.muffliato import Muffliato
from pdsl.algorithms.net_fleet import NetFleet
from pdsl.engine import LocalEngine
from pdsl.topology import Graph
from tests.oracles.quadratics import Flat, heterogeneous, mixing, polynomial, run, start

M, D = 8, 5
RING = topology.ring(M)
PROBLEM = heterogeneous(M, D, seed=1)
OPTIMUM = PROBLEM.optimum()
X0 = start(M, D)

each_graph = pytest.mark.parametrize(
    "graph",
    [topology.ring(8), topology.line(9), topology.grid(12), topology.full(7), topology.star(6)],
    ids=lambda g: f"{g.name} of {g.agents}",
)


def error(x: Tensor) -> float:
    """Of the agent that is furthest from the optimum, relative."""
    return float((x - OPTIMUM).norm(dim=1).max() / OPTIMUM.norm())


def test_the_optimum_is_nobodys_own() -> None:
    """Gradients vanish there in the sum, and at no agent by itself: the problem is heterogeneous."""
    at_optimum = PROBLEM.gradients(1, torch.arange(M), OPTIMUM.expand(M, D))
    assert float(at_optimum.sum(0).norm()) < 1e-12
    assert float(at_optimum.norm(dim=1).min()) > 0.1


@pytest.mark.parametrize(
    ("algorithm", "T"),
    [
        (GradientTracking(), 300),
        (GradientTracking(learning_rate=0.1), 200),
        (MomentumTracking(), 300),
        (MomentumTracking(learning_rate=0.05), 200),
        (GUT(learning_rate=0.5), 120),
        (GUT(learning_rate=0.25, scaling=1.0, averaging=0.5), 120),
        (NetFleet(learning_rate=0.1, local_steps=2), 220),
        (NetFleet(learning_rate=0.05, local_steps=3), 220),
        (MSPD(), 350),
        (MSPD(learning_rate=0.5, local_steps=4, gossip_steps=3), 80),
        (MSPD(learning_rate=0.5, gossip_steps=1, dual_rate=1.0), 80),
        (DPADMM(), 220),
        (DPADMM(learning_rate=0.3, local_steps=4), 130),
    ],
    ids=lambda value: value.name if isinstance(value, Algorithm) else None,
)
def test_every_agent_reaches_the_common_optimum(algorithm: Algorithm, T: int) -> None:
    assert error(run(algorithm, PROBLEM, RING, T, X0).x[-1]) <= 1e-6


def test_d_psgd_stalls_where_linear_algebra_says_and_ever_nearer_with_smaller_steps() -> None:
    away = []
    for gamma in (0.05, 0.025):
        limit = PROBLEM.stalled(mixing(RING), gamma)
        reached = run(DPSGD(learning_rate=gamma), PROBLEM, RING, int(24 / gamma), X0).x[-1]
        torch.testing.assert_close(reached, limit, rtol=0, atol=1e-8)
        away.append(float((reached - OPTIMUM).norm()))
        assert error(reached) > 0.05
    assert away[0] / away[1] == pytest.approx(2, rel=0.15)


def test_d_psgd_s_bias_is_in_proportion_to_small_steps() -> None:
    """By linear algebra alone, where rounds would be too many: halving γ halves it."""
    away = [float((PROBLEM.stalled(mixing(RING), gamma) - OPTIMUM).norm()) for gamma in (2e-4, 1e-4)]
    assert away[0] / away[1] == pytest.approx(2, rel=1e-2)


@pytest.mark.parametrize("scaling", [0.0, 0.3, 0.6, 0.9])
def test_gut_keeps_the_bias_of_the_steps_it_does_not_correct(scaling: float) -> None:
    """With μ < 1 the limit is D-PSGD's with steps (1 − μ)γ, on W' = I + a(W − I): between D-PSGD's and none.

    On W itself D-PSGD's is the smaller one up to μ = 0.6: half the gossip nearly doubles the bias.
    """
    gamma, lazy = 0.25, 0.5 * (mixing(RING) + torch.eye(M, dtype=torch.float64))
    reached = run(GUT(learning_rate=gamma, scaling=scaling, averaging=0.5), PROBLEM, RING, 600, X0).x[-1]
    torch.testing.assert_close(reached, PROBLEM.stalled(lazy, (1 - scaling) * gamma), rtol=0, atol=1e-8)
    assert 0.01 < error(reached) <= error(PROBLEM.stalled(lazy, gamma)) * (1 + 1e-8)
    assert scaling == 0 or error(reached) < 0.95 * error(PROBLEM.stalled(lazy, gamma))


def apart(x: Tensor) -> float:
    return float((x - x.mean(0)).norm())


@pytest.mark.parametrize(
    "graph",
    [RING, topology.full(M), topology.erdos_renyi(12, 0.3, seed=1), topology.complete_bipartite(6)],
    ids=lambda g: f"{g.name} of {g.agents}",
)
def test_without_gradients_agents_come_to_agree_at_the_rate_of_the_spectral_gap(graph: Graph) -> None:
    """Never slower from anywhere, and no faster from the slowest eigenvector."""
    n, rate, rounding = graph.agents, 1 - graph.spectral_gap, 1e-12
    x = run(DPSGD(), Flat(), graph, 20, start(n, D)).x
    assert all(apart(x_t) <= rate**t * apart(x[0]) + rounding for t, x_t in enumerate(x))
    torch.testing.assert_close(x[-1].mean(0), x[0].mean(0), rtol=0, atol=rounding)

    values, vectors = np.linalg.eigh(graph.W)
    slowest = torch.from_numpy(vectors[:, np.abs(values[:-1]).argmax()])
    x = run(DPSGD(), Flat(), graph, 20, slowest[:, None] + 1.0).x
    assert [apart(x_t) for x_t in x] == pytest.approx([rate**t for t in range(21)], rel=1e-9, abs=rounding)


@each_graph
@pytest.mark.parametrize("K", [1, 2, 3, 5, 10, 30, 100])
def test_accelerated_gossip_is_a_polynomial_of_W_and_keeps_the_mean(graph: Graph, K: int) -> None:  # noqa: N802
    """In float32 the mean drifts by up to 1e-7 of the scale in each round of gossip: 1e-6 holds up to 10 rounds."""
    x = start(graph.agents, 40, seed=K) + 3.0
    scale = float(x.abs().max())
    found = accelerated_gossip(LocalEngine(graph), x, K, chebyshev_omega(graph.spectral_gap))
    right = polynomial(graph.W, K, chebyshev_omega(graph.spectral_gap)) @ x.numpy()
    np.testing.assert_allclose(found.numpy(), right, rtol=0, atol=1e-12 * scale)
    torch.testing.assert_close(found.mean(0), x.mean(0), rtol=0, atol=1e-12 * scale)

    single = accelerated_gossip(LocalEngine(graph), x.float(), K, chebyshev_omega(graph.spectral_gap))
    assert single.dtype == torch.float32
    drift = (single.double().mean(0) - x.float().double().mean(0)).abs().max()
    assert float(drift) <= max(1e-6, 1e-7 * K) * scale


def test_accelerated_gossip_is_faster_than_gossip() -> None:
    ring = topology.ring(32)
    x, K = start(32, D), 60
    plain = np.linalg.matrix_power(ring.W, K) @ x.numpy()
    found = accelerated_gossip(LocalEngine(ring), x, K, chebyshev_omega(ring.spectral_gap))
    assert apart(found) < 0.01 * apart(torch.from_numpy(plain))


def test_the_weight_of_chebyshev_s_recursion() -> None:
    """ω = 2 / (1 + √(1 − ρ²)) in the usual form, ρ = 1 − λ/2; next to 1 where ρ is next to 0, below 2 always."""
    for lam in (1e-6, 0.1, 1 / 3, 0.7, 1.0):
        rho = 1 - lam / 2
        assert chebyshev_omega(lam) == pytest.approx(2 / (1 + math.sqrt(1 - rho**2)), rel=1e-9)
        assert 1 < chebyshev_omega(lam) < 2


@pytest.mark.parametrize("n", [2, 5, 16])
def test_one_round_of_gossip_on_the_full_graph_is_the_mean(n: int) -> None:
    graph, x = topology.full(n), start(n, D)
    assert gossip_steps_to_agree(graph, 0.3) == 1
    found = accelerated_gossip(LocalEngine(graph), x, 1, chebyshev_omega(graph.spectral_gap))
    torch.testing.assert_close(found, x.mean(0).expand(n, D), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("graph", "sigma", "K"),
    [
        # λ = 1 − (1 + 2 cos 45°)/3 = 0.195262, √λ = 0.441885; ln 8 = 2.07944, over √λ 4.706
        (topology.ring(8), 1.0, 5),
        (topology.ring(8), 0.5, 5),
        (topology.ring(8), 100.0, 5),
        (topology.ring(8), 0.0, 5),  # no noise: as if σ were at least ½
        (topology.ring(8), 0.25, 8),  # ln(8 · ¼/0.0625) = ln 32 = 3.46574, over √λ 7.843
        (topology.ring(8), 0.05, 16),  # ln(8 · ¼/0.0025) = ln 800 = 6.68461, over √λ 15.13
        (topology.ring(4), 1.0, 2),  # λ = 2/3: ln 4/0.81650 = 1.698
        (topology.star(5), 1.0, 4),  # λ = 1/5: ln 5/0.44721 = 3.599
        (topology.line(3), 1.0, 2),  # λ = 1/3: ln 3/0.57735 = 1.903
        (topology.line(2), 1.0, 1),  # two agents with ω = ½ are a full graph
        (topology.ring(3), 0.01, 1),  # and so are three on a ring
        (topology.full(50), 0.01, 1),
    ],
    ids=lambda value: value.describe().split(",")[0] if isinstance(value, Graph) else None,
)
def test_gossip_steps_to_agree_by_hand(graph: Graph, sigma: float, K: int) -> None:
    assert gossip_steps_to_agree(graph, sigma) == K
    assert Muffliato().sends(graph, sigma) == K
    assert Muffliato(gossip_steps=3).sends(graph, sigma) == 3


@pytest.mark.parametrize("K", [1, 2, 3, 5, 10, 20])
@pytest.mark.parametrize(
    "graph",
    [*map(topology.ring, (5, 10, 50, 300)), topology.line(60), topology.star(40), topology.grid(64)],
    ids=lambda g: f"{g.name} of {g.agents}",
)
def test_more_gossip_never_leaves_more_than_plain_gossip_does(graph: Graph, K: int) -> None:
    """Also where there are too few rounds for the graph's gap. White noise is mixed, and what is left is compared."""
    omega = best_omega(graph, K)
    noise = torch.from_numpy(np.random.default_rng(K).standard_normal((graph.agents, 2000)))
    left = accelerated_gossip(LocalEngine(graph), noise, K, omega)
    measured = float((left - left.mean(0)).square().sum() / (graph.agents - 1) / 2000)
    assert measured == pytest.approx(remaining_disagreement(graph, K, omega), rel=0.2)
    plain = (np.linalg.eigvalsh(graph.W)[:-1] ** (2 * K)).mean()
    assert remaining_disagreement(graph, K, omega) <= plain * (1 + 1e-9)


@pytest.mark.parametrize("graph", [topology.ring(10), topology.bipartite(10), topology.star(10)], ids=lambda g: g.name)
def test_with_rounds_enough_the_gap_decides(graph: Graph) -> None:
    assert best_omega(graph, gossip_steps_to_agree(graph)) == chebyshev_omega(graph.spectral_gap)


def test_pdsl_mixes_models_until_they_agree_but_not_for_ever() -> None:
    assert PDSL().sends(topology.full(50), 1.0) == 3 + 1
    assert PDSL().sends(topology.ring(8), 1.0) == PDSL().sends(topology.ring(8), 0.05) == 3 + 5
    assert PDSL().sends(topology.ring(100), 1.0) == 3 + 10
    assert PDSL(gossip_steps=1).sends(topology.ring(100), 1.0) == 4


@pytest.mark.parametrize("sigma", [0.3, 1.0])
@pytest.mark.parametrize("n", [8, 16, 32])
def test_default_gossip_leaves_little_more_error_than_the_exact_mean_of_noisy_values(n: int, sigma: float) -> None:
    """MUFFLIATO's bound for (1/n) Σ_i (x_i − mean)² is 3σ²/n. On rings even 1.1 σ²/n holds, and σ²/n nobody can avoid.

    Half the ring has 0 and half has 1: of all values in [0, 1] nearly the slowest to agree, ½ from their mean.
    """
    ring, repetitions = topology.ring(n), 4000
    values = (torch.arange(n) < n // 2).double()
    noise = torch.from_numpy(np.random.default_rng(n).standard_normal((n, repetitions)))
    found = gossiped(ring, values[:, None] + sigma * noise, sigma)
    measured, expected = float((found - values.mean()).square().mean()), expected_error(ring, values, sigma)
    assert measured <= 3 * sigma**2 / n
    assert measured == pytest.approx(expected, rel=0.1)  # its standard deviation is 2 %
    assert sigma**2 / n < expected <= 1.1 * sigma**2 / n


def gossiped(graph: Graph, x: Tensor, sigma: float) -> Tensor:
    """What MUFFLIATO makes of x in a round without gradients, told that the noise is σ."""
    return run(Muffliato(), Flat(), graph, 1, x, noise_multiplier=sigma).x[-1]


def expected_error(graph: Graph, values: Tensor, sigma: float) -> float:
    """E (1/n) Σ_i (x_i − mean)² after the default gossip P: what is left of the spread, and of the noise."""
    n = graph.agents
    P = gossiped(graph, torch.eye(n, dtype=torch.float64), sigma)
    return float((P @ (values - values.mean())).square().sum() + sigma**2 * P.square().sum()) / n


@pytest.mark.parametrize("sigma", [0.3, 1.0])
@pytest.mark.parametrize(
    "graph",
    [
        topology.line(16), topology.grid(16), topology.star(16), topology.torus(16), topology.bipartite(10),
        topology.exponential(16), topology.erdos_renyi(16, 0.3, seed=1), topology.complete_bipartite(20),
        topology.complete_bipartite(64), topology.from_matrix([[0.1, 0.9], [0.9, 0.1]]),
    ],
    ids=lambda g: f"{g.name} of {g.agents}",
)  # fmt: skip
def test_default_gossip_is_enough_on_other_graphs(graph: Graph, sigma: float) -> None:
    """The values are ½ from their mean along the eigenvector that gossip damps least: no others can do worse."""
    n = graph.agents
    left, vectors = torch.linalg.eigh(gossiped(graph, torch.eye(n, dtype=torch.float64), sigma) - 1 / n)
    values = math.sqrt(n) / 2 * vectors[:, left.abs().argmax()]
    assert expected_error(graph, values, sigma) <= 3 * sigma**2 / n
