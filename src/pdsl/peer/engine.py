"""Engine of one organisation: its process owns one agent, and the neighbours are on the network.

The roll call fixes the neighbours of a round before the algorithm starts. The engine has edges to the present
neighbours only, and the mixing weight of the absent ones goes to the agent itself. If both ends of every missing edge
agree, the mixing matrix of the round is still symmetric and doubly stochastic.

A neighbour lost during a round keeps its edge, because an algorithm must not see edges change within a step. The
agent's own row (model, gradient or momentum) replaces each missing message, so the weight again goes to the agent
itself. The other end may have used messages of this agent before the loss; the row of the round records the loss. The
same holds for a neighbour of an earlier attempt at the round, before a crash.

A reply to `request` (a gradient) whose norm exceeds the largest norm of an honest one is rescaled to that norm, because
one false message must not spoil a round.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pdsl.engine.base import Replies, ReplyFn, T, request_all, weighted_sum
from pdsl.peer.transport import Transport
from pdsl.settings import PrivacySettings
from pdsl.topology import Graph
from pdsl.utils.types import JsonDict

MAX_RECORDS_RATIO = 4.0  # records of an honest neighbour, as a multiple of the number in the plan
TAIL_SIGMAS = 6.0  # standard deviations, of the batch size and of the norm of the noise


def max_honest_norm(privacy: PrivacySettings, batch: int, sigma: float, d: int) -> float:
    """Largest norm of an honest noisy gradient, for data of at most four times the plan's records.

    A gradient clipped as a whole batch has norm C at most. With per-record clipping it has norm C per record, divided
    by the batch size.
    """
    batches = 1.0
    if privacy.clipping != "batch":
        batches = MAX_RECORDS_RATIO + TAIL_SIGMAS * math.sqrt(MAX_RECORDS_RATIO / batch)
    return batches * privacy.max_grad_norm + sigma * (math.sqrt(d) + TAIL_SIGMAS)


class PeerEngine:
    """`Engine` for the agent of one organisation. Its counters cover this agent only."""

    is_main_process = True

    def __init__(self, graph: Graph, transport: Transport):
        self._transport = transport
        self._me = me = transport.me
        a, b = int(graph.offsets[me]), int(graph.offsets[me + 1])
        self._weights = {int(j): float(w) for j, w in zip(graph.sender[a:b], graph.omega[a:b], strict=True)}
        self.agents = range(me, me + 1)
        self.messages = self.bytes = self.bytes_between_processes = 0
        self.max_norms = [math.inf] * graph.agents  # largest norm accepted for an agent's gradients
        self.shortened: list[int] = []  # neighbours whose gradients were rescaled in this round
        self.lost: dict[int, int] = {}  # neighbour lost in this round → phase
        self.begin_round(0, frozenset(self._weights) - {me})

    def enter_round(self, t: int) -> None:
        """Do nothing: peers have one graph for all rounds, and `begin_round` has more to know."""

    def begin_round(self, t: int, present: frozenset[int], before: frozenset[int] = frozenset()) -> None:
        """Start round t with these neighbours. `before`: neighbours of an attempt that a crash ended.

        Neighbours of the earlier attempt that are absent now may have used its messages, so they count as lost.
        """
        self._t, self._phase = t, 0
        self._present = set(present)
        self.lost, self.shortened = dict.fromkeys(sorted(before - present), 0), []
        self.network_seconds = 0.0  # time spent in exchanges of this round
        members = sorted({*present, self._me})
        absent = sum(w for j, w in self._weights.items() if j not in members)
        weights = [self._weights[j] + (absent if j == self._me else 0.0) for j in members]
        self.sender = torch.tensor(members)
        self.receiver = torch.full_like(self.sender, self._me)
        self.omega = torch.tensor(weights, dtype=torch.float64)
        self.offsets = [0, len(members)]

    def describe_mixing(self) -> JsonDict:
        """Weights of this round by sender, neighbours lost in a phase, and the number of phases."""
        weights = {str(j): w for j, w in zip(self.sender.tolist(), self.omega.tolist(), strict=True)}
        return {"weights": weights, "lost": {str(j): phase for j, phase in self.lost.items()}, "phases": self._phase}

    def deliver(self, x: Tensor) -> Tensor:
        return self._exchange(dict.fromkeys(self._present, x[0]), x[0])

    def reply(self, v: Tensor) -> Tensor:
        rows = dict(zip(self.sender.tolist(), v, strict=True))
        return self._exchange({j: rows[j] for j in self._present}, rows[self._me])

    def request(self, x: Tensor, answer: ReplyFn) -> Iterator[Replies]:
        for at in request_all(self, x, answer):
            yield replace(at, values=self._limit_norms(at.values))

    def mix(self, x: Tensor) -> Tensor:
        return weighted_sum(self.deliver(x), self.omega.tolist())[None]

    def gather(self, values: Sequence[T]) -> list[T]:
        return list(values)

    def mean(self, x: Tensor) -> Tensor:
        return x[0].double()

    def _limit_norms(self, v: Tensor) -> Tensor:
        """Rescale received gradients, one row per edge, to the largest honest norm."""
        rows = list(v)
        for e, j in enumerate(self.sender.tolist()):
            norm = float(v[e].double().norm())
            if j in self._present and norm > self.max_norms[j]:
                rows[e] = v[e] * (self.max_norms[j] / norm)
                self.shortened.append(j)
        return torch.stack(rows)

    def _exchange(self, rows: dict[int, Tensor], own: Tensor) -> Tensor:
        """Exchange rows with the present neighbours. Returns one row per edge, `own` for itself and lost neighbours."""
        phase, self._phase = self._phase, self._phase + 1
        start = time.monotonic()
        received = self._transport.exchange(self._t, phase, rows)
        self.network_seconds += time.monotonic() - start
        self.messages += len(rows)
        self.bytes += sum(row.numel() * row.element_size() for row in rows.values())
        self.bytes_between_processes = self.bytes
        for j in self._present - set(received):
            self._present.discard(j)
            self.lost[j] = phase
        return torch.stack([received[j].to(own.device) if j in received else own for j in self.sender.tolist()])
