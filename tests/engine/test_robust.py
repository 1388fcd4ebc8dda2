"""Robust mixing: the limits of displacements, and how far a liar moves an honest row."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdsl.algorithms import ALGORITHMS
from pdsl.algorithms.mixing import accelerated_gossip
from pdsl.algorithms.rehearsal import rehearse
from pdsl.config import load
from pdsl.engine import LocalEngine
from pdsl.engine.robust import MEMORY, Limits, RobustEngine, limit_component, shorten, widen
from pdsl.privacy import Noise
from pdsl.topology import Graph, build
from pdsl.utils.random import Streams
from pdsl.utils.workers import Workers


def make_graph(kind: str, agents: int) -> Graph:
    return build(load(None, [f"graph.kind={kind}", f"graph.agents={agents}"]).graph, Streams(0))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def shortened(x_j: list[float], x_i: list[float], limits: Limits) -> list[float]:
    scale = min(1.0, limits.radius / max(math.dist(x_j, x_i), 1e-9)) ** 2
    return [scale * (a - b) for a, b in zip(x_j, x_i, strict=True)]


def mix_literally(
    x: list[list[float]], graph: Graph, limits: Limits, history: dict[tuple[int, int], list[float]], harm: list[float]
) -> list[list[float]]:
    """Oracle: plain Python, number by number."""

    def norm(v: list[float]) -> float:
        return math.sqrt(sum(a * a for a in v))

    def limit_along(v: list[float], direction: list[float]) -> list[float]:
        if norm(direction) == 0:
            return v
        unit = [a / norm(direction) for a in direction]
        along = sum(a * b for a, b in zip(unit, v, strict=True))
        kept = max(-limits.component, min(limits.component, along))
        return [a + (kept - along) * b for a, b in zip(v, unit, strict=True)]

    mixed, tight = [], limits
    for i in range(graph.agents):
        total = list(x[i])
        apart = sorted(math.dist(x[j], x[i]) for j in graph.neighbourhood(i).tolist() if j != i)
        median = apart[(len(apart) - 1) // 2]
        limits = Limits(median, median) if len(apart) >= 3 and median > tight.radius else tight
        for j in graph.neighbourhood(i).tolist():
            v = [a - b for a, b in zip(x[j], x[i], strict=True)]
            if norm(v) > limits.radius:
                v = [a * (limits.radius / norm(v)) ** 2 for a in v]
            v = limit_along(limit_along(v, history[i, j]), harm)
            history[i, j] = [MEMORY * a + b for a, b in zip(history[i, j], shortened(x[j], x[i], limits), strict=True)]
            total = [a + float(graph.W[i, j]) * b for a, b in zip(total, v, strict=True)]
        mixed.append(total)
    return mixed


def test_shorten_keeps_short_vectors_and_fades_long_ones() -> None:
    v = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert shorten(v, 5.0) is v
    assert shorten(v, 1.0).tolist() == pytest.approx([3 / 25, 4 / 25])  # length 1/5 = τ²/‖v‖
    assert shorten(v * 1e300, 1.0).norm() < 1e-200
    assert shorten(torch.tensor([math.nan, 1.0]), 1.0).tolist() == [0.0, 0.0]
    assert shorten(torch.tensor([math.inf, 1.0]), 1.0).tolist() == [0.0, 0.0]


def test_limit_component_changes_only_the_component_along_the_direction() -> None:
    v, along = torch.tensor([3.0, 4.0, 0.0]), torch.tensor([0.0, 10.0, 0.0])
    assert limit_component(v, along, 1.5).tolist() == [3.0, 1.5, 0.0]
    assert limit_component(v, -along, 1.5).tolist() == [3.0, 1.5, 0.0]
    assert limit_component(v, along, 4.0) is v
    assert limit_component(v, torch.zeros(3), 0.0) is v


@pytest.mark.parametrize(("kind", "agents"), [("ring", 5), ("full", 4), ("star", 5)])
def test_mix_agrees_with_the_literal_oracle_over_three_rounds(kind: str, agents: int) -> None:
    graph, d, limits = make_graph(kind, agents), 6, Limits(radius=3.3, component=0.8)
    history = {(i, j): [0.0] * d for i in range(agents) for j in range(agents)}
    harm, kept = normal(d, seed=9), torch.zeros(agents, 0, 0, d)
    for t in range(3):
        x = normal(agents, d, seed=t)
        engine = RobustEngine(LocalEngine(graph), graph, [limits])
        engine.begin(kept, harm.repeat(agents, 1))
        found = engine.mix(x)
        expected = mix_literally(x.tolist(), graph, limits, history, harm.tolist())
        torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-5)
        kept = engine.history


@pytest.mark.parametrize("kind", ["ring", "full", "erdos-renyi"])
def test_mix_without_limited_rows_has_the_bits_of_plain_mixing(kind: str) -> None:
    graph, x = make_graph(kind, 7), normal(7, 50)
    robust = RobustEngine(LocalEngine(graph), graph, [Limits(1e3, 1e3)])
    assert torch.equal(robust.mix(x), LocalEngine(graph).mix(x))
    assert robust.implausible == set()


@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-3, 1.0, 30.0, 1e6, 1e30]), st.integers(0, 5))
@settings(deadline=None, max_examples=60)
def test_one_liar_moves_an_honest_row_by_at_most_its_weight_times_the_radius(seed: int, size: float, liar: int) -> None:
    graph, radius = make_graph("ring", 6), 1.7
    x = normal(6, 20, seed=seed)
    lie = x.clone()
    lie[liar] = size * normal(20, seed=seed + 1)
    rows = []
    for sent in (x, lie):
        engine = RobustEngine(LocalEngine(graph), graph, [Limits(radius, 0.5)])
        rows.append(engine.mix(sent))
    for i in range(6):
        if i != liar:
            moved = float((rows[1][i] - rows[0][i]).norm())
            assert moved <= 2 * graph.W[i, liar] * radius * (1 + 1e-5)  # from one end of the ball to the other


def test_a_persistent_push_moves_a_row_slowly_and_a_changing_one_does_not_accumulate() -> None:
    graph, limits, d = make_graph("ring", 3), Limits(1.0, 0.1), 400
    push, kept, x = torch.zeros(d), torch.zeros(3, 0, 0, d), torch.zeros(3, d)
    push[0] = 1.0
    for _ in range(30):
        engine = RobustEngine(LocalEngine(graph), graph, [limits])
        engine.begin(kept, torch.zeros(3, d))
        sent = x.clone()
        sent[2] = x[0] + push
        x = torch.stack([engine.mix(sent)[0]] * 3)
        kept = engine.history
    weight = float(graph.W[0, 2])
    assert float(x[0, 0]) <= weight * (limits.radius + 29 * limits.component) * (1 + 1e-5)  # plain: 30 times the weight


def test_widen_needs_three_neighbours_and_a_majority_beyond_the_radius() -> None:
    tight = Limits(1.0, 0.1)
    assert widen(tight, [5.0, 7.0]) is tight  # a ring: two liars must not widen it
    assert widen(tight, [0.5, 0.9, 1e6, 1e6]) is tight
    assert widen(tight, [1e6, 3.0, 4.0, 2.0]) == Limits(3.0, 3.0)
    assert widen(tight, [1e6, 1e6, 1e6]) == Limits(10.0, 10.0)
    assert widen(tight, [math.nan, math.nan, math.nan]).radius <= 10.0


def test_agents_that_were_driven_apart_meet_again_in_spite_of_a_liar() -> None:
    graph, limits, d = make_graph("full", 6), Limits(1.0, 0.1), 30
    x, kept = 2 * normal(6, d), torch.zeros(6, 0, 0, d)
    for _ in range(8):
        engine = RobustEngine(LocalEngine(graph), graph, [limits])
        engine.begin(kept, torch.zeros(6, d))
        x[5] = 1e4
        x, kept = engine.mix(x), engine.history
    assert torch.cdist(x[:5], x[:5]).max() < limits.radius
    assert x[:5].abs().max() < 5


def test_distrusted_neighbours_have_no_weight() -> None:
    graph, x = make_graph("full", 4), normal(4, 10)
    engine = RobustEngine(LocalEngine(graph), graph, [Limits(1e3, 1e3)])
    engine.trust(torch.tensor([0.0 if j == 3 else 1.0 for j in graph.sender.tolist()]))
    expected = x[0] + 0.25 * (x[1] - x[0]) + 0.25 * (x[2] - x[0])
    torch.testing.assert_close(engine.mix(x)[0], expected)


def test_implausible_senders_are_named() -> None:
    graph, x = make_graph("full", 4), normal(4, 10)
    x[2] *= 1e4
    engine = RobustEngine(LocalEngine(graph), graph, [Limits(20.0, 20.0)])
    mixed = engine.mix(x)
    assert 2 in engine.implausible
    assert mixed[[0, 1, 3]].norm(dim=1).max() < 10


def rehearse_on(kind: str, sigma: float, settings: list[str], d: int = 400) -> tuple[Graph, tuple[Limits, ...]]:
    graph = make_graph(kind, 6)
    algorithm = load(None, ["algorithm.learning_rate=0.5", *settings]).algorithm
    with Workers(1) as workers:
        noise = Noise([sigma] * 6, Streams(0), workers)
        return graph, rehearse(algorithm, graph, noise, 1.0, d, 1.0, 0.5, 0)


def test_rehearsed_radius_of_d_psgd_follows_from_noise_step_and_gossip_error() -> None:
    sigma, d = 2.0, 400
    graph, (limits,) = rehearse_on("ring", sigma, ["algorithm.name=d-psgd"], d)
    # x̂ = Σ_s W^s n_s γ, so the covariance of the agents' x̂ is γ²σ² Σ_s W^{2s}
    covariance = sum(np.linalg.matrix_power(graph.W, 2 * s) for s in range(20))
    squared = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
    expected = 0.5 * sigma * math.sqrt(d * squared)
    assert 1.05 * expected < limits.radius < 1.25 * expected


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in ("soft-dsgd", "def-kt")])
def test_every_algorithm_that_mixes_is_rehearsed(name: str) -> None:
    _, limits = rehearse_on("ring", 1.0, [f"algorithm.name={name}"])
    assert limits
    assert all(0 < limit.component <= 1.25 * limit.radius < 1e3 for limit in limits)


def test_accelerated_gossip_bounds_a_liar_in_every_step() -> None:
    graph, d = make_graph("ring", 8), 300
    x = 0.1 * normal(8, d)
    limits = [Limits(3.0, 0.5)] * 4

    class Liar(LocalEngine):
        def deliver(self, x: Tensor) -> Tensor:
            sent = x.clone()
            sent[0] = 1e6
            return super().deliver(sent)

    honest = accelerated_gossip(RobustEngine(LocalEngine(graph), graph, limits), x, 4, 1.2)
    lied = accelerated_gossip(RobustEngine(Liar(graph), graph, limits), x, 4, 1.2)
    assert (lied[1:] - honest[1:]).norm(dim=1).max() < 1.0
