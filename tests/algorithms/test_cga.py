"""CGA's quadratic program against scipy's general solvers and the conditions of Karush, Kuhn and Tucker.

minimise ½ ‖Mᵀv + g‖² + ½ 1e-12 ‖v‖² over v ≥ ½, in units of the largest number in M and g.
"""

from functools import cache
from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import lsq_linear, minimize
from torch import Tensor

from pdsl import topology
from pdsl.algorithms.cga import CGA, project, solve_weights
from pdsl.topology import Graph
from tests.oracles.quadratics import Flat, Quadratics, heterogeneous, mixing, run, start

Floats = NDArray[np.float64]
Instance = tuple[Floats, Floats]  # M [k, d], g [d]
RIDGE = 1e-12


def scaled(M: Floats, g: Floats) -> Instance:
    scale = max(np.abs(M).max(), np.abs(g).max()) or 1.0
    return M / scale, g / scale


def objective(M: Floats, g: Floats, v: Floats) -> float:
    M, g = scaled(M, g)
    return float(((M.T @ v + g) ** 2).sum() + RIDGE * (v**2).sum()) / 2


def length(M: Floats, g: Floats, v: Floats) -> float:
    """‖Mᵀv + g‖."""
    M, g = scaled(M, g)
    return float(np.linalg.norm(M.T @ v + g))


def by_slsqp(M: Floats, g: Floats) -> Floats:
    P, q, k = M @ M.T, M @ g, len(M)
    found = minimize(
        lambda v: (v @ P @ v / 2 + q @ v, P @ v + q),
        x0=np.ones(k),
        jac=True,
        bounds=[(0.5, None)] * k,
        method="SLSQP",
        options={"ftol": 1e-16, "maxiter": 1000},
    )
    v: Floats = found.x
    return v


def by_least_squares(M: Floats, g: Floats) -> Floats:
    """The ridge as k more rows: then the problem has one minimum, whatever M."""
    M, g = scaled(M, g)
    k = len(M)
    A, b = np.vstack([M.T, np.sqrt(RIDGE) * np.eye(k)]), np.concatenate([-g, np.zeros(k)])
    v: Floats = lsq_linear(A, b, bounds=(0.5, np.inf), method="bvls", tol=1e-15).x
    return v


def assert_optimal(M: Floats, g: Floats, v: Floats, tolerance: float = 1e-7) -> None:
    """v is feasible; the slope of the objective is nowhere negative, and zero where v is off its bound."""
    assert np.isfinite(v).all()
    assert v.min() >= 0.5 - 1e-9
    M, g = scaled(M, g)
    slope = M @ (M.T @ v + g)
    assert slope.min() >= -tolerance
    assert np.abs(slope * np.minimum(v - 0.5, 1)).max() <= tolerance


@cache
def instances() -> list[Instance]:
    """500, of 2 to 10 rows of length 1 to 50: where k > d the rows are dependent."""
    rng = np.random.default_rng(0)
    sizes = zip(rng.integers(2, 11, 500), rng.integers(1, 51, 500), strict=True)
    return [(rng.standard_normal((k, d)) / k, rng.standard_normal(d)) for k, d in sizes]


def test_weights_are_those_of_a_general_solver() -> None:
    """Objectives agree to 1e-9 of ½‖g‖²; v to 1e-5 where the rows are independent enough to decide it."""
    compared = 0
    for M, g in instances():
        v, right = solve_weights(M, g)[0], by_slsqp(M, g)
        mine, theirs = (float(((M.T @ w + g) ** 2).sum() / (g @ g)) for w in (v, right))
        assert mine == pytest.approx(theirs, rel=0, abs=1e-9)
        if len(M) <= len(g) and np.linalg.cond(M @ M.T) < 1e6:
            np.testing.assert_allclose(v, right, rtol=0, atol=1e-5)
            compared += 1
    assert compared > 350


def test_weights_satisfy_the_conditions_of_a_minimum() -> None:
    fallbacks = 0
    for M, g in instances():
        v, fell_back = solve_weights(M, g)
        assert_optimal(M, g, v)
        assert fell_back == (len(M) > len(g) or np.linalg.cond(M @ M.T) > 1e10)
        fallbacks += fell_back
    assert 20 < fallbacks < 100


rng = np.random.default_rng(1)
ROWS, G = rng.standard_normal((4, 6)), rng.standard_normal(6)
SIGNS = np.array([[1.0], [-1.0], [2.0], [-0.5]])
EDGES: dict[str, Instance] = {
    "nothing but zeros": (0 * ROWS, 0 * G),
    "zero rows": (0 * ROWS, G),
    "one zero row": (ROWS * [[1], [0], [1], [1]], G),
    "g is zero": (ROWS, 0 * G),
    "one row": (ROWS[:1], G),
    "one row against g": (-G[None] / 9, G),
    "equal rows along g": (np.tile(G / 4, (4, 1)), G),
    "equal rows against g": (np.tile(-G / 4, (4, 1)), G),
    "parallel rows": (np.abs(SIGNS) * ROWS[:1], G),
    "parallel rows of both signs": (SIGNS * ROWS[:1], G),
    "parallel to g, of both signs": (SIGNS * G, G),
    "a huge and a tiny row": (ROWS[:2] * [[1e8], [1e-8]], G),
    "a huge and a tiny row, parallel to g": (G * [[1e8], [1e-8]], G),
    "a huge row against a tiny one": (G * [[1e-8], [-1e8]], G),
    "rows of 1e-30": (ROWS * 1e-30, G),
    "rows and g of 1e-30": (ROWS * 1e-30, G * 1e-30),
    "g of 1e-30": (ROWS, G * 1e-30),
    "below the least normal number": (ROWS * 1e-310, G * 1e-310),
    "squares overflow": (ROWS * 1e200, G * 1e200),
    "more rows than numbers": (np.vstack([ROWS, -ROWS, ROWS / 3])[:, :1], G[:1]),
}


@pytest.mark.parametrize("case", EDGES)
def test_edge_cases_have_a_finite_minimum(case: str) -> None:
    M, g = EDGES[case]
    v, _ = solve_weights(M, g)
    assert_optimal(M, g, v)
    assert length(M, g, v) <= length(M, g, by_least_squares(M, g)) + 1e-9


def test_nothing_to_agree_on_gives_the_least_weights() -> None:
    """Where all rows point along g already, any more of them would only lengthen the direction."""
    for case in ("nothing but zeros", "zero rows", "equal rows along g", "a huge and a tiny row, parallel to g"):
        assert solve_weights(*EDGES[case])[0] == pytest.approx(np.full(len(EDGES[case][0]), 0.5), abs=1e-9)


def dependent(kind: str, n: int) -> list[tuple[Tensor, Tensor]]:
    """Neighbourhoods in float32 whose gradients lie in a few directions only; the own one is the first row."""
    rng = np.random.default_rng(7)
    found = []
    for _ in range(n):
        k, d = int(rng.integers(2, 11)), int(rng.integers(2, 51))
        base = rng.standard_normal((int(rng.integers(1, k)), d))
        some = base[rng.integers(len(base), size=k)]
        gradients = {
            "the same": some,
            "the same or the opposite": some * rng.choice([-1, 1], (k, 1)),
            "multiples of either sign": some * rng.standard_normal((k, 1)),
            "of low rank": rng.standard_normal((k, len(base))) @ base,
        }[kind]
        rows, omega = torch.from_numpy(gradients).float(), torch.from_numpy(rng.dirichlet(np.full(k, 5.0))).float()
        found.append((rows * omega[:, None], rows[0]))
    return found


@pytest.mark.parametrize("kind", ["the same", "the same or the opposite", "multiples of either sign", "of low rank"])
def test_dependent_gradients_never_give_a_longer_direction_than_the_least_weights(kind: str) -> None:
    """v = ½ is allowed, so a minimum is no longer. Rounding must not be taken for a direction worth any weight."""
    for rows, g in dependent(kind, 500):
        direction, _ = project(rows, g, [len(g)])
        least = g.double() + rows.double().sum(0) / 2
        assert float(direction.double().norm()) <= 1.01 * float(least.norm())


@pytest.mark.parametrize("kind", ["the same", "the same or the opposite", "multiples of either sign", "of low rank"])
def test_dependent_gradients_have_the_minimum_that_the_ridge_decides(kind: str) -> None:
    for rows, g32 in dependent(kind, 200):
        M, g = rows.double().numpy(), g32.double().numpy()
        assert objective(M, g, solve_weights(M, g)[0]) <= objective(M, g, by_least_squares(M, g)) + 1e-3


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e-3, 1e3, 1e6, 1e30])
def test_the_direction_does_not_depend_on_the_unit_of_the_loss(scale: float) -> None:
    for M, g in instances()[:100]:
        direction, right = (M.T @ solve_weights(s * M, s * g)[0] + g for s in (scale, 1.0))
        np.testing.assert_allclose(direction, right, rtol=0, atol=1e-6)
    for rows, g32 in dependent("the same or the opposite", 300):
        M, g = rows.double().numpy(), g32.double().numpy()
        assert solve_weights(scale * M, scale * g)[0].max() < 1e6


def test_projecting_by_tensor_is_projecting_each_tensor_by_itself() -> None:
    rng = np.random.default_rng(3)
    for sizes in ([4, 1, 7], [12], [1] * 12, [2, 10]):
        rows, g = (torch.from_numpy(rng.standard_normal(shape)) for shape in ((5, 12), (12,)))
        whole, fallbacks = project(rows, g, sizes)
        edges = np.cumsum([0, *sizes])
        parts = [project(rows[:, a:b], g[a:b], [size]) for a, b, size in zip(edges[:-1], edges[1:], sizes, strict=True)]
        assert torch.equal(whole, torch.cat([part for part, _ in parts]))
        assert fallbacks == sum(n for _, n in parts)


def test_a_projection_is_g_and_the_weighted_rows() -> None:
    for M, g in instances()[:50]:
        v, fell_back = solve_weights(M, g)
        direction, fallbacks = project(torch.from_numpy(M), torch.from_numpy(g), [len(g)])
        np.testing.assert_allclose(direction.numpy(), g + M.T @ v, rtol=0, atol=1e-12)
        assert fallbacks == fell_back


GRAPH = topology.erdos_renyi(6, 0.5, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize(("projection", "programs"), [("tensor", [2, 4]), ("vector", [6])])
def test_a_run_is_cga_written_out(projection: Literal["tensor", "vector"], programs: list[int]) -> None:
    """Own gradient plus weighted cross-gradients, momentum, gossip; scipy solves the programs."""
    problem, gamma, alpha, M = heterogeneous(6, 6, seed=4, jitter=0.3), 0.05, 0.5, 6
    x0 = start(M, 6)
    algorithm = CGA(learning_rate=gamma, momentum=alpha, projection=projection)
    found = run(algorithm, problem, GRAPH, 6, x0, tensors=[2, 4])
    x, u = x0, torch.zeros_like(x0)
    for t in range(1, 7):
        directions = []
        for i in range(M):
            rows = torch.stack([GRAPH.W[i, j] * problem.gradient(int(j), x[i], t) for j in GRAPH.neighbourhood(i)])
            own = problem.gradient(i, x[i], t)
            parts = zip(torch.split(rows, programs, dim=1), torch.split(own, programs), strict=True)
            directions.append(np.concatenate([g + m.T @ by_least_squares(m, g) for m, g in numbers(parts)]))
        u = alpha * u + torch.from_numpy(np.stack(directions))
        x = mixing(GRAPH) @ (x - gamma * u)
        torch.testing.assert_close(found.states[t].x, x, rtol=0, atol=1e-6)
        torch.testing.assert_close(found.states[t].u, u, rtol=0, atol=1e-6)


def numbers(parts: "zip[tuple[Tensor, Tensor]]") -> list[Instance]:
    return [(rows.numpy(), g.numpy()) for rows, g in parts]


each_graph = pytest.mark.parametrize("graph", [topology.ring(6), topology.full(5)], ids=lambda g: g.name)


@each_graph
def test_a_run_without_gradients_is_gossip(graph: Graph) -> None:
    x0 = start(graph.agents, 6)
    found = run(CGA(), Flat(), graph, 5, x0, tensors=[2, 4])
    right = np.linalg.matrix_power(graph.W, 5) @ x0.numpy()
    np.testing.assert_allclose(found.x[-1].numpy(), right, rtol=0, atol=1e-12)
    assert [facts["fallbacks"] for facts in found.metadata] == [2 * graph.agents] * 5


@each_graph
def test_a_run_of_agents_that_all_want_the_same_goes_half_again_as_fast(graph: Graph) -> None:
    """All rows are parallel to g, so v = ½ and the direction is g + ½ Σ ω g = 1.5 g, at every agent."""
    n, gamma, alpha = graph.agents, 0.1, 0.5
    one = heterogeneous(1, 6, seed=5)
    found = run(CGA(learning_rate=gamma, momentum=alpha), Quadratics(one.A.repeat(n, 1, 1), one.b.repeat(n, 1)), graph,
                30, start(1, 6).repeat(n, 1))  # fmt: skip
    x, u = start(1, 6)[0], torch.zeros(6, dtype=torch.float64)
    for t in range(1, 31):
        u = alpha * u + 1.5 * one.gradient(0, x)
        x = x - gamma * u
        torch.testing.assert_close(found.x[t], x.expand(n, 6), rtol=0, atol=1e-9)


@each_graph
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_run_along_one_line_stays_on_it(graph: Graph, dtype: torch.dtype) -> None:
    """Optima and models lie on a line, so all gradients are parallel, of both signs; nobody leaves what was spanned."""
    n = graph.agents
    line, optima, models = start(1, 6, seed=1), start(n, 1, seed=2), start(n, 1, seed=3)
    problem = Quadratics(torch.eye(6).to(dtype).repeat(n, 1, 1), (optima * line).to(dtype))
    found = run(CGA(learning_rate=0.1), problem, graph, 20, (models * line).to(dtype)).x.double()
    assert bool((found.abs() <= 1.01 * max(optima.abs().max(), models.abs().max()) * line.abs()).all())
    aside = found - (found @ line[0])[:, :, None] * line / line.square().sum()
    assert float(aside.abs().max()) < (1e-3 if dtype == torch.float32 else 1e-9)  # rounding, times weights of 1e3


@each_graph
def test_a_run_with_one_agent_that_wants_nothing_does_not_fail(graph: Graph) -> None:
    problem = heterogeneous(graph.agents, 6, seed=6)
    problem.A[0] = 0
    found = run(CGA(learning_rate=0.1), problem, graph, 40, start(graph.agents, 6), tensors=[2, 4])
    assert bool(torch.isfinite(found.x).all())
    wanted = float((problem.b[1:] - problem.b[1:].mean(0)).norm(dim=1).max())
    assert float((found.x[-1] - problem.b[1:].mean(0)).norm(dim=1).max()) < wanted


def test_fallbacks_are_counted_tensor_by_tensor() -> None:
    """Three independent rows of twelve numbers need no help; three of one number do, at each of the agents."""
    problem, ring, x0 = heterogeneous(6, 13, seed=8), topology.ring(6), start(6, 13)
    by_tensor = run(CGA(learning_rate=0.1), problem, ring, 3, x0, tensors=[12, 1])
    assert [facts["fallbacks"] for facts in by_tensor.metadata] == [6] * 3
    as_vector = run(CGA(learning_rate=0.1, projection="vector"), problem, ring, 3, x0, tensors=[12, 1])
    assert [facts["fallbacks"] for facts in as_vector.metadata] == [0] * 3
