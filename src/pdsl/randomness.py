"""Randomness as a pure function of (agent's key, purpose, round, peer).

Nothing here has state: asking twice for the same stream gives the same numbers, in any process, in any order and
after any restart. That is what lets a resumed run end bit for bit where an uninterrupted one does, and a message that
is sent again be the same bytes instead of a second draw.

Noise and the choice of batches must be secret for a privacy statement to hold. `Streams` derives them from the config's
seed, which is no secret: it is for simulation. `SecretStreams` derives them from the operating system's entropy.
"""

import hashlib
import secrets

import numpy as np
from numpy.typing import NDArray

NOBODY = -1  # no agent: the stream belongs to the whole run (partition, graph, initial model)
KEY_BYTES = 32


class Streams:
    """All random streams of a simulated run, derived from one seed."""

    secret = False

    def __init__(self, seed: int):
        self.seed = seed

    def generator(self, purpose: str, agent: int = NOBODY, round: int = 0, peer: int = NOBODY) -> np.random.Generator:
        """A public stream, at its beginning. Philox gives the same bits on every machine and thread."""
        agent_key = hashlib.blake2b(f"{self.seed}/{agent}".encode(), digest_size=KEY_BYTES).digest()
        philox_key = _derived(agent_key, purpose, round, peer, size=16)
        return np.random.Generator(np.random.Philox(key=np.frombuffer(philox_key, dtype=np.uint64)))

    def uniforms(self, n: int, purpose: str, agent: int, round: int, peer: int = NOBODY) -> NDArray[np.float64]:
        """n numbers from [0, 1)."""
        return self.generator(purpose, agent, round, peer).random(n)

    def normals(self, n: int, purpose: str, agent: int, round: int, peer: int = NOBODY) -> NDArray[np.float32]:
        """n standard normal numbers."""
        return self.generator(purpose, agent, round, peer).standard_normal(n, dtype=np.float32)


class SecretStreams(Streams):
    """As `Streams`, but batches and noise come from a secret key through ChaCha20.

    Guarantee: to someone without the key they are as good as truly random, and no two purposes, agents, rounds or
    peers share a draw. Each normal number is the sum of four, over 2: undoing the rounding of floating-point numbers
    to tell which inputs were possible then takes guessing all four (Holohan and Braghin, 2021).
    """

    secret = True

    def __init__(self, seed: int, key: bytes | None = None):
        super().__init__(seed)
        self.key = key if key is not None else secrets.token_bytes(KEY_BYTES)

    def uniforms(self, n: int, purpose: str, agent: int, round: int, peer: int = NOBODY) -> NDArray[np.float64]:
        bits = self._keystream(n, purpose, agent, round, peer) >> np.uint64(11)
        return bits.astype(np.float64) * 2.0**-53

    def normals(self, n: int, purpose: str, agent: int, round: int, peer: int = NOBODY) -> NDArray[np.float32]:
        from scipy.special import ndtri

        bits = self._keystream(4 * n, purpose, agent, round, peer) >> np.uint64(11)
        four = ndtri((bits.astype(np.float64) + 0.5) * 2.0**-53).reshape(4, n)  # never 0 or 1, so never infinite
        normals: NDArray[np.float32] = (four.sum(0) / 2).astype(np.float32)
        return normals

    def _keystream(self, n: int, purpose: str, agent: int, round: int, peer: int) -> NDArray[np.uint64]:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

        agent_key = hashlib.blake2b(f"{agent}".encode(), key=self.key, digest_size=KEY_BYTES).digest()
        key = _derived(agent_key, purpose, round, peer, size=KEY_BYTES)  # used once, so a fixed nonce repeats nothing
        stream = Cipher(ChaCha20(key, nonce=bytes(16)), mode=None).encryptor().update(bytes(8 * n))
        return np.frombuffer(stream, dtype=np.uint64)


def purpose(name: str, step: int = 0, nth: int = 0) -> str:
    """The name of a stream for a round's local step and the nth message on that step's batch."""
    return name if step == nth == 0 else f"{name}.{step}.{nth}"


def _derived(key: bytes, purpose: str, round: int, peer: int, size: int) -> bytes:
    return hashlib.blake2b(f"{purpose}/{round}/{peer}".encode(), key=key, digest_size=size).digest()
