"""Each process owns a block of agents; rows travel between them with torch.distributed.

One packed message goes from a process to another in each phase, with a row for every edge between their agents and
nothing else. Sums are added in the same order as in one process, so that results have the same bits.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, distributed

from pdsl.engine.base import Answer, Answers, Edges, T, add_rows, ask_at_once
from pdsl.engine.ranks import Group, Ranks, contact
from pdsl.errors import PdslError
from pdsl.graph import Graph


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
        self._ranks, self._group, self._everyone = ranks, group, graph.agents
        receiver, sender, reverse = (torch.as_tensor(a) for a in (graph.receiver, graph.sender, graph.reverse))
        first_agent, first_edge = self.agents.start, int(graph.offsets[self.agents.start])
        blocks = [block(graph.agents, rank, ranks.size) for rank in range(ranks.size)]

        def between(receivers: range, senders: range) -> Tensor:
            """Edges from these senders to these receivers, in the order of all edges."""
            into = (receiver >= receivers.start) & (receiver < receivers.stop)
            return torch.nonzero(into & (sender >= senders.start) & (sender < senders.stop)).flatten()

        # By the other rank; our own is in it too, for what does not cross.
        arriving = [between(self.agents, others) for others in blocks]
        leaving = [between(others, self.agents) for others in blocks]
        self._arrives = [edges - first_edge for edges in arriving]  # our edges whose sender is there
        self._row_sent = [sender[edges] - first_agent for edges in leaving]  # of a row per agent
        self._edge_sent = [reverse[edges] - first_edge for edges in leaving]  # of a row per edge: the other way

    def deliver(self, x: Tensor) -> Tensor:
        self._count(x)
        return self._by_edge(x, self._row_sent)

    def reply(self, v: Tensor) -> Tensor:
        self._count(v)
        return self._by_edge(v, self._edge_sent)

    def ask(self, x: Tensor, answer: Answer) -> Iterator[Answers]:
        return ask_at_once(self, x, answer)

    def mix(self, x: Tensor) -> Tensor:
        self._count(x)
        row = {j: x[j - self.agents.start] for j in self.agents}
        for edges, rows in self._exchange(x, self._row_sent):
            row |= zip(self.sender[edges].tolist(), rows, strict=True)
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
        return total / self._everyone

    def _by_edge(self, rows: Tensor, sent: list[Tensor]) -> Tensor:  # [E, d]
        out = rows.new_empty(len(self.sender), rows.shape[1])
        own = self._ranks.rank
        out[self._arrives[own]] = rows[sent[own]]
        for edges, arrived in self._exchange(rows, sent):
            out[edges] = arrived
        return out

    def _exchange(self, rows: Tensor, sent: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Send each other rank the rows meant for it; for each, the edges that end here and what came along them."""
        arrived, leaving, operations = [], [], []
        for rank, (edges, places) in enumerate(zip(self._arrives, sent, strict=True)):
            if rank == self._ranks.rank or not len(edges):  # W is symmetric: nothing comes where nothing goes
                continue
            leaving.append(rows[places])
            arrived.append((edges, torch.empty_like(leaving[-1])))
            operations.append(distributed.P2POp(distributed.irecv, arrived[-1][1], rank, group=self._group))
            operations.append(distributed.P2POp(distributed.isend, leaving[-1], rank, group=self._group))
            self.across += leaving[-1].nbytes
        with contact():
            for work in distributed.batch_isend_irecv(operations) if operations else []:
                work.wait()
        return arrived
