"""Coalitions to evaluate, and Shapley values from their values."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import factorial

import numpy as np
from numpy.typing import NDArray

from pdsl.settings import ShapleySettings
from pdsl.utils.errors import PdslError

MAX_EXACT_AUTO = 5  # members up to which 'auto' evaluates every coalition's true model: at most 32 evaluations
MAX_EXACT_LOGITS = 10  # members up to which 'fast' enumerates all coalitions; for more it draws R permutations
MAX_EXACT = 14  # members up to which 'exact' is allowed: 2^k evaluations, and sums must be exact in float64

Values = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class CoalitionPlan:
    """Coalitions to evaluate, and the weight of each marginal contribution (a player joining a coalition).

    Weights are integers over a common denominator. With integer values the sums are exact, so members of equal worth
    get equal φ to the last bit.
    """

    coalitions: tuple[int, ...]  # distinct bit masks
    player: Integers  # [joins] the joining player
    before: Integers  # [joins] index of the coalition without the player
    after: Integers  # [joins] index of the coalition with the player
    weight: Integers | Values  # [joins] integers
    denominator: int

    def phi(self, values: Values, players: int) -> Values:
        """φ [players] from the value v of each coalition: Σ weight · (v(S ∪ {j}) − v(S)) / denominator."""
        gains = self.weight * (values[self.after] - values[self.before])
        return np.bincount(self.player, weights=gains, minlength=players) / self.denominator


@lru_cache(maxsize=MAX_EXACT)
def exact(players: int) -> CoalitionPlan:
    """Equation (18): all S without j, each with weight 1 / (k · C(k−1, |S|)) = |S|! (k−1−|S|)! / k!."""
    joins = [
        (j, s, s | 1 << j, factorial(s.bit_count()) * factorial(players - 1 - s.bit_count()))
        for j in range(players)
        for s in range(2**players)
        if not s >> j & 1
    ]
    player, before, after, weight = (np.array(column) for column in zip(*joins, strict=True))
    return CoalitionPlan(tuple(range(2**players)), player, before, after, weight, factorial(players))


def monte_carlo(permutations: Integers) -> CoalitionPlan:
    """Algorithm 2: each row of `permutations` [R, k] is an order of arrival; each arrival has weight 1/R (line 6)."""
    index: dict[int, int] = {}
    joins: list[tuple[int, int, int]] = []
    for order in permutations.tolist():  # line 2
        masks = [0]
        for j in order:
            masks.append(masks[-1] | 1 << j)  # line 5: the predecessors of j, then the same with j
        at = [index.setdefault(mask, len(index)) for mask in masks]
        joins += [(j, before, after) for j, (before, after) in zip(order, pairwise(at), strict=True)]
    player, before, after = (np.array(column) for column in zip(*joins, strict=True))
    return CoalitionPlan(tuple(index), player, before, after, np.ones(len(joins)), len(permutations))


def draw_orders(k: int, settings: ShapleySettings, generator: np.random.Generator) -> Integers:
    """Draw R permutations of k members [R, k], each uniformly distributed: Algorithm 2, line 3.

    `circular`: place the members on a random circle and read it from each member, then backwards from each. If R > 2k,
    continue with a new circle; if R is smaller, start from evenly spaced members. With R = 2k every member has every
    position equally often, and backward readings reuse the same coalitions, the arcs of the circle.
    """
    R = settings.permutations
    if settings.orders == "independent":
        return generator.permuted(np.tile(np.arange(k), (R, 1)), axis=1)
    orders = []
    for left in range(R, 0, -2 * k):
        circle = generator.permutation(k)
        forwards = min(left, k)
        backwards = min(left, 2 * k) - forwards
        for way, readings in ((circle, forwards), (circle[::-1], backwards)):
            starts = np.arange(readings) * k // max(readings, 1)
            orders.append(way[(starts[:, None] + np.arange(k)) % k])
    return np.concatenate(orders)


def members(mask: int) -> list[int]:
    """Positions of the bits that are set."""
    return [j for j in range(mask.bit_length()) if mask >> j & 1]


def check_size(settings: ShapleySettings, k: int) -> None:
    """Raise PdslError if a neighbourhood of k members is too large for the estimator."""
    if settings.estimator == "exact" and settings.weighting != "uniform" and k > MAX_EXACT:
        raise PdslError(
            f"algorithm.shapley.estimator=exact needs 2^{k} evaluations for a neighbourhood of {k} members;"
            " try montecarlo or fast"
        )
