"""Each process owns a block of agents; rows travel between them with torch.distributed.

One packed message goes from a process to another in each phase, with a row for every edge between their agents and
nothing else. Where agents ask each other about large models, some do so after others, and the phase has several turns.
Sums are added in the same order as in one process, so that results have the same bits.
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch
from torch import Tensor, distributed

from pdsl.engine.base import Answer, Answers, Edges, T, add_rows, how_many, portions
from pdsl.engine.ranks import Group, Ranks, contact
from pdsl.errors import PdslError
from pdsl.graph import Graph

ByRank = list[Tensor]  # edges or rows, as numbers, by the other rank; our own is among them, for what does not cross


def block(agents: int, rank: int, size: int) -> range:
    """The agents of a rank: blocks one after another, as even as can be."""
    return range(agents * rank // size, agents * (rank + 1) // size)


class Torchrun(Edges):
    """The engine for clusters."""

    def __init__(self, graph: Graph, ranks: Ranks, group: Group):
        if ranks.size > graph.agents:
            raise PdslError(f"{ranks.size} ranks for {graph.agents} agents; start at most one rank per agent")
        super().__init__(graph, block(graph.agents, ranks.rank, ranks.size))
        self.writes = ranks.rank == 0
        self._ranks, self._group, self._graph = ranks, group, graph
        self._blocks = [block(graph.agents, rank, ranks.size) for rank in range(ranks.size)]
        self._ends = torch.as_tensor(graph.receiver), torch.as_tensor(graph.sender)  # of all edges
        self._arriving = [self._between(self.agents, others) for others in self._blocks]
        leaving = [self._between(others, self.agents) for others in self._blocks]
        # The most rows that any rank gets from others: all cut what they send alike.
        self._most_arriving = max(
            sum(len(self._between(agents, others)) for others in self._blocks if others != agents)
            for agents in self._blocks
        )
        reverse, first_edge = torch.as_tensor(graph.reverse), int(graph.offsets[self.agents.start])
        self._row_sent = [self._ends[1][edges] - self.agents.start for edges in leaving]  # of a row per agent
        self._edge_sent = [reverse[edges] - first_edge for edges in leaving]  # of a row per edge: the other way

    def deliver(self, x: Tensor) -> Tensor:
        self._count(x)
        return self._by_edge(x, self._row_sent)

    def reply(self, v: Tensor) -> Tensor:
        self._count(v)
        return self._by_edge(v, self._edge_sent)

    def ask(self, x: Tensor, answer: Answer) -> Iterator[Answers]:
        """In turns: some agents of every rank ask, and their neighbours answer, wherever they live."""
        self._count(x)
        self._count(x)  # as much comes back
        cut = [portions(self._offsets_of(agents), x[0].nbytes, self._ranks.size) for agents in self._blocks]
        for parts in zip_longest(*cut, fillvalue=range(0)):
            asking = [agents[part.start : part.stop] for agents, part in zip(self._blocks, parts, strict=True)]
            v = self._answered(x, answer, asking)
            if part := parts[self._ranks.rank]:  # else only others have more to ask
                yield self._answers(part, v)

    def mix(self, x: Tensor) -> Tensor:
        """Numbers are mixed each by itself, so that of long rows some columns can travel after others."""
        self._count(x)
        width = how_many(self._most_arriving * x.element_size(), self._ranks.size)
        mixed = torch.empty_like(x)
        for start in range(0, x.shape[1], width):
            columns = slice(start, start + width)
            mixed[:, columns] = self._mixed_columns(x[:, columns])
        return mixed

    def _mixed_columns(self, x: Tensor) -> Tensor:
        arriving, sent = self._others(self._arriving), self._others(self._row_sent)
        rows = self._swapped([x[places] for places in sent], arriving)
        row = dict(zip(self.agents, x, strict=True)) | dict(
            zip(self._ends[1][torch.cat(arriving)].tolist(), rows, strict=True)
        )
        return self._mixed(row.__getitem__)

    def gather(self, values: Sequence[T]) -> list[T]:
        return self._ranks.gather(values)

    def mean(self, x: Tensor) -> Tensor:
        """The sum so far goes from rank to rank, and the last tells all."""
        rank, last = self._ranks.rank, self._ranks.size - 1
        total = torch.zeros_like(x[0], dtype=torch.float64)
        with contact():
            if rank > 0:
                distributed.recv(total, src=rank - 1, group=self._group)
            add_rows(total, x)
            if rank < last:
                distributed.send(total, dst=rank + 1, group=self._group)
            distributed.broadcast(total, src=last, group=self._group)
        return total / self._graph.agents

    def _by_edge(self, rows: Tensor, sent: ByRank) -> Tensor:  # [E, d]
        return _in_order(self._swapped([rows[places] for places in sent], self._arriving), self._arriving)

    def _answered(self, x: Tensor, answer: Answer, asking: list[range]) -> Tensor:
        """What those of our agents are told that are among these, by rank: a row for each of their edges."""
        receiver, sender = self._ends
        to_us = [self._between(asking[self._ranks.rank], others) for others in self._blocks]  # edges of answers
        by_us = [self._between(others, self.agents) for others in asking]
        heard = self._swapped([x[receiver[edges] - self.agents.start] for edges in to_us], by_us)
        edges = torch.cat(by_us)
        said = answer(sender[edges], receiver[edges], heard) if len(edges) else heard  # nobody may have asked us
        return _in_order(self._swapped(torch.split(said, [len(edges) for edges in by_us]), to_us), to_us)

    def _swapped(self, leaving: Sequence[Tensor], arriving: ByRank) -> Tensor:
        """Send every rank its rows; what comes along these edges, by the rank that it comes from."""
        rows = leaving[0].new_empty(sum(map(len, arriving)), leaving[0].shape[1])
        operations = []
        for rank, (out, into) in enumerate(zip(leaving, torch.split(rows, [*map(len, arriving)]), strict=True)):
            if rank == self._ranks.rank:
                into.copy_(out)
                continue
            if len(into):
                operations.append(distributed.P2POp(distributed.irecv, into, rank, group=self._group))
            if len(out):
                operations.append(distributed.P2POp(distributed.isend, out, rank, group=self._group))
            self.across += out.nbytes
        with contact():
            for work in distributed.batch_isend_irecv(operations) if operations else []:
                work.wait()
        return rows

    def _between(self, receivers: range, senders: range) -> Tensor:
        """Edges from these senders to these receivers, in the order of all edges."""
        a, b = (int(self._graph.offsets[i]) for i in (receivers.start, receivers.stop))
        sender = self._ends[1][a:b]
        return a + torch.nonzero((sender >= senders.start) & (sender < senders.stop)).flatten()

    def _offsets_of(self, agents: range) -> list[int]:
        """Of a rank's edges, as it has them itself."""
        offsets = self._graph.offsets[agents.start : agents.stop + 1]
        return [int(o - offsets[0]) for o in offsets]

    def _others(self, by_rank: ByRank) -> ByRank:
        """The same without what does not cross."""
        return [numbers[: 0 if rank == self._ranks.rank else None] for rank, numbers in enumerate(by_rank)]


def _in_order(rows: Tensor, edges: ByRank) -> Tensor:
    """Rows by rank → in the order of edges."""
    return rows[torch.cat(edges).argsort()]
