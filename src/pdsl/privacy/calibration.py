"""From what was asked to what each agent does in a round: the amount of noise, found before the run starts."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdsl.data.batches import Batches
from pdsl.errors import PdslError
from pdsl.graph import Graph
from pdsl.privacy.accounting import Mechanism, calibrate
from pdsl.privacy.mechanism import ARITHMETIC, STEPS, rounded_sensitivity, sensitivity
from pdsl.privacy.theorem1 import theorem1_sigma
from pdsl.settings import PrivacySettings

Floats = NDArray[np.float64]


class Release(NamedTuple):
    """What an agent releases in a round: `messages` noisy vectors on one batch, `steps` times."""

    messages: int  # k
    steps: int = 1  # K, each on a batch of its own
    stretch: tuple[float, ...] = ()  # σ of each message over σ of k that are alike; Σ 1/stretch² = k, so ε is the same


def by_weight(omega: Floats) -> tuple[float, ...]:
    """The `stretch` of messages whose σ² is as 1/ω, for weights ω that sum to 1; empty where all weigh the same.

    Such messages, each times its ω, add up to noise of σ²/k, whatever the weights are: little of the budget goes to
    what hardly counts.
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
    """Every agent's mechanism; None without noise.

    With a target, σ_i = z·√k_i·Δ_i, z the least noise multiplier whose `rounds` rounds (in mode per-round: one
    round by itself) stay within the target: an agent with more neighbours adds more noise, and all spend the same.
    Messages differ where the algorithm stretches them, but for a σ that was asked for itself, and Theorem 1's.
    """
    if settings.mode == "none":
        return None
    deltas = [sensitivity(settings, batches, i) for i in range(graph.agents)]
    if settings.epsilon_per_round is not None and settings.mode != "per-round":
        phi_min = settings.phi_min if settings.phi_min is not None else floor / int(max(graph.degrees))
        C, delta = settings.max_grad_norm, settings.delta
        sigmas, stretched = [theorem1_sigma(graph, settings.epsilon_per_round, delta, C, phi_min)] * graph.agents, False
    elif settings.sigma is not None:
        sigmas, stretched = [settings.sigma] * graph.agents, False
    else:
        z = settings.noise_multiplier
        if z is None:
            target, over = (settings.budget, rounds) if settings.mode == "sound" else (settings.epsilon_per_round, 1)
            assert target is not None
            steps = max(release.steps for release in releases)
            z = calibrate(target, settings.delta, over, batches.rate, steps)
        for release in releases:
            if release.stretch and not math.isclose(math.fsum(s**-2 for s in release.stretch), release.messages):
                raise PdslError(
                    f"stretch {release.stretch}: 1/stretch² must add up to {release.messages}; try by_weight"
                )
        sigmas = [_sigma(z, release, delta, d) for release, delta in zip(releases, deltas, strict=True)]
        stretched = True
    made = []
    for sigma, delta, release in zip(sigmas, deltas, releases, strict=True):
        factors = release.stretch if stretched else ()
        rounded = rounded_sensitivity(delta, sigma * max(factors, default=1.0), d)
        made.append(Mechanism(sigma, rounded, release.messages, release.steps, batches.rate, factors, d))
    return made


def _sigma(z: float, release: Release, delta: float, d: int) -> float:
    """σ = z·√k·Δ', where Δ' is Δ once messages are rounded to the lattice of σ itself (`rounded_sensitivity`)."""
    root = z * math.sqrt(release.messages)
    share = root * max(release.stretch, default=1.0) * math.sqrt(d) / STEPS
    if share > 0.5:
        raise PdslError(
            f"noise_multiplier={z:g} for {d:,} parameters is more noise than the lattice of messages can hold; try"
            " fewer rounds or a larger target_epsilon"
        )
    return root * delta * (1 + ARITHMETIC) / (1 - share)
