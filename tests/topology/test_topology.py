"""Graphs against networkx, closed forms of their spectra, and the definitions written out edge by edge."""

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdsl import topology
from pdsl.settings import GraphSettings
from pdsl.topology import GRAPHS, SCHEDULES, Graph, build
from pdsl.utils.errors import PdslError
from pdsl.utils.random import Streams

SIZES = {
    "full": [2, 3, 10],
    "ring": [2, 3, 4, 5, 10, 37],
    "bipartite": [4, 5, 10, 15, 20, 101, 102, 150],
    "complete-bipartite": [2, 3, 10, 15],
    "star": [2, 3, 10],
    "line": [2, 3, 10],
    "grid": [4, 6, 9, 10, 25, 36],
    "torus": [4, 6, 9, 10, 25, 36],
    "k-regular": [5, 6, 10, 25],
    "erdos-renyi": [2, 5, 10, 30],
    "small-world": [5, 6, 10, 40],
    "exponential": [2, 3, 7, 8, 10, 33],
}


def streams(seed: int = 0) -> Streams:
    return Streams(seed)


def built(kind: str, seed: int = 0, **more: Any) -> Graph:
    return build(GraphSettings.model_validate({"kind": kind, **more}), streams(seed))


def check(graph: Graph, M: int) -> None:
    """Everything a Graph promises, from the definitions."""
    W = graph.W
    assert graph.agents == M
    assert W.shape == (M, M)
    assert W.dtype == np.float64
    assert (W >= 0).all()
    assert (W == W.T).all()
    assert np.abs(W.sum(axis=0) - 1).max() < 1e-12
    assert np.abs(W.sum(axis=1) - 1).max() < 1e-12
    assert (W.diagonal() > 0).all()
    assert nx.is_connected(nx.from_numpy_array(W))

    edges = [(i, j) for i in range(M) for j in range(M) if W[i, j] > 0]
    position = {edge: e for e, edge in enumerate(edges)}
    for array in (graph.receiver, graph.sender, graph.reverse, graph.offsets, graph.degrees):
        assert array.dtype == np.int64
    assert list(zip(graph.receiver, graph.sender, strict=True)) == edges
    assert graph.reverse.tolist() == [position[j, i] for i, j in edges]
    assert (graph.reverse[graph.reverse] == np.arange(len(edges))).all()
    assert graph.omega.tolist() == [W[edge] for edge in edges]
    assert graph.offsets.shape == (M + 1,)
    for i in range(M):
        mine = slice(graph.offsets[i], graph.offsets[i + 1])
        assert (graph.receiver[mine] == i).all()
        assert graph.neighbourhood(i).tolist() == [j for j in range(M) if W[i, j] > 0]
        assert graph.degrees[i] == len(graph.neighbourhood(i))
    assert graph.offsets[-1] == len(edges)
    assert 0 < graph.spectral_gap <= 1 + 1e-12


def literal_metropolis(G: nx.Graph) -> np.ndarray:
    """The definition, entry by entry."""
    W = np.zeros((len(G), len(G)))
    for i, j in G.edges:
        W[i, j] = W[j, i] = 1 / (1 + max(G.degree[i], G.degree[j]))
    for i in G:
        W[i, i] = 1 - sum(W[i, j] for j in G[i])
    return W


@pytest.mark.parametrize(("kind", "M"), [(kind, M) for kind, sizes in SIZES.items() for M in sizes])
def test_every_kind_keeps_the_promises(kind: str, M: int) -> None:
    graph = built(kind, agents=M)
    check(graph, M)
    assert graph.name == kind
    assert "\n" not in graph.describe()


def test_every_kind_of_the_settings_is_built_and_tested() -> None:
    kinds = set(get_args(GraphSettings.model_fields["kind"].annotation))
    assert kinds - {"python"} == set(GRAPHS) == set(SIZES) | {"file"} | set(SCHEDULES)  # test_schedules has these


@pytest.mark.parametrize("M", [2, 3, 6, 10, 35])
def test_metropolis_kinds_are_those_of_networkx(M: int) -> None:
    def same(graph: Graph, G: nx.Graph) -> None:
        np.testing.assert_allclose(graph.W, literal_metropolis(G), atol=1e-15)

    same(topology.star(M), nx.star_graph(M - 1))
    same(topology.line(M), nx.path_graph(M))
    same(topology.exponential(M), nx.circulant_graph(M, [2**k for k in range(M) if 2**k < M]))
    same(
        topology.complete_bipartite(M),
        nx.Graph((i, j) for i in range(M) for j in range(M) if (i - j) % 2),
    )
    if M > 3:
        rows, columns = {6: (2, 3), 10: (2, 5), 35: (5, 7)}[M]
        for ours, periodic in ((topology.grid(M), False), (topology.torus(M), True)):
            G = nx.grid_2d_graph(rows, columns, periodic=periodic)
            same(ours, nx.relabel_nodes(G, {(r, c): r * columns + c for r, c in G}))


def test_full_and_ring_have_the_weights_of_the_paper() -> None:
    assert (topology.full(7).W == 1 / 7).all()
    assert (topology.ring(2).W == 1 / 2).all()
    assert (topology.ring(3).W == 1 / 3).all()
    assert set(topology.ring(8).omega) == {1 / 3}
    assert topology.ring(8).neighbourhood(0).tolist() == [0, 1, 7]
    assert topology.ring(8).neighbourhood(4).tolist() == [3, 4, 5]


@pytest.mark.parametrize(("M", "a"), [(4, 0.33), (10, 0.11), (15, 0.07), (20, 0.05), (101, 0.01), (201, 1 / 200)])
def test_bipartite_has_the_weights_of_the_cga_code(M: int, a: float) -> None:
    W = topology.bipartite(M).W
    expected = np.zeros((M, M))
    for other in range(2, M):
        for hub in (0, 1):
            expected[hub, other] = expected[other, hub] = a
        expected[other, other] = 1 - 2 * a
    expected[0, 0] = expected[1, 1] = 1 - (M - 2) * a
    np.testing.assert_allclose(W, expected, atol=1e-14)
    assert W[0, 1] == 0


def test_spectral_gaps_have_their_closed_forms() -> None:
    for M in (2, 3, 10, 50):
        assert topology.full(M).spectral_gap == pytest.approx(1)
    for M in (3, 4, 5, 10, 37):
        eigenvalues = [1 / 3 + 2 / 3 * math.cos(2 * math.pi * k / M) for k in range(1, M)]
        assert topology.ring(M).spectral_gap == pytest.approx(1 - max(map(abs, eigenvalues)))
    for M in (3, 10, 50):
        assert topology.star(M).spectral_gap == pytest.approx(1 / M)
        assert topology.line(M).spectral_gap == pytest.approx((2 - 2 * math.cos(math.pi / M)) / 3)
    for half in (2, 5, 20):  # the least eigenvalue decides here
        assert topology.complete_bipartite(2 * half).spectral_gap == pytest.approx(2 / (half + 1))
    for side in (3, 4, 6):
        rest = 1 - (2 - 2 * math.cos(2 * math.pi / side)) / 5
        assert topology.torus(side**2).spectral_gap == pytest.approx(1 - rest)
    for M in (4, 10, 20):  # the others' differences decay by 1-2a, the hubs' by 1-(M-2)a, hubs against others by 1-Ma
        a = 100 // (M - 1) / 100
        modulus = max(abs(1 - 2 * a), abs(1 - (M - 2) * a), abs(1 - M * a))
        assert topology.bipartite(M).spectral_gap == pytest.approx(1 - modulus)


def test_description_reads_well() -> None:
    assert topology.ring(10).describe() == "ring of 10 agents, 3 members each, spectral gap 0.127"
    assert topology.full(10).describe() == "full graph of 10 agents, 10 members each, spectral gap 1"
    assert topology.star(10).describe() == "star of 10 agents, 2 to 10 members each, spectral gap 0.1"


@pytest.mark.parametrize(("M", "degree"), [(2, 1), (5, 4), (10, 2), (10, 3), (10, 7), (11, 8), (200, 150)])
def test_regular_graphs_are_regular(M: int, degree: int) -> None:
    graph = topology.k_regular(M, degree)
    check(graph, M)
    assert (graph.degrees == degree + 1).all()


@pytest.mark.parametrize("kind", ["k-regular", "erdos-renyi", "small-world"])
def test_random_graphs_follow_their_seed(kind: str) -> None:
    first, again, other = (built(kind, seed, agents=30).W for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()


def test_random_graphs_have_the_edges_expected() -> None:
    edges = sum((topology.erdos_renyi(60, 0.3, seed=s).degrees - 1).sum() / 2 for s in range(10))
    pairs = 10 * 60 * 59 / 2
    assert abs(edges - 0.3 * pairs) < 5 * math.sqrt(pairs * 0.3 * 0.7)
    assert (topology.erdos_renyi(20, 1.0).degrees == 20).all()
    assert (topology.small_world(60, 6, 0.5).degrees - 1).sum() == 60 * 6
    lattice = topology.small_world(12, 4, 1e-12)
    np.testing.assert_allclose(lattice.W, literal_metropolis(nx.circulant_graph(12, [1, 2])), atol=1e-15)


@st.composite
def connected_graphs(draw: st.DrawFn) -> nx.Graph:
    M = draw(st.integers(2, 12))
    G = nx.empty_graph(M)
    G.add_edges_from((i, draw(st.integers(0, i - 1))) for i in range(1, M))  # a random tree
    agent = st.integers(0, M - 1)
    G.add_edges_from(draw(st.lists(st.tuples(agent, agent).filter(lambda e: e[0] != e[1]), max_size=30)))
    return G


@settings(max_examples=60, deadline=None)
@given(connected_graphs())
def test_metropolis_of_any_connected_graph(G: nx.Graph) -> None:
    graph = topology.from_networkx(G)
    check(graph, len(G))
    np.testing.assert_allclose(graph.W, literal_metropolis(G), atol=1e-15)
    moduli = np.sort(np.abs(np.linalg.eigvals(literal_metropolis(G))))
    assert graph.spectral_gap == pytest.approx(1 - moduli[-2], abs=1e-7)
    assert (topology.from_matrix(graph.W).W == graph.W).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 12), st.data())
def test_a_disconnected_graph_is_refused_with_its_number_of_parts(M: int, data: st.DataObject) -> None:
    agent = st.integers(0, M - 1)
    G = nx.empty_graph(M)
    G.add_edges_from(data.draw(st.lists(st.tuples(agent, agent), max_size=M)))
    parts = nx.number_connected_components(G)
    if parts == 1:
        check(topology.from_networkx(G), M)
    else:
        refused(lambda: topology.from_networkx(G), f"{parts} parts")


def test_networkx_nodes_become_agents_in_order() -> None:
    assert topology.from_networkx(nx.Graph([(3, 1), (1, 2)])).degrees.tolist() == [3, 2, 2]
    assert topology.from_networkx(nx.Graph([("b", 0), (0, "a")])).degrees.tolist() == [2, 3, 2]
    weighted = nx.Graph()
    weighted.add_edge(0, 1, weight=0)
    weighted.add_edge(0, 0, weight=-5)
    with pytest.warns(UserWarning, match="edge weights"):
        assert (topology.from_networkx(weighted).W == 1 / 2).all()
    assert (topology.from_networkx(nx.MultiGraph([(0, 1), (0, 1)])).W == 1 / 2).all()


def test_a_matrix_is_copied_and_made_exactly_symmetric() -> None:
    W = np.full((3, 3), 1 / 3)
    W[0, 1] += 5e-10
    graph = topology.from_matrix(W)
    assert (graph.W == graph.W.T).all()
    W[:] = 0
    assert graph.W.all()
    one_way = np.diag([1.0, 1.0])
    one_way[0, 1] = 5e-10
    assert topology.from_matrix(one_way).reverse.tolist() == [0, 2, 1, 3]


def test_edges_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "friends.txt"
    file.write_bytes("\ufeff# who talks to whom\r\n0 1\r\n\r\n1\t2 # a friend\r\n2 1\r\n 2 3 \r\n3 3".encode())
    for graph in (topology.from_edges(file, 4), built("file", agents=4, path=str(file))):
        check(graph, 4)
        np.testing.assert_allclose(graph.W, literal_metropolis(nx.path_graph(4)))
        assert graph.describe().startswith("friends.txt graph of 4 agents, 2 to 3 members each")


def refused(make: Callable[[], Any], *words: str) -> None:
    with pytest.raises(PdslError) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message
    assert "try" in message or "check" in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0 1\n1 two\n", ["line 2", "'1 two'"]),
        ("0 1\n\n# fine\n1,2\n", ["line 4"]),
        ("0 1 0.5\n", ["line 1"]),
        ("0 -1\n", ["line 1"]),
        ("0\n", ["line 1"]),
        (f"0 {'9' * 5000}\n", ["line 1"]),
        ("0 1\n1 2\n2 4\n", ["line 3", "agent 4", "graph.agents=5"]),
        ("0 1\n1 2\n", ["3 agents", "graph.agents=4"]),
        ("0 1\n1 3\n", ["agent 2", "isolated"]),
        ("0 1\n1 2\n3 3\n", ["agent 3", "isolated"]),
        ("0 1\n2 3\n", ["2 parts", "edges.txt"]),
        ("# nothing\n", ["0 agents"]),
    ],
)
def test_bad_edge_files_are_refused(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "edges.txt"
    file.write_text(text)
    refused(lambda: topology.from_edges(file, 4), "edges.txt", *words)


def test_unreadable_edge_files_are_refused(tmp_path: Path) -> None:
    refused(lambda: topology.from_edges(tmp_path / "missing.txt", 4), "missing.txt", "No such file")
    refused(lambda: topology.from_edges(tmp_path, 4), "graph.path")
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8\xff\xe0")
    refused(lambda: topology.from_edges(tmp_path / "photo.jpg", 4), "UTF-8")
    refused(lambda: built("file"), "graph.path")


def matrix(*changes: tuple[int, int, float]) -> np.ndarray:
    W = np.full((3, 3), 1 / 3)
    for i, j, value in changes:
        W[i, j] = value
    return W


@pytest.mark.parametrize(
    ("W", "word"),
    [
        (np.full((2, 3), 1 / 3), "square"),
        (np.ones(3), "square"),
        ([[1, 0], [0]], "numbers"),
        ("W", "numbers"),
        (matrix((0, 1, math.nan)), "finite at [0, 1]"),
        (matrix((2, 1, math.inf)), "finite at [2, 1]"),
        (matrix((0, 1, -1 / 3), (1, 0, -1 / 3), (0, 0, 1), (1, 1, 1)), "negative at [0, 1]"),
        (matrix((0, 1, 2 / 3), (0, 0, 0)), "symmetric at [0, 1]"),
        (matrix((1, 1, 0.5)), "doubly stochastic: row 1"),
        ([[0.0, 1.0], [1.0, 0.0]], "diagonal at agent 0"),
        ([[0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]], "diagonal at agent 1"),
        (np.eye(3), "3 parts"),
        ([[1.0]], "1 agents"),
        (np.empty((0, 0)), "0 agents"),
    ],
)
def test_bad_matrices_are_refused(W: Any, word: str) -> None:
    refused(lambda: topology.from_matrix(W), word)


@pytest.mark.parametrize("M", [-1, 0, 1])
def test_fewer_than_two_agents_are_refused(M: int, tmp_path: Path) -> None:
    makers: list[Callable[[int], Graph]] = [
        topology.full,
        topology.ring,
        topology.bipartite,
        topology.complete_bipartite,
        topology.star,
        topology.line,
        topology.grid,
        topology.torus,
        topology.exponential,
        lambda M: topology.k_regular(M, 4),
        lambda M: topology.erdos_renyi(M, 0.5),
        lambda M: topology.small_world(M, 4, 0.5),
        lambda M: topology.from_edges(tmp_path / "edges.txt", M),
        lambda M: topology.from_networkx(nx.empty_graph(max(M, 0))),
    ]
    for make in makers:
        refused(partial(make, M), "agents")


def test_sizes_and_degrees_that_cannot_be_are_refused() -> None:
    refused(lambda: topology.bipartite(3), "at least 4")
    for make in (topology.grid, topology.torus):
        refused(partial(make, 7), "7 agents", "6 or 8")
        refused(partial(make, 3), "agents=4")
    refused(lambda: topology.k_regular(4, 4), "degree 4", "between 1 and 3")
    refused(lambda: topology.k_regular(4, 0), "degree 0")
    refused(lambda: topology.k_regular(5, 3), "even", "degree=4")
    refused(lambda: topology.k_regular(6, 1), "connected", "degree=2")
    refused(lambda: topology.small_world(2, 1, 0.5), "at least 3")
    refused(lambda: topology.small_world(4, 4, 0.5), "degree 4", "degree=2")
    refused(lambda: topology.small_world(9, 5, 0.5), "even", "degree=4")
    refused(lambda: topology.from_networkx(nx.DiGraph([(0, 1)])), "directed")


def test_random_graphs_give_up_on_being_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    refused(lambda: topology.erdos_renyi(50, 0.01), "connected in 100 draws", "raise probability")
    monkeypatch.setattr("pdsl.topology.generators.MAX_DRAWS", 1)
    refused(lambda: topology.small_world(300, 2, 1.0), "connected", "degree")
    refused(lambda: topology.k_regular(300, 2), "connected", "degree=3")


@pytest.mark.parametrize("kind", ["full", "ring", "grid", "exponential", "k-regular", "erdos-renyi", "small-world"])
def test_a_thousand_agents_are_quick(kind: str) -> None:
    start = time.process_time()
    graph = built(kind, agents=1000)
    assert graph.spectral_gap > 0
    assert len(graph.reverse) == graph.offsets[-1]
    assert time.process_time() - start < 3  # a fraction of a second; loops over pairs in Python would take longer
