"""The paper's Theorem 1: how much noise it asks for one round."""

import math

import numpy as np

from pdsl.errors import PdslError
from pdsl.graph import Graph


def theorem1_sigma(graph: Graph, epsilon: float, delta: float, C: float, phi_min: float) -> float:
    """The σ of Theorem 1: the least that the paper's bound admits for (ε, δ) in each round.

    max over i of  2C (1/ω_min + Σ_j 1/ω_ij) √(2 ln(1.25/δ)) / (φ̂_min ε √(Σ_j ω_ij⁻²)),  j over M_i.

    Guarantee: none that this program states. The theorem speaks of one round, of the aggregate ḡ_i, which is never
    sent, and of the least share φ̂_min, which min-max normalisation makes 0.
    """
    if not 0 < phi_min <= 1:
        raise PdslError(
            f"Theorem 1 with φ̂_min={phi_min} asks for infinite noise: min-max weights make the least share 0;"
            " set shapley.floor above 0, or privacy.phi_min"
        )
    inverse = 1 / graph.omega  # [E]
    per_agent = np.add.reduceat(inverse, graph.offsets[:-1])
    root = np.sqrt(np.add.reduceat(inverse**2, graph.offsets[:-1]))
    largest = ((inverse.max() + per_agent) / root).max()
    return float(2 * C * largest * math.sqrt(2 * math.log(1.25 / delta)) / (phi_min * epsilon))
