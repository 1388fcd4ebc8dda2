"""Sampling of batches."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdsl.settings import BatchSettings
from pdsl.utils.errors import PdslError
from pdsl.utils.random import Streams, purpose


@dataclass(frozen=True)
class Batches:
    """Sampler of batches; each batch is a pure function of (seed, agent, round, local step).

    poisson: every record is included independently, at all agents with the same rate q, which is `batch.rate` or
    min(1, B / records). Both are public constants, so q does not reveal how many records an agent has. A batch may be
    empty.
    fixed: min(B, n_i) distinct records, drawn uniformly.
    """

    sizes: Sequence[int]  # n_i, number of records of each agent
    settings: BatchSettings
    streams: Streams
    records: float  # public estimate of the records per agent; see `public_records`

    @property
    def rate(self) -> float | None:
        """Sampling rate q; None for fixed batches, where it differs between agents."""
        if self.settings.sampler == "fixed":
            return None
        return self.settings.rate or min(1.0, self.settings.size / self.records)

    def divisor(self, agent: int) -> float:
        """Constant by which the sum of a batch's gradients is divided.

        It must not depend on the batch, because dividing by the size of a Poisson batch would change the sensitivity.
        With poisson it is the expected batch size of an average agent: B, or all its records.
        """
        if self.settings.sampler == "fixed":
            return float(min(self.settings.size, self.sizes[agent]))
        return float(self.settings.size) if self.settings.rate else min(float(self.settings.size), self.records)

    def draw(self, agent: int, round: int, step: int = 0) -> Tensor:  # [batch] int64
        """Draw a batch: ascending indices into the agent's records (0..n_i-1)."""
        n = self.sizes[agent]
        draws = self.streams.uniforms(n, purpose("batch", step), agent, round)
        rate = self.rate
        if rate is None:
            chosen = np.sort(np.argsort(draws, kind="stable")[: self.settings.size])
        else:
            chosen = np.flatnonzero(draws < rate)
        return torch.from_numpy(chosen.astype(np.int64))


def public_records(settings: BatchSettings, published: int | None, sizes: Sequence[int], private: bool) -> float:
    """Public estimate of the records per agent, which determines the sampling rate.

    It is `batch.records`, or `published` (the size of a published data set) over the number of agents. Without either,
    a simulation uses the true mean. A private run is refused, because the true mean would reveal the number of records.
    """
    if settings.rate is not None or settings.records is not None:
        return settings.records or float(settings.size)
    if published is not None:
        return published / len(sizes)
    if private and settings.sampler == "poisson":
        raise PdslError(
            "batch.records: not set, and a sampling rate computed from private data would reveal the number of records;"
            " set batch.records, a public estimate of the records per agent, or batch.rate"
        )
    return sum(sizes) / len(sizes)
