"""One process owns all agents: sending a message is indexing."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pdsl.engine.base import EdgeList, Replies, ReplyFn, T, add_rows, chunk_agents
from pdsl.topology import Graph


class LocalEngine(EdgeList):
    """Engine for one process."""

    is_main_process = True

    def __init__(self, graph: Graph):
        super().__init__(graph, range(graph.agents))

    def _use(self, graph: Graph) -> None:
        super()._use(graph)
        self._reverse = torch.as_tensor(graph.reverse)

    def deliver(self, x: Tensor) -> Tensor:
        self._count(x)
        return x[self.sender]

    def reply(self, v: Tensor) -> Tensor:
        self._count(v)
        return v[self._reverse]

    def request(self, x: Tensor, reply_fn: ReplyFn) -> Iterator[Replies]:
        self._count(x)
        self._count(x)  # replies have the size of requests
        for chunk in chunk_agents(self.offsets, x[0].nbytes):
            edges = slice(self.offsets[chunk.start], self.offsets[chunk.stop])
            receiver = self.receiver[edges]
            yield self._replies(chunk, reply_fn(self.sender[edges], receiver, x[receiver]))

    def mix(self, x: Tensor) -> Tensor:
        self._count(x)
        return self._mix_rows(lambda j: x[j])

    def gather(self, values: Sequence[T]) -> list[T]:
        return list(values)

    def mean(self, x: Tensor) -> Tensor:
        return add_rows(torch.zeros_like(x[0], dtype=torch.float64), x) / len(x)
