"""Value of coalitions of messages on the public set Q, and the Shapley values of the messages."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pdsl.gradients.clipping import row_digests
from pdsl.models.network import Network, trainable
from pdsl.settings import ShapleySettings
from pdsl.shapley.coalitions import (
    MAX_EXACT_AUTO,
    MAX_EXACT_LOGITS,
    CoalitionPlan,
    Values,
    check_size,
    draw_orders,
    exact,
    members,
    monte_carlo,
)
from pdsl.tasks import Task
from pdsl.utils.inputs import Inputs
from pdsl.utils.random import Streams
from pdsl.utils.workers import Workers

SMALL_WORK = 2**20  # records times parameters evaluated in one task, so that small models need few calls
LOGITS_BLOCK = 250  # records whose logits of all coalitions are held at once
CHECKED_COALITIONS = 4  # coalitions per fidelity check of 'fast'
LOSS_STEPS = 2**20  # losses are multiples of cap / 20 / LOSS_STEPS, so that sums are exact


@dataclass(frozen=True)
class Valuation:
    """Shapley values of the messages to one agent, and how they were estimated."""

    phi: Values  # [k]
    alone: Values  # [k] value of each message without the others, v({j}) − v(∅); NaN if it was not evaluated
    estimator: str
    coalitions: int  # number of distinct coalitions evaluated


@dataclass(frozen=True)
class Validation:
    """The public set Q, and the value of messages on it.

    v(S) is the accuracy of the model of coalition S (equation 16), or minus its loss, with plain or centred logits;
    see `shapley.value`.
    """

    network: Network
    inputs: Inputs
    labels: Tensor
    streams: Streams
    workers: Workers
    shared: bool = True  # evaluate agents with equal candidates together, which affects how sums are rounded

    def contributions(
        self, t: int, agents: Sequence[int], x: Tensor, candidates: Sequence[Tensor], settings: ShapleySettings
    ) -> list[Valuation]:
        """Shapley value of each member's message, for each agent.

        x [m, d]: the agents' models x_i^[t-1]. candidates[i] [k_i, d]: the models x_{i,j} after a step along one
        member's message (line 14). v(∅) is the value of x_i, or 0.
        """
        if settings.weighting == "uniform":
            return [Valuation(np.zeros(len(c)), np.zeros(len(c)), "none", 0) for c in candidates]
        if settings.sample is not None and settings.sample < len(self.labels):
            return self._sample(t, settings.sample).contributions(t, agents, x, candidates, settings)
        plans = [self._plan(t, agent, len(c), settings) for agent, c in zip(agents, candidates, strict=True)]
        value_fn = value_function(settings.value, self.network.task)
        empty = self._evaluate_distinct(x, value_fn) if settings.empty_value == "model" else [0] * len(x)

        # Agents with equal candidates (a full graph without noise) play the same game. It is evaluated once.
        games: dict[bytes, _Game] = {}
        keys = [b"".join(row_digests(c)) if self.shared else b"%d" % i for i, c in enumerate(candidates)]
        for key, c, (estimator, plan) in zip(keys, candidates, plans, strict=True):
            game = games.setdefault(key, _Game(c, estimator, value_fn, {}))
            game.values.update(dict.fromkeys(s for s in plan.coalitions if s))
        self._evaluate(list(games.values()))

        valuations = []
        for key, v_empty, (estimator, plan) in zip(keys, empty, plans, strict=True):
            v = games[key].values | {0: v_empty}
            units = np.array([v[s] for s in plan.coalitions], dtype=np.float64)
            k = len(games[key].models)
            single = [v.get(1 << j) for j in range(k)]
            alone = np.array([np.nan if value is None else value - v_empty for value in single], dtype=np.float64)
            phi, alone = (found * value_fn.unit / len(self.labels) for found in (plan.phi(units, k), alone))
            valuations.append(Valuation(phi, alone, estimator, len(plan.coalitions)))
        return valuations

    def fidelity(
        self, t: int, agents: range, all_agents: int, candidates: Sequence[Tensor], settings: ShapleySettings
    ) -> dict[str, float] | None:
        """Error of `fast` on a few coalitions of one agent, against the values of their true models.

        The agent, one of `all_agents`, and the coalitions are drawn for every check. None in rounds without a check,
        and if the drawn agent is not among `agents`, the agents of `candidates`.
        """
        if settings.weighting == "uniform" or not settings.check_every or t % settings.check_every:
            return None
        if settings.sample is not None and settings.sample < len(self.labels):
            return self._sample(t, settings.sample).fidelity(t, agents, all_agents, candidates, settings)
        generator = self.streams.generator("fidelity", round=t)
        if (chosen := int(generator.integers(all_agents))) not in agents:
            return None
        models = candidates[chosen - agents.start]
        name, _ = self._plan(t, 0, len(models), settings)
        if name != "fast":
            return None
        sizes = generator.integers(2, len(models) + 1, CHECKED_COALITIONS)
        masks = {sum(1 << int(j) for j in generator.choice(len(models), size, replace=False)) for size in sizes}
        value_fn = value_function(settings.value, self.network.task)
        by_logits, true = (
            _Game(models, estimator, value_fn, dict.fromkeys(sorted(masks))) for estimator in ("fast", "exact")
        )
        self._evaluate([by_logits, true])
        unit = value_fn.unit / len(self.labels)
        errors = [abs(a - b) for a, b in zip(by_logits.evaluated(), true.evaluated(), strict=True)]
        return {
            "coalitions": len(masks),
            "mean_error": float(np.mean(errors)) * unit,
            "max_error": max(errors) * unit,
        }

    def loss_gradients(self, x: Tensor) -> Tensor:
        """Gradient of the mean loss on Q at each model: [m, d] → [m, d]. Equal models are evaluated once."""

        def gradient(row: Tensor) -> Tensor:
            module = self.network.replica().load(row)
            loss = self.network.losses(module, self.inputs, self.labels).mean()
            parts = torch.autograd.grad(loss, trainable(module), allow_unused=True, materialize_grads=True)
            return torch.cat([part.flatten() for part in parts])

        digests = row_digests(x)
        distinct = {digest: row for row, digest in enumerate(digests)}
        found = dict(zip(distinct, self.workers.map(lambda row: gradient(x[row]), distinct.values()), strict=True))
        return torch.stack([found[digest] for digest in digests])

    def _sample(self, t: int, size: int) -> "Validation":
        """Random subset of Q, the same for all agents in this round."""
        chosen = self.streams.generator("validation-sample", round=t).choice(len(self.labels), size, replace=False)
        records = torch.from_numpy(np.sort(chosen)).to(self.labels.device)
        return replace(self, inputs=self.inputs[records], labels=self.labels[records])

    def _plan(self, t: int, agent: int, k: int, settings: ShapleySettings) -> tuple[str, CoalitionPlan]:
        """Name of the estimator and its coalitions, for a neighbourhood of k members."""
        check_size(settings, k)
        name: str = settings.estimator
        if name == "auto":
            name = "exact" if k <= MAX_EXACT_AUTO else "fast"
        if name == "exact" or (name == "fast" and k <= MAX_EXACT_LOGITS):
            return name, exact(k)
        generator = self.streams.generator("permutations", agent, t)
        return name, monte_carlo(draw_orders(k, settings, generator))

    def _evaluate(self, games: "list[_Game]") -> None:
        """Compute the value of every coalition of the games, on all workers."""
        per_task = max(1, SMALL_WORK // (len(self.labels) * self.network.num_parameters))
        true = [(game, list(game.values)) for game in games if game.estimator != "fast"]
        tasks = [(game, s[n : n + per_task]) for game, s in true for n in range(0, len(s), per_task)]

        def evaluate_task(task: tuple[_Game, list[int]]) -> list[int]:
            game, masks = task
            models = [game.models[members(s)].mean(0) for s in masks]  # equation 17: mean of the members' models
            return self._evaluate_models(models, game.value_fn)

        for (game, masks), units in zip(tasks, self.workers.map(evaluate_task, tasks), strict=True):
            game.values.update(zip(masks, units, strict=True))
        for game in games:
            if game.estimator == "fast":
                self._evaluate_by_logits(game)

    def _evaluate_by_logits(self, game: "_Game") -> None:
        """Approximate a coalition's logits by the mean of its members' logits: k forward passes over Q.

        This is exact to first order, because x_{i,S} is a small step from x_i.
        """
        logits = torch.stack(self.workers.map(lambda x: self.network.outputs(x, self.inputs), game.models))
        logits = game.value_fn.preprocess(logits)  # centring and averaging commute
        starts = range(0, len(self.labels), LOGITS_BLOCK)
        blocks = [slice(start, start + LOGITS_BLOCK) for start in starts]
        masks = list(game.values)
        by_block = self.workers.map(
            lambda block: _values_of_means(logits[:, block], masks, self.labels[block], game.value_fn), blocks
        )
        game.values.update(zip(masks, torch.stack(by_block).sum(0).tolist(), strict=True))

    def _evaluate_models(self, models: Iterable[Tensor], value_fn: "ValueFunction") -> list[int]:
        """Value on Q of each model [d]."""
        outputs = torch.stack([self.network.outputs(x, self.inputs) for x in models])
        values: list[int] = value_fn.of(value_fn.preprocess(outputs), self.labels).tolist()
        return values

    def _evaluate_distinct(self, x: Tensor, value_fn: "ValueFunction") -> list[int]:
        """Value on Q of each model [n, d]; equal models are evaluated once."""
        digests = row_digests(x)
        distinct = {digest: row for row, digest in enumerate(digests)}
        values = self.workers.map(lambda row: self._evaluate_models(x[row : row + 1], value_fn)[0], distinct.values())
        value_of = dict(zip(distinct, values, strict=True))
        return [value_of[digest] for digest in digests]


@dataclass(frozen=True)
class ValueFunction:
    """Quality of a model, summed over records, in integer multiples of a unit."""

    of: Callable[[Tensor, Tensor], Tensor]  # outputs of m models [m, n, ...], targets [n, ...] → [m] int64
    unit: float
    preprocess: Callable[[Tensor], Tensor] = lambda outputs: outputs  # of outputs [m, n, ...]


def value_function(name: str, task: Task) -> ValueFunction:
    """The value function of the `shapley.value` setting for a task.

    `centred` subtracts each class's mean over Q from the logits. The value then depends on how well classes are
    separated, not on how often each is predicted. With heterogeneous data every agent pushes towards its own classes,
    so without centring an attacker that pushes towards rare classes would seem to help. For tasks without classes it is
    the same as `loss`.
    """
    if name == "accuracy":
        return ValueFunction(lambda outputs, targets: _hits(task, outputs, targets), 1.0)
    unit = task.max_loss / 20 / LOSS_STEPS
    minus_loss = partial(_minus_loss, task, unit)
    return ValueFunction(minus_loss, unit, task.centre) if name == "centred" else ValueFunction(minus_loss, unit)


def _hits(task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
    """Correct predictions; of several labels per record, all count."""
    return torch.stack([(task.predict(of_model) == targets).sum() for of_model in outputs])


def _minus_loss(task: Task, unit: float, outputs: Tensor, targets: Tensor) -> Tensor:
    """Minus the loss; a record without a finite loss counts as the cap of the task."""
    repeated = targets.repeat(len(outputs), *(1 for _ in targets.shape[1:]))
    losses = task.losses(outputs.flatten(0, 1), repeated)
    bounded = losses.nan_to_num(task.max_loss, posinf=task.max_loss, neginf=-task.max_loss)
    bounded = bounded.clamp(-task.max_loss, task.max_loss)
    return -(bounded.double() / unit).round().long().view(outputs.shape[:2]).sum(-1)


@dataclass(frozen=True)
class _Game:
    """Candidate models of one neighbourhood, and the value of each coalition in units; None until evaluated."""

    models: Tensor  # [k, d]
    estimator: str
    value_fn: ValueFunction
    values: dict[int, int | None]

    def evaluated(self) -> list[int]:
        """Values of all evaluated coalitions."""
        return [units for units in self.values.values() if units is not None]


def _values_of_means(logits: Tensor, masks: Sequence[int], labels: Tensor, value_fn: ValueFunction) -> Tensor:
    """Value of each coalition's mean outputs: [k, n, ...] → [coalitions]."""
    if not torch.isfinite(logits).all():  # so that a diverged member affects only its own coalitions
        return torch.cat([value_fn.of(logits[members(mask)].mean(0)[None], labels) for mask in masks]).cpu()
    k = len(logits)
    membership = torch.tensor([[mask >> j & 1 for j in range(k)] for mask in masks], dtype=logits.dtype)
    means = (membership / membership.sum(1, keepdim=True)).to(logits.device) @ logits.reshape(k, -1)
    return value_fn.of(means.view(len(masks), *logits.shape[1:]), labels).cpu()
