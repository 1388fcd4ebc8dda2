"""Gaussian mechanism on a lattice: noise on every message of an agent, including its message to itself.

Every message is a multiple of a public power of two. The clipped gradient is rounded to a lattice with 2^32 to 2^33
steps per standard deviation. Noise on that lattice, drawn independently of the gradient, is added as integers. The sum
is rounded to a coarser lattice and sent. So the set of possible values and their bits never depend on data.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pdsl.data.sampling import Batches
from pdsl.privacy import discrete_gaussian
from pdsl.settings import PrivacySettings
from pdsl.utils.random import Streams, purpose
from pdsl.utils.workers import Workers

STEPS = 2.0**32  # minimum number of lattice steps per standard deviation
MESSAGE_BITS = 16  # a message's step is 2^16 steps of the noise's lattice
GROUP = 2**16  # numbers per group of rows drawn in one call; longer rows are drawn in parallel
ARITHMETIC = 2.0**-24  # relative error of a clipped sum of up to 2^27 products in float64


def sensitivity(settings: PrivacySettings, batches: Batches, agent: int) -> float:
    """Δ: the most that one record of `agent` can move one of its messages, before rounding.

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


def rounded_sensitivity(delta: float, sigma: float, d: int) -> float:
    """Δ of a message of d numbers after rounding to the lattice of σ.

    Guarantee: rounding increases the distance of two numbers by at most one step, and of two vectors by at most √d
    steps. A step is at most 2^-32 σ, and the relative error of the clipped sum is at most ARITHMETIC.
    """
    return delta * (1 + ARITHMETIC) + math.sqrt(d) * sigma / STEPS


def message_step(sigma: float) -> float:
    """Power of two that divides every number of a message with noise of this σ; public, like σ."""
    _, exponent = discrete_gaussian.scale(sigma)
    return math.ldexp(1.0, exponent + MESSAGE_BITS)


@dataclass(frozen=True)
class Noise:
    """Independent Gaussian noise for each (maker, peer, round, step, nth): no two messages share a draw."""

    sigma: list[float]  # per agent
    streams: Streams
    workers: Workers
    # per agent: peer → factor on σ; empty: all 1
    sigma_scale: Sequence[Mapping[int, float]] = field(default=(), kw_only=True)

    def sigma_of(self, maker: int, peer: int) -> float:
        """σ of the messages from `maker` to `peer`."""
        scale = self.sigma_scale[maker] if self.sigma_scale else {}
        return self.sigma[maker] * (scale[peer] if scale else 1.0)

    def add(self, t: int, makers: Tensor, peers: Tensor, g: Tensor, step: int = 0, nth: int = 0) -> Tensor:
        """g[e] + N(0, σ² I), drawn by makers[e] for peers[e] in round t: [rows, d], float32.

        `step` is the local step within the round; `nth` distinguishes messages on the same batch.

        Guarantee: row e is a function of the integers r(g[e]) + Z, where r rounds to the lattice of σ and Z is a
        discrete Gaussian of at least that σ, independent of g and of all other rows. With σ = 0 it is g unchanged.
        """
        if not any(self.sigma):
            return g

        def draw(rows: list[int]) -> Tensor:
            name = purpose("noise", step, nth)
            sources = [self.streams.bits(name, int(makers[e]), t, int(peers[e])) for e in rows]
            lattices = [discrete_gaussian.scale(sigmas[e]) for e in rows]
            z = discrete_gaussian.sample_rows(g.shape[1], [k for k, _ in lattices], sources)
            return _message(g[rows], torch.from_numpy(np.stack(z)).to(g.device), [exponent for _, exponent in lattices])

        sigmas = [self.sigma_of(int(maker), int(peer)) for maker, peer in zip(makers, peers, strict=True)]
        noisy = [e for e, sigma in enumerate(sigmas) if sigma]
        size = max(1, GROUP // g.shape[1])  # rows per call
        groups = [noisy[a : a + size] for a in range(0, len(noisy), size)]
        messages = g.to(torch.float32, copy=True)
        if noisy:
            drawn = self.workers.map(draw, groups) if size == 1 else [draw(rows) for rows in groups]
            messages[noisy] = torch.cat(drawn)
        return messages


def _message(g: Tensor, z: Tensor, exponents: Sequence[int]) -> Tensor:
    """Sum of gradients and noise z in lattice steps of 2^exponent, rounded to message steps: [rows, d] float32.

    In float64 the sum of two integers is a function of their exact sum, and so are the roundings after it.
    """
    step = torch.tensor([math.ldexp(1.0, e) for e in exponents], dtype=torch.float64, device=g.device)[:, None]
    sums = (g.double() / step).round_().add_(z)
    return sums.mul_(2.0**-MESSAGE_BITS).round_().mul_(step * 2.0**MESSAGE_BITS).float()
