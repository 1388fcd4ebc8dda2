"""Significance of a difference between two algorithms: a paired t-test over seeds."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from scipy.stats import t as student
from scipy.stats import ttest_rel

CONFIDENCE = 0.95
MIN_PAIRS = 3  # seeds; two pairs have one degree of freedom, and equal differences would look certain by chance


def paired_p_value(ours: Sequence[float | None], theirs: Sequence[float | None]) -> float | None:
    """Two-sided p-value of equal means, over the seeds that both have; None with too few.

    The same seed has the same data, partition, graph and initial model for both, so differences are paired.
    """
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    if len(pairs) < MIN_PAIRS:
        return None
    differences = [a - b for a, b in pairs]
    if max(differences) - min(differences) <= 1e-12 * max(1.0, *map(abs, differences)):  # no variance: no statistic
        return 0.0 if abs(fmean(differences)) > 1e-12 else 1.0
    first, second = zip(*pairs, strict=True)
    return float(ttest_rel(first, second).pvalue)


def is_significant(p_value: float | None) -> bool:
    return p_value is not None and p_value < 1 - CONFIDENCE


class PairedDifference(NamedTuple):
    """Mean of the differences over seeds, with its 95 % interval."""

    mean: float
    low: float
    high: float
    seeds: int


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> PairedDifference | None:
    """Mean difference of two methods over the same seeds; None with too few seeds."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    if len(differences) < MIN_PAIRS:
        return None
    mean, n = fmean(differences), len(differences)
    half = float(student.ppf((1 + CONFIDENCE) / 2, n - 1)) * stdev(differences) / math.sqrt(n)
    return PairedDifference(mean, mean - half, mean + half, n)
