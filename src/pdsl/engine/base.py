"""The four operations an algorithm has for talking to neighbours, and two with which processes keep one account.

State is rows: a row per agent that this process owns. Edges are directed, self-loops included, and sorted by
(receiver, sender); a process holds the edges whose receiver it owns.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from pdsl.graph import Graph

T = TypeVar("T")

MOST_BYTES = 2**27  # of what is on its way between agents that are held at once, by all processes; of one agent, all

Answer = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Who answers [E], who asks [E] and the rows that are asked about [E, d] → the answers [E, d]."""


@dataclass(frozen=True)
class Answers:
    """What came back to some agents, one after another, along all of their edges."""

    agents: range
    rows: slice  # theirs, of a row per agent
    edges: slice  # theirs, of a row per edge
    offsets: list[int]  # agent n of these has the answers offsets[n]:offsets[n+1]
    v: Tensor  # [edges, d]: from the sender, about the receiver's row

    def by_agent(self, v: Tensor) -> list[Tensor]:
        """A row per edge of these → each agent's own."""
        return [v[a:b] for a, b in pairwise(self.offsets)]

    def asked(self, x: Tensor) -> Tensor:
        """A row per agent [m, d] → for each of these edges the receiver's."""
        counts = torch.tensor([b - a for a, b in pairwise(self.offsets)], device=x.device)
        return x[self.rows].repeat_interleave(counts, dim=0)


class Engine(Protocol):
    agents: range  # the agents this process owns; row r belongs to agents[r]
    receiver: Tensor  # [E] the agent at which the edge ends
    sender: Tensor  # [E] the neighbour at its other end
    omega: Tensor  # [E] float64, the edge's mixing weight ω
    offsets: list[int]  # row r's edges are offsets[r]:offsets[r+1]
    writes: bool  # this process keeps the run directory and speaks to the user
    messages: int  # vectors that the agents here sent to other agents so far,
    bytes: int  # what they weigh, and
    across: int  # how much of that went to another process

    def deliver(self, x: Tensor) -> Tensor:
        """A row per agent [m, d] → a row per edge [E, d]: the sender's row, as it reaches the receiver."""

    def reply(self, v: Tensor) -> Tensor:
        """A row per edge [E, d], made by the receiver for the sender and sent to it: each agent gets what is its own.

        Row e of the result is what sender[e] made for receiver[e].
        """

    def ask(self, x: Tensor, answer: Answer) -> Iterator[Answers]:
        """Every agent sends its row to its neighbours, and gets what they have to say to it: `deliver` and `reply`.

        Some agents after others, in order, where that keeps memory small.
        """

    def mix(self, x: Tensor) -> Tensor:
        """x_i ← Σ_j ω_ij x_j over the neighbourhood: [m, d] → [m, d]."""

    def gather(self, values: Sequence[T]) -> list[T]:
        """What every process has to say (plain values, as JSON has them), in the order of agents, on all of them.

        Nobody gets past before all have spoken.
        """

    def mean(self, x: Tensor) -> Tensor:
        """The mean [d] of all agents' rows, in float64, added in the order of agents: [m, d] → [d]."""


def how_many(size: int, processes: int) -> int:
    """Things of so many bytes that each process may hold at once."""
    return max(1, MOST_BYTES // processes // max(size, 1))


def portions(offsets: list[int], row_bytes: int, processes: int = 1) -> list[range]:
    """Agents one after another, by their rows, in parts whose answers may be held at once. offsets: see `Engine`."""
    most = how_many(row_bytes, processes)
    parts, start = [], 0
    while start < len(offsets) - 1:
        stop = start + 1
        while stop < len(offsets) - 1 and offsets[stop + 1] - offsets[start] <= most:
            stop += 1
        parts.append(range(start, stop))
        start = stop
    return parts


def ask_at_once(engine: Engine, x: Tensor, answer: Answer) -> Iterator[Answers]:
    """`Engine.ask` for an engine whose agents must not keep others waiting: all together."""
    v = engine.reply(answer(engine.receiver, engine.sender, engine.deliver(x)))
    yield Answers(engine.agents, slice(0, len(engine.agents)), slice(0, len(v)), engine.offsets, v)


class Edges:
    """The edges that end at some of a graph's agents, as an `Engine` has them."""

    def __init__(self, graph: Graph, agents: range):
        own = slice(int(graph.offsets[agents.start]), int(graph.offsets[agents.stop]))
        self.agents = agents
        self.receiver = torch.as_tensor(graph.receiver[own])
        self.sender = torch.as_tensor(graph.sender[own])
        self.omega = torch.as_tensor(graph.omega[own])
        self.offsets = [int(o) - own.start for o in graph.offsets[agents.start : agents.stop + 1]]
        # Agents with the same neighbourhood and weights mix to the same row; on a full graph that is all of them.
        rows = [(tuple(self.sender[a:b].tolist()), tuple(self.omega[a:b].tolist())) for a, b in pairwise(self.offsets)]
        index = {row: n for n, row in enumerate(dict.fromkeys(rows))}
        self._distinct = list(index)
        self._row_of = torch.tensor([index[row] for row in rows])
        self._links = int((self.receiver != self.sender).sum())  # a message to oneself crosses no wire
        self.messages = self.bytes = self.across = 0

    def _answers(self, part: range, v: Tensor) -> Answers:
        """What came back to a portion of the agents."""
        first, last = self.offsets[part.start], self.offsets[part.stop]
        offsets = [o - first for o in self.offsets[part.start : part.stop + 1]]
        rows = slice(part.start, part.stop)
        return Answers(self.agents[rows], rows, slice(first, last), offsets, v)

    def _mixed(self, row: Callable[[int], Tensor]) -> Tensor:
        """Σ_j ω_ij x_j for each agent, given how to find x_j: [m, d]."""
        sums = [weighted_sum([row(j) for j in senders], weights) for senders, weights in self._distinct]
        return torch.stack(sums)[self._row_of]

    def _count(self, rows: Tensor) -> None:
        self.messages += self._links
        self.bytes += self._links * rows.shape[1] * rows.element_size()


def add_rows(total: Tensor, x: Tensor) -> Tensor:
    """total [d] + Σ_i x_i, one after another: the same bits however the rows are cut into blocks."""
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
    """weighted_sum over each agent's edges: [E, d], [E] → [m, d]."""
    w = weights.tolist()
    return torch.stack([weighted_sum(rows[a:b], w[a:b]) for a, b in pairwise(offsets)])
