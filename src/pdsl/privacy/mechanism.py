"""The Gaussian mechanism: noise on every message that leaves an agent, its own to itself included."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdsl.data.batches import Batches
from pdsl.graph import Graph
from pdsl.parallel import Workers
from pdsl.privacy.theorem1 import theorem1_sigma
from pdsl.randomness import Streams
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


def sigmas(
    settings: PrivacySettings, graph: Graph, batches: Batches, releases: Sequence[int], floor: float
) -> list[float]:
    """Standard deviation of the noise of each agent's messages.

    `releases[i]` is k_i, how many noisy vectors agent i computes on one batch: together they have sensitivity √k·Δ.
    """
    agents = range(graph.agents)
    if settings.mode == "none":
        return [0.0 for _ in agents]
    if settings.sigma is not None:
        return [settings.sigma for _ in agents]
    if settings.noise_multiplier is not None:
        z = settings.noise_multiplier
        return [z * math.sqrt(releases[i]) * sensitivity(settings, batches, i) for i in agents]
    assert settings.epsilon_per_round is not None  # the settings admit no fourth way
    phi_min = settings.phi_min if settings.phi_min is not None else floor / int(max(graph.degrees))
    sigma = theorem1_sigma(graph, settings.epsilon_per_round, settings.delta, settings.max_grad_norm, phi_min)
    return [sigma for _ in agents]


@dataclass(frozen=True)
class Noise:
    """Independent Gaussian noise for each (maker, peer, round): no two messages ever share a draw."""

    sigma: list[float]  # per agent
    streams: Streams
    workers: Workers

    def add(self, t: int, makers: Tensor, peers: Tensor, g: Tensor) -> Tensor:
        """g[e] + N(0, σ² I), drawn by makers[e] for peers[e] in round t: [rows, d]."""
        if not any(self.sigma):
            return g

        def one(e: int) -> Tensor:
            maker, peer = int(makers[e]), int(peers[e])
            n = self.streams.generator("noise", maker, t, peer).standard_normal(g.shape[1], dtype=np.float32)
            return g[e] + self.sigma[maker] * torch.from_numpy(n).to(g.device)

        return torch.stack(self.workers.map(one, range(len(g))))
