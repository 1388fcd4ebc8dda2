"""deliver, reply and mix between organisations: this process owns one agent, and the others are on the network.

Who is in a round is settled by its roll call, before the algorithm starts: the edges are those to the neighbours that
are there, and the weight of the others goes to the agent itself. If both ends of every missing edge agree on that, the
mixing matrix of the round is symmetric and doubly stochastic still.

A neighbour that is lost in the middle of a round leaves its edge behind, so that an algorithm never sees edges come and
go within a step: what it did not send is replaced by the agent's own row, its own model, gradient or momentum. So its
weight goes to the agent itself here too. The other end may see it differently until the round is over; the row says so.

A neighbour's answer to `ask`, a gradient, that is longer than an honest one would be is shortened to that length before
it is used: one message of a liar must not undo a round.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pdsl.engine.base import Answer, Answers, T, ask_at_once, weighted_sum
from pdsl.graph import Graph
from pdsl.peer.transport import Transport
from pdsl.settings import PrivacySettings

MOST_BATCHES = 4.0  # a neighbour may have that many times the records that the plan says, and draw as many
FAR_OUT = 6.0  # standard deviations, of the number drawn and of the noise's length; nobody is so far off


def longest_honest(privacy: PrivacySettings, batch: int, sigma: float, d: int) -> float:
    """No honest noisy gradient is longer, but of who has more than four times the agreed records.

    A batch clipped as a whole has at most length C. Records clipped one by one have C each, over the batch's size.
    """
    batches = 1.0 if privacy.clipping == "batch" else MOST_BATCHES + FAR_OUT * math.sqrt(MOST_BATCHES / batch)
    return batches * privacy.max_grad_norm + sigma * (math.sqrt(d) + FAR_OUT)


class Peer:
    """The engine of one organisation. It keeps its own account: what others measure stays with them."""

    writes = True

    def __init__(self, graph: Graph, transport: Transport):
        self._transport = transport
        self._me = me = transport.me
        a, b = int(graph.offsets[me]), int(graph.offsets[me + 1])
        self._weights = {int(j): float(w) for j, w in zip(graph.sender[a:b], graph.omega[a:b], strict=True)}
        self.agents = range(me, me + 1)
        self.messages = self.bytes = self.across = 0
        self.longest = [math.inf] * graph.agents  # length that an agent's gradients may have
        self.shortened: list[int] = []  # neighbours that sent a longer one in this round
        self.lost: dict[int, int] = {}  # neighbour: phase in which it was lost in this round
        self.begin(0, frozenset(self._weights) - {me})

    def begin(self, t: int, present: frozenset[int]) -> None:
        """Round t, with these neighbours."""
        self._t, self._phase = t, 0
        self._there = set(present)
        self.lost, self.shortened = {}, []
        self.waited = 0.0  # seconds in which this round was with the network
        members = sorted({*present, self._me})
        absent = sum(w for j, w in self._weights.items() if j not in members)
        weights = [self._weights[j] + (absent if j == self._me else 0.0) for j in members]
        self.sender = torch.tensor(members)
        self.receiver = torch.full_like(self.sender, self._me)
        self.omega = torch.tensor(weights, dtype=torch.float64)
        self.offsets = [0, len(members)]

    def deliver(self, x: Tensor) -> Tensor:
        return self._exchanged(dict.fromkeys(self._there, x[0]), x[0])

    def reply(self, v: Tensor) -> Tensor:
        rows = dict(zip(self.sender.tolist(), v, strict=True))
        return self._exchanged({j: rows[j] for j in self._there}, rows[self._me])

    def ask(self, x: Tensor, answer: Answer) -> Iterator[Answers]:
        for at in ask_at_once(self, x, answer):
            yield replace(at, v=self._plausible(at.v))

    def mix(self, x: Tensor) -> Tensor:
        return weighted_sum(self.deliver(x), self.omega.tolist())[None]

    def gather(self, values: Sequence[T]) -> list[T]:
        return list(values)

    def mean(self, x: Tensor) -> Tensor:
        return x[0].double()

    def _plausible(self, v: Tensor) -> Tensor:
        """Gradients, a row per edge, none of those that came from others longer than an honest one."""
        rows = list(v)
        for e, j in enumerate(self.sender.tolist()):
            length = float(v[e].double().norm())
            if j in self._there and length > self.longest[j]:
                rows[e] = v[e] * (self.longest[j] / length)
                self.shortened.append(j)
        return torch.stack(rows)

    def _exchanged(self, rows: dict[int, Tensor], own: Tensor) -> Tensor:
        """A row per edge: what each neighbour sent, the own row for oneself and for those that are lost."""
        phase, self._phase = self._phase, self._phase + 1
        start = time.monotonic()
        got = self._transport.exchange(self._t, phase, rows)
        self.waited += time.monotonic() - start
        self.messages += len(rows)
        self.bytes += sum(row.numel() * row.element_size() for row in rows.values())
        self.across = self.bytes
        for j in self._there - set(got):
            self._there.discard(j)
            self.lost[j] = phase
        return torch.stack([got[j].to(own.device) if j in got else own for j in self.sender.tolist()])
