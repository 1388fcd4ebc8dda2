"""Several rounds of gossip without new gradients: post-processing, which costs bytes and no privacy."""

import math

import numpy as np
from torch import Tensor

from pdsl.engine import Engine
from pdsl.graph import Graph


def gossip(engine: Engine, x: Tensor, steps: int) -> Tensor:
    """W^steps x."""
    for _ in range(steps):
        x = engine.mix(x)
    return x


def accelerated(engine: Engine, x: Tensor, steps: int, omega: float) -> Tensor:
    """P_K(W) x, a polynomial of degree K = `steps` with P_K(1) = 1: means are preserved.

    x¹ = W x⁰,  x^{s+1} = ω W x^s + (1 − ω) x^{s−1}.  ω = 1 is plain gossip, W^K x.
    """
    before, x = x, engine.mix(x)
    for _ in range(steps - 1):
        before, x = x, omega * engine.mix(x) + (1 - omega) * before
    return x


def chebyshev_omega(gap: float) -> float:
    """ω = 2 (1 − √(λ (1 − λ/4))) / (1 − λ/2)², which makes P_K Chebyshev's polynomial for the spectral gap λ.

    λ is λ₂(I − W), but for graphs near to bipartite, where W has an eigenvalue near −1 that decides instead.
    """
    return 2 * (1 - math.sqrt(gap * (1 - gap / 4))) / (1 - gap / 2) ** 2


def best_omega(graph: Graph, steps: int) -> float:
    """The ω after whose `steps` rounds agents that differ at random differ least: plain, by the gap, or by the steps.

    By the gap is best where there are rounds enough for it (`enough_gossip`). With fewer, on a long ring, it would
    leave more than one plain round does: there ω goes by the gap for which the rounds are enough.
    """
    reached = min(1.0, (math.log(graph.agents) / steps) ** 2)
    candidates = (1.0, chebyshev_omega(graph.spectral_gap), chebyshev_omega(reached))
    return min(candidates, key=lambda omega: disagreement(graph, steps, omega))


def disagreement(graph: Graph, steps: int, omega: float) -> float:
    """The mean of P_K(μ)² over the eigenvalues μ of W but the largest: what is left of white noise."""
    mu = graph.eigenvalues[:-1]
    before, now = np.ones_like(mu), mu
    for _ in range(steps - 1):
        before, now = now, omega * mu * now + (1 - omega) * before
    return float(np.square(now).mean())


def enough_gossip(graph: Graph, sigma: float | None = None) -> int:
    """K, after which disagreement is below what noise leaves: σ in units of what one record can change.

    Without σ, or without noise, K is what any σ of at least 1/2 asks for.
    """
    lam = graph.spectral_gap
    if lam > 1 - 1e-9:  # the full graph: one round of gossip is the mean
        return 1
    ratio = max(0.25, sigma**2) / sigma**2 if sigma else 1.0
    return math.ceil(math.log(graph.agents * ratio) / math.sqrt(lam))
