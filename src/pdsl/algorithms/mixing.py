"""Several gossip steps without new gradients: post-processing, which costs bytes and no privacy."""

import math

import numpy as np
from torch import Tensor

from pdsl.engine import Engine
from pdsl.topology import Graph, Schedule


def gossip(engine: Engine, x: Tensor, steps: int) -> Tensor:
    """Plain gossip: W^steps x."""
    for _ in range(steps):
        x = engine.mix(x)
    return x


def accelerated_gossip(engine: Engine, x: Tensor, steps: int, omega: float) -> Tensor:
    """P_K(W) x, where P_K is a polynomial of degree K = `steps` with P_K(1) = 1, so means are preserved.

    x¹ = W x⁰,  x^{s+1} = ω W x^s + (1 − ω) x^{s−1}.  ω = 1 is plain gossip, W^K x.
    """
    before, x = x, engine.mix(x)
    for _ in range(steps - 1):
        before, x = x, omega * engine.mix(x) + (1 - omega) * before
    return x


def chebyshev_omega(gap: float) -> float:
    """ω = 2 (1 − √(λ (1 − λ/4))) / (1 − λ/2)²: with it P_K is the Chebyshev polynomial for the spectral gap λ.

    λ is λ₂(I − W). On nearly bipartite graphs W has an eigenvalue near −1, and λ is its distance from −1.
    """
    return 2 * (1 - math.sqrt(gap * (1 - gap / 4))) / (1 - gap / 2) ** 2


def graph_omega(graph: Graph) -> float:
    """Chebyshev ω of the graph's spectral gap; 1, plain gossip, on a schedule."""
    return 1.0 if isinstance(graph, Schedule) else chebyshev_omega(graph.spectral_gap)


def best_omega(graph: Graph, steps: int) -> float:
    """The ω that leaves the least disagreement after `steps` steps, out of three candidates.

    The candidates are plain gossip, the Chebyshev ω of the graph's spectral gap, and the Chebyshev ω of the gap for
    which `steps` steps suffice (`gossip_steps_to_agree`). The second is best if there are enough steps. With fewer, on
    a long ring, it would leave more disagreement than one plain step. On a schedule gossip is plain, because the graph
    of one round need not be connected.
    """
    if isinstance(graph, Schedule):
        return 1.0
    sufficient_gap = min(1.0, (math.log(graph.agents) / steps) ** 2)
    candidates = (1.0, chebyshev_omega(graph.spectral_gap), chebyshev_omega(sufficient_gap))
    return min(candidates, key=lambda omega: remaining_disagreement(graph, steps, omega))


def remaining_disagreement(graph: Graph, steps: int, omega: float) -> float:
    """Share of the variance of white noise that gossip leaves: the mean of P_K(μ)² over all eigenvalues μ < 1 of W."""
    mu = graph.eigenvalues[:-1]
    before, now = np.ones_like(mu), mu
    for _ in range(steps - 1):
        before, now = now, omega * mu * now + (1 - omega) * before
    return float(np.square(now).mean())


def gossip_steps_to_agree(graph: Graph, sigma: float | None = None) -> int:
    """K such that the disagreement after K accelerated steps is below the noise.

    σ is in units of the sensitivity to one record. Without noise, K is that of any σ ≥ 1/2.
    On a schedule K = 1: the graphs of the following rounds bring agreement, and the same graph again would not.
    """
    if isinstance(graph, Schedule):
        return 1
    lam = graph.spectral_gap
    if lam > 1 - 1e-9:  # full graph: one step computes the mean
        return 1
    ratio = max(0.25, sigma**2) / sigma**2 if sigma else 1.0
    return math.ceil(math.log(graph.agents * ratio) / math.sqrt(lam))
