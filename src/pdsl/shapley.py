"""Shapley values (equation 18 and Algorithm 2 of the paper), and the weights made of them (equations 19 and 20).

An estimator is a `Plan`: the distinct coalitions whose value it needs, and how values become φ. That φ is linear in v
is the whole of the theory; estimators differ in which coalitions they look at. A coalition is a bit mask over the
positions 0..k-1 of a neighbourhood's members, so that a set met twice is valued once.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import factorial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from pdsl.errors import PdslError
from pdsl.gradients import row_digests
from pdsl.models import Network
from pdsl.parallel import Workers
from pdsl.randomness import Streams
from pdsl.settings import ShapleySettings

EXACT_TO = 5  # members up to which 'auto' values every coalition's true model: at most 32 evaluations
EXACT_LOGITS_TO = 10  # members up to which 'fast' looks at every coalition; beyond, at R permutations
EXACT_LIMIT = 14  # members beyond which 'exact' is refused: 2^k evaluations, and sums that float64 no longer holds

SMALL_WORK = 2**20  # records times parameters up to which coalitions are valued together, to spare calls
LOGITS_BLOCK = 250  # records for which all coalitions' logits are held at once
CHECKED = 4  # coalitions in a check of 'fast'
LOSS_UNIT = 2**-20  # losses are counted in whole numbers of it, as accuracy is in records
LOSS_LIMIT = 20.0  # of one record: a message that ruins the model is worth little, but not endlessly little

BY_CHANCE = 0.5  # standard errors below zero up to which a member counts like all others
BEYOND_DOUBT = 1.5  # and from which it counts nothing
FEWEST_ROUNDS = 3  # before them there is no evidence
FEWEST_EFFECTIVE = 2.0  # nor as long as one round outweighs all others
MOST_WEIGHT = 10.0  # of a round, in those of a mean one
EVIDENCE = 5  # numbers on each member
LEAST_VARIANCE = 1e-3  # of values in units of their mean size: who is always the same is not infinitely certain

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


def draw_orders(k: int, settings: ShapleySettings, generator: np.random.Generator) -> NDArray[np.int64]:
    """R orders of k members [R, k], each of them uniform: Algorithm 2, line 3.

    `circular`: members stand in a random circle, which is read from each of them and then backwards from each; another
    circle if R is more than that, and from evenly spaced ones if it is less. With R = 2k everyone has every place
    equally often, and the backward readings meet the same coalitions again, the arcs of the circle.
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
    """Positions whose bit is set."""
    return [j for j in range(mask.bit_length()) if mask >> j & 1]


def shares(phi: Values, settings: ShapleySettings, evidence: Values | None = None) -> Values:
    """Each member's share of the aggregate: φ̂/Σφ̂ of equation (20), raised to at least λ/k; sums to 1.

    `minmax` is equation (19): the least member counts nothing, however little the members differ. `evidence`: all count
    alike, but for those whose messages hurt as far as the rounds so far can tell.
    """
    k = len(phi)
    uniform: Values = np.full(k, 1 / k)
    if settings.weighting == "uniform":
        return uniform
    if settings.weighting == "minmax":
        above = phi - phi.min()
        phi_hat: Values = above / above.max() if above.any() else above
    else:
        assert evidence is not None
        phi_hat = trust(evidence)
        if not phi_hat.any():
            phi_hat = least_harm(evidence)
    if not phi_hat.any():
        return uniform  # nobody is worth more than another; (19) and (20) would be 0/0
    raised: Values = (1 - settings.floor) * phi_hat / phi_hat.sum() + settings.floor * uniform
    return raised


def remembered(evidence: Values, phi: Values, memory: float) -> Values:
    """The evidence on each member [k, EVIDENCE], with another round's φ; what was before counts `memory` as much.

    It is on what each member's message does by itself, u. A round counts by its mean |u|, w: late in training, where
    what one honest agent gains another loses, there is little to learn about anybody. Columns: rounds, Σw, Σw², and
    of x = u over the mean |u| the sums Σwx and Σwx². No round counts more than MOST_WEIGHT others: how large its
    message is, a member chooses for itself.
    """
    u = by_itself(phi)
    unit = np.abs(u).mean()
    w = np.minimum(unit, _most_weight(evidence, memory))
    part = w / (unit or 1)
    new = np.stack([np.ones(len(u)), w, w**2, part * u, part * u**2 / (unit or 1)], axis=1)
    found: Values = evidence * [1, memory, memory**2, memory, memory] + new
    return found


def _most_weight(evidence: Values, memory: float) -> Values:
    """What a round may weigh at most, for each member."""
    rounds, w = evidence[:, 0], evidence[:, 1]
    mean = w * (1 - memory) / np.maximum(1 - memory**rounds, 1 - memory)
    return np.where((rounds >= FEWEST_ROUNDS) & (mean > 0), MOST_WEIGHT * mean, np.inf)


def by_itself(phi: Values) -> Values:
    """What each member's message does by itself, to first order: φ without what it is for being unlike the others.

    v(S) is the value of a mean, so whoever joins S also leaves less of the others: beside a member that does much harm,
    one that does a little has a positive φ. If v(S) is the mean of its members' own u, then Σφ is the mean of all u,
    and φ_j = (u_j·H_k − mean of the others' u·(H_k − 1))/k, with H_k = 1 + 1/2 + … + 1/k; solved for u.
    """
    k = len(phi)
    if k == 1:
        return phi
    harmonic = float((1 / np.arange(1, k + 1)).sum())
    u: Values = (phi + (harmonic - 1) / (k - 1) * phi.sum()) * (k - 1) / (harmonic - 1 / k)
    return u


def trust(evidence: Values) -> Values:
    """1 for a member whose mean effect is not below zero by more than chance explains, 0 for one that is beyond doubt.

    Chance is the standard error of a mean of so many rounds as (Σw)²/Σw² says.
    """
    rounds, w, w2, wx, wx2 = evidence.T
    w, w2 = np.where(w2 > 0, w, 1), np.where(w2 > 0, w2, 1)
    mean, n = wx / w, w**2 / w2
    error = np.sqrt(np.maximum(wx2 / w - mean**2, LEAST_VARIANCE) / np.maximum(n - 1, 1))
    errors_below = np.where((rounds >= FEWEST_ROUNDS) & (n >= FEWEST_EFFECTIVE), -mean / error, 0)
    return np.clip((BEYOND_DOUBT - errors_below) / (BEYOND_DOUBT - BY_CHANCE), 0, 1)


def least_harm(evidence: Values) -> Values:
    """Where nobody is to be trusted: 1 for those who do no more harm than the mean of all, 0 for the others.

    A message that ruins every model it has a part in is met so: beside it the others' own effects cannot be told.
    """
    wx = evidence[:, 3]
    spared: Values = (wx >= wx.mean() - 1e-9 * np.abs(wx).max()).astype(np.float64)
    return spared


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
    """The public set Q, and the worth of messages measured on it: v(S) is the accuracy of S's model (equation 16).

    Or, by `shapley.value`, minus its loss, as it is or with centred logits.
    """

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
        worth = WORTHS[settings.value]
        empty = self._worth_of_models(x, worth) if settings.empty == "model" else [0] * len(x)

        # Agents with the same candidates (a full graph without noise) play the same game: it is evaluated once.
        games: dict[bytes, _Game] = {}
        keys = [b"".join(row_digests(c)) if self.shared else b"%d" % i for i, c in enumerate(candidates)]
        for key, c, (estimator, plan) in zip(keys, candidates, plans, strict=True):
            game = games.setdefault(key, _Game(c, estimator, worth, {}))
            game.values.update(dict.fromkeys(s for s in plan.coalitions if s))
        self._evaluate(list(games.values()))

        valuations = []
        for key, v_empty, (estimator, plan) in zip(keys, empty, plans, strict=True):
            v = games[key].values | {0: v_empty}
            units = np.array([v[s] for s in plan.coalitions], dtype=np.float64)
            phi = plan.phi(units, len(games[key].models)) * worth.unit / len(self.labels)
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
        worth = WORTHS[settings.value]
        by_logits, true = (_Game(models, how, worth, dict.fromkeys(sorted(masks))) for how in ("fast", "exact"))
        self._evaluate([by_logits, true])
        unit = worth.unit / len(self.labels)
        errors = [abs(a - b) for a, b in zip(by_logits.found(), true.found(), strict=True)]
        return {
            "coalitions": len(masks),
            "mean_error": float(np.mean(errors)) * unit,
            "max_error": max(errors) * unit,
        }

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
        return name, monte_carlo(draw_orders(k, settings, generator))

    def _evaluate(self, games: "list[_Game]") -> None:
        """Fill in the value of every coalition asked for, all workers busy."""
        together = max(1, SMALL_WORK // (len(self.labels) * self.network.d))
        true = [(game, list(game.values)) for game in games if game.estimator != "fast"]
        tasks = [(game, s[n : n + together]) for game, s in true for n in range(0, len(s), together)]

        def worth_of_coalitions(task: tuple[_Game, list[int]]) -> list[int]:
            game, masks = task
            models = [game.models[members(s)].mean(0) for s in masks]  # equation 17: the mean of its members' models
            return self._worths(models, game.worth)

        for (game, masks), units in zip(tasks, self.workers.map(worth_of_coalitions, tasks), strict=True):
            game.values.update(zip(masks, units, strict=True))
        for game in games:
            if game.estimator == "fast":
                self._evaluate_by_logits(game)

    def _evaluate_by_logits(self, game: "_Game") -> None:
        """x_{i,S} is a small step from x_i, so to first order its logits are the mean of its members' logits.

        k forward passes over Q instead of one for each coalition.
        """
        logits = torch.stack(self.workers.map(lambda x: self.network.logits(x, self.inputs), game.models))
        logits = game.worth.looked_at(logits)  # centred or not before it is averaged: that is the same
        starts = range(0, len(self.labels), LOGITS_BLOCK)
        blocks = [slice(start, start + LOGITS_BLOCK) for start in starts]
        masks = list(game.values)
        found = self.workers.map(lambda at: _worth_of_means(logits[:, at], masks, self.labels[at], game.worth), blocks)
        game.values.update(zip(masks, torch.stack(found).sum(0).tolist(), strict=True))

    def _worths(self, models: Iterable[Tensor], worth: "Worth") -> list[int]:
        """The value on Q of each model [d]."""
        logits = torch.stack([self.network.logits(x, self.inputs) for x in models])
        found: list[int] = worth.of(worth.looked_at(logits), self.labels).tolist()
        return found

    def _worth_of_models(self, x: Tensor, worth: "Worth") -> list[int]:
        """The value on Q of each model [n, d]; equal models are evaluated once."""
        digests = row_digests(x)
        distinct = {digest: row for row, digest in enumerate(digests)}
        found = self.workers.map(lambda row: self._worths(x[row : row + 1], worth)[0], distinct.values())
        of = dict(zip(distinct, found, strict=True))
        return [of[digest] for digest in digests]


@dataclass(frozen=True)
class Worth:
    """What makes a model good, summed over records, in whole numbers of a unit."""

    of: Callable[[Tensor, Tensor], Tensor]  # logits [..., n, classes], labels [n] → [...] int64
    unit: float
    centred: bool = False

    def looked_at(self, logits: Tensor) -> Tensor:
        """What is judged of a model's logits on Q, [..., n, classes]: centred, each class's mean over Q is taken off.

        What is left tells classes apart. How often a class is named at all is not counted: with heterogeneous data
        every agent pushes towards its own classes, and a liar who pushes towards rare ones would seem to help.
        """
        return logits - logits.mean(-2, keepdim=True) if self.centred else logits


def _hits(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(-1) == labels).sum(-1)


def _minus_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """A record that a model has no finite loss for counts as the worst."""
    rows = logits.reshape(-1, logits.shape[-1])
    losses = cross_entropy(rows, labels.repeat(len(rows) // len(labels)), reduction="none")
    bounded = losses.nan_to_num(LOSS_LIMIT, posinf=LOSS_LIMIT).clamp(max=LOSS_LIMIT)
    return -(bounded.double() / LOSS_UNIT).round().long().view(logits.shape[:-1]).sum(-1)


WORTHS = {
    "accuracy": Worth(_hits, 1.0),
    "loss": Worth(_minus_loss, LOSS_UNIT),
    "centred": Worth(_minus_loss, LOSS_UNIT, centred=True),
}


@dataclass(frozen=True)
class _Game:
    """One neighbourhood's candidates and the value of each coalition asked for, in units."""

    models: Tensor  # [k, d]
    estimator: str
    worth: Worth
    values: dict[int, int | None]

    def found(self) -> list[int]:
        """The values of all coalitions, when all are evaluated."""
        return [units for units in self.values.values() if units is not None]


def _worth_of_means(logits: Tensor, masks: Sequence[int], labels: Tensor, worth: Worth) -> Tensor:
    """The value of each coalition's mean logits: [k, n, classes] → [coalitions]."""
    if not torch.isfinite(logits).all():  # a diverged member spoils the coalitions it is in, and no other
        return torch.stack([worth.of(logits[members(mask)].mean(0), labels) for mask in masks]).cpu()
    k, n, classes = logits.shape
    joined = torch.tensor([[mask >> j & 1 for j in range(k)] for mask in masks], dtype=logits.dtype)
    means = (joined / joined.sum(1, keepdim=True)).to(logits.device) @ logits.reshape(k, -1)
    return worth.of(means.view(len(masks), n, classes), labels).cpu()
