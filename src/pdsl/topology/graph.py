"""A graph of agents with its mixing matrix W, and a schedule: graphs that change from round to round.

ω_ij is the weight of agent j's message at agent i; the paper calls W the weight matrix.
"""

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property, reduce

import numpy as np
from numpy.typing import NDArray

from pdsl.settings import GraphSettings
from pdsl.utils.errors import PdslError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Links = NDArray[np.bool_]  # [M, M], symmetric, False on the diagonal

TOLERANCE = 1e-9  # for symmetry and row sums of W
NOUNS = ("ring", "star", "line", "grid", "torus")  # names that need no noun after them


@dataclass(frozen=True, eq=False)
class Graph:
    """A connected graph of agents and its mixing matrix W (symmetric, doubly stochastic).

    Every agent is a member of its own neighbourhood. Edges are directed, include self-loops and are sorted by
    (receiver, sender), so the edges of one receiver are contiguous. A graph that is one round of a schedule need not be
    connected (`connected=False`).
    """

    name: str
    W: Floats  # [M, M], read-only
    settings: GraphSettings | None = field(default=None, kw_only=True)  # as a config names this graph; None: it cannot
    names: tuple[str, ...] | None = field(default=None, kw_only=True)  # of the agents; None: they are numbers
    connected: InitVar[bool] = field(default=True, kw_only=True)  # refuse a graph that is not connected

    def __post_init__(self, connected: bool) -> None:
        W = _check_matrix(self.name, self.W)
        if connected and (problem := describe_parts(self.name, W > 0)):
            raise PdslError(problem)
        W.flags.writeable = False
        object.__setattr__(self, "W", W)
        if self.names is not None:
            check_names(self.name, self.names, len(W))

    @property
    def agents(self) -> int:
        """Number of agents M."""
        return len(self.W)

    def at(self, t: int) -> "Graph":
        """The graph of round t, from 1: the graph itself, unless it is a schedule."""
        return self

    @property
    def distinct(self) -> tuple["Graph", ...]:
        """The different graphs of all rounds."""
        return (self,)

    @property
    def max_members(self) -> int:
        """Size of the largest neighbourhood in any round, the agent included."""
        return max(int(graph.degrees.max()) for graph in self.distinct)

    @property
    def is_connected(self) -> bool:
        return not _components(self.W > 0).any()

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

    def edges(self) -> list[tuple[int, int, float]]:
        """(receiver, sender, ω) of each edge."""
        return list(zip(self.receiver.tolist(), self.sender.tolist(), self.omega.tolist(), strict=True))

    def describe(self) -> str:
        """Describe the graph in one line."""
        noun = self.name if self.name in NOUNS else f"{self.name} graph"
        members = _span(self.degrees)
        return f"{noun} of {self.agents} agents, {members} members each, spectral gap {self.spectral_gap:.3g}"


@dataclass(frozen=True, eq=False)
class Schedule(Graph):
    """Graphs that change from round to round.

    As a graph, a schedule is the union of its rounds: W is the mean of their matrices, so an edge is there if it is in
    any round. `at(t)` is the graph of round t. The union must be connected; the graph of a round need not be.
    """

    graphs: tuple[Graph, ...] = field(kw_only=True)  # of rounds 1, 2, …; equal ones are the same object
    cyclic: bool = field(default=True, kw_only=True)  # repeated after the last; otherwise the run ends with the last

    @classmethod
    def of(
        cls, name: str, graphs: Sequence[Graph], *, cyclic: bool = True, settings: GraphSettings | None = None
    ) -> "Schedule":
        """Schedule of the graphs of rounds 1, 2, …; PdslError if they do not fit together."""
        if not graphs:
            raise PdslError("graph: a schedule needs at least one graph; try [pdsl.ring(8), pdsl.full(8)]")
        first = graphs[0]
        for t, graph in enumerate(graphs, start=1):
            if (graph.agents, graph.names) != (first.agents, first.names):
                raise PdslError(
                    f"graph: the agents of round {t} differ from those of round 1 ({graph.agents} and {first.agents});"
                    " give all rounds the same agents"
                )
            if isinstance(graph, Schedule):
                raise PdslError(f"graph: round {t} is a schedule itself; give one graph for each round")
            if len(graph.receiver) == graph.agents:
                raise PdslError(f"graph: round {t} has no edges; give each round at least one edge")
        known: dict[bytes, Graph] = {}
        same = tuple(known.setdefault(graph.W.tobytes(), graph) for graph in graphs)
        W = np.zeros_like(first.W)
        for graph in same:
            W += graph.W / len(same)
        over = "the period" if cyclic else "all rounds"
        if problem := describe_parts(name, W > 0, f"the union over {over}"):
            raise PdslError(problem)
        return cls(name, W, graphs=same, cyclic=cyclic, settings=settings, names=first.names)

    @classmethod
    def from_function(cls, function: Callable[[int], Graph], rounds: int) -> "Schedule":
        """Schedule of a function of the round, evaluated for all rounds of a run."""
        return cls.of("own", [function(t) for t in range(1, rounds + 1)], cyclic=False)

    @property
    def period(self) -> int:
        return len(self.graphs)

    def at(self, t: int) -> Graph:
        if self.cyclic:
            return self.graphs[(t - 1) % self.period]
        if not 1 <= t <= self.period:
            raise PdslError(
                f"rounds: the graph was a function of the round and is known for {self.period} rounds, not for round"
                f" {t}; leave rounds as they were, or start a new run in Python"
            )
        return self.graphs[t - 1]

    @property
    def distinct(self) -> tuple[Graph, ...]:
        return tuple(dict.fromkeys(self.graphs))

    @cached_property
    def spectral_gap(self) -> float:
        """1 − ‖W_P … W_1 − J‖₂ for the product over a period and the averaging matrix J; 1: exact consensus."""
        product = reduce(lambda done, graph: graph.W @ done, self.graphs, np.eye(self.agents))
        return max(0.0, float(1 - np.linalg.norm(product - 1 / self.agents, ord=2)))

    def describe(self) -> str:
        members = _span(np.concatenate([graph.degrees for graph in self.distinct]))
        over = "a period" if self.cyclic else "all rounds"
        return (
            f"{self.name} schedule of {self.agents} agents, {self.period} rounds, {members} members each in a round,"
            f" spectral gap {self.spectral_gap:.3g} over {over}"
        )


def _span(degrees: Integers) -> str:
    low, high = degrees.min(), degrees.max()
    return f"{low}" if low == high else f"{low} to {high}"


def _check_matrix(name: str, W: Floats) -> Floats:
    """Check W and return a copy that is symmetric to the last bit, so that both directions of an edge exist."""
    where = f"mixing matrix of graph {name!r}"
    if W.ndim != 2 or W.shape[0] != W.shape[1]:
        raise PdslError(f"{where} has shape {W.shape}, which is not square; try one row and one column per agent")
    check_size(name, len(W))
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
    return (W + W.T) / 2


def describe_parts(name: str, linked: Links, which: str = "it") -> str | None:
    """Error line for a graph that is not connected; None if it is connected."""
    part = _components(linked)
    if not part.any():
        return None
    return (
        f"graph {name!r} is not connected: {which} has {part.max() + 1} parts, and agent 0 cannot reach"
        f" agent {part.nonzero()[0][0]}; try adding edges that join the parts"
    )


def _first(wrong: Links) -> str:
    i, j = np.argwhere(wrong)[0]
    return f"at [{i}, {j}]"


def check_size(name: str, agents: int) -> None:
    if agents < 2:
        raise PdslError(f"graph {name!r} has {agents} agents, and at least 2 are needed; try graph.agents=2 or more")


def check_names(name: str, names: tuple[str, ...], agents: int) -> None:
    if len(names) != agents or len(set(names)) != agents:
        raise PdslError(f"graph {name!r} has {agents} agents, but {len(set(names))} different names; give each its own")


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


def metropolis(
    name: str,
    linked: Links,
    settings: GraphSettings | None = None,
    names: tuple[str, ...] | None = None,
    connected: bool = True,
) -> Graph:
    """Graph with Metropolis–Hastings weights, ω_ij = 1 / max(|M_i|, |M_j|).

    A neighbourhood includes its agent, so ω_ij = 1 / (1 + larger degree) and the diagonal is always positive.
    """
    members = 1 + linked.sum(axis=1)
    W = linked / np.maximum.outer(members, members)
    np.fill_diagonal(W, 1 - W.sum(axis=1))
    return Graph(name, W, settings=settings, names=names, connected=connected)


def is_connected(linked: Links) -> bool:
    return not _components(linked).any()
