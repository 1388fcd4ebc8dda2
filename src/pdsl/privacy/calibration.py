"""From what was asked to what each agent does in a round: the amount of noise, found before the run starts."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from pdsl.data.batches import Batches
from pdsl.graph import Graph
from pdsl.privacy.accounting import Mechanism, calibrate
from pdsl.privacy.mechanism import sensitivity
from pdsl.privacy.theorem1 import theorem1_sigma
from pdsl.settings import PrivacySettings


class Release(NamedTuple):
    """What an agent releases in a round: `messages` noisy vectors on one batch, `steps` times."""

    messages: int  # k
    steps: int = 1  # K, each on a batch of its own
    seen: int = 1  # how many of the k reach one and the same neighbour, as they are or in a model made of them


def mechanisms(
    settings: PrivacySettings, graph: Graph, batches: Batches, releases: Sequence[Release], rounds: int, floor: float
) -> list[Mechanism] | None:
    """Every agent's mechanism; None without noise.

    With a target, σ_i = z·√k_i·Δ_i, z the least noise multiplier whose `rounds` rounds (in mode per-round: one
    round by itself) stay within the target: an agent with more neighbours adds more noise, and all spend the same.
    """
    if settings.mode == "none":
        return None
    deltas = [sensitivity(settings, batches, i) for i in range(graph.agents)]
    if settings.epsilon_per_round is not None and settings.mode != "per-round":
        phi_min = settings.phi_min if settings.phi_min is not None else floor / int(max(graph.degrees))
        C, delta = settings.max_grad_norm, settings.delta
        sigmas = [theorem1_sigma(graph, settings.epsilon_per_round, delta, C, phi_min)] * graph.agents
    elif settings.sigma is not None:
        sigmas = [settings.sigma] * graph.agents
    else:
        z = settings.noise_multiplier
        if z is None:
            target, over = (settings.budget, rounds) if settings.mode == "sound" else (settings.epsilon_per_round, 1)
            assert target is not None
            steps = max(release.steps for release in releases)
            z = calibrate(target, settings.delta, over, batches.rate, steps)
        sigmas = [z * math.sqrt(release.messages) * d for release, d in zip(releases, deltas, strict=True)]
    return [
        Mechanism(sigma, d, release.messages, release.steps, batches.rate, release.seen)
        for sigma, d, release in zip(sigmas, deltas, releases, strict=True)
    ]
