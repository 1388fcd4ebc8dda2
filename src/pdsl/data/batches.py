"""Which of its records an agent uses in a round."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdsl.randomness import Streams, purpose
from pdsl.settings import BatchSettings


@dataclass(frozen=True)
class Batches:
    """Draws batches; each is a pure function of (seed, agent, round, local step).

    poisson: every record enters independently with the same rate q at every agent, q = min(1, B / mean part size),
    so that no batch tells how many records its agent holds, and a batch may be empty.
    fixed: min(B, n_i) distinct records, uniformly.
    """

    sizes: Sequence[int]  # n_i, the records of each agent
    settings: BatchSettings
    streams: Streams
    mean_size: float | None = None  # public, and decides the rate; default: the mean of `sizes`

    @property
    def rate(self) -> float | None:
        """q, the probability that a record is in a batch; None with fixed, where it differs between agents."""
        if self.settings.sampler == "fixed":
            return None
        return min(1.0, self.settings.size / self._mean_size)

    def divisor(self, agent: int) -> float:
        """The constant a batch's sum of gradients is divided by.

        It must not depend on what was drawn: dividing by a Poisson batch's own size would change what one record
        can do to the result. With poisson it is the batch expected of an average agent, B unless q is capped at 1.
        """
        if self.settings.sampler == "fixed":
            return float(min(self.settings.size, self.sizes[agent]))
        return min(float(self.settings.size), self._mean_size)

    def draw(self, agent: int, round: int, step: int = 0) -> Tensor:  # [batch] int64
        """Places of the batch's records in the agent's own part (0..n_i-1), ascending."""
        n = self.sizes[agent]
        draws = self.streams.uniforms(n, purpose("batch", step), agent, round)
        rate = self.rate
        if rate is None:
            chosen = np.sort(np.argsort(draws, kind="stable")[: self.settings.size])
        else:
            chosen = np.flatnonzero(draws < rate)
        return torch.from_numpy(chosen.astype(np.int64))

    @property
    def _mean_size(self) -> float:
        return sum(self.sizes) / len(self.sizes) if self.mean_size is None else self.mean_size
