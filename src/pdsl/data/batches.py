"""Which of its records an agent uses in a round."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdsl.errors import PdslError
from pdsl.randomness import Streams, purpose
from pdsl.settings import BatchSettings


@dataclass(frozen=True)
class Batches:
    """Draws batches; each is a pure function of (seed, agent, round, local step).

    poisson: every record enters independently with the same rate q at every agent, `batch.rate` or
    min(1, B / records). Both are public constants, so neither q nor a batch tells how many records its agent holds; a
    batch may be empty.
    fixed: min(B, n_i) distinct records, uniformly.
    """

    sizes: Sequence[int]  # n_i, the records of each agent
    settings: BatchSettings
    streams: Streams
    records: float  # public: how many an average agent is taken to have; see `public_records`

    @property
    def rate(self) -> float | None:
        """q, the probability that a record is in a batch; None with fixed, where it differs between agents."""
        if self.settings.sampler == "fixed":
            return None
        return self.settings.rate or min(1.0, self.settings.size / self.records)

    def divisor(self, agent: int) -> float:
        """The constant a batch's sum of gradients is divided by.

        It must not depend on what was drawn: dividing by a Poisson batch's own size would change what one record
        can do to the result. With poisson it is the batch expected of an average agent, B or all its records.
        """
        if self.settings.sampler == "fixed":
            return float(min(self.settings.size, self.sizes[agent]))
        return float(self.settings.size) if self.settings.rate else min(float(self.settings.size), self.records)

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


def public_records(settings: BatchSettings, published: int | None, sizes: Sequence[int], private: bool) -> float:
    """The number of records an average agent is taken to have, from which the sampling rate follows.

    `published`: records of a data set that everybody has. Where neither that nor a setting says, the true mean is used
    in a simulation; in a private run it would tell the number of records, and is refused.
    """
    if settings.rate is not None or settings.records is not None:
        return settings.records or float(settings.size)
    if published is not None:
        return published / len(sizes)
    if private and settings.sampler == "poisson":
        raise PdslError(
            "batch.records: not set, and a sampling rate computed from private records would tell how many there are;"
            " give batch.records, a public estimate of an agent's records, or batch.rate"
        )
    return sum(sizes) / len(sizes)
