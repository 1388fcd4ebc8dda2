"""Each process owns a block of agents; rows travel between processes with torch.distributed.

In each phase a process sends one packed message to every other process, with one row for every edge between their
agents. If rows are too large to be held at once, a phase has several turns. Sums are added in the same order as in
one process, so the results have the same bits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeAlias

import torch
from torch import Tensor, distributed

from pdsl.engine.base import EdgeList, Replies, ReplyFn, T, add_rows, chunk_agents, max_rows_in_flight
from pdsl.topology import Graph
from pdsl.utils.errors import ContactError, PdslError

Group: TypeAlias = "distributed.ProcessGroup | None"  # None is the default group
ByRank = list[Tensor]  # indices of edges or rows for each rank, this rank included


@contextmanager
def contact() -> Iterator[None]:
    """Turn torch's errors about a dead or slow rank into `ContactError`."""
    try:
        yield
    except RuntimeError as e:
        reason = next(iter(str(e).splitlines()), type(e).__name__)
        raise ContactError(f"lost contact with another rank: {reason}") from e


def gather_values(values: Sequence[T], size: int, group: Group) -> list[T]:
    """All-gather plain Python values over a group of `size` ranks, in the order of ranks."""
    by_rank: list[list[T]] = [[]] * size
    with contact():
        distributed.all_gather_object(by_rank, list(values), group=group)
    return [value for part in by_rank for value in part]


def block(agents: int, rank: int, size: int) -> range:
    """The agents of a rank: consecutive blocks of equal size, to one agent."""
    return range(agents * rank // size, agents * (rank + 1) // size)


@dataclass(frozen=True)
class _Routes:
    """The way of rows between this rank and the others, along the edges of one round's graph."""

    arriving: ByRank
    max_arriving: int  # largest number of rows that any rank receives: all ranks split their columns by it
    rows_to_send: ByRank  # of a tensor with a row per agent
    edges_to_send: ByRank  # of a tensor with a row per edge, reversed


class DistributedEngine(EdgeList):
    """Engine for several processes. Rows travel in group `rows`, plain values in group `control`."""

    def __init__(self, graph: Graph, rank: int, size: int, rows: Group, control: Group):
        if size > graph.agents:
            raise PdslError(f"{size} ranks for {graph.agents} agents; start at most one rank per agent")
        self.is_main_process = rank == 0
        self._rank, self._size, self._group, self._control = rank, size, rows, control
        self._blocks = [block(graph.agents, other, size) for other in range(size)]
        self._routes: dict[Graph, _Routes] = {}
        super().__init__(graph, self._blocks[rank])

    def _use(self, graph: Graph) -> None:
        super()._use(graph)
        self._ends = torch.as_tensor(graph.receiver), torch.as_tensor(graph.sender)  # of all edges
        self._first_edges = graph.offsets
        if graph not in self._routes:
            self._routes[graph] = self._find_routes(graph)
        routes = self._routes[graph]
        self._arriving, self._max_arriving = routes.arriving, routes.max_arriving
        self._rows_to_send, self._edges_to_send = routes.rows_to_send, routes.edges_to_send

    def _find_routes(self, graph: Graph) -> "_Routes":
        leaving = [self._edges_between(others, self.agents) for others in self._blocks]
        reverse, first_edge = torch.as_tensor(graph.reverse), int(graph.offsets[self.agents.start])
        return _Routes(
            arriving=[self._edges_between(self.agents, others) for others in self._blocks],
            max_arriving=max(
                sum(len(self._edges_between(agents, others)) for others in self._blocks if others != agents)
                for agents in self._blocks
            ),
            rows_to_send=[self._ends[1][edges] - self.agents.start for edges in leaving],
            edges_to_send=[reverse[edges] - first_edge for edges in leaving],
        )

    def deliver(self, x: Tensor) -> Tensor:
        self._count(x)
        return self._exchange_by_edge(x, self._rows_to_send)

    def reply(self, v: Tensor) -> Tensor:
        self._count(v)
        return self._exchange_by_edge(v, self._edges_to_send)

    def request(self, x: Tensor, reply_fn: ReplyFn) -> Iterator[Replies]:
        """In turns: in each turn every rank serves one chunk of its agents, and all ranks reply."""
        self._count(x)
        self._count(x)  # replies have the size of requests
        chunks = [chunk_agents(self._offsets_of(agents), x[0].nbytes, self._size) for agents in self._blocks]
        for turn in zip_longest(*chunks, fillvalue=range(0)):
            requesting = [agents[chunk.start : chunk.stop] for agents, chunk in zip(self._blocks, turn, strict=True)]
            values = self._exchange_replies(x, reply_fn, requesting)
            if chunk := turn[self._rank]:  # empty if only other ranks have agents left
                yield self._replies(chunk, values)

    def mix(self, x: Tensor) -> Tensor:
        """Mix blocks of columns one after another, because each column is mixed independently."""
        self._count(x)
        width = max_rows_in_flight(self._max_arriving * x.element_size(), self._size)
        mixed = torch.empty_like(x)
        for start in range(0, x.shape[1], width):
            columns = slice(start, start + width)
            mixed[:, columns] = self._mix_columns(x[:, columns])
        return mixed

    def _mix_columns(self, x: Tensor) -> Tensor:
        arriving, to_send = self._without_own(self._arriving), self._without_own(self._rows_to_send)
        received = self._exchange([x[rows] for rows in to_send], arriving)
        row = dict(zip(self.agents, x, strict=True)) | dict(
            zip(self._ends[1][torch.cat(arriving)].tolist(), received, strict=True)
        )
        return self._mix_rows(row.__getitem__)

    def gather(self, values: Sequence[T]) -> list[T]:
        return gather_values(values, self._size, self._control)

    def mean(self, x: Tensor) -> Tensor:
        """Pass the running sum from rank to rank; the last rank broadcasts it."""
        last = self._size - 1
        total = torch.zeros_like(x[0], dtype=torch.float64)
        with contact():
            if self._rank > 0:
                distributed.recv(total, src=self._rank - 1, group=self._group)
            add_rows(total, x)
            if self._rank < last:
                distributed.send(total, dst=self._rank + 1, group=self._group)
            distributed.broadcast(total, src=last, group=self._group)
        return total / self._all_rounds.agents

    def _exchange_by_edge(self, rows: Tensor, to_send: ByRank) -> Tensor:  # [E, d]
        return _sort_by_edge(self._exchange([rows[places] for places in to_send], self._arriving), self._arriving)

    def _exchange_replies(self, x: Tensor, reply_fn: ReplyFn, requesting: list[range]) -> Tensor:
        """The replies to our agents among the requesting agents of each rank, one row per edge."""
        receiver, sender = self._ends
        to_us = [self._edges_between(requesting[self._rank], others) for others in self._blocks]
        from_us = [self._edges_between(others, self.agents) for others in requesting]
        requests = self._exchange([x[receiver[edges] - self.agents.start] for edges in to_us], from_us)
        edges = torch.cat(from_us)
        replies = reply_fn(sender[edges], receiver[edges], requests) if len(edges) else requests
        return _sort_by_edge(self._exchange(torch.split(replies, [len(edges) for edges in from_us]), to_us), to_us)

    def _exchange(self, leaving: Sequence[Tensor], arriving: ByRank) -> Tensor:
        """Send each rank its rows; return the rows that arrive along the given edges, ordered by rank."""
        rows = leaving[0].new_empty(sum(map(len, arriving)), leaving[0].shape[1])
        operations = []
        for rank, (out, into) in enumerate(zip(leaving, torch.split(rows, [*map(len, arriving)]), strict=True)):
            if rank == self._rank:
                into.copy_(out)
                continue
            if len(into):
                operations.append(distributed.P2POp(distributed.irecv, into, rank, group=self._group))
            if len(out):
                operations.append(distributed.P2POp(distributed.isend, out, rank, group=self._group))
            self.bytes_between_processes += out.nbytes
        with contact():
            for work in distributed.batch_isend_irecv(operations) if operations else []:
                work.wait()
        return rows

    def _edges_between(self, receivers: range, senders: range) -> Tensor:
        """Indices of the edges from these senders to these receivers, ascending."""
        a, b = (int(self._first_edges[i]) for i in (receivers.start, receivers.stop))
        sender = self._ends[1][a:b]
        return a + torch.nonzero((sender >= senders.start) & (sender < senders.stop)).flatten()

    def _offsets_of(self, agents: range) -> list[int]:
        """`Engine.offsets` of the rank that owns these agents."""
        offsets = self._first_edges[agents.start : agents.stop + 1]
        return [int(o - offsets[0]) for o in offsets]

    def _without_own(self, by_rank: ByRank) -> ByRank:
        """The same indices with none for this rank."""
        return [indices[: 0 if rank == self._rank else None] for rank, indices in enumerate(by_rank)]


def _sort_by_edge(rows: Tensor, edges: ByRank) -> Tensor:
    """Reorder rows from the order of ranks to the order of edges."""
    return rows[torch.cat(edges).argsort()]
