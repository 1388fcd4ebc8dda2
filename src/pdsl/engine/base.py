"""The `Engine` interface: four operations on neighbours' rows, and two all-gathers for metrics.

State is stored as rows, one per agent that this process owns. Edges are directed, include self-loops and are sorted by
(receiver, sender). A process holds the edges whose receiver it owns.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from pdsl.topology import Graph

T = TypeVar("T")

MAX_BYTES_IN_FLIGHT = 2**27  # message bytes held at once over all processes; one agent's messages are never split

ReplyFn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(replying agents [E], requesting agents [E], the requesting agents' rows [E, d]) → replies [E, d]."""


@dataclass(frozen=True)
class Replies:
    """The replies to some consecutive agents, one row per edge."""

    agents: range
    rows: slice  # of these agents, in a tensor with a row per agent
    edges: slice  # of these agents, in a tensor with a row per edge
    offsets: list[int]  # the replies to the n-th of these agents are values[offsets[n]:offsets[n+1]]
    values: Tensor  # [edges, d]: the reply of each edge's sender to the row of its receiver

    def split_by_agent(self, v: Tensor) -> list[Tensor]:
        """Split a tensor with a row per edge into one tensor per agent."""
        return [v[a:b] for a, b in pairwise(self.offsets)]

    def own_rows(self, x: Tensor) -> Tensor:
        """Repeat the receiver's row of x [m, d] for each edge: [edges, d]."""
        counts = torch.tensor([b - a for a, b in pairwise(self.offsets)], device=x.device)
        return x[self.rows].repeat_interleave(counts, dim=0)


@dataclass(frozen=True)
class _Edges:
    """The edges of one round's graph that end at some agents."""

    receiver: Tensor
    sender: Tensor
    omega: Tensor
    offsets: list[int]
    distinct: list[tuple[tuple[int, ...], tuple[float, ...]]]  # senders and weights of the different rows of W
    row_of: Tensor  # index into `distinct` for each agent
    links: int  # without self-loops, which send nothing

    @classmethod
    def of(cls, graph: Graph, agents: range) -> "_Edges":
        own = slice(int(graph.offsets[agents.start]), int(graph.offsets[agents.stop]))
        receiver, sender, omega = (torch.as_tensor(of[own]) for of in (graph.receiver, graph.sender, graph.omega))
        offsets = [int(o) - own.start for o in graph.offsets[agents.start : agents.stop + 1]]
        # Agents with the same neighbourhood and weights mix to the same row. On a full graph that is all agents.
        rows = [(tuple(sender[a:b].tolist()), tuple(omega[a:b].tolist())) for a, b in pairwise(offsets)]
        index = {row: n for n, row in enumerate(dict.fromkeys(rows))}
        row_of = torch.tensor([index[row] for row in rows])
        return cls(receiver, sender, omega, offsets, list(index), row_of, int((receiver != sender).sum()))


class Engine(Protocol):
    agents: range  # the agents of this process; row r belongs to agents[r]
    receiver: Tensor  # [E] agent at which the edge ends
    sender: Tensor  # [E] neighbour at which the edge starts
    omega: Tensor  # [E] float64, mixing weight ω of the edge
    offsets: list[int]  # the edges of row r are offsets[r]:offsets[r+1]
    is_main_process: bool  # this process writes the run directory and prints
    messages: int  # vectors sent to other agents by the agents of this process
    bytes: int  # size of these vectors
    bytes_between_processes: int  # the part of `bytes` that went to another process

    def enter_round(self, t: int) -> None:
        """Use the graph of round t from now on."""

    def deliver(self, x: Tensor) -> Tensor:
        """Send each agent's row to its neighbours: [m, d] → [E, d], the sender's row for each edge."""

    def reply(self, v: Tensor) -> Tensor:
        """Send row e of v [E, d], computed by receiver[e], to sender[e].

        Row e of the result [E, d] is the row that sender[e] computed for receiver[e].
        """

    def request(self, x: Tensor, reply_fn: ReplyFn) -> Iterator[Replies]:
        """Send each agent's row to its neighbours and return their replies: `deliver`, `reply_fn`, `reply`.

        Agents are served in order, in chunks that bound the memory.
        """

    def mix(self, x: Tensor) -> Tensor:
        """Gossip: x_i ← Σ_j ω_ij x_j over the neighbourhood, [m, d] → [m, d]."""

    def gather(self, values: Sequence[T]) -> list[T]:
        """All-gather: concatenate the values of all processes in the order of agents. Also a barrier."""

    def mean(self, x: Tensor) -> Tensor:
        """Mean [d] over the rows of all agents, in float64, added in the order of agents."""


def max_rows_in_flight(row_bytes: int, processes: int) -> int:
    """Number of rows of this size that each process may hold at once."""
    return max(1, MAX_BYTES_IN_FLIGHT // processes // max(row_bytes, 1))


def chunk_agents(offsets: list[int], row_bytes: int, processes: int = 1) -> list[range]:
    """Split agents into consecutive chunks whose replies fit into memory. `offsets`: see `Engine`."""
    max_rows = max_rows_in_flight(row_bytes, processes)
    chunks, start = [], 0
    while start < len(offsets) - 1:
        stop = start + 1
        while stop < len(offsets) - 1 and offsets[stop + 1] - offsets[start] <= max_rows:
            stop += 1
        chunks.append(range(start, stop))
        start = stop
    return chunks


def request_all(engine: Engine, x: Tensor, reply_fn: ReplyFn) -> Iterator[Replies]:
    """`Engine.request` for all agents of this process in one chunk."""
    v = engine.reply(reply_fn(engine.receiver, engine.sender, engine.deliver(x)))
    yield Replies(engine.agents, slice(0, len(engine.agents)), slice(0, len(v)), engine.offsets, v)


class EdgeList:
    """The edges of a graph that end at some of its agents, with the counters of an `Engine`."""

    def __init__(self, graph: Graph, agents: range):
        self.agents = agents
        self._all_rounds = graph
        self._known: dict[Graph, _Edges] = {}
        self._graph: Graph | None = None  # of the current round
        self.messages = self.bytes = self.bytes_between_processes = 0
        self.enter_round(1)

    def enter_round(self, t: int) -> None:
        graph = self._all_rounds.at(t)
        if graph is not self._graph:
            self._graph = graph
            self._use(graph)

    def _use(self, graph: Graph) -> None:
        """Use the edges of this graph."""
        if graph not in self._known:
            self._known[graph] = _Edges.of(graph, self.agents)
        edges = self._known[graph]
        self.receiver, self.sender, self.omega, self.offsets = edges.receiver, edges.sender, edges.omega, edges.offsets
        self._distinct, self._row_of, self._links = edges.distinct, edges.row_of, edges.links

    def _replies(self, chunk: range, values: Tensor) -> Replies:
        """Wrap the replies to a chunk of agents."""
        first, last = self.offsets[chunk.start], self.offsets[chunk.stop]
        offsets = [o - first for o in self.offsets[chunk.start : chunk.stop + 1]]
        rows = slice(chunk.start, chunk.stop)
        return Replies(self.agents[rows], rows, slice(first, last), offsets, values)

    def _mix_rows(self, row: Callable[[int], Tensor]) -> Tensor:
        """Σ_j ω_ij x_j for each agent [m, d], where row(j) returns x_j."""
        sums = [weighted_sum([row(j) for j in senders], weights) for senders, weights in self._distinct]
        return torch.stack(sums)[self._row_of]

    def _count(self, rows: Tensor) -> None:
        self.messages += self._links
        self.bytes += self._links * rows.shape[1] * rows.element_size()


def add_rows(total: Tensor, x: Tensor) -> Tensor:
    """Add the rows of x to total [d] one by one: the same bits for any split of the rows into blocks."""
    for row in x:
        total.add_(row)
    return total


def weighted_sum(rows: Sequence[Tensor] | Tensor, weights: Sequence[float]) -> Tensor:
    """Σ weights[e] · rows[e], added in order: the same bits on every engine."""
    total = rows[0] * weights[0]
    for row, weight in zip(rows[1:], weights[1:], strict=True):
        total.add_(row, alpha=weight)
    return total


def weighted_sums(rows: Tensor, weights: Tensor, offsets: list[int]) -> Tensor:
    """`weighted_sum` over the edges of each agent: [E, d], [E] → [m, d]."""
    w = weights.tolist()
    return torch.stack([weighted_sum(rows[a:b], w[a:b]) for a, b in pairwise(offsets)])
