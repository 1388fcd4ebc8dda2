"""Robust mixing: a neighbour's row counts only as far as honest rows can differ (self-centred clipping).

Plain mixing is x_i ← x_i + Σ_j ω_ij v_ij with the displacements v_ij = x_j − x_i. Robust mixing limits each v_ij:

1. Length. Up to the radius τ it is unchanged. Beyond, it shrinks to τ²/‖v‖, so distant rows count for nothing.
2. History. Honest displacements are mostly noise, which points elsewhere in every round. The component along the
   displacements of earlier rounds is at most a limit ℓ, so a persistent push in one direction is slow.
3. Harm. The component along the gradient of the public loss at the agent's model is at most ℓ.

If the median distance of three or more neighbours exceeds τ, the network was disturbed. Then this distance takes the
place of τ, and of ℓ, so that honest agents meet again.

Guarantee: a neighbour moves an agent's row in one mixing step by at most ω_ij τ. Post-processing: it costs no privacy.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median_low
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdsl.engine.base import Engine, Replies, ReplyFn, weighted_sum
from pdsl.topology import Graph

MEMORY = 0.9  # decay of the history per round
MIN_NEIGHBOURS = 3  # neighbours whose median distance is trusted
MAX_GROWTH = 10.0  # largest median distance, in units of the radius
FAR = 2.0  # distance in units of the radius from which a sender is reported


@dataclass(frozen=True)
class Limits:
    """Limits of the displacements in one mixing step of a round."""

    radius: float  # τ: length
    component: float  # ℓ: length along the history, and along the gradient of the public loss


def shorten(v: Tensor, radius: float) -> Tensor:
    """v min(1, (τ/‖v‖)²): a vector of at most length τ. A vector that is not finite becomes zero."""
    length = float(v.norm())
    if length <= radius:
        return v
    return v * (radius / length) ** 2 if math.isfinite(length) else torch.zeros_like(v)


def widen(limits: Limits, distances: Sequence[float]) -> Limits:
    """Limits for a disturbed network: the radius is at least the median distance, so that honest agents meet again.

    This needs a majority: with at least three neighbours, of which more than half are honest, liars cannot widen it
    beyond an honest distance. The radius grows by at most MAX_GROWTH.
    """
    if len(distances) < MIN_NEIGHBOURS:
        return limits
    median = min(median_low(distances), MAX_GROWTH * limits.radius)
    return limits if not median > limits.radius else Limits(median, median)


def limit_component(v: Tensor, direction: Tensor, limit: float) -> Tensor:
    """Reduce the component of v along a direction to at most ±limit."""
    length = float(direction.norm())
    if length == 0:
        return v
    unit = direction / length
    along = float(unit @ v)
    excess = along - min(max(along, -limit), limit)
    return v - excess * unit if excess else v


class RobustEngine:
    """Wrap an engine: `mix` limits the displacements of neighbours. `limits`: one per mixing step of a round."""

    def __init__(self, engine: Engine, graph: Graph, limits: Sequence[Limits]):
        self._engine, self._graph, self._limits = engine, graph, limits
        self._trust: list[float] | None = None
        self._harm: Tensor | None = None
        self._step = 0  # index of the mixing step in the round
        self.history = self._no_history(0)
        self.implausible: set[int] = set()  # senders of a row whose distance exceeds FAR times the radius

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def begin(self, history: Tensor, harm: Tensor) -> None:
        """Start a round with the history of the earlier rounds, and the gradients of the public loss [m, d]."""
        self.history = history.clone()
        self._harm = harm.double()

    def trust(self, trust: Tensor) -> None:
        """Multiply the weight of each edge's sender by the trust in it, [E] from 0 to 1."""
        self._trust = trust.tolist()

    def deliver(self, x: Tensor) -> Tensor:
        return self._engine.deliver(x)

    def reply(self, v: Tensor) -> Tensor:
        return self._engine.reply(v)

    def request(self, x: Tensor, reply_fn: ReplyFn) -> Iterator[Replies]:
        return self._engine.request(x, reply_fn)

    def mix(self, x: Tensor) -> Tensor:
        engine, step = self._engine, min(self._step, len(self._limits) - 1)
        self._step += 1
        if self.history.shape[1] == 0:  # round 1
            self.history = self._no_history(x.shape[1])
        received = engine.deliver(x)
        rows = [
            self._mix_row(x[row], received[a:b], agent, row, slice(a, b), step)
            for row, (agent, (a, b)) in enumerate(zip(engine.agents, pairwise(engine.offsets), strict=True))
        ]
        return torch.stack(rows)

    def _mix_row(self, own: Tensor, received: Tensor, agent: int, row: int, edges: slice, step: int) -> Tensor:
        """The mixed row of one agent. If no displacement is limited, it has the bits of plain mixing."""
        senders, omega = self._engine.sender[edges].tolist(), self._engine.omega[edges].tolist()
        places = np.searchsorted(self._graph.neighbourhood(agent), senders).tolist()
        trust = [1.0] * len(senders) if self._trust is None else self._trust[edges]
        displacements = {e: received[e].double() - own.double() for e, j in enumerate(senders) if j != agent}
        limits = widen(self._limits[step], [float(v.norm()) for v in displacements.values()])
        total, plain = own.double(), True
        for e, v in displacements.items():
            if not float(v.norm()) <= FAR * limits.radius:
                self.implausible.add(senders[e])
            limited = self._limit(v, row, places[e], step, limits)
            plain = plain and limited is v and trust[e] == 1.0
            total = total + limited * (omega[e] * trust[e])
        return weighted_sum(received, omega) if plain else total.to(own.dtype)

    def _limit(self, v: Tensor, row: int, place: int, step: int, limits: Limits) -> Tensor:
        """The displacement of a neighbour within the limits: v itself if it is within them."""
        past = self.history[row, place, step]
        v = shorten(v, limits.radius)
        limited = limit_component(v, past.double(), limits.component)
        if self._harm is not None:
            limited = limit_component(limited, self._harm[row], limits.component)
        self.history[row, place, step] = MEMORY * past + v.to(past.dtype)
        return limited

    def _no_history(self, d: int) -> Tensor:
        """Zeros [m, members, mixing steps, d]; no members if d is 0."""
        members = int(max(self._graph.degrees)) if d else 0
        device = self._engine.omega.device
        return torch.zeros(len(self._engine.agents), members, len(self._limits), d, device=device)
