"""Randomness as a pure function of (agent's key, purpose, round, peer).

Nothing here has state: asking twice for the same stream gives the same numbers, in any process, in any order and
after any restart. That is what lets a resumed run end bit for bit where an uninterrupted one does, and a message that
is sent again be the same bytes instead of a second draw.

Noise and the choice of batches must be secret for a privacy statement to hold. `Streams` derives them from the config's
seed, which is no secret: it is for simulation. `SecretStreams` derives them from the operating system's entropy.
"""

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

NOBODY = -1  # no agent: the stream belongs to the whole run (partition, graph, initial model)
KEY_BYTES = 32
Words = NDArray[np.uint64]


@dataclass(frozen=True)
class RandomBits:
    """One stream of random bits, read from its beginning."""

    read: Callable[[int], Words]  # the next n words of 64 bits
    key: bytes  # of this stream alone

    def extension(self, index: int) -> int:
        """Return 512 further random bits that belong to the value `index`, the same whenever they are asked for."""
        return int.from_bytes(hashlib.blake2b(f"extension/{index}".encode(), key=self.key).digest(), "big")


class Streams:
    """All random streams of a simulated run, derived from one seed."""

    secret = False

    def __init__(self, seed: int):
        self.seed = seed

    def generator(self, purpose: str, agent: int = NOBODY, round: int = 0, peer: int = NOBODY) -> np.random.Generator:
        """A public stream, at its beginning. Philox gives the same bits on every machine and thread."""
        return np.random.Generator(self._philox(purpose, agent, round, peer))

    def bits(self, purpose: str, agent: int, round: int, peer: int = NOBODY) -> RandomBits:
        """A stream for noise or batches."""
        philox = self._philox(purpose, agent, round, peer)
        key = _derive(self._agent_key(agent), f"{purpose}/bits", round, peer, size=KEY_BYTES)
        return RandomBits(philox.random_raw, key)

    def uniforms(self, n: int, purpose: str, agent: int, round: int, peer: int = NOBODY) -> NDArray[np.float64]:
        """Draw n numbers from [0, 1), multiples of 2^-53."""
        words = self.bits(purpose, agent, round, peer).read(n)
        return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def bind(self, context: bytes) -> Self:
        """Return the streams of a run with this context. Seeded streams are public, and stay as they are."""
        return self

    def _agent_key(self, agent: int) -> bytes:
        return hashlib.blake2b(f"{self.seed}/{agent}".encode(), digest_size=KEY_BYTES).digest()

    def _philox(self, purpose: str, agent: int, round: int, peer: int) -> np.random.Philox:
        key = _derive(Streams._agent_key(self, agent), purpose, round, peer, size=16)
        return np.random.Philox(key=np.frombuffer(key, dtype=np.uint64))


class SecretStreams(Streams):
    """As `Streams`, but batches and noise come from a secret key through ChaCha20.

    Guarantee: to an adversary without the key they are indistinguishable from random bits, and no two purposes, agents,
    rounds, peers or contexts share a draw. The context is everything that shapes a message (`privacy.bond`): a copy of
    a run that is resumed with other settings, data, model or noise draws other noise, so nothing can be subtracted.
    """

    secret = True

    def __init__(self, seed: int, key: bytes | None = None, context: bytes = b""):
        super().__init__(seed)
        self.key = key if key is not None else secrets.token_bytes(KEY_BYTES)
        self.context = context
        self._bound = hashlib.blake2b(context, key=self.key, digest_size=KEY_BYTES).digest()

    def bits(self, purpose: str, agent: int, round: int, peer: int = NOBODY) -> RandomBits:
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
    """The name of a stream for a round's local step and the nth message on that step's batch."""
    return name if step == nth == 0 else f"{name}.{step}.{nth}"


def _derive(key: bytes, purpose: str, round: int, peer: int, size: int) -> bytes:
    return hashlib.blake2b(f"{purpose}/{round}/{peer}".encode(), key=key, digest_size=size).digest()
