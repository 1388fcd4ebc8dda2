"""The three operations an algorithm has for talking to neighbours.

State is rows: a row per agent that this process owns. Edges are directed, self-loops included, and sorted by
(receiver, sender); a process holds the edges whose receiver it owns.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor


class Engine(Protocol):
    agents: range  # the agents this process owns; row r belongs to agents[r]
    receiver: Tensor  # [E] the agent at which the edge ends
    sender: Tensor  # [E] the neighbour at its other end
    omega: Tensor  # [E] float64, the edge's mixing weight ω
    offsets: list[int]  # row r's edges are offsets[r]:offsets[r+1]
    messages: int  # vectors sent to other agents so far, and
    bytes: int  # what they weigh

    def deliver(self, x: Tensor) -> Tensor:
        """A row per agent [m, d] → a row per edge [E, d]: the sender's row, as it reaches the receiver."""

    def reply(self, v: Tensor) -> Tensor:
        """A row per edge [E, d], made by the receiver for the sender and sent to it: each agent gets what is its own.

        Row e of the result is what sender[e] made for receiver[e].
        """

    def mix(self, x: Tensor) -> Tensor:
        """x_i ← Σ_j ω_ij x_j over the neighbourhood: [m, d] → [m, d]."""


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
