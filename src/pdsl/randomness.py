"""Randomness as a pure function of (agent's key, purpose, round, peer).

Nothing here has state: asking twice for the same stream gives the same numbers, in any process, in any order and
after any restart. That is what lets a resumed run end bit for bit where an uninterrupted one does.
"""

import hashlib

import numpy as np

NOBODY = -1  # no agent: the stream belongs to the whole run (partition, graph, initial model)


class Streams:
    """All random streams of a simulated run, derived from one seed.

    Each agent has a key of its own, so that what one agent draws says nothing about another's draws to someone who
    does not hold the seed. A seed is known to whoever wrote the config: noise drawn this way is for simulation.
    """

    def __init__(self, seed: int):
        self.seed = seed

    def generator(self, purpose: str, agent: int = NOBODY, round: int = 0, peer: int = NOBODY) -> np.random.Generator:
        """The stream for one purpose, at its beginning. Philox gives the same bits on every machine and thread."""
        agent_key = hashlib.blake2b(f"{self.seed}/{agent}".encode(), digest_size=32).digest()
        name = f"{purpose}/{round}/{peer}".encode()
        philox_key = hashlib.blake2b(name, key=agent_key, digest_size=16).digest()
        return np.random.Generator(np.random.Philox(key=np.frombuffer(philox_key, dtype=np.uint64)))
