"""One process owns all agents: sending is indexing."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pdsl.engine.base import Answer, Answers, Edges, T, add_rows, portions
from pdsl.graph import Graph


class Local(Edges):
    """The engine for laptops, CI and research."""

    writes = True

    def __init__(self, graph: Graph):
        super().__init__(graph, range(graph.agents))
        self._reverse = torch.as_tensor(graph.reverse)

    def deliver(self, x: Tensor) -> Tensor:
        self._count(x)
        return x[self.sender]

    def reply(self, v: Tensor) -> Tensor:
        self._count(v)
        return v[self._reverse]

    def ask(self, x: Tensor, answer: Answer) -> Iterator[Answers]:
        self._count(x)
        self._count(x)  # as much comes back
        for part in portions(self.offsets, x[0].nbytes):
            edges = slice(self.offsets[part.start], self.offsets[part.stop])
            receiver = self.receiver[edges]
            yield self._answers(part, answer(self.sender[edges], receiver, x[receiver]))

    def mix(self, x: Tensor) -> Tensor:
        self._count(x)
        return self._mixed(lambda j: x[j])

    def gather(self, values: Sequence[T]) -> list[T]:
        return list(values)

    def mean(self, x: Tensor) -> Tensor:
        return add_rows(torch.zeros_like(x[0], dtype=torch.float64), x) / len(x)
