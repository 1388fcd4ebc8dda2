"""The Gaussian mechanism: noise on every message that leaves an agent, its own to itself included."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pdsl.data.batches import Batches
from pdsl.parallel import Workers
from pdsl.randomness import Streams, purpose
from pdsl.settings import PrivacySettings


def sensitivity(settings: PrivacySettings, batches: Batches, agent: int) -> float:
    """Δ: how far one record of `agent` can move one message it sends.

    | clipping   | batch   | neighbouring data differ in | Δ               |
    |------------|---------|-----------------------------|-----------------|
    | per-sample | poisson | a record added or removed   | C / B           |
    | per-sample | fixed   | a record replaced           | 2C / min(B, n)  |
    | batch      | either  | either                      | 2C              |
    """
    C = settings.max_grad_norm
    if settings.clipping == "batch":
        return 2 * C
    return (C if batches.rate is not None else 2 * C) / batches.divisor(agent)


@dataclass(frozen=True)
class Noise:
    """Independent Gaussian noise for each (maker, peer, round, step, nth): no two messages ever share a draw."""

    sigma: list[float]  # per agent
    streams: Streams
    workers: Workers
    stretch: Sequence[Mapping[int, float]] = field(default=(), kw_only=True)  # per agent: peer → factor; empty: all 1

    def sigma_of(self, maker: int, peer: int) -> float:
        """σ of what `maker` makes for `peer`."""
        stretched = self.stretch[maker] if self.stretch else {}
        return self.sigma[maker] * (stretched[peer] if stretched else 1.0)

    def add(self, t: int, makers: Tensor, peers: Tensor, g: Tensor, step: int = 0, nth: int = 0) -> Tensor:
        """g[e] + N(0, σ² I), drawn by makers[e] for peers[e] in round t: [rows, d].

        In a round with several local steps, `step` says which; `nth` tells messages on one and the same batch apart.
        """
        if not any(self.sigma):
            return g

        def one(e: int) -> Tensor:
            maker, peer = int(makers[e]), int(peers[e])
            n = self.streams.normals(g.shape[1], purpose("noise", step, nth), maker, t, peer)
            return g[e] + self.sigma_of(maker, peer) * torch.from_numpy(n).to(g.device)

        return torch.stack(self.workers.map(one, range(len(g))))
