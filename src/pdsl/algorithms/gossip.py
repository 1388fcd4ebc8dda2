"""Several rounds of gossip without new gradients: post-processing, which costs bytes and no privacy."""

import math

from torch import Tensor

from pdsl.engine import Engine


def gossip(engine: Engine, x: Tensor, steps: int) -> Tensor:
    """W^steps x."""
    for _ in range(steps):
        x = engine.mix(x)
    return x


def accelerated(engine: Engine, x: Tensor, steps: int, connectivity: float) -> Tensor:
    """P_K(W) x, Chebyshev's polynomial of degree K = `steps`, with P_K(1) = 1: means are preserved.

    x¹ = W x⁰,  x^{s+1} = ω W x^s + (1 − ω) x^{s−1},  with `connectivity` λ = λ₂(I − W).
    """
    omega = chebyshev_omega(connectivity)
    before, x = x, engine.mix(x)
    for _ in range(steps - 1):
        before, x = x, omega * engine.mix(x) + (1 - omega) * before
    return x


def chebyshev_omega(connectivity: float) -> float:
    """ω = 2 (1 − √(λ (1 − λ/4))) / (1 − λ/2)²."""
    return 2 * (1 - math.sqrt(connectivity * (1 - connectivity / 4))) / (1 - connectivity / 2) ** 2
