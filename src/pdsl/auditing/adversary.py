"""The adversary: from all messages of an agent to a score for each canary, the likelier to be in the larger."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdsl.auditing.one_run import Floats, log_ratios
from pdsl.privacy import Mechanism

PRIOR = 2  # coordinates per message that the claimed σ is worth, where the noise's covariance is estimated, and
POOLED_PRIOR = 50  # that the estimate from all rounds is worth, where that of one batch is
MIN_VARIANCE = 1e-4  # of an estimate, in σ²

Places = NDArray[np.int64]  # coordinates of the model


@dataclass(frozen=True)
class Message:
    """One vector that left the agent."""

    peer: int
    nth: int
    sigma: float  # as claimed
    way: int  # 1 or -1: the direction of canaries in it
    noisy: Floats
    clear: Floats  # before the noise


@dataclass(frozen=True)
class _Batch:
    """All messages on one batch, as far as the adversary makes use of them."""

    kind: tuple[tuple[int, int], ...]  # peer and number of each
    claimed: Floats  # [k, k] covariance of the noise
    ways: Floats  # [k]
    seen: Floats  # [k, canaries]
    products: list[Floats]  # [k, k] for each parameter tensor: noise times noise, summed over its coordinates


class Adversary:
    """Log-likelihood ratios of canaries that are in and out, summed over batches.

    The messages on one batch are one observation, whose noise has a covariance in each parameter tensor of the model.
    By the claim it is that of independent noise. From there it is estimated on all rounds, and from that on the batch
    itself, so that noise that is less than claimed, missing, or shared between messages is made use of.
    """

    def __init__(self, mechanism: Mechanism, places: Places, sizes: list[int]):
        self._replaced = mechanism.rate is None
        self._rate = mechanism.rate or 1.0
        self._shift = mechanism.sensitivity
        self._places, self._sizes, self._ends = places, sizes, np.cumsum(sizes)
        self._tensor = np.searchsorted(self._ends, places, side="right")  # of each canary
        self._batches: list[_Batch] = []

    def see(self, messages: list[Message], rows: list[Floats]) -> None:
        """All messages on one batch, and the rows [d] that stand in them."""
        all_rows, ways = np.stack(rows), np.array([m.way for m in messages], dtype=np.float64)
        claimed = np.diag(np.maximum([m.sigma for m in messages], 1e-9 * self._shift) ** 2)
        share = (0.25 if self._replaced else self._rate / 2) * self._shift**2 * np.outer(ways, ways)
        held = np.bincount(self._tensor, minlength=len(self._sizes))
        parts = (all_rows[:, end - size : end] for end, size in zip(self._ends, self._sizes, strict=True))
        products = [part @ part.T - n * share for part, n in zip(parts, held, strict=True)]
        kind = tuple((m.peer, m.nth) for m in messages)
        self._batches.append(_Batch(kind, claimed, ways, all_rows[:, self._places], products))

    def scores(self) -> Floats:
        scores: Floats = np.zeros(len(self._places))
        for n, size in enumerate(self._sizes):
            mine = np.flatnonzero(self._tensor == n)
            alike: dict[Any, list[Floats]] = {}
            for batch in self._batches:
                alike.setdefault(batch.kind, []).append(batch.products[n])
            sums = {kind: (np.sum(products, axis=0), len(products)) for kind, products in alike.items()}
            for batch in self._batches if len(mine) else ():
                total, count = sums[batch.kind]
                pooled = _estimated(batch.claimed, PRIOR, total, count * size)
                covariance = _estimated(pooled, POOLED_PRIOR, batch.products[n], size)
                weights = self._shift * _solved(covariance, batch.ways, float(np.diag(batch.claimed).min()))
                middle = 0.0 if self._replaced else self._shift / 2 * float(weights @ batch.ways)
                scores[mine] += log_ratios(weights @ batch.seen[:, mine] - middle, self._rate)
        return scores


def _estimated(before: Floats, worth: int, products: Floats, size: int) -> Floats:
    """A covariance that was known as well as `worth` coordinates per message tell, and now from `size` others."""
    prior = worth * len(before)
    found: Floats = (prior * before + products) / (prior + size)
    return found


def _solved(covariance: Floats, ways: Floats, claimed: float) -> Floats:
    """covariance⁻¹ · ways, without variances that are negative, or next to nothing beside the claimed one."""
    values, vectors = np.linalg.eigh(covariance)
    found: Floats = vectors @ (vectors.T @ ways / np.maximum(values, MIN_VARIANCE * claimed))
    return found
