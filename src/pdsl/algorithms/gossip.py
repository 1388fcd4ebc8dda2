"""Several rounds of gossip without new gradients: post-processing, which costs bytes and no privacy."""

import math

from torch import Tensor

from pdsl.engine import Engine
from pdsl.graph import Graph


def gossip(engine: Engine, x: Tensor, steps: int) -> Tensor:
    """W^steps x."""
    for _ in range(steps):
        x = engine.mix(x)
    return x


def accelerated(engine: Engine, x: Tensor, steps: int, gap: float) -> Tensor:
    """P_K(W) x, Chebyshev's polynomial of degree K = `steps`, with P_K(1) = 1: means are preserved.

    x¹ = W x⁰,  x^{s+1} = ω W x^s + (1 − ω) x^{s−1},  ω by the spectral gap λ. That is λ₂(I − W), but for graphs
    near to bipartite, where W has an eigenvalue near −1 that decides instead.
    """
    omega = chebyshev_omega(gap)
    before, x = x, engine.mix(x)
    for _ in range(steps - 1):
        before, x = x, omega * engine.mix(x) + (1 - omega) * before
    return x


def chebyshev_omega(gap: float) -> float:
    """ω = 2 (1 − √(λ (1 − λ/4))) / (1 − λ/2)²."""
    return 2 * (1 - math.sqrt(gap * (1 - gap / 4))) / (1 - gap / 2) ** 2


def enough_gossip(graph: Graph, sigma: float = 0.0) -> int:
    """K, after which disagreement is below what the noise leaves: σ in units of what one record can change.

    Without noise there is no such level; K is then what any σ of at least 1/2 asks for.
    """
    lam = graph.spectral_gap
    if lam > 1 - 1e-9:  # the full graph: one round of gossip is the mean
        return 1
    ratio = max(0.25, sigma**2) / sigma**2 if sigma > 0 else 1.0
    return math.ceil(math.log(graph.agents * ratio) / math.sqrt(lam))
