"""Schedules against their definition: exact consensus, few neighbours, and one direction as good as the other."""

from collections.abc import Callable
from functools import reduce

import networkx as nx
import numpy as np
import pytest

from pdsl import topology
from pdsl.settings import GraphSettings
from pdsl.topology import Graph, Schedule, as_graph, build, describe_schedule, from_setup
from pdsl.utils.errors import PdslError
from pdsl.utils.random import Streams


def product(schedule: Schedule, start: int = 1) -> np.ndarray:
    """W of a whole period that starts in round `start`, as one matrix."""
    rounds = range(start, start + schedule.period)
    return reduce(lambda done, t: schedule.at(t).W @ done, rounds, np.eye(schedule.agents))


def check_rounds(schedule: Schedule, most: int) -> None:
    for graph in schedule.graphs:
        assert (graph.W == graph.W.T).all()
        assert (graph.W >= 0).all()
        assert np.abs(graph.W.sum(axis=1) - 1).max() < 1e-12
        assert (graph.W.diagonal() > 0).all()
        assert (graph.degrees - 1).max() <= most
        assert len(graph.receiver) > graph.agents
    together = sum((graph.W > 0).astype(int) for graph in schedule.graphs) > 0
    assert ((schedule.W > 0) == together).all()
    assert nx.is_connected(nx.from_numpy_array(schedule.W))


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_base_k_reaches_exact_consensus_in_a_period_with_at_most_k_neighbours(k: int) -> None:
    for agents in range(2, 41):
        schedule = topology.base_k(agents, k)
        check_rounds(schedule, k)
        assert np.abs(product(schedule) - 1 / agents).max() < 1e-12
        assert schedule.spectral_gap == pytest.approx(1, abs=1e-12)
        assert schedule.period <= 2 * np.log(agents) / np.log(k + 1) + 2  # the paper's bound


def test_base_k_has_the_lengths_of_the_paper() -> None:
    """Takezawa et al.: five rounds for five agents, four for six; powers need no more than their exponent."""
    assert [topology.base_k(agents, 1).period for agents in (5, 6, 8, 16)] == [5, 4, 3, 4]
    assert [topology.base_k(agents, 2).period for agents in (9, 27)] == [2, 3]


@pytest.mark.parametrize("agents", [2, 4, 8, 16, 64])
def test_one_peer_reaches_exact_consensus_from_any_round(agents: int) -> None:
    schedule = topology.one_peer_exponential(agents)
    check_rounds(schedule, 1)
    assert schedule.period == agents.bit_length() - 1
    for start in range(1, schedule.period + 1):
        assert np.abs(product(schedule, start) - 1 / agents).max() < 1e-15
    assert all((graph.degrees == 2).all() for graph in schedule.graphs)


def test_one_peer_points_to_base_k_for_other_sizes() -> None:
    with pytest.raises(PdslError, match=r"12 agents.*power of two.*base_k"):
        topology.one_peer_exponential(12)
    with pytest.raises(PdslError, match="k=0"):
        topology.base_k(5, 0)


def test_a_sequence_repeats_and_a_function_ends() -> None:
    ring, full = topology.ring(5), topology.full(5)
    repeated = as_graph([ring, full, ring], rounds=100)
    assert [repeated.at(t) for t in (1, 2, 3, 4, 5, 300)] == [ring, full, ring, ring, full, ring]
    np.testing.assert_allclose(repeated.W, (2 * ring.W + full.W) / 3, atol=1e-15)
    assert repeated.max_members == 5

    asked: list[int] = []

    def graph_of(t: int) -> Graph:
        asked.append(t)
        return topology.k_regular(6, 3, seed=t % 2)

    once = as_graph(graph_of, rounds=4)
    assert isinstance(once, Schedule)
    assert asked == [1, 2, 3, 4]
    assert len(once.distinct) == 2  # equal graphs are one
    assert once.at(1) is once.at(3)
    with pytest.raises(PdslError, match=r"known for 4 rounds.*round 5"):
        once.at(5)


def test_rounds_may_be_disconnected_but_not_all_of_them_together() -> None:
    pairs = [nx.Graph([(0, 1), (2, 3)]), nx.Graph([(1, 2), (0, 3)])]
    schedule = as_graph(pairs, rounds=1)
    assert not any(graph.is_connected for graph in schedule.distinct)
    assert schedule.spectral_gap > 0
    for wrong, message in (
        ([pairs[0]], "the union over the period has 2 parts"),
        (lambda t: pairs[0], "the union over all rounds has 2 parts"),
        ([], "at least one"),
        ([topology.ring(4), topology.ring(5)], "agents of round 2 differ"),
        ([topology.ring(4), topology.base_k(4)], "round 2 is a schedule"),
        ([topology.ring(4), "ring"], "round 2 has 'ring'"),
        ([topology.ring(4), topology.from_matrix(np.eye(4), connected=False)], "round 2 has no edges"),
        (topology.ring, "pdsl.ring is a function; call it"),
        (7, "7 given"),
        (topology.from_matrix(np.eye(3), connected=False), "not connected"),
    ):
        with pytest.raises(PdslError, match=message):
            as_graph(wrong, rounds=3)


def test_the_gap_of_a_schedule_is_that_of_the_product() -> None:
    ring = topology.ring(8)
    twice = Schedule.of("own", [ring, ring])
    assert twice.spectral_gap == pytest.approx(1 - (1 - ring.spectral_gap) ** 2, abs=1e-12)
    assert "schedule of 8 agents, 2 rounds, 3 members each in a round" in twice.describe()


# As a config names them

MADE: list[Callable[[], Graph]] = [
    lambda: topology.full(4),
    lambda: topology.ring(5),
    lambda: topology.bipartite(6),
    lambda: topology.complete_bipartite(5),
    lambda: topology.star(4),
    lambda: topology.line(4),
    lambda: topology.grid(6),
    lambda: topology.torus(12),
    lambda: topology.exponential(9),
    lambda: topology.k_regular(10, 3, seed=4),
    lambda: topology.erdos_renyi(9, 0.5, seed=5),
    lambda: topology.small_world(12, 4, 0.5, seed=6),
    lambda: topology.one_peer_exponential(8),
    lambda: topology.base_k(7, k=2),
]


@pytest.mark.parametrize("make", MADE)
def test_a_graph_knows_the_settings_that_build_it_again(make: Callable[[], Graph]) -> None:
    graph = make()
    assert graph.settings is not None
    again = build(GraphSettings.model_validate(graph.settings.model_dump()), Streams(99))
    assert again.describe() == graph.describe()
    assert [again.at(t).W.tobytes() for t in range(1, 9)] == [graph.at(t).W.tobytes() for t in range(1, 9)]


def test_a_random_graph_has_its_own_seed_or_that_of_the_run() -> None:
    settings = GraphSettings(kind="k-regular", agents=20, degree=4)
    assert (build(settings, Streams(3)).W == topology.k_regular(20, 4, seed=3).W).all()
    assert (build(settings, Streams(3)).W != topology.k_regular(20, 4, seed=4).W).any()
    own = settings.model_copy(update={"seed": 4})
    assert (build(own, Streams(3)).W == topology.k_regular(20, 4, seed=4).W).all()


@pytest.mark.parametrize(
    "graph",
    [
        topology.from_matrix([[0.7, 0.3], [0.3, 0.7]]),
        topology.from_networkx(nx.Graph([("bonn", "aachen"), ("bonn", "trier")])),
        Schedule.of("own", [topology.ring(7), topology.star(7), topology.ring(7)]),
        Schedule.from_function(lambda t: topology.erdos_renyi(7, 0.5, seed=t), 5),
    ],
)
def test_setup_holds_any_graph_to_the_last_bit(graph: Graph) -> None:
    names = {} if graph.names is None else {"names": list(graph.names)}
    setup = {"agents": graph.agents, "edges": graph.edges(), "graph_name": graph.name, **names}
    again = from_setup({**setup, **describe_schedule(graph)})
    assert again.names == graph.names
    assert again.describe() == graph.describe()
    for t in range(1, 6):
        assert again.at(t).W.tobytes() == graph.at(t).W.tobytes()


# Names and weights of networkx graphs


def test_names_of_nodes_are_kept() -> None:
    graph = topology.from_networkx(nx.Graph([("bonn", "aachen"), ("bonn", "trier")]))
    assert graph.names == ("aachen", "bonn", "trier")
    assert graph.neighbourhood(0).tolist() == [0, 1]
    assert topology.from_networkx(nx.path_graph(4)).names is None
    assert topology.from_networkx(nx.Graph([(30, 10), (10, 20)])).names == ("10", "20", "30")
    assert topology.ring(4).names is None
    with pytest.raises(PdslError, match="2 agents, but 1 different names"):
        topology.from_networkx(nx.Graph([(1, "1")]))


def test_edge_weights_are_used_if_asked_and_never_ignored_in_silence() -> None:
    G = nx.Graph()
    G.add_weighted_edges_from([(0, 1, 0.2), (1, 2, 0.5)])
    with pytest.warns(UserWarning, match="not used"):
        assert (topology.from_networkx(G).W == topology.line(3).W).all()
    W = topology.from_networkx(G, weight="weight").W
    np.testing.assert_allclose(W, [[0.8, 0.2, 0], [0.2, 0.3, 0.5], [0, 0.5, 0.5]], atol=1e-15)
    with pytest.raises(PdslError, match="None; give a number between 0 and 1"):
        topology.from_networkx(nx.path_graph(3), weight="weight")
    G[0][1]["weight"] = 0.6
    with pytest.raises(PdslError, match=r"weights at 1 sum to 1\.1"):
        topology.from_networkx(G, weight="weight")


def test_a_graph_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        topology.ring(4).W[0, 0] = 1
