"""Graphs of agents: topologies, the mixing matrix W and its spectral gap.

ω_ij is the weight of agent j's message at agent i; the paper calls W the weight matrix. The full graph has ω = 1/M, the
ring 1/3, and the bipartite graph the weights of the CGA code. All other graphs have Metropolis–Hastings weights.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pdsl.settings import GraphSettings
from pdsl.utils.errors import PdslError
from pdsl.utils.random import Streams

if TYPE_CHECKING:
    import networkx

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Links = NDArray[np.bool_]  # [M, M], symmetric, False on the diagonal

TOLERANCE = 1e-9  # for symmetry and row sums of W
MAX_DRAWS = 100  # draws of a random graph until one is connected


@dataclass(frozen=True, eq=False)
class Graph:
    """A connected graph of agents and its mixing matrix W (symmetric, doubly stochastic).

    Every agent is a member of its own neighbourhood. Edges are directed, include self-loops and are sorted by
    (receiver, sender), so the edges of one receiver are contiguous.
    """

    name: str
    W: Floats  # [M, M]

    def __post_init__(self) -> None:
        object.__setattr__(self, "W", _check_matrix(self.name, self.W))

    @property
    def agents(self) -> int:
        """Number of agents M."""
        return len(self.W)

    @cached_property
    def receiver(self) -> Integers:
        """Receiving agent of each edge, [E]."""
        return np.nonzero(self.W)[0].astype(np.int64)

    @cached_property
    def sender(self) -> Integers:
        """Sending agent of each edge, [E]."""
        return np.nonzero(self.W)[1].astype(np.int64)

    @cached_property
    def reverse(self) -> Integers:
        """Index of the reverse of each edge, [E]; a self-loop is its own reverse."""
        # W is symmetric, so the edges sorted by (sender, receiver) are the reversed edges in order
        return np.lexsort((self.receiver, self.sender)).astype(np.int64)

    @cached_property
    def omega(self) -> Floats:
        """Weight ω of each edge, [E]."""
        return self.W[self.receiver, self.sender]

    @cached_property
    def offsets(self) -> Integers:
        """[M+1]: the edges with receiver i are offsets[i]:offsets[i+1]."""
        return np.searchsorted(self.receiver, np.arange(self.agents + 1)).astype(np.int64)

    @cached_property
    def degrees(self) -> Integers:
        """Size |M_i| of each neighbourhood, the agent included, [M]."""
        return np.diff(self.offsets)

    def neighbourhood(self, i: int) -> Integers:
        """Neighbourhood M_i, ascending, i included."""
        return self.sender[self.offsets[i] : self.offsets[i + 1]]

    @cached_property
    def eigenvalues(self) -> Floats:
        """Eigenvalues of W, ascending; the last is 1."""
        return np.linalg.eigvalsh(self.W).astype(np.float64)

    @cached_property
    def spectral_gap(self) -> float:
        """1 - max(|λ_2|, |λ_M|), positive and at most 1; the larger, the faster agents reach consensus."""
        return float(1 - np.abs(self.eigenvalues[:-1]).max())

    def describe(self) -> str:
        """Describe the graph in one line."""
        noun = self.name if self.name in ("ring", "star", "line", "grid", "torus") else f"{self.name} graph"
        low, high = self.degrees.min(), self.degrees.max()
        members = f"{low}" if low == high else f"{low} to {high}"
        return f"{noun} of {self.agents} agents, {members} members each, spectral gap {self.spectral_gap:.3g}"


def _check_matrix(name: str, W: Floats) -> Floats:
    """Check W and return a copy that is symmetric to the last bit, so that both directions of an edge exist."""
    where = f"mixing matrix of graph {name!r}"
    if W.ndim != 2 or W.shape[0] != W.shape[1]:
        raise PdslError(f"{where} has shape {W.shape}, which is not square; try one row and one column per agent")
    _check_size(name, len(W))
    if not np.isfinite(W).all():
        raise PdslError(f"{where} is not finite {_first(~np.isfinite(W))}; try 0 where there is no edge")
    if (W < 0).any():
        raise PdslError(f"{where} is negative {_first(W < 0)}; try Metropolis–Hastings weights (from_networkx)")
    skewed = np.abs(W - W.T) > TOLERANCE
    if skewed.any():
        raise PdslError(f"{where} is not symmetric {_first(skewed)}; try (W + W.T) / 2")
    not_one = np.abs(W.sum(axis=1) - 1) > TOLERANCE
    if not_one.any():
        i = int(not_one.argmax())
        total = f"{W[i].sum():.10g}"
        raise PdslError(
            f"{where} is not doubly stochastic: row {i} sums to {total}; try W[i, i] = 1 - its other weights"
        )
    if not W.diagonal().all():
        i = int(W.diagonal().argmin())
        raise PdslError(f"{where} has 0 on the diagonal at agent {i}; try (W + the identity matrix) / 2")
    W = (W + W.T) / 2
    part = _components(W > 0)
    if part.any():
        raise PdslError(
            f"graph {name!r} is not connected: it has {part.max() + 1} parts, and agent 0 cannot reach"
            f" agent {part.nonzero()[0][0]}; try adding edges that join the parts"
        )
    return W


def _first(wrong: Links) -> str:
    i, j = np.argwhere(wrong)[0]
    return f"at [{i}, {j}]"


def _check_size(name: str, M: int) -> None:
    if M < 2:
        raise PdslError(f"graph {name!r} has {M} agents, and at least 2 are needed; try graph.agents=2 or more")


def _components(linked: Links) -> Integers:
    """Connected component of each agent, numbered from 0 in the order of their first agents, [M]."""
    part = np.full(len(linked), -1, dtype=np.int64)
    while (part < 0).any():
        frontier = np.flatnonzero(part < 0)[:1]
        number = part.max() + 1
        while frontier.size:
            part[frontier] = number
            frontier = np.flatnonzero(linked[frontier].any(axis=0) & (part < 0))
    return part


def _links(
    name: str, M: int, generate: "Callable[[ModuleType], networkx.Graph]", nodes: Sequence[object] | None = None
) -> Links:
    """Links of the graph that `generate` makes with the module networkx; agents are `nodes`, or its nodes, in order."""
    _check_size(name, M)
    import networkx  # here, because it takes long to import

    linked: Links = networkx.to_numpy_array(generate(networkx), nodelist=nodes, weight=None) > 0
    np.fill_diagonal(linked, False)
    return linked


def _metropolis(name: str, linked: Links) -> Graph:
    """Graph with Metropolis–Hastings weights, ω_ij = 1 / max(|M_i|, |M_j|).

    A neighbourhood includes its agent, so ω_ij = 1 / (1 + larger degree) and the diagonal is always positive.
    """
    members = 1 + linked.sum(axis=1)
    W = linked / np.maximum.outer(members, members)
    np.fill_diagonal(W, 1 - W.sum(axis=1))
    return Graph(name, W)


def full(M: int) -> Graph:
    """All agents are neighbours: ω = 1/M."""
    _check_size("full", M)
    return Graph("full", np.full((M, M), 1 / M))


def ring(M: int) -> Graph:
    """Each agent has two neighbours: ω = 1/3. With two or three agents this is the full graph."""
    linked = _links("ring", M, lambda nx: nx.cycle_graph(M))
    return Graph("ring", (linked + np.eye(M)) / min(M, 3))


def bipartite(M: int) -> Graph:
    """Two hubs, agents 0 and 1, joined to all others but not to each other, with the weights of the CGA code.

    An edge has weight a = ⌊100/(M-1)⌋/100. Beyond 101 agents that would be 0, and a = 1/(M-1).
    """
    if M < 4:
        raise PdslError(f"graph 'bipartite' has {M} agents, and at least 4 are needed; try graph.kind=line")
    a = 100 // (M - 1) / 100 or 1 / (M - 1)
    linked = _links("bipartite", M, lambda nx: nx.complete_bipartite_graph(2, M - 2))
    W = np.where(linked, a, 0.0)
    np.fill_diagonal(W, 1 - W.sum(axis=1))
    return Graph("bipartite", W)


def complete_bipartite(M: int) -> Graph:
    """Each agent with an even number is joined to each agent with an odd number."""
    _check_size("complete-bipartite", M)
    odd = np.arange(M) % 2 == 1
    return _metropolis("complete-bipartite", np.not_equal.outer(odd, odd))


def star(M: int) -> Graph:
    """Agent 0 is joined to all others."""
    return _metropolis("star", _links("star", M, lambda nx: nx.star_graph(M - 1)))


def line(M: int) -> Graph:
    """A ring without one edge: each of the two ends has one neighbour."""
    return _metropolis("line", _links("line", M, lambda nx: nx.path_graph(M)))


def grid(M: int) -> Graph:
    """Rows and columns, as square as M allows; each agent is joined to the agents beside, above and below it."""
    return _lattice("grid", M, periodic=False)


def torus(M: int) -> Graph:
    """A grid whose rows and columns are closed to rings."""
    return _lattice("torus", M, periodic=True)


def _lattice(name: str, M: int, periodic: bool) -> Graph:
    _check_size(name, M)
    rows = max(r for r in range(1, math.isqrt(M) + 1) if M % r == 0)
    if rows == 1:
        sizes = "4" if M < 4 else f"{M - 1} or {M + 1}"
        raise PdslError(f"graph {name!r} cannot have {M} agents: a prime has no rows and columns; try agents={sizes}")
    return _metropolis(name, _links(name, M, lambda nx: nx.grid_2d_graph(rows, M // rows, periodic=periodic)))


def exponential(M: int) -> Graph:
    """Agent i is joined to i ± 2^k mod M, for every 2^k below M."""
    steps = [2**k for k in range((M - 1).bit_length())]
    return _metropolis("exponential", _links("exponential", M, lambda nx: nx.circulant_graph(M, steps)))


def k_regular(M: int, degree: int, streams: Streams) -> Graph:
    """Random connected graph in which each agent has `degree` neighbours besides itself."""
    what = f"graph 'k-regular' of {M} agents cannot have degree {degree}"
    _check_size("k-regular", M)
    if not 1 <= degree < M:
        raise PdslError(f"{what}: it lies between 1 and {M - 1}; try degree={min(M - 1, 4)}")
    if M * degree % 2:
        raise PdslError(f"{what}: agents times degree must be even; try degree={degree + 1} or agents={M + 1}")
    if degree == 1 and M > 2:
        raise PdslError(f"{what}: that makes pairs, which are not connected; try degree=2 or more")
    # networkx is slow if degree is near M, and the complement of a regular graph is regular
    missing = M - 1 - degree

    def draw(rng: np.random.Generator) -> Links:
        seed = int(rng.integers(2**63))  # networkx is 10 to 30 times slower with a generator than with an integer seed
        drawn = _links("k-regular", M, lambda nx: nx.random_regular_graph(min(degree, missing), M, seed=seed))
        return drawn if degree <= missing else ~drawn & ~np.eye(M, dtype=np.bool_)

    return _draw_connected("k-regular", draw, streams, f"degree={degree + 1} or more, or kind=ring")


def erdos_renyi(M: int, probability: float, streams: Streams) -> Graph:
    """Each pair of agents is joined with this probability; redrawn until the graph is connected."""
    _check_size("erdos-renyi", M)

    def draw(rng: np.random.Generator) -> Links:
        upper = np.triu(rng.random((M, M)) < probability, k=1)
        return upper | upper.T

    high = min(1.0, 2 * math.log(M) / M)  # beyond log(M)/M it is connected almost surely
    return _draw_connected("erdos-renyi", draw, streams, f"to raise probability, e.g. to {high:.2g}")


def small_world(M: int, degree: int, probability: float, streams: Streams) -> Graph:
    """Watts–Strogatz: a ring lattice of this degree, each edge rewired with this probability; connected."""
    what = f"graph 'small-world' of {M} agents cannot have degree {degree}"
    if M < 3:
        raise PdslError(f"graph 'small-world' has {M} agents, and at least 3 are needed; try graph.kind=full")
    if not 2 <= degree < M:
        raise PdslError(f"{what}: it lies between 2 and {M - 1}; try degree={2 if M < 5 else 4}")
    if degree % 2:
        raise PdslError(f"{what}: it must be even, half to each side of the ring; try degree={degree - 1 or 2}")

    def draw(rng: np.random.Generator) -> Links:
        seed = int(rng.integers(2**63))
        return _links("small-world", M, lambda nx: nx.watts_strogatz_graph(M, degree, probability, seed=seed))

    return _draw_connected("small-world", draw, streams, "a larger degree or a lower probability")


def _draw_connected(name: str, draw: Callable[[np.random.Generator], Links], streams: Streams, advice: str) -> Graph:
    """Draw until the graph is connected."""
    rng = streams.generator("graph")
    for _ in range(MAX_DRAWS):
        linked = draw(rng)
        if not _components(linked).any():
            return _metropolis(name, linked)
    raise PdslError(f"graph {name!r} of {len(linked)} agents was not connected in {MAX_DRAWS} draws; try {advice}")


def from_networkx(G: "networkx.Graph") -> Graph:
    """Convert a connected undirected networkx graph; its weights and self-loops are ignored.

    Agents are its nodes in sorted order, or in the graph's own order if they cannot be compared.
    """
    name = G.name or "networkx"
    _check_size(name, len(G))
    if G.is_directed():
        raise PdslError(f"graph {name!r} is directed, and messages go both ways; try G.to_undirected()")
    try:
        nodes = sorted(G)
    except TypeError:
        nodes = list(G)
    return _metropolis(name, _links(name, len(G), lambda _: G, nodes))


def from_matrix(W: ArrayLike) -> Graph:
    """Graph of a mixing matrix [M, M]: symmetric, doubly stochastic, positive diagonal; 0 means no edge."""
    try:
        return Graph("matrix", np.asarray(W, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise PdslError("mixing matrix is not a table of numbers; try an [M, M] array of floats") from error


def from_edges(path: str | PathLike[str] | None, agents: int) -> Graph:
    """Read a text file with one edge 'i j' per line, agents from 0; # starts a comment. Repeated edges count once."""
    if path is None:
        raise PdslError("graph.kind 'file' needs graph.path; try graph.path=edges.txt with one edge 'i j' per line")
    file = Path(path)
    _check_size(file.name, agents)
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
    return _metropolis(file.name, linked)


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


GRAPHS: dict[str, Callable[[GraphSettings, Streams], Graph]] = {
    "full": lambda s, _: full(s.agents),
    "ring": lambda s, _: ring(s.agents),
    "bipartite": lambda s, _: bipartite(s.agents),
    "complete-bipartite": lambda s, _: complete_bipartite(s.agents),
    "star": lambda s, _: star(s.agents),
    "line": lambda s, _: line(s.agents),
    "grid": lambda s, _: grid(s.agents),
    "torus": lambda s, _: torus(s.agents),
    "k-regular": lambda s, streams: k_regular(s.agents, s.degree, streams),
    "erdos-renyi": lambda s, streams: erdos_renyi(s.agents, s.probability, streams),
    "small-world": lambda s, streams: small_world(s.agents, s.degree, s.probability, streams),
    "exponential": lambda s, _: exponential(s.agents),
    "file": lambda s, _: from_edges(s.path, s.agents),
}


def build(settings: GraphSettings, streams: Streams) -> Graph:
    """Build the graph of the settings; the same streams give the same random graph."""
    return GRAPHS[settings.kind](settings, streams)
