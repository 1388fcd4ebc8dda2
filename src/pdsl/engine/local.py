"""One process owns all agents: sending is indexing."""

from itertools import pairwise

import torch
from torch import Tensor

from pdsl.engine.base import weighted_sum
from pdsl.graph import Graph


class Local:
    """The engine for laptops, CI and research."""

    def __init__(self, graph: Graph):
        self.agents = range(graph.agents)
        self.receiver = torch.as_tensor(graph.receiver)
        self.sender = torch.as_tensor(graph.sender)
        self.omega = torch.as_tensor(graph.omega)
        self.offsets = [int(o) for o in graph.offsets]
        self._reverse = torch.as_tensor(graph.reverse)
        # Agents with the same neighbourhood and weights mix to the same row; on a full graph that is all of them.
        rows = [(tuple(self.sender[a:b].tolist()), tuple(self.omega[a:b].tolist())) for a, b in pairwise(self.offsets)]
        index = {row: n for n, row in enumerate(dict.fromkeys(rows))}
        self._distinct = list(index)
        self._row_of = torch.tensor([index[row] for row in rows])
        self._links = len(self.sender) - len(self.agents)  # a message to oneself crosses no wire
        self.messages = self.bytes = 0

    def deliver(self, x: Tensor) -> Tensor:
        self._count(x)
        return x[self.sender]

    def reply(self, v: Tensor) -> Tensor:
        self._count(v)
        return v[self._reverse]

    def mix(self, x: Tensor) -> Tensor:
        self._count(x)
        distinct = torch.stack([weighted_sum(x[list(senders)], weights) for senders, weights in self._distinct])
        return distinct[self._row_of]

    def _count(self, rows: Tensor) -> None:
        self.messages += self._links
        self.bytes += self._links * rows.shape[1] * rows.element_size()
