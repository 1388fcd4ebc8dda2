"""Graphs from other objects: networkx graphs, matrices, files, sequences, functions of the round, and setup.json."""

import re
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from pdsl.settings import GraphSettings
from pdsl.topology.graph import Floats, Graph, Integers, Links, Schedule, check_size, metropolis
from pdsl.utils.errors import PdslError

if TYPE_CHECKING:
    import networkx


def as_graph(value: object, rounds: int) -> Graph:
    """Convert what `pdsl.train` accepts: a graph, a networkx graph, a sequence of them, or a function of the round.

    A function is evaluated for rounds 1 to `rounds`.
    """
    if isinstance(value, Graph):
        if not value.is_connected:
            raise PdslError(f"graph {value.name!r} is not connected; add edges, or give a sequence that is, as a whole")
        return value
    if hasattr(value, "is_directed"):
        return from_networkx(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return Schedule.of("own", [_of_round(graph, t) for t, graph in enumerate(value, start=1)])
    if callable(value) and not isinstance(value, type):
        if str(getattr(value, "__module__", "")).startswith("pdsl.topology"):
            raise PdslError(f"graph: pdsl.{getattr(value, '__name__', '?')} is a function; call it, like pdsl.ring(10)")
        return Schedule.from_function(lambda t: _of_round(value(t), t), rounds)
    raise PdslError(
        f"graph: {value!r:.60} given; give a name like 'ring', pdsl.ring(10) or the like, a networkx graph, a list of"
        " graphs, or a function of the round"
    )


def _of_round(value: object, t: int) -> Graph:
    if isinstance(value, Graph):
        return value
    if hasattr(value, "is_directed"):
        return from_networkx(value, connected=False)
    raise PdslError(f"graph: round {t} has {value!r:.60}; give pdsl.ring(10) or the like, or a networkx graph")


def from_networkx(G: "networkx.Graph[Any]", weight: str | None = None, connected: bool = True) -> Graph:
    """Convert an undirected networkx graph. Self-loops are ignored.

    Agents are its nodes in sorted order, or in the graph's own order if they cannot be compared. Their names are kept,
    unless they are the numbers 0, 1, ….

    Args:
        G: the graph.
        weight: edge attribute with the mixing weights ω; the rest of an agent's weight is its own. Default:
            Metropolis–Hastings weights, whatever weights the edges have.
        connected: refuse a graph that is not connected; False: for one round of a schedule.
    """
    name = G.name or "networkx"
    check_size(name, len(G))
    if G.is_directed():
        raise PdslError(f"graph {name!r} is directed, and messages go both ways; try G.to_undirected()")
    try:
        nodes = sorted(G)
    except TypeError:
        nodes = list(G)
    names = None if nodes == list(range(len(nodes))) else tuple(str(node) for node in nodes)
    import networkx  # here, because it takes long to import

    linked: Links = networkx.to_numpy_array(G, nodelist=nodes, weight=None) > 0
    np.fill_diagonal(linked, False)
    if weight is not None:
        return _weighted(name, G, nodes, weight, names, connected)
    if any(w != 1 for *_, w in G.edges(data="weight", default=1)):
        warnings.warn(
            f"graph {name!r} has edge weights, which are not used; pass pdsl.from_networkx(G, weight='weight') to take"
            " them as mixing weights ω",
            stacklevel=2,
        )
    return metropolis(name, linked, names=names, connected=connected)


def _weighted(
    name: str, G: "networkx.Graph[Any]", nodes: list[Any], weight: str, names: tuple[str, ...] | None, connected: bool
) -> Graph:
    """Graph with the mixing weights of an edge attribute."""
    place = {node: n for n, node in enumerate(nodes)}
    W = np.zeros((len(nodes), len(nodes)))
    for a, b, omega in G.edges(data=weight):
        if a != b:
            if not isinstance(omega, int | float) or not 0 < omega < 1:
                raise PdslError(f"graph {name!r}: edge {a}–{b} has {weight}={omega!r}; give a number between 0 and 1")
            W[place[a], place[b]] = W[place[b], place[a]] = omega
    own = 1 - W.sum(axis=1)
    if (own <= 0).any():
        node = nodes[int(own.argmin())]
        raise PdslError(f"graph {name!r}: the weights at {node} sum to {1 - own.min():.4g}; scale them below 1")
    np.fill_diagonal(W, own)
    return Graph(name, W, names=names, connected=connected)


def from_matrix(W: ArrayLike, connected: bool = True) -> Graph:
    """Graph of a mixing matrix [M, M]: symmetric, doubly stochastic, positive diagonal; 0 means no edge.

    Args:
        W: the matrix.
        connected: refuse a graph that is not connected; False: for one round of a schedule.
    """
    try:
        return Graph("matrix", np.asarray(W, dtype=np.float64), connected=connected)
    except (TypeError, ValueError) as error:
        raise PdslError("mixing matrix is not a table of numbers; try an [M, M] array of floats") from error


def from_setup(setup: Mapping[str, Any]) -> Graph:
    """The graph that a run stored in setup.json, to the last bit."""
    agents, name = int(setup["agents"]), str(setup["graph_name"])
    names = setup.get("names")
    named = None if names is None else tuple(str(of_agent) for of_agent in names)
    stored = setup.get("schedule")
    if stored is None:
        return Graph(name, _matrix(agents, setup["edges"]), names=named)
    graphs = [Graph(name, _matrix(agents, edges), names=named, connected=False) for edges in stored["graphs"]]
    return Schedule.of(name, [graphs[int(n)] for n in stored["order"]], cyclic=bool(stored["cyclic"]))


def describe_schedule(graph: Graph) -> dict[str, Any]:
    """The graphs of a schedule, for setup.json; empty for a fixed graph."""
    if not isinstance(graph, Schedule):
        return {}
    index = {round_graph: n for n, round_graph in enumerate(graph.distinct)}
    return {
        "schedule": {
            "graphs": [[list(edge) for edge in round_graph.edges()] for round_graph in graph.distinct],
            "order": [index[round_graph] for round_graph in graph.graphs],
            "cyclic": graph.cyclic,
        }
    }


def _matrix(agents: int, edges: Sequence[Sequence[float]]) -> Floats:
    W = np.zeros((agents, agents))
    for i, j, omega in edges:
        W[int(i), int(j)] = omega
    return W


def from_edges(path: str | PathLike[str] | None, agents: int) -> Graph:
    """Read a text file with one edge 'i j' per line, agents from 0; # starts a comment. Repeated edges count once.

    Args:
        path: the file.
        agents: number of agents.
    """
    if path is None:
        raise PdslError("graph.kind 'file' needs graph.path; try graph.path=edges.txt with one edge 'i j' per line")
    file = Path(path)
    check_size(file.name, agents)
    edges = _read_edges(file, agents)
    found = edges.max(initial=-1) + 1
    if found < agents:
        raise PdslError(f"{str(file)!r} has {found} agents, but graph.agents={agents}; try the same number")
    linked = np.zeros((agents, agents), dtype=np.bool_)
    linked[edges[:, 0], edges[:, 1]] = linked[edges[:, 1], edges[:, 0]] = True
    np.fill_diagonal(linked, False)
    isolated = np.flatnonzero(~linked.any(axis=1))
    if isolated.size:
        raise PdslError(f"{str(file)!r}: agent {isolated[0]} is isolated; try adding an edge for it")
    settings = GraphSettings(kind="file", agents=agents, path=str(file.absolute()))
    return metropolis(file.name, linked, settings)


def _read_edges(file: Path, agents: int) -> Integers:
    """Edges of a file, in its order, [n, 2]."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a UTF-8 text file"
        raise PdslError(f"cannot read edges from {str(file)!r} ({reason}); check graph.path") from error
    edges: list[tuple[int, int]] = []
    for number, content in enumerate(text.split("\n"), start=1):
        edge = content.partition("#")[0].strip()
        if not edge:
            continue
        if not re.fullmatch(r"[0-9]{1,9}\s+[0-9]{1,9}", edge):
            raise PdslError(f"{str(file)!r} line {number}: {edge[:40]!r} is not an edge; try two agents, like '0 1'")
        i, j = map(int, edge.split())
        if max(i, j) >= agents:
            raise PdslError(
                f"{str(file)!r} line {number}: agent {max(i, j)} is not among the {agents} agents, 0 to {agents - 1};"
                f" try graph.agents={max(i, j) + 1}"
            )
        edges.append((i, j))
    return np.array(edges, dtype=np.int64).reshape(-1, 2)
