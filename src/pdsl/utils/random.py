"""Random streams as a pure function of (agent's key, purpose, round, peer).

Streams have no state: the same arguments give the same numbers, in any process, in any order and after any restart.
So a resumed run ends with the same bits as an uninterrupted one, and a message that is sent again has the same bytes
instead of a second noise draw.

Noise and batches must be secret for a privacy statement to hold. `Streams` derives them from the config's seed, which
is not secret: it is for simulation. `SecretStreams` derives them from the operating system's entropy.
"""

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

NO_AGENT = -1  # the stream belongs to the whole run (partition, graph, initial model)
KEY_BYTES = 32
Words = NDArray[np.uint64]


@dataclass(frozen=True)
class RandomBits:
    """One stream of random bits, from its beginning."""

    read: Callable[[int], Words]  # the next n words of 64 bits
    key: bytes  # key of this stream

    def extension(self, index: int) -> int:
        """Return 512 further random bits of the value `index`, the same on every call."""
        return int.from_bytes(hashlib.blake2b(f"extension/{index}".encode(), key=self.key).digest(), "big")


class Streams:
    """Random streams of a simulated run, derived from one seed."""

    secret = False

    def __init__(self, seed: int):
        self.seed = seed

    def generator(
        self, purpose: str, agent: int = NO_AGENT, round: int = 0, peer: int = NO_AGENT
    ) -> np.random.Generator:
        """Public stream, from its beginning. Philox gives the same bits on every machine and thread."""
        return np.random.Generator(self._philox(purpose, agent, round, peer))

    def bits(self, purpose: str, agent: int, round: int, peer: int = NO_AGENT) -> RandomBits:
        """Stream for noise or batches."""
        philox = self._philox(purpose, agent, round, peer)
        key = _derive(self._agent_key(agent), f"{purpose}/bits", round, peer, size=KEY_BYTES)
        return RandomBits(philox.random_raw, key)

    def uniforms(self, n: int, purpose: str, agent: int, round: int, peer: int = NO_AGENT) -> NDArray[np.float64]:
        """Draw n numbers from [0, 1), multiples of 2^-53."""
        words = self.bits(purpose, agent, round, peer).read(n)
        return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def bind(self, context: bytes) -> Self:
        """Return the streams of a run with this context. Seeded streams are public and do not depend on it."""
        return self

    def _agent_key(self, agent: int) -> bytes:
        return hashlib.blake2b(f"{self.seed}/{agent}".encode(), digest_size=KEY_BYTES).digest()

    def _philox(self, purpose: str, agent: int, round: int, peer: int) -> np.random.Philox:
        key = _derive(Streams._agent_key(self, agent), purpose, round, peer, size=16)
        return np.random.Philox(key=np.frombuffer(key, dtype=np.uint64))


class SecretStreams(Streams):
    """Random streams of a private run: batches and noise come from a secret key through ChaCha20.

    Guarantee: to an adversary without the key they are indistinguishable from random bits, and no two purposes, agents,
    rounds, peers or contexts share a draw. The context is everything that determines a message (`privacy.seal`): a copy
    of a run that is resumed with other settings, data, model or noise draws other noise, so noise cannot be cancelled.
    """

    secret = True

    def __init__(self, seed: int, key: bytes | None = None, context: bytes = b""):
        super().__init__(seed)
        self.key = key if key is not None else secrets.token_bytes(KEY_BYTES)
        self.context = context
        self._bound = hashlib.blake2b(context, key=self.key, digest_size=KEY_BYTES).digest()

    def bits(self, purpose: str, agent: int, round: int, peer: int = NO_AGENT) -> RandomBits:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

        key = _derive(self._agent_key(agent), purpose, round, peer, size=KEY_BYTES)
        # each key encrypts one stream of zeros, so a fixed nonce repeats nothing
        cipher = Cipher(ChaCha20(key, nonce=bytes(16)), mode=None).encryptor()
        return RandomBits(lambda n: np.frombuffer(cipher.update(bytes(8 * n)), dtype="<u8"), key)

    def bind(self, context: bytes) -> Self:
        return type(self)(self.seed, self.key, context)

    def _agent_key(self, agent: int) -> bytes:
        return hashlib.blake2b(f"{agent}".encode(), key=self._bound, digest_size=KEY_BYTES).digest()


def purpose(name: str, step: int = 0, nth: int = 0) -> str:
    """Name of the stream for a local step of a round and the nth message on that step's batch."""
    return name if step == nth == 0 else f"{name}.{step}.{nth}"


def _derive(key: bytes, purpose: str, round: int, peer: int, size: int) -> bytes:
    return hashlib.blake2b(f"{purpose}/{round}/{peer}".encode(), key=key, digest_size=size).digest()
