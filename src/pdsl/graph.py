"""The graph of agents: topologies, the mixing matrix W and its spectral gap.

W is what the paper calls the weight matrix: ω_ij is the weight agent i gives to what it hears from agent j. The full
graph has 1/M and the ring 1/3, the bipartite graph the weights of the CGA code; every other graph takes
Metropolis–Hastings weights.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pdsl.errors import PdslError
from pdsl.randomness import Streams
from pdsl.settings import GraphSettings

if TYPE_CHECKING:
    import networkx

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Links = NDArray[np.bool_]  # [M, M], symmetric, nothing on the diagonal

TOLERANCE = 1e-9  # for symmetry and for the sums of rows
DRAWS = 100  # of a random graph, before giving up on a connected one


@dataclass(frozen=True, eq=False)
class Graph:
    """A connected graph of agents and its mixing matrix W (symmetric, doubly stochastic).

    Every agent is a member of its own neighbourhood. Edges are directed, self-loops included, and sorted by
    (receiver, sender), so the edges of one receiver lie together.
    """

    name: str
    W: Floats  # [M, M]

    def __post_init__(self) -> None:
        object.__setattr__(self, "W", _mixing_matrix(self.name, self.W))

    @property
    def agents(self) -> int:
        """M."""
        return len(self.W)

    @cached_property
    def _edges(self) -> tuple[Integers, Integers]:
        receiver, sender = np.nonzero(self.W)
        return receiver.astype(np.int64), sender.astype(np.int64)

    @property
    def receiver(self) -> Integers:
        """The receiving agent of each edge, [E]."""
        return self._edges[0]

    @property
    def sender(self) -> Integers:
        """The sending agent of each edge, [E]."""
        return self._edges[1]

    @cached_property
    def reverse(self) -> Integers:
        """The edge that goes the other way, for each edge, [E]; a self-loop is its own."""
        # W is symmetric: the edges sorted by (sender, receiver) are the reversed edges in their own order
        return np.lexsort((self.receiver, self.sender)).astype(np.int64)

    @cached_property
    def omega(self) -> Floats:
        """The weight ω of each edge, [E]."""
        return self.W[self.receiver, self.sender]

    @cached_property
    def offsets(self) -> Integers:
        """[M+1]: the edges with receiver i are offsets[i]:offsets[i+1]."""
        return np.searchsorted(self.receiver, np.arange(self.agents + 1)).astype(np.int64)

    @cached_property
    def degrees(self) -> Integers:
        """|M_i| of each agent, itself included, [M]."""
        return np.diff(self.offsets)

    def neighbourhood(self, i: int) -> Integers:
        """M_i, ascending, i included."""
        return self.sender[self.offsets[i] : self.offsets[i + 1]]

    @cached_property
    def eigenvalues(self) -> Floats:
        """Of W, ascending; the last is 1."""
        return np.linalg.eigvalsh(self.W).astype(np.float64)

    @cached_property
    def spectral_gap(self) -> float:
        """1 - max(|λ_2|, |λ_M|): the larger, the faster agents come to agree; at most 1, always positive."""
        return float(1 - np.abs(self.eigenvalues[:-1]).max())

    def describe(self) -> str:
        """One line for people."""
        noun = self.name if self.name in ("ring", "star", "line", "grid", "torus") else f"{self.name} graph"
        least, most = self.degrees.min(), self.degrees.max()
        members = f"{least}" if least == most else f"{least} to {most}"
        return f"{noun} of {self.agents} agents, {members} members each, spectral gap {self.spectral_gap:.3g}"


def _mixing_matrix(name: str, W: Floats) -> Floats:
    """A checked copy of W, symmetric to the last bit so that both directions of an edge exist."""
    where = f"mixing matrix of graph {name!r}"
    if W.ndim != 2 or W.shape[0] != W.shape[1]:
        raise PdslError(f"{where} has shape {W.shape}, which is not square; try one row and one column per agent")
    _need_two(name, len(W))
    if not np.isfinite(W).all():
        raise PdslError(f"{where} is not finite {_first(~np.isfinite(W))}; try 0 where there is no edge")
    if (W < 0).any():
        raise PdslError(f"{where} is negative {_first(W < 0)}; try Metropolis–Hastings weights (from_networkx)")
    skewed = np.abs(W - W.T) > TOLERANCE
    if skewed.any():
        raise PdslError(f"{where} is not symmetric {_first(skewed)}; try (W + W.T) / 2")
    off = np.abs(W.sum(axis=1) - 1) > TOLERANCE
    if off.any():
        i = int(off.argmax())
        raise PdslError(
            f"{where} is not doubly stochastic: row {i} sums to {W[i].sum():.10g}; try W[i, i] = 1 - its other weights"
        )
    if not W.diagonal().all():
        i = int(W.diagonal().argmin())
        raise PdslError(
            f"{where} has 0 on the diagonal at agent {i}, which needs its own message; try (W + the identity) / 2"
        )
    W = (W + W.T) / 2
    part = _parts(W > 0)
    if part.any():
        raise PdslError(
            f"graph {name!r} is not connected: it has {part.max() + 1} parts, and agent 0 cannot reach"
            f" agent {part.nonzero()[0][0]}; try adding edges that join the parts"
        )
    return W


def _first(wrong: Links) -> str:
    i, j = np.argwhere(wrong)[0]
    return f"at [{i}, {j}]"


def _need_two(name: str, M: int) -> None:
    if M < 2:
        raise PdslError(f"graph {name!r} has {M} agents, and at least 2 are needed; try graph.agents=2 or more")


def _parts(linked: Links) -> Integers:
    """The connected part each agent is in, numbered from 0 in the order of their first agents, [M]."""
    part = np.full(len(linked), -1, dtype=np.int64)
    while (part < 0).any():
        frontier = np.flatnonzero(part < 0)[:1]
        number = part.max() + 1
        while frontier.size:
            part[frontier] = number
            frontier = np.flatnonzero(linked[frontier].any(axis=0) & (part < 0))
    return part


def _linked(name: str, M: int, i: Integers, j: Integers) -> Links:
    """Agents i joined to agents j (broadcast against each other), both ways."""
    _need_two(name, M)
    linked = np.zeros((M, M), dtype=np.bool_)
    linked[i, j] = True
    linked |= linked.T
    np.fill_diagonal(linked, False)
    return linked


def _keep_the_rest(W: Floats) -> Floats:
    """W with each agent keeping for itself what it does not give to others."""
    np.fill_diagonal(W, 1 - W.sum(axis=1))
    return W


def _metropolis(name: str, linked: Links) -> Graph:
    """Metropolis–Hastings: ω_ij = 1 / max(|M_i|, |M_j|).

    The neighbourhoods count the agent itself, so ω_ij = 1 / (1 + larger degree) and the diagonal is always positive.
    """
    members = 1 + linked.sum(axis=1)
    return Graph(name, _keep_the_rest(linked / np.maximum.outer(members, members)))


def full(M: int) -> Graph:
    """Everybody hears everybody: ω = 1/M."""
    _need_two("full", M)
    return Graph("full", np.full((M, M), 1 / M))


def ring(M: int) -> Graph:
    """Each agent hears the one before and the one after: ω = 1/3. Up to three agents this is the full graph."""
    agents = np.arange(M)
    linked = _linked("ring", M, agents, np.roll(agents, 1))
    return Graph("ring", (linked + np.eye(M)) / min(M, 3))


def bipartite(M: int) -> Graph:
    """Two hubs, agents 0 and 1, joined to all others but not to each other, with the weights of the CGA code.

    An edge has a = ⌊100/(M-1)⌋/100. Beyond 101 agents that would be 0, and a = 1/(M-1) goes on where it ends.
    """
    if M < 4:
        raise PdslError(f"graph 'bipartite' has {M} agents, and at least 4 are needed; try graph.kind=line")
    a = 100 // (M - 1) / 100 or 1 / (M - 1)
    agents = np.arange(M)
    linked = _linked("bipartite", M, agents[:2, None], agents[2:])
    return Graph("bipartite", _keep_the_rest(np.where(linked, a, 0.0)))


def complete_bipartite(M: int) -> Graph:
    """Every even agent is joined to every odd one."""
    agents = np.arange(M)
    return _metropolis("complete-bipartite", _linked("complete-bipartite", M, agents[::2, None], agents[1::2]))


def star(M: int) -> Graph:
    """Agent 0 is joined to all others."""
    agents = np.arange(M)
    return _metropolis("star", _linked("star", M, agents[:1], agents[1:]))


def line(M: int) -> Graph:
    """A ring that is cut open: the two ends have one neighbour."""
    agents = np.arange(M)
    return _metropolis("line", _linked("line", M, agents[:-1], agents[1:]))


def grid(M: int) -> Graph:
    """Rows and columns, as square as M allows; each agent is joined to those beside, above and below it."""
    cell = _cells("grid", M)
    i = np.concatenate([cell[1:].ravel(), cell[:, 1:].ravel()])
    j = np.concatenate([cell[:-1].ravel(), cell[:, :-1].ravel()])
    return _metropolis("grid", _linked("grid", M, i, j))


def torus(M: int) -> Graph:
    """A grid whose rows and columns are closed to rings."""
    cell = _cells("torus", M)
    before = np.stack([np.roll(cell, 1, axis=0), np.roll(cell, 1, axis=1)])
    return _metropolis("torus", _linked("torus", M, cell, before))


def _cells(name: str, M: int) -> Integers:
    """The agents laid out in rows and columns."""
    _need_two(name, M)
    rows = max(r for r in range(1, math.isqrt(M) + 1) if M % r == 0)
    if rows == 1:
        sizes = "4" if M < 4 else f"{M - 1} or {M + 1}"
        raise PdslError(f"graph {name!r} cannot have {M} agents: a prime has no rows and columns; try agents={sizes}")
    return np.arange(M, dtype=np.int64).reshape(rows, -1)


def exponential(M: int) -> Graph:
    """Agent i is joined to i ± 2^k mod M, for every 2^k below M."""
    agents = np.arange(M)[:, None]
    steps = 2 ** np.arange((M - 1).bit_length())
    return _metropolis("exponential", _linked("exponential", M, agents, (agents + steps) % max(M, 1)))


def k_regular(M: int, degree: int, streams: Streams) -> Graph:
    """A random connected graph in which each agent has `degree` neighbours besides itself."""
    import networkx

    what = f"graph 'k-regular' of {M} agents cannot have degree {degree}"
    _need_two("k-regular", M)
    if not 1 <= degree < M:
        raise PdslError(f"{what}: it lies between 1 and {M - 1}; try degree={min(M - 1, 4)}")
    if M * degree % 2:
        raise PdslError(f"{what}: agents times degree must be even; try degree={degree + 1} or agents={M + 1}")
    if degree == 1 and M > 2:
        raise PdslError(f"{what}: that makes pairs, which are not connected; try degree=2 or more")

    # networkx takes long when degree is near M; the missing edges of a regular graph are a regular graph too
    missing = M - 1 - degree
    rng = streams.generator("graph")

    def draw() -> Links:
        drawn = _links_of(networkx.random_regular_graph(min(degree, missing), M, seed=_seed(rng)), range(M))
        return drawn if degree <= missing else ~drawn & ~np.eye(M, dtype=np.bool_)

    return _metropolis("k-regular", _connected(draw, "k-regular", f"degree={degree + 1} or more, or kind=ring"))


def erdos_renyi(M: int, probability: float, streams: Streams) -> Graph:
    """Each pair of agents is joined with this probability, redrawn until the graph is connected."""
    _need_two("erdos-renyi", M)
    rng = streams.generator("graph")

    def draw() -> Links:
        upper = np.triu(rng.random((M, M)) < probability, k=1)
        return upper | upper.T

    ample = min(1.0, 2 * math.log(M) / M)  # connected almost surely beyond log(M)/M
    return _metropolis("erdos-renyi", _connected(draw, "erdos-renyi", f"to raise probability, {ample:.2g} for example"))


def small_world(M: int, degree: int, probability: float, streams: Streams) -> Graph:
    """Watts–Strogatz: a ring lattice of this degree, each edge rewired with this probability; connected."""
    import networkx

    what = f"graph 'small-world' of {M} agents cannot have degree {degree}"
    if M < 3:
        raise PdslError(f"graph 'small-world' has {M} agents, and at least 3 are needed; try graph.kind=full")
    if not 2 <= degree < M:
        raise PdslError(f"{what}: it lies between 2 and {M - 1}; try degree={2 if M < 5 else 4}")
    if degree % 2:
        raise PdslError(f"{what}: it must be even, half to each side of the ring; try degree={degree - 1 or 2}")
    rng = streams.generator("graph")

    def draw() -> Links:
        return _links_of(networkx.watts_strogatz_graph(M, degree, probability, seed=_seed(rng)), range(M))

    return _metropolis("small-world", _connected(draw, "small-world", "a larger degree or a lower probability"))


def _seed(rng: np.random.Generator) -> int:
    # networkx takes a numpy generator as well, but then is 10 to 30 times slower than with a seed of its own
    return int(rng.integers(2**63))


def _connected(draw: Callable[[], Links], name: str, advice: str) -> Links:
    """The first connected graph among the draws."""
    for _ in range(DRAWS):
        linked = draw()
        if not _parts(linked).any():
            return linked
    raise PdslError(f"graph {name!r} of {len(linked)} agents was not connected in {DRAWS} draws; try {advice}")


def _links_of(G: "networkx.Graph[Any]", nodes: Any) -> Links:
    import networkx

    linked: Links = networkx.to_numpy_array(G, nodelist=nodes, weight=None) > 0
    np.fill_diagonal(linked, False)
    return linked


def from_networkx(G: "networkx.Graph[Any]") -> Graph:
    """Any connected undirected networkx graph; its weights and self-loops are ignored.

    The agents are its nodes in sorted order, or in the graph's own order when they cannot be compared.
    """
    name = G.name or "networkx"
    _need_two(name, len(G))
    if G.is_directed():
        raise PdslError(f"graph {name!r} is directed, and messages go both ways; try G.to_undirected()")
    try:
        nodes = sorted(G)
    except TypeError:
        nodes = list(G)
    return _metropolis(name, _links_of(G, nodes))


def from_matrix(W: ArrayLike) -> Graph:
    """A mixing matrix of one's own: [M, M], symmetric, doubly stochastic, positive diagonal; 0 means no edge."""
    try:
        return Graph("matrix", np.asarray(W, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise PdslError("mixing matrix is not a table of numbers; try an [M, M] array of floats") from error


def from_edges(path: str | PathLike[str], agents: int) -> Graph:
    """A text file with one edge 'i j' per line, agents from 0; # begins a comment. Repeated edges count once."""
    file = Path(path)
    _need_two(file.name, agents)
    edges = _read_edges(file, agents)
    if edges.max(initial=-1) < agents - 1:
        raise PdslError(
            f"{str(file)!r} has {edges.max(initial=-1) + 1} agents, but graph.agents={agents};"
            " try the same number, and at least one edge for each agent"
        )
    linked = _linked(file.name, agents, edges[:, 0], edges[:, 1])
    isolated = np.flatnonzero(~linked.any(axis=1))
    if isolated.size:
        raise PdslError(f"{str(file)!r}: agent {isolated[0]} is isolated; try adding an edge for it")
    return _metropolis(file.name, linked)


def _read_edges(file: Path, agents: int) -> Integers:
    """The edges of a file, in its order, [n, 2]."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PdslError(f"cannot read edges from {str(file)!r} ({error.strerror}); check graph.path") from error
    except UnicodeDecodeError as error:
        raise PdslError(f"cannot read edges from {str(file)!r}: not a UTF-8 text file; check graph.path") from error

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


def _from_settings_file(settings: GraphSettings) -> Graph:
    if settings.path is None:
        raise PdslError("graph.kind 'file' needs graph.path; try graph.path=edges.txt with one edge 'i j' per line")
    return from_edges(settings.path, settings.agents)


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
    "file": lambda s, _: _from_settings_file(s),
}


def build(settings: GraphSettings, streams: Streams) -> Graph:
    """The graph that the settings describe; the same streams give the same random graph."""
    return GRAPHS[settings.kind](settings, streams)
