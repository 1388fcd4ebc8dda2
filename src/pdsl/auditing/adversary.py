"""Adversary of the canary attack: a score per canary from all messages of an agent; larger means likelier present."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdsl.auditing.one_run import Floats, log_ratios
from pdsl.privacy import Mechanism

# Weights of the priors in covariance estimates, in coordinates per message
CLAIM_WEIGHT = 2  # of the claimed covariance, in the estimate from all rounds
POOLED_WEIGHT = 50  # of the estimate from all rounds, in the estimate for one batch
MIN_VARIANCE = 1e-4  # of an estimate, relative to the claimed σ²

Places = NDArray[np.int64]  # coordinates of the model
Kind = tuple[tuple[int, int], ...]  # peer and nth of each message on a batch


@dataclass(frozen=True)
class Observation:
    """One message of the agent, as the adversary sees it."""

    peer: int
    nth: int
    sigma: float  # as claimed
    sign: int  # 1 or -1: the direction of canaries in this message
    noisy: Floats
    clean: Floats  # before the noise


@dataclass(frozen=True)
class _Batch:
    """Statistics of all k messages on one batch."""

    kind: Kind
    claimed: Floats  # [k, k] covariance of the noise
    signs: Floats  # [k]
    values: Floats  # [k, canaries], at the canaries' coordinates
    products: list[Floats]  # per parameter tensor [k, k]: products of noise, summed over coordinates


class Adversary:
    """Log-likelihood ratios of canaries present and absent, summed over batches.

    The messages on one batch are one observation. In each parameter tensor, their noise has a covariance, which is
    diagonal according to the claim. The adversary estimates it from all rounds, with the claim as prior, and then for
    each batch, with that estimate as prior. So it exploits noise that is too small, missing or shared by messages.
    """

    def __init__(self, mechanism: Mechanism, places: Places, sizes: list[int]):
        self._replaced = mechanism.rate is None
        self._rate = mechanism.rate or 1.0
        self._shift = mechanism.sensitivity
        self._places, self._sizes, self._ends = places, sizes, np.cumsum(sizes)
        self._tensor = np.searchsorted(self._ends, places, side="right")  # of each canary
        self._batches: list[_Batch] = []

    def observe(self, messages: list[Observation], rows: list[Floats]) -> None:
        """Add all messages on one batch, with the vectors [d] in them."""
        all_rows, signs = np.stack(rows), np.array([m.sign for m in messages], dtype=np.float64)
        claimed = np.diag(np.maximum([m.sigma for m in messages], 1e-9 * self._shift) ** 2)
        share = (0.25 if self._replaced else self._rate / 2) * self._shift**2 * np.outer(signs, signs)
        counts = np.bincount(self._tensor, minlength=len(self._sizes))
        parts = (all_rows[:, end - size : end] for end, size in zip(self._ends, self._sizes, strict=True))
        products = [part @ part.T - n * share for part, n in zip(parts, counts, strict=True)]
        kind = tuple((m.peer, m.nth) for m in messages)
        self._batches.append(_Batch(kind, claimed, signs, all_rows[:, self._places], products))

    def scores(self) -> Floats:
        """Score of each canary."""
        scores: Floats = np.zeros(len(self._places))
        for n, size in enumerate(self._sizes):
            mine = np.flatnonzero(self._tensor == n)
            by_kind: dict[Kind, list[Floats]] = {}
            for batch in self._batches:
                by_kind.setdefault(batch.kind, []).append(batch.products[n])
            sums = {kind: (np.sum(products, axis=0), len(products)) for kind, products in by_kind.items()}
            for batch in self._batches if len(mine) else ():
                total, count = sums[batch.kind]
                pooled = _estimate(batch.claimed, CLAIM_WEIGHT, total, count * size)
                covariance = _estimate(pooled, POOLED_WEIGHT, batch.products[n], size)
                weights = self._shift * _solve(covariance, batch.signs, float(np.diag(batch.claimed).min()))
                middle = 0.0 if self._replaced else self._shift / 2 * float(weights @ batch.signs)
                scores[mine] += log_ratios(weights @ batch.values[:, mine] - middle, self._rate)
        return scores


def _estimate(prior: Floats, weight: int, products: Floats, size: int) -> Floats:
    """Covariance from the products of `size` coordinates and a prior worth `weight` coordinates per message."""
    prior_size = weight * len(prior)
    found: Floats = (prior_size * prior + products) / (prior_size + size)
    return found


def _solve(covariance: Floats, signs: Floats, claimed: float) -> Floats:
    """covariance⁻¹ · signs, with eigenvalues of at least MIN_VARIANCE times the claimed variance."""
    values, vectors = np.linalg.eigh(covariance)
    found: Floats = vectors @ (vectors.T @ signs / np.maximum(values, MIN_VARIANCE * claimed))
    return found
