"""The Gaussian mechanism on a lattice: noise on every message that leaves an agent, its own to itself included.

A message is a multiple of a public power of two. The clipped gradient is rounded to a lattice with 2^32 to 2^33 steps
in a standard deviation; noise on that lattice, drawn without looking at the gradient, is added to it as integers; the
sum is rounded to a coarser lattice and leaves. So which values are possible, and which bits they have, never depends on
data.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pdsl.data.batches import Batches
from pdsl.parallel import Workers
from pdsl.privacy import discrete_gaussian
from pdsl.randomness import Streams, purpose
from pdsl.settings import PrivacySettings

STEPS = 2.0**32  # least number of lattice steps in a standard deviation
MESSAGE_BITS = 16  # a message's step is 2^16 steps of the noise's lattice
GROUP = 2**16  # numbers of a group of rows that is drawn at once; longer rows are drawn side by side
ARITHMETIC = 2.0**-24  # relative error of a clipped sum: sums of up to 2^27 products in float64


def sensitivity(settings: PrivacySettings, batches: Batches, agent: int) -> float:
    """Δ: how far one record of `agent` can move one message it sends, before rounding.

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
    """Δ of a message of d numbers once it is rounded to the lattice of σ.

    Guarantee: rounding moves two numbers apart by at most a step, so two vectors by at most √d steps more than they
    were; a step is at most 2^-32 σ, and the clipped sum before it is off by at most ARITHMETIC.
    """
    return delta * (1 + ARITHMETIC) + math.sqrt(d) * sigma / STEPS


def message_step(sigma: float) -> float:
    """The power of two of which every number in a message with noise of this σ is a multiple; public, as σ is."""
    _, exponent = discrete_gaussian.scale(sigma)
    return math.ldexp(1.0, exponent + MESSAGE_BITS)


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
        """g[e] + N(0, σ² I), drawn by makers[e] for peers[e] in round t: [rows, d], float32.

        In a round with several local steps, `step` says which; `nth` tells messages on one and the same batch apart.

        Guarantee: row e is a function of integers r(g[e]) + Z, where r rounds to the lattice of σ and Z is a discrete
        Gaussian of at least that σ, independent of g and of every other row. Without noise (σ = 0) it is g itself.
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
        size = max(1, GROUP // g.shape[1])  # rows at a time: of short ones many, to spare calls
        groups = [noisy[a : a + size] for a in range(0, len(noisy), size)]
        messages = g.to(torch.float32, copy=True)
        if noisy:
            drawn = self.workers.map(draw, groups) if size == 1 else [draw(rows) for rows in groups]
            messages[noisy] = torch.cat(drawn)
        return messages


def _message(g: Tensor, z: Tensor, exponents: Sequence[int]) -> Tensor:
    """The sums of gradients and noise z, each row in steps of 2^exponent, in steps of the message: [rows, d] float32.

    The sum of two integers in float64 is a function of their exact sum, as are the roundings after it.
    """
    step = torch.tensor([math.ldexp(1.0, e) for e in exponents], dtype=torch.float64, device=g.device)[:, None]
    sums = (g.double() / step).round_().add_(z)
    return sums.mul_(2.0**-MESSAGE_BITS).round_().mul_(step * 2.0**MESSAGE_BITS).float()
