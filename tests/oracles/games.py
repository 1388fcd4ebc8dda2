"""Cooperative games whose Shapley values have a closed form or stand in a textbook. Players are 0..players-1.

Every `shapley` is written from the closed form beside it, never from a solver. With v(∅) ≠ 0 the Shapley values sum
to v(N) - v(∅).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Value = Callable[[frozenset[int]], float]


@dataclass(frozen=True)
class Game:
    name: str
    players: int
    value: Value
    shapley: tuple[float, ...]


def additive(worth: Sequence[float]) -> Value:
    return lambda S: float(sum(worth[i] for i in S))


def average(worth: Sequence[float]) -> Value:
    return lambda S: sum(worth[i] for i in S) / len(S) if S else 0.0


def airport(costs: Sequence[float]) -> Value:
    """The runway must serve the largest aircraft in the coalition."""
    return lambda S: max((costs[i] for i in S), default=0.0)


def gloves(left: int, right: int) -> Value:
    """Players 0..left-1 hold a left glove, the others a right one; only pairs are worth anything."""
    return lambda S: float(min(sum(i < left for i in S), sum(left <= i < left + right for i in S)))


def majority(quota: int, weights: Sequence[int]) -> Value:
    return lambda S: float(sum(weights[i] for i in S) >= quota)


def unanimity(carrier: frozenset[int]) -> Value:
    return lambda S: float(carrier <= S)


def bankruptcy(estate: float, claims: Sequence[float]) -> Value:
    """What a coalition keeps after paying everyone else's claim in full."""
    return lambda S: max(0.0, estate - sum(c for i, c in enumerate(claims) if i not in S))


def induced_edges(edges: dict[tuple[int, int], float]) -> Value:
    """The weight of the edges with both ends in the coalition."""
    return lambda S: float(sum(w for (a, b), w in edges.items() if a in S and b in S))


def cut_edges(edges: dict[tuple[int, int], float]) -> Value:
    """The weight of the edges with exactly one end in the coalition."""
    return lambda S: float(sum(w for (a, b), w in edges.items() if (a in S) != (b in S)))


def shifted(value: Value, constant: float) -> Value:
    return lambda S: value(S) + constant


def with_empty(value: Value, empty: float) -> Value:
    return lambda S: value(S) if S else empty


EDGES = {(0, 1): 4.0, (0, 2): -2.0, (1, 2): 6.0, (2, 3): -3.0, (1, 3): 1.0}

GAMES: tuple[Game, ...] = (
    Game("single player", 1, additive([7]), (7,)),
    # φ_i = a_i
    Game("additive", 4, additive([3, -1, 0.5, 2]), (3, -1, 0.5, 2)),
    # By symmetry φ_i = v(N)/n = 25/5
    Game("symmetric, |S|^2", 5, lambda S: float(len(S) ** 2), (5, 5, 5, 5, 5)),
    # φ_i = 1/|T| on the carrier T = {1, 3, 4}; the others are null players
    Game("unanimity", 5, unanimity(frozenset({1, 3, 4})), (0, 1 / 3, 0, 1 / 3, 1 / 3)),
    # Littlechild and Owen (1973): the costs sorted are 2, 5, 9, 14, and each step is split among those who need it:
    # 2/4, then + 3/3, then + 4/2, then + 5/1
    Game("airport", 4, airport([9, 2, 14, 5]), (3.5, 0.5, 8.5, 1.5)),
    # A null player (0) beside two equal ones
    Game("airport, null player and a tie", 4, airport([6, 0, 6, 3]), (2.5, 0, 2.5, 1)),
    Game("gloves, 1 left 2 right", 3, gloves(1, 2), (2 / 3, 1 / 6, 1 / 6)),
    # A left glove is worth 1 iff rights outnumber lefts before it; over 0..4 predecessors that has probability
    # 0, 3/4, 1/2, 1, 1, so φ_left = 13/20; likewise φ_right = (1/2 + 1/6 + 1/2)/5 = 7/30
    Game("gloves, 2 left 3 right", 5, gloves(2, 3), (13 / 20, 13 / 20, 7 / 30, 7 / 30, 7 / 30)),
    Game("majority [51; 50, 49, 1]", 3, majority(51, [50, 49, 1]), (2 / 3, 1 / 6, 1 / 6)),
    # Apex game: the large party with anyone, or all the small ones; φ_apex = (n - 2)/n
    Game("apex [4; 3, 2, 1, 1]", 4, majority(4, [3, 2, 1, 1]), (1 / 2, 1 / 6, 1 / 6, 1 / 6)),
    # The Council of the six, 1958: Germany, France, Italy, Belgium, Netherlands, and Luxembourg without any power
    Game("council of 1958", 6, majority(12, [4, 4, 4, 2, 2, 1]), (14 / 60, 14 / 60, 14 / 60, 9 / 60, 9 / 60, 0)),
    # A small security council: 2 vetoes and q = 2 of the n = 4 others. An elected member is pivotal iff both vetoes and
    # exactly one other came before: C(3, 1) 3! 2! / 6! = 1/20; the vetoes split the rest
    Game("vetoes [12; 5, 5, 1, 1, 1, 1]", 6, majority(12, [5, 5, 1, 1, 1, 1]), (2 / 5,) * 2 + (1 / 20,) * 4),
    # O'Neill (1982): the Talmud's three wives, estate 200, claims 100, 200, 300, by random arrival
    Game("bankruptcy", 3, bankruptcy(200, [100, 200, 300]), (100 / 3, 250 / 3, 250 / 3)),
    # Deng and Papadimitriou (1994): half the weight of a player's edges; some marginals are negative
    Game("induced edges", 4, induced_edges(EDGES), (1, 5.5, 0.5, -1)),
    # v(S) = v(N \ S), so the marginals of i at S and at N \ (S ∪ i) cancel: equal values, in a game that is not flat
    Game("cut edges", 4, cut_edges(EDGES), (0, 0, 0, 0)),
    # Arriving s-th, i moves the mean by (a_i - mean of predecessors)/s, so with b the mean of the others
    # φ_i = (a_i + (H_n - 1)(a_i - b))/n; here n = 4, H_4 - 1 = 13/12, and a_i - b = -8, 0, 0, 8
    Game("average", 4, average([0, 6, 6, 12]), (-13 / 6, 1.5, 1.5, 3 + 13 / 6)),
    # A constant everywhere, ∅ too, leaves the values as they are
    Game("gloves shifted by 10", 3, shifted(gloves(1, 2), 10), (2 / 3, 1 / 6, 1 / 6)),
    # (25 - 1)/4 each
    Game("symmetric, (|S| + 1)^2", 4, lambda S: float((len(S) + 1) ** 2), (6, 6, 6, 6)),
    # Only the first to arrive meets v(∅): φ_i = a_i - v(∅)/n
    Game("additive but for v(∅) = 6", 4, with_empty(additive([3, -1, 0.5, 2]), 6), (1.5, -2.5, -1, 0.5)),
)
