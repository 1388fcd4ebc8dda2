"""Baselines of a run: the same model trained on less, or on the same without the graph.

| baseline | records | noise |
|---|---|---|
| public | the public set, with its labels | none needed |
| alone | each agent's own | none |
| alone_private | each agent's own | for the run's ε |
| pooled | all agents' together | none: the limit |
| central | all agents' together, at a trusted server | for the run's ε, added once |

All use the run's model. Those with noise use its rounds, batches and clipping, with momentum and the automatic learning
rate. Those without are trained by L-BFGS (one layer of weights) or AdamW. Baselines that read private records are for
simulations only: a run with secret noise has the first one alone.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pdsl.gradients.clipping import LocalGradients
from pdsl.metrics import BASELINES as NAMES
from pdsl.privacy.seal import model_digest
from pdsl.public.cache import CacheError, without_cache
from pdsl.public.knowledge import train_publicly
from pdsl.public.start import BATCH, STEPS, fit_without_privacy, with_start
from pdsl.training.experiment import Experiment
from pdsl.training.learning_rate import rate_for_walk
from pdsl.training.trainer import build_gradients
from pdsl.utils.errors import warn_user
from pdsl.utils.inputs import concat
from pdsl.utils.progress import report_progress
from pdsl.utils.random import Streams
from pdsl.utils.workers import Workers

MOMENTUM = 0.5
MIN_STEPS, MAX_ALONE_STEPS = 50, 300  # of AdamW, for a network
Baselines = dict[str, float | None]  # headline metric on the test set by name in NAMES; None: diverged


def compute_baselines(e: Experiment, rounds: int | None = None) -> Baselines:
    """Headline metric of each baseline on the test set: of one model, or the mean over the agents' models.

    `rounds`: rounds that the run has made; default: those of its settings.
    """
    if e.config.baselines == "none":
        return {}
    if rounds is not None:
        e = replace(e, config=e.config.model_copy(update={"rounds": rounds}))
    found: Baselines = {"public": _finite(_score(e, train_on_q(e)))}
    everyone = list(e.engine.agents) == list(range(e.graph.agents))
    if e.config.baselines == "public" or e.streams.secret or not everyone:
        return found
    with Workers(e.config.engine.workers) as workers:
        local = build_gradients(e, workers)
        own = [(local.inputs[i], local.labels[i]) for i in range(e.graph.agents)]
        seen = e.config.rounds * e.config.batch.size  # records that an agent reads in the run
        alone, together = (_steps_for(n, limit) for n, limit in ((seen, MAX_ALONE_STEPS), (seen * len(own), STEPS)))
        found["alone"] = _mean_score(e, [fit_without_privacy(e.network, *records, steps=alone) for records in own])
        if e.mechanisms is not None:
            found["alone_private"] = _mean_score(e, list(_train(e, local, pooled=False)))
        everything = concat([x for x, _ in own]), torch.cat([y for _, y in own])
        found["pooled"] = _mean_score(e, [fit_without_privacy(e.network, *everything, steps=together)])
        if e.mechanisms is not None:
            found["central"] = _mean_score(e, list(_train(e, local, pooled=True)))
    return found


def _steps_for(records: int, limit: int) -> int:
    """Steps of AdamW that read about as many records as the run, so that a baseline does not take much longer."""
    return min(limit, max(MIN_STEPS, records // BATCH))


def train_on_q(e: Experiment) -> Tensor:
    """Parameters [d] of the run's model, trained on all of the public set and nothing else."""
    network = e.network if e.public.cold is None else with_start(e.network, e.public.cold)
    train = partial(train_publicly, e.config.public, network, e.public_set, e.public, model_digest(network.module))
    try:
        return train()
    except CacheError as error:  # at the end of a run: its result must not be lost
        warn_user(f"{error}; the public set alone is computed without it")
        with without_cache():
            return train()


def _train(e: Experiment, local: LocalGradients, pooled: bool) -> Tensor:  # [1 or M, d]
    """Train with noise: one model on all agents' gradients, or one model per agent."""
    name = "central" if pooled else "alone_private"
    agents = torch.arange(e.graph.agents)
    x = e.network.initial_parameters().repeat(1 if pooled else len(agents), 1)
    u = torch.zeros_like(x)
    sigma, steps = _noise(e, pooled), max(m.steps for m in e.mechanisms or ())
    walk = sigma * math.sqrt(steps * e.config.rounds) / (1 - MOMENTUM)
    gamma = rate_for_walk(e.config, e.network, e.validation, walk, 1.0)
    streams = Streams(e.config.seed)
    for t, step in _steps(e.config.rounds, steps):
        g = local.gradients(t, agents, x.expand(len(agents), -1) if pooled else x, step)
        g = (g.mean(0, keepdim=True) if pooled else g).to(x.dtype)
        noise = streams.generator(f"baseline/{name}.{step}", round=t).standard_normal(g.shape)
        u = MOMENTUM * u + g + sigma * torch.from_numpy(noise).to(g)
        x = x - gamma * u
        report_progress(f"baseline: {NAMES[name]}", t, e.config.rounds)
    return x


def _steps(rounds: int, steps: int) -> Iterator[tuple[int, int]]:
    return ((t, step) for t in range(1, rounds + 1) for step in range(steps))


def _noise(e: Experiment, pooled: bool) -> float:
    """Standard deviation of the noise per step: z·Δ for one message per step, and z·Δ/M for the mean of M agents."""
    largest = max(m.noise_multiplier * m.sensitivity for m in e.mechanisms or ())
    return largest / e.graph.agents if pooled else largest


def _mean_score(e: Experiment, models: Sequence[Tensor]) -> float | None:
    return _finite(math.fsum(_score(e, x) for x in models) / len(models))


def _score(e: Experiment, x: Tensor) -> float:
    if not bool(torch.isfinite(x).all()):
        return math.nan
    return e.task.score(e.network.outputs(x, e.test[0].to(x.device)).cpu(), e.test[1])


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def describe_gain(score: float, baselines: Baselines, metric: str, higher_is_better: bool) -> str:
    """One sentence on what collaboration was worth; empty without baselines."""
    public, alone = baselines.get("public"), baselines.get("alone_private", baselines.get("alone"))
    pooled = baselines.get("pooled")
    if not math.isfinite(score) or public is None:
        return ""
    points = higher_is_better

    def gain(other: float) -> float:
        return 100 * (score - other) if points else 100 * (other - score) / abs(other) if other else 0.0

    unit = " points" if points else f" % of {metric}"
    parts = [f"{_signed(gain(public))}{unit} over the public set alone"]
    if alone is not None:
        parts.append(f"{_signed(gain(alone))} over training alone")
    if pooled is not None:
        below = -gain(pooled)
        parts.append(f"{abs(below):.1f} {'below' if below >= 0 else 'above'} pooled data without privacy")
    best = max((public, *([] if alone is None else [alone])), key=lambda value: value if points else -value)
    worth = gain(best) > 0
    return f"{'Collaboration was worth' if worth else 'Collaboration was worth nothing here'}: {', '.join(parts)}."


def _signed(value: float) -> str:
    return f"{'+' if value >= 0 else '−'}{abs(value):.1f}"
