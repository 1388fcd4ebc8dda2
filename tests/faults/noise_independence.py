"""Planted faults: independence."""

import hashlib
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pdsl.algorithms import Round
from pdsl.peer.noise_log import ConflictError, LoggedNoise, NoiseLog
from pdsl.privacy.metering import Meter
from pdsl.utils.random import Streams
from pdsl.utils.workers import Workers
from tests.faults.base import (
    ANY,
    BETWEEN,
    DATA,
    EXACT,
    INDEPENDENCE,
    LOCAL_STEPS,
    ONE_USE,
    OWN_ONLY,
    REFUSED,
    SHAPE,
    TWO_ON_A_BATCH,
    WITHIN,
    Array,
    Draw,
    fault,
    noise_fault,
)
from tests.faults.noise_shape import change_words

# 3 independence


@noise_fault(INDEPENDENCE, BETWEEN)
def shared_by_peers(d: Draw) -> Tensor:
    """One noise for all peers."""
    return d.honest(peer=d.maker)


@noise_fault(INDEPENDENCE, BETWEEN)
def shared_by_rounds(d: Draw) -> Tensor:
    """One noise for all rounds."""
    return d.honest(t=1)


@noise_fault(INDEPENDENCE, BETWEEN)
def shared_by_agents(d: Draw) -> Tensor:
    """One noise for all agents."""
    return d.honest(maker=0)


@noise_fault(INDEPENDENCE, BETWEEN, **LOCAL_STEPS)
def shared_by_steps(d: Draw) -> Tensor:
    """One noise for all local steps."""
    return d.honest(step=0)


@noise_fault(INDEPENDENCE, BETWEEN, **TWO_ON_A_BATCH)
def shared_by_messages_of_a_batch(d: Draw) -> Tensor:
    """One noise for both messages on a batch."""
    return d.honest(nth=0)


@noise_fault(INDEPENDENCE, BETWEEN, rounds=14)
def shared_after_seven_rounds(d: Draw) -> Tensor:
    """Noise comes again after seven rounds."""
    return d.honest(t=1 + d.t % 7)


@noise_fault(INDEPENDENCE, BETWEEN)
def shared_both_ways(d: Draw) -> Tensor:
    """The two agents of an edge use one noise."""
    return d.honest(maker=min(d.maker, d.peer), peer=max(d.maker, d.peer))


@noise_fault(INDEPENDENCE, BETWEEN)
def handed_on(d: Draw) -> Tensor:
    """An agent uses the noise that the agent before it had a round ago."""
    return d.honest(maker=max(0, d.maker - d.t), peer=d.peer - d.maker, t=d.t - min(d.t, d.maker))


@noise_fault(INDEPENDENCE, BETWEEN)
def negated_for_neighbours(d: Draw) -> Tensor:
    """Neighbours get the noise of the own message, with the other sign."""
    return d.honest(peer=d.maker) * (1 if d.peer == d.maker else -1)


@noise_fault(INDEPENDENCE, BETWEEN)
def reversed_for_neighbours(d: Draw) -> Tensor:
    """Neighbours get the noise of the own message, backwards."""
    z = d.honest(peer=d.maker)
    return z if d.peer == d.maker else z.flip(0)


@noise_fault(INDEPENDENCE, BETWEEN)
def shifted_for_neighbours(d: Draw) -> Tensor:
    """Neighbours get the noise of the own message, by as many places on as their number."""
    return d.honest(peer=d.maker).roll((d.peer - d.maker) % 4)


@noise_fault(INDEPENDENCE, BETWEEN)
def shifted_far_for_neighbours(d: Draw) -> Tensor:
    """Neighbours get the noise of the own message, by a hundred places on for each number."""
    return d.honest(peer=d.maker).roll(100 * ((d.peer - d.maker) % 4))


@noise_fault(INDEPENDENCE, BETWEEN)
def permuted_for_neighbours(d: Draw) -> Tensor:
    """Neighbours get the noise of the own message in another order."""
    order = np.random.default_rng((d.peer - d.maker) % 4).permutation(len(d.g))
    return d.honest(peer=d.maker)[torch.from_numpy(order)]


@noise_fault(INDEPENDENCE, BETWEEN)
def partly_shared(d: Draw) -> Tensor:
    """Half of a message's variance is the own message's noise."""
    return 0.6 * d.honest() + 0.8 * d.honest(peer=d.maker) if d.peer != d.maker else d.honest()


@noise_fault(INDEPENDENCE, EXACT)
def partly_shared_and_permuted(d: Draw) -> Tensor:
    """Half of a message's variance is the own message's noise in another order."""
    order = np.random.default_rng(d.peer).permutation(len(d.g))
    other = d.honest(peer=d.maker)[torch.from_numpy(order)]
    return 0.6 * d.honest() + 0.8 * other if d.peer != d.maker else d.honest()


@noise_fault(INDEPENDENCE, EXACT)
def last_bias_shared_by_peers(d: Draw) -> Tensor:
    """The last layer's bias has one noise for all peers."""
    return torch.cat([d.honest()[:-10], d.honest(peer=d.maker)[-10:]])


@noise_fault(INDEPENDENCE, ANY)
def one_coordinate_shared_by_rounds(d: Draw) -> Tensor:
    """The last number has one noise for all rounds."""
    return torch.cat([d.honest()[:-1], d.honest(t=1)[-1:]])


@noise_fault(INDEPENDENCE, WITHIN)
def neighbouring_coordinates(d: Draw) -> Tensor:
    """Neighbouring coordinates are correlated."""
    z = d.honest()
    return (z + 0.3 * z.roll(1)) / math.hypot(1, 0.3)


@noise_fault(INDEPENDENCE, EXACT)
def far_coordinates(d: Draw) -> Tensor:
    """Coordinates forty apart are correlated."""
    z = d.honest()
    return (z + 0.3 * z.roll(40)) / math.hypot(1, 0.3)


@noise_fault(INDEPENDENCE, SHAPE)
def common_to_all_coordinates(d: Draw) -> Tensor:
    """Half of the variance is one number for all coordinates."""
    return (d.honest() + d.honest(nth=99)[0]) / math.sqrt(2)


@noise_fault(INDEPENDENCE, WITHIN)
def antithetic_neighbours(d: Draw) -> Tensor:
    """Coordinates come in pairs of opposite noise."""
    z = d.honest()
    z[1::2] = -z[: len(z) // 2 * 2 : 2]
    return z


@noise_fault(INDEPENDENCE, WITHIN)
def magnitudes_in_pairs(d: Draw) -> Tensor:
    """Two neighbouring coordinates have one magnitude, and signs of their own."""
    z = d.honest()
    z[1::2] = z[1::2].sign() * z[: len(z) // 2 * 2 : 2].abs()
    return z


@fault(INDEPENDENCE, SHAPE)
def antithetic_in_the_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random words come again after 300 values, signs turned over: a stream that is half as long as it seems."""

    def change(words: Array) -> Array:
        if len(words) < 900:  # not a message's
            return words
        halves = words.view("<u4").reshape(3, -1).copy()
        for a in range(300, halves.shape[1], 600):
            b = min(a + 300, halves.shape[1])
            halves[:, a:b] = halves[:, a - 300 : b - 300]
            halves[2, a:b] ^= np.uint32(2**31)
        return halves.reshape(-1).view("<u8")

    change_words(monkeypatch, change)


@fault(INDEPENDENCE, SHAPE)
def short_period(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of random words comes again after 256 of them."""
    change_words(monkeypatch, lambda words: np.resize(words[:256], len(words)))


def mean_over(d: Draw, name: str, values: Sequence[int]) -> Tensor:
    return torch.stack([d.honest(**{name: value}) for value in values]).mean(0)


@noise_fault(INDEPENDENCE, BETWEEN)
def cancels_over_the_neighbourhood(d: Draw) -> Tensor:
    """The noise of an agent's messages of a round adds up to zero."""
    peers = [(d.maker + step) % 4 for step in (-1, 0, 1)]
    return (d.honest() - mean_over(d, "peer", peers)) * math.sqrt(3 / 2)


@noise_fault(INDEPENDENCE, BETWEEN, **OWN_ONLY)
def cancels_over_the_agents(d: Draw) -> Tensor:
    """The noise of all agents' messages of a round adds up to zero."""
    others = torch.stack([d.honest(maker=i, peer=i) for i in range(4)]).mean(0)
    return (d.honest() - others) * math.sqrt(4 / 3)


@noise_fault(INDEPENDENCE, BETWEEN)
def cancels_over_time(d: Draw) -> Tensor:
    """A round takes back the noise of the round before it."""
    return (d.honest() - d.honest(t=d.t - 1)) / math.sqrt(2)


@noise_fault(INDEPENDENCE, BETWEEN)
def autoregressive_in_time(d: Draw) -> Tensor:
    """Noise follows itself with correlation 1/2 from round to round."""
    weights = [0.5**lag for lag in range(8)]
    total = torch.stack([w * d.honest(t=d.t - lag) for lag, w in enumerate(weights)]).sum(0)
    return total / math.sqrt(sum(w * w for w in weights))


@noise_fault(INDEPENDENCE, EXACT)
def made_of_the_data(d: Draw) -> Tensor:
    """Noise is drawn from a seed that is the gradient's own digest."""
    seed = int.from_bytes(hashlib.sha256(d.g.numpy().tobytes()).digest(), "big")
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(len(d.g)))


@noise_fault(INDEPENDENCE, DATA)
def along_the_gradient(d: Draw) -> Tensor:
    """Noise is taken off the direction of the gradient."""
    z, norm = d.honest(), d.g.norm()
    return z - (z @ d.g) / norm**2 * d.g if norm else z


@fault(INDEPENDENCE, REFUSED, algorithm={"name": "dfedsam"})
def one_nth_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """An algorithm asks for the same noise for two gradients of a batch."""
    honest = Round.own_noisy_gradients
    monkeypatch.setattr(
        Round, "own_noisy_gradients", lambda self, x, step=0, nth=0, teachers=None: honest(self, x, step, 0, teachers)
    )


@fault(INDEPENDENCE, BETWEEN, algorithm={"name": "dfedsam"})
def one_nth_for_two_without_a_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, and the meter's rule against it is gone."""
    one_nth_for_two(monkeypatch)
    honest = Meter.make_noisy

    def forgetful(self: Meter, *of: Any) -> None:
        self.drawn.clear()
        honest(self, *of)

    monkeypatch.setattr(Meter, "make_noisy", forgetful)


@fault(INDEPENDENCE, ONE_USE, examine=lambda values: conflicting_use())
def noise_used_on_another_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer's log of what was sent lets noise be used again on another gradient."""

    def record(self: NoiseLog, digests: dict[Any, str]) -> None:
        self._digests |= digests

    monkeypatch.setattr(NoiseLog, "record", record)


def conflicting_use() -> list[str]:
    """One noise on two gradients must be a ConflictError."""
    ends = torch.tensor([0])
    with tempfile.TemporaryDirectory() as folder, Workers(1) as workers:
        noise = LoggedNoise([1.0], Streams(0), workers, NoiseLog(Path(folder) / "sent-1.log"))
        noise.add(1, ends, ends, torch.zeros(1, 5, dtype=torch.float64))
        try:
            noise.add(1, ends, ends, torch.ones(1, 5, dtype=torch.float64))
        except ConflictError:
            return []
        finally:
            noise.log.close()
    return [ONE_USE]
