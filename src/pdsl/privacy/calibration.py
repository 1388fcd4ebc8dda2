"""Calibration: from privacy settings to each agent's mechanism, before the run starts."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdsl.data.sampling import Batches
from pdsl.privacy.accounting import Mechanism, calibrate
from pdsl.privacy.noise import ARITHMETIC, STEPS, rounded_sensitivity, sensitivity
from pdsl.settings import PrivacySettings
from pdsl.topology import Graph
from pdsl.utils.errors import PdslError

Floats = NDArray[np.float64]


class Release(NamedTuple):
    """Messages that an agent releases in a round: `messages` noisy vectors on one batch, `steps` times."""

    messages: int  # k
    steps: int = 1  # K, each on its own batch
    sigma_scale: tuple[float, ...] = ()  # factor on σ for each message, with Σ 1/scale² = k so that ε stays the same


def by_weight(omega: Floats) -> tuple[float, ...]:
    """`sigma_scale` that makes σ² proportional to 1/ω, for weights ω that sum to 1; empty if all weights are equal.

    The weighted sum of such messages has noise of variance σ²/k for any weights: messages with little weight take
    little of the privacy budget.
    """
    if np.allclose(omega, omega[0], rtol=1e-9):
        return ()
    return tuple(float(factor) for factor in 1 / np.sqrt(len(omega) * omega / math.fsum(omega)))


def mechanisms(
    settings: PrivacySettings,
    graph: Graph,
    batches: Batches,
    releases: Sequence[Release],
    rounds: int,
    floor: float,
    d: int,  # numbers in a message
) -> list[Mechanism] | None:
    """Mechanism of every agent; None without noise.

    With a target ε, σ_i = z·√k_i·Δ_i, where z is the smallest noise multiplier with which all `rounds` rounds (in mode
    per-round: one round) stay within the target. An agent with more neighbours adds more noise, and all agents spend
    the same. The algorithm's `sigma_scale` applies unless σ is set directly or computed by Theorem 1.
    """
    if settings.mode == "none":
        return None
    deltas = [sensitivity(settings, batches, i) for i in range(graph.agents)]
    if settings.epsilon_per_round is not None and settings.mode != "per-round":
        phi_min = settings.phi_min if settings.phi_min is not None else floor / graph.max_members
        C, delta = settings.max_grad_norm, settings.delta
        sigmas, scaled = [theorem1_sigma(graph, settings.epsilon_per_round, delta, C, phi_min)] * graph.agents, False
    elif settings.sigma is not None:
        sigmas, scaled = [settings.sigma] * graph.agents, False
    else:
        z = settings.noise_multiplier
        if z is None:
            target, over = (settings.budget, rounds) if settings.mode == "total" else (settings.epsilon_per_round, 1)
            assert target is not None
            steps = max(release.steps for release in releases)
            z = calibrate(target, settings.delta, over, batches.rate, steps)
        for release in releases:
            scale, k = release.sigma_scale, release.messages
            if scale and not math.isclose(math.fsum(s**-2 for s in scale), k):
                raise PdslError(f"sigma_scale={scale}: the sum of 1/scale² must be {k}; try pdsl.privacy.by_weight")
        sigmas = [_sigma(z, release, delta, d) for release, delta in zip(releases, deltas, strict=True)]
        scaled = True
    made = []
    for sigma, delta, release in zip(sigmas, deltas, releases, strict=True):
        factors = release.sigma_scale if scaled else ()
        rounded = rounded_sensitivity(delta, sigma * max(factors, default=1.0), d)
        made.append(Mechanism(sigma, rounded, release.messages, release.steps, batches.rate, factors, d))
    return made


def _sigma(z: float, release: Release, delta: float, d: int) -> float:
    """σ = z·√k·Δ′, where Δ′ is the sensitivity after rounding to the lattice of this σ (`rounded_sensitivity`)."""
    root = z * math.sqrt(release.messages)
    share = root * max(release.sigma_scale, default=1.0) * math.sqrt(d) / STEPS
    if share > 0.5:
        raise PdslError(
            f"noise_multiplier={z:g} for {d:,} parameters is more noise than the lattice of messages can represent;"
            " try fewer rounds or a larger target_epsilon"
        )
    return root * delta * (1 + ARITHMETIC) / (1 - share)


def theorem1_sigma(graph: Graph, epsilon: float, delta: float, C: float, phi_min: float) -> float:
    """σ by the paper's Theorem 1: the smallest that its bound admits for (ε, δ) in each round.

    max over i of  2C (1/ω_min + Σ_j 1/ω_ij) √(2 ln(1.25/δ)) / (φ̂_min ε √(Σ_j ω_ij⁻²)),  j over M_i.

    Guarantee: none, and no ε is stated from it. The theorem covers one round and the aggregate ḡ_i, which is never
    sent. It divides by the smallest share φ̂_min, which min-max normalisation makes 0.
    """
    if not 0 < phi_min <= 1:
        raise PdslError(
            f"Theorem 1 with φ̂_min={phi_min} needs infinite noise: min-max weights make the smallest share 0;"
            " set algorithm.shapley.floor above 0, privacy.share_floor or privacy.phi_min"
        )
    largest = max(_largest_ratio(of_round) for of_round in graph.distinct)
    return float(2 * C * largest * math.sqrt(2 * math.log(1.25 / delta)) / (phi_min * epsilon))


def _largest_ratio(graph: Graph) -> float:
    """Theorem 1's max over i of (1/ω_min + Σ_j 1/ω_ij) / √(Σ_j ω_ij⁻²)."""
    inverse = 1 / graph.omega  # [E]
    per_agent = np.add.reduceat(inverse, graph.offsets[:-1])
    root = np.sqrt(np.add.reduceat(inverse**2, graph.offsets[:-1]))
    return float(((inverse.max() + per_agent) / root).max())
