"""One process owns all agents: sending is indexing."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pdsl.engine.base import Edges, T, add_rows
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

    def mix(self, x: Tensor) -> Tensor:
        self._count(x)
        return self._mixed(lambda j: x[j])

    def gather(self, values: Sequence[T]) -> list[T]:
        return list(values)

    def mean(self, x: Tensor) -> Tensor:
        return add_rows(torch.zeros_like(x[0], dtype=torch.float64), x) / len(x)
