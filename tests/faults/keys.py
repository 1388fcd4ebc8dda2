"""Planted faults: keys."""

import hashlib
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pdsl.data import Batches
from pdsl.privacy import noise as mechanism
from pdsl.utils import random as randomness
from pdsl.utils.random import RandomBits, SecretStreams, Streams
from tests.faults.base import (
    ANY,
    BETWEEN,
    KEY,
    KEYS,
    LOCAL_STEPS,
    SYSTEM,
    TWO_ON_A_BATCH,
    experiment,
    fault,
    substitute,
)

# 4 keys


@fault(KEY, KEYS, **SYSTEM)
def batches_from_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are drawn from the public seed, noise from the secret."""
    honest = SecretStreams.bits

    def bits(self: SecretStreams, purpose: str, agent: int, round: int, peer: int = -1) -> RandomBits:
        return (Streams.bits if purpose.startswith("batch") else honest)(self, purpose, agent, round, peer)

    monkeypatch.setattr(SecretStreams, "bits", bits)


@fault(KEY, KEYS, **SYSTEM)
def noise_from_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise is drawn from the public seed, batches from the secret."""
    honest = SecretStreams.bits

    def bits(self: SecretStreams, purpose: str, agent: int, round: int, peer: int = -1) -> RandomBits:
        if not purpose.startswith("noise"):
            return honest(self, purpose, agent, round, peer)
        return Streams(self.seed).bits(purpose, agent, round, peer)

    monkeypatch.setattr(SecretStreams, "bits", bits)


class NoSecret(Streams):
    """Says that it is secret."""

    secret = True
    key = bytes(range(32))

    def __init__(self, seed: int, key: bytes | None = None):
        super().__init__(seed)


@fault(KEY, KEYS, **SYSTEM)
def seeded_streams_in_a_private_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with system randomness takes seeded streams."""
    monkeypatch.setattr(experiment, "SecretStreams", NoSecret)


def entropy(monkeypatch: pytest.MonkeyPatch, token: Callable[[int], bytes]) -> None:
    monkeypatch.setattr(randomness, "secrets", SimpleNamespace(token_bytes=token))


@fault(KEY, KEYS, **SYSTEM)
def constant_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The secret key is the same in every run."""
    entropy(monkeypatch, lambda n: hashlib.sha256(b"secret").digest()[:n])


@fault(KEY, KEYS, **SYSTEM)
def key_from_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The secret key is the time in minutes."""
    entropy(monkeypatch, lambda n: hashlib.sha256(str(time.time() // 60).encode()).digest()[:n])


@fault(KEY, KEYS, **SYSTEM)
def key_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The secret key is one of 65,536."""
    generator = np.random.default_rng(1)
    entropy(monkeypatch, lambda n: hashlib.sha256(str(generator.integers(2**16)).encode()).digest()[:n])


@fault(KEY, KEYS, **SYSTEM)
def key_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The secret key is 32 hexadecimal digits: half of its bits are known."""
    import secrets

    entropy(monkeypatch, lambda n: secrets.token_hex(n // 2).encode())


@fault(KEY, KEYS, **SYSTEM)
def key_without_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise does not depend on what shapes a message: a copy with other settings draws the same noise."""
    monkeypatch.setattr(SecretStreams, "bind", lambda self, context: self)


@fault(KEY, KEYS, **SYSTEM)
def context_without_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the run with another σ draws the same noise."""
    substitute(monkeypatch, experiment, "noise_digest", lambda agreed: "")


@fault(KEY, KEYS, **SYSTEM)
def context_without_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the run with other records draws the same noise."""
    substitute(monkeypatch, experiment, "tensors_digest", lambda tensors: "")


@fault(KEY, KEYS, **SYSTEM)
def context_without_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the run with another clip or learning rate draws the same noise."""
    substitute(monkeypatch, experiment, "settings_digest", lambda values, besides: "")


@fault(KEY, KEYS, **SYSTEM)
def agent_forgotten_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """All agents have one key."""
    honest = SecretStreams._agent_key
    monkeypatch.setattr(SecretStreams, "_agent_key", lambda self, agent: honest(self, 0))


@fault(KEY, BETWEEN, **SYSTEM)
def two_agents_with_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents 0 and 2 have one key."""
    honest = SecretStreams._agent_key
    monkeypatch.setattr(SecretStreams, "_agent_key", lambda self, agent: honest(self, agent & ~2))


def derive(monkeypatch: pytest.MonkeyPatch, **constant: Any) -> None:
    honest = randomness._derive

    def forgetful(key: bytes, purpose: str, round: int, peer: int, size: int) -> bytes:
        at = {"purpose": purpose, "round": round, "peer": peer} | constant
        return honest(key, **at, size=size)

    substitute(monkeypatch, randomness, "_derive", forgetful)


@fault(KEY, KEYS, **SYSTEM)
def round_forgotten_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rounds have one key."""
    derive(monkeypatch, round=0)


@fault(KEY, KEYS, **SYSTEM)
def peer_forgotten_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """All peers have one key."""
    derive(monkeypatch, peer=0)


@fault(KEY, KEYS, **SYSTEM)
def purpose_forgotten_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise, batches and every step have one key."""
    derive(monkeypatch, purpose="")


@fault(KEY, BETWEEN, **SYSTEM, **LOCAL_STEPS)
def step_forgotten_in_the_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    """All local steps have one key."""
    substitute(monkeypatch, mechanism, "purpose", lambda name, step=0, nth=0: name)


@fault(KEY, BETWEEN, **TWO_ON_A_BATCH)
def step_and_nth_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """The purpose of a stream has the sum of step and nth: two messages of a round have one."""
    substitute(monkeypatch, mechanism, "purpose", lambda name, step=0, nth=0: f"{name}.{step + nth}")


@fault(KEY, ANY, rounds=12, graph={"kind": "ring", "agents": 12}, model={"name": "softmax"})
def key_without_separators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round and peer are written one after the other: round 1 for peer 11 is round 11 for peer 1."""

    def run_together(key: bytes, purpose: str, round: int, peer: int, size: int) -> bytes:
        return hashlib.blake2b(f"{purpose}{round}{peer}".encode(), key=key, digest_size=size).digest()

    substitute(monkeypatch, randomness, "_derive", run_together)


@fault(KEY, KEYS, **SYSTEM)
def other_bits_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that is run again draws other noise: two messages on one gradient, charged as one."""
    import secrets

    honest = SecretStreams._agent_key
    monkeypatch.setattr(
        SecretStreams, "_agent_key", lambda self, agent: honest(self, agent)[:16] + secrets.token_bytes(16)
    )


@fault(KEY, ANY, **SYSTEM)
def stream_keys_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of a stream has 16 bits: whoever tries them all has the noise."""
    honest = randomness._derive

    def short(key: bytes, purpose: str, round: int, peer: int, size: int) -> bytes:
        return honest(key, purpose, round, peer, size)[:2] + bytes(size - 2)

    substitute(monkeypatch, randomness, "_derive", short)


@fault(KEY, ANY, **SYSTEM)
def not_chacha(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random bits are the Mersenne twister's, which 624 words give away."""

    def bits(self: SecretStreams, purpose: str, agent: int, round: int, peer: int = -1) -> RandomBits:
        key = randomness._derive(self._agent_key(agent), purpose, round, peer, size=32)
        twister = np.random.Generator(np.random.MT19937(int.from_bytes(key, "big")))
        return RandomBits(lambda n: twister.integers(2**64, size=n, dtype=np.uint64), key)

    monkeypatch.setattr(SecretStreams, "bits", bits)


@fault(KEY, ANY, **SYSTEM)
def extension_is_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The further bits that decide a value in 10^5 are always the same."""
    monkeypatch.setattr(RandomBits, "extension", lambda self, index: 2**511 + 2**255)


@fault(KEY, ANY, **SYSTEM)
def batch_from_the_bits_of_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is drawn from the very bits that the own message's noise is drawn from."""

    def draw(self: Batches, agent: int, round: int, step: int = 0) -> Tensor:
        draws = self.streams.uniforms(self.sizes[agent], randomness.purpose("noise", step), agent, round, agent)
        assert self.rate is not None
        return torch.from_numpy(np.flatnonzero(draws < self.rate))

    monkeypatch.setattr(Batches, "draw", draw)
