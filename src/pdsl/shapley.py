"""Shapley values (equation 18 and Algorithm 2 of the paper), and the weights made of them (equations 19 and 20).

An estimator is a `Plan`: the distinct coalitions whose value it needs, and how values become φ. That φ is linear in v
is the whole of the theory; estimators differ in which coalitions they look at. A coalition is a bit mask over the
positions 0..k-1 of a neighbourhood's members, so that a set met twice is valued once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import factorial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdsl.errors import PdslError
from pdsl.gradients import row_digests
from pdsl.models import Network
from pdsl.parallel import Workers
from pdsl.randomness import Streams
from pdsl.settings import ShapleySettings

EXACT_TO = 5  # members up to which 'auto' values every coalition's true model: at most 32 evaluations
EXACT_LOGITS_TO = 10  # members up to which 'fast' looks at every coalition; beyond, at R permutations
EXACT_LIMIT = 14  # members beyond which 'exact' is refused: 2^k evaluations, and sums that float64 no longer holds

LOGITS_BLOCK = 250  # records for which all coalitions' logits are held at once
CHECKED = 4  # coalitions in a check of 'fast'

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Plan:
    """Which coalitions to value, and which joinings of a player to a coalition count how much.

    Weights are whole numbers over one denominator: with values that are counts of hits the sums are exact, and
    members of equal worth get equal φ to the last bit.
    """

    coalitions: tuple[int, ...]  # distinct bit masks
    player: NDArray[Any]  # [joins] who joins
    before: NDArray[Any]  # [joins] index of the coalition joined
    after: NDArray[Any]  # [joins] index of the same with the player in it
    weight: NDArray[Any]  # [joins] whole numbers
    denominator: int

    def phi(self, values: Values, players: int) -> Values:
        """φ [players] from v of each coalition: Σ weight · (v(S ∪ {j}) − v(S)) / denominator."""
        gains = self.weight * (values[self.after] - values[self.before])
        return np.bincount(self.player, weights=gains, minlength=players) / self.denominator


@lru_cache(maxsize=EXACT_LIMIT)
def exact(players: int) -> Plan:
    """Equation (18): all S without j, each with weight 1 / (k · C(k−1, |S|)) = |S|! (k−1−|S|)! / k!."""
    joins = [
        (j, s, s | 1 << j, factorial(s.bit_count()) * factorial(players - 1 - s.bit_count()))
        for j in range(players)
        for s in range(2**players)
        if not s >> j & 1
    ]
    player, before, after, weight = (np.array(column) for column in zip(*joins, strict=True))
    return Plan(tuple(range(2**players)), player, before, after, weight, factorial(players))


def monte_carlo(permutations: NDArray[np.int64]) -> Plan:
    """Algorithm 2: a row of `permutations` [R, k] is an order of arrival; each arrival counts 1/R (line 6)."""
    index: dict[int, int] = {}
    joins: list[tuple[int, int, int]] = []
    for order in permutations.tolist():  # line 2
        masks = [0]
        for j in order:
            masks.append(masks[-1] | 1 << j)  # line 5: j's predecessors, and the same with j
        at = [index.setdefault(mask, len(index)) for mask in masks]
        joins += [(j, before, after) for j, (before, after) in zip(order, pairwise(at), strict=True)]
    player, before, after = (np.array(column) for column in zip(*joins, strict=True))
    return Plan(tuple(index), player, before, after, np.ones(len(joins)), len(permutations))


def members(mask: int) -> list[int]:
    """Positions whose bit is set."""
    return [j for j in range(mask.bit_length()) if mask >> j & 1]


def shares(phi: Values, settings: ShapleySettings) -> Values:
    """Each member's share of the aggregate: φ̂/Σφ̂ of equations (19) and (20), raised to at least λ/k; sums to 1."""
    k = len(phi)
    uniform: Values = np.full(k, 1 / k)
    spread = phi.max() - phi.min()
    if settings.weighting == "uniform" or spread == 0:
        return uniform  # equal values: nobody is worth more than another, and (19) would be 0/0
    phi_hat: Values = (phi - phi.min()) / spread
    raised: Values = (1 - settings.floor) * phi_hat / phi_hat.sum() + settings.floor * uniform
    return raised


def check(settings: ShapleySettings, k: int) -> None:
    """Refuse an estimator that a neighbourhood of k members is too large for."""
    if settings.estimator == "exact" and settings.weighting != "uniform" and k > EXACT_LIMIT:
        raise PdslError(
            f"shapley.estimator=exact needs 2^{k} evaluations for a neighbourhood of {k} members;"
            " try montecarlo or fast"
        )


@dataclass(frozen=True)
class Valuation:
    """What each member's message is worth to one agent, and what it took to find out."""

    phi: Values  # [k]
    estimator: str
    coalitions: int  # distinct coalitions valued


@dataclass(frozen=True)
class Validation:
    """The public set Q, and the worth of messages measured on it: v(S) is the accuracy of S's model (equation 16)."""

    network: Network
    inputs: Tensor
    labels: Tensor
    streams: Streams
    workers: Workers
    shared: bool = True  # agents with the same candidates are valued together, which decides how sums are rounded

    def contributions(
        self, t: int, agents: Sequence[int], x: Tensor, candidates: Sequence[Tensor], settings: ShapleySettings
    ) -> list[Valuation]:
        """The Shapley value of each member's message, for each agent.

        x [m, d]: the agents' models x_i^[t-1]. candidates[i] [k_i, d]: the models x_{i,j} that a step along each
        member's message alone would give (line 14). v(∅) is the accuracy of x_i, or 0.
        """
        if settings.weighting == "uniform":
            return [Valuation(np.zeros(len(c)), "none", 0) for c in candidates]
        if settings.sample is not None and settings.sample < len(self.labels):
            return self._sampled(t, settings.sample).contributions(t, agents, x, candidates, settings)
        plans = [self._plan(t, agent, len(c), settings) for agent, c in zip(agents, candidates, strict=True)]
        empty = self._hits_of_models(x) if settings.empty == "model" else [0] * len(x)

        # Agents with the same candidates (a full graph without noise) play the same game: it is evaluated once.
        games: dict[bytes, _Game] = {}
        keys = [b"".join(row_digests(c)) if self.shared else b"%d" % i for i, c in enumerate(candidates)]
        for key, c, (estimator, plan) in zip(keys, candidates, plans, strict=True):
            game = games.setdefault(key, _Game(c, estimator, {}))
            game.hits.update(dict.fromkeys(s for s in plan.coalitions if s))
        self._evaluate(list(games.values()))

        valuations = []
        for key, v_empty, (estimator, plan) in zip(keys, empty, plans, strict=True):
            v = games[key].hits | {0: v_empty}
            hits = np.array([v[s] for s in plan.coalitions], dtype=np.float64)
            phi = plan.phi(hits, len(games[key].models)) / len(self.labels)
            valuations.append(Valuation(phi, estimator, len(plan.coalitions)))
        return valuations

    def fidelity(
        self, t: int, agents: range, everyone: int, candidates: Sequence[Tensor], settings: ShapleySettings
    ) -> dict[str, float] | None:
        """How far `fast` is from the truth: a few coalitions of one agent by their logits and by their true models.

        None in rounds without a check. The agent, one of `everyone`, and the coalitions are drawn anew for every
        check; None as well where that agent is not among `agents`, whose candidates are given.
        """
        if settings.weighting == "uniform" or not settings.check_every or t % settings.check_every:
            return None
        if settings.sample is not None and settings.sample < len(self.labels):
            return self._sampled(t, settings.sample).fidelity(t, agents, everyone, candidates, settings)
        generator = self.streams.generator("fidelity", round=t)
        if (chosen := int(generator.integers(everyone))) not in agents:
            return None
        models = candidates[chosen - agents.start]
        name, _ = self._plan(t, 0, len(models), settings)
        if name != "fast":
            return None
        sizes = generator.integers(2, len(models) + 1, CHECKED)
        masks = {sum(1 << int(j) for j in generator.choice(len(models), size, replace=False)) for size in sizes}
        by_logits, true = (_Game(models, how, dict.fromkeys(sorted(masks))) for how in ("fast", "exact"))
        self._evaluate([by_logits, true])
        errors = [abs(a - b) / len(self.labels) for a, b in zip(by_logits.values(), true.values(), strict=True)]
        return {"coalitions": len(masks), "mean_error": float(np.mean(errors)), "max_error": max(errors)}

    def _sampled(self, t: int, size: int) -> "Validation":
        """A part of Q, the same for all agents in this round."""
        chosen = self.streams.generator("validation-sample", round=t).choice(len(self.labels), size, replace=False)
        at = torch.from_numpy(np.sort(chosen)).to(self.labels.device)
        return replace(self, inputs=self.inputs[at], labels=self.labels[at])

    def _plan(self, t: int, agent: int, k: int, settings: ShapleySettings) -> tuple[str, Plan]:
        """The estimator's name and its coalitions for a neighbourhood of k members."""
        check(settings, k)
        name: str = settings.estimator
        if name == "auto":
            name = "exact" if k <= EXACT_TO else "fast"
        if name == "exact" or (name == "fast" and k <= EXACT_LOGITS_TO):
            return name, exact(k)
        generator = self.streams.generator("permutations", agent, t)
        orders = generator.permuted(np.tile(np.arange(k), (settings.permutations, 1)), axis=1)  # Algorithm 2, line 3
        return name, monte_carlo(orders)

    def _evaluate(self, games: "list[_Game]") -> None:
        """Fill in the hits of every coalition asked for, all workers busy."""
        true = [(game, s) for game in games if game.estimator != "fast" for s in game.hits]
        counts = self.workers.map(lambda task: self._hits_of_model(task[0].models[members(task[1])].mean(0)), true)
        for (game, s), hits in zip(true, counts, strict=True):
            game.hits[s] = hits  # the coalition's model is the mean of its members' models: equation 17
        for game in games:
            if game.estimator == "fast":
                self._evaluate_by_logits(game)

    def _evaluate_by_logits(self, game: "_Game") -> None:
        """x_{i,S} is a small step from x_i, so to first order its logits are the mean of its members' logits.

        k forward passes over Q instead of one for each coalition.
        """
        logits = torch.stack(self.workers.map(lambda x: self.network.logits(x, self.inputs), game.models))
        starts = range(0, len(self.labels), LOGITS_BLOCK)
        blocks = [slice(start, start + LOGITS_BLOCK) for start in starts]
        masks = list(game.hits)
        counts = self.workers.map(lambda at: _hits_of_sums(logits[:, at], masks, self.labels[at]), blocks)
        game.hits.update(zip(masks, torch.stack(counts).sum(0).tolist(), strict=True))

    def _hits_of_model(self, x: Tensor) -> int:
        return _hits(self.network.logits(x, self.inputs), self.labels)

    def _hits_of_models(self, x: Tensor) -> list[int]:
        """Right answers on Q of each model [n, d]; equal models are evaluated once."""
        digests = row_digests(x)
        distinct = {digest: row for row, digest in enumerate(digests)}
        hits = self.workers.map(lambda row: self._hits_of_model(x[row]), distinct.values())
        of = dict(zip(distinct, hits, strict=True))
        return [of[digest] for digest in digests]


@dataclass(frozen=True)
class _Game:
    """One neighbourhood's candidates and, for each coalition asked for, its right answers on Q."""

    models: Tensor  # [k, d]
    estimator: str
    hits: dict[int, int | None]

    def values(self) -> list[int]:
        """The hits of every coalition, all evaluated."""
        return [n for n in self.hits.values() if n is not None]


def _hits_of_sums(logits: Tensor, masks: Sequence[int], labels: Tensor) -> Tensor:
    """Right answers of each coalition's summed logits: [k, n, classes] → [coalitions]."""
    if not torch.isfinite(logits).all():  # a diverged member spoils the coalitions it is in, and no other
        return torch.tensor([_hits(logits[members(mask)].sum(0), labels) for mask in masks])
    k, n, classes = logits.shape
    joined = torch.tensor([[mask >> j & 1 for j in range(k)] for mask in masks], dtype=logits.dtype)
    sums = (joined.to(logits.device) @ logits.reshape(k, -1)).view(len(masks), n, classes)
    return (sums.argmax(-1) == labels).sum(1).cpu()


def _hits(logits: Tensor, labels: Tensor) -> int:
    return int((logits.argmax(-1) == labels).sum())
