"""Agreement of receivers on a sender: do their measurements of the same sender differ by more than noise?

All receivers of a sender's messages estimate the same masses (`shapley.masses`). Message noise is independent between
receivers. So one receiver's estimate and the pooled estimate of the other receivers differ by noise only. Its size is
measured in the other receivers' blocks of rounds: a receiver cannot hide a false measurement behind noise of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.stats import f as f_distribution

from pdsl.shapley.coalitions import Values
from pdsl.shapley.masses import RIDGE, information

FREEDOM = 0.5  # part of the blocks' degrees of freedom that counts, because rounds with large gradients weigh more
FALSE_ALARMS = 0.01  # chance that honest receivers of any sender are named, for all comparisons together


@dataclass(frozen=True)
class Disagreement:
    """Measurements of one sender that differ by more than noise."""

    sender: int
    receivers: tuple[int, ...]  # the receiver that differs from the others; or both, if there are two
    chance: float  # at most; of such a difference among honest receivers, over all comparisons


def find_disagreements(measured: Mapping[int, Mapping[int, Values]]) -> list[Disagreement]:
    """Disagreements on each sender. measured: sender → receiver → sums [BLOCKS, G + 1, G] in units of equal noise.

    Guarantee: with honest receivers, rounds of equal weight and Gaussian noise, the chance of any disagreement is at
    most FALSE_ALARMS. Batches are the same for all receivers and count as noise here, which lowers it.
    """
    tests = sum(len(receivers) for receivers in measured.values() if len(receivers) > 1)
    found = []
    for sender, receivers in measured.items():
        left = {receiver: sums for receiver, sums in receivers.items() if _is_measured(sums)}
        while len(left) > 1:
            chances = {receiver: min(1.0, tests * _chance(receiver, left)) for receiver in left}
            worst = min(chances, key=chances.__getitem__)
            if chances[worst] >= FALSE_ALARMS:
                break
            found.append(Disagreement(sender, (worst,) if len(left) > 2 else tuple(left), chances[worst]))
            if len(left) == 2:
                break
            del left[worst]
    return found


def _is_measured(sums: Values) -> bool:
    """Whether at least two blocks have rounds, so that their dispersion is known."""
    return int((information(sums) > 0).sum()) > 1


def _chance(receiver: int, measured: Mapping[int, Values]) -> float:
    """Chance that one receiver's estimate differs this much from the pooled one of the others: an F test.

    The covariance of an estimate A⁻¹c is s²·A⁻¹, and s² is that of the other receivers.
    """
    others = [sums for other, sums in measured.items() if other != receiver]
    (estimate, inverse), (pooled, pooled_inverse) = (
        _estimate(sums) for sums in (measured[receiver], np.sum(others, 0))
    )
    groups = len(estimate)
    freedom = [int((information(sums) > 0).sum() - 1) * groups for sums in others]
    scale = sum(_residual_squares(sums) for sums in others) / sum(freedom)
    difference = estimate - pooled
    statistic = float(difference @ np.linalg.solve(inverse + pooled_inverse, difference)) / (groups * scale)
    return float(f_distribution.sf(statistic, groups, FREEDOM * sum(freedom)))


def _estimate(sums: Values) -> tuple[Values, Values]:
    """Masses [G], which may be negative, and A⁻¹ [G, G]."""
    gram, cross = sums[:, :-1].sum(0), sums[:, -1].sum(0)
    inverse: Values = np.linalg.inv(gram + RIDGE * np.trace(gram) / len(gram) * np.eye(len(gram)))
    return inverse @ cross, inverse


def _residual_squares(sums: Values) -> float:
    """Sum over blocks of rᵀA⁻¹r, r = c_b − A_b·m; its mean is s² times the degrees of freedom of the blocks."""
    masses, inverse = _estimate(sums)
    residuals = sums[:, -1] - sums[:, :-1] @ masses
    blocks = int((information(sums) > 0).sum())
    return float(np.einsum("bg,gh,bh->", residuals, inverse, residuals)) * blocks
