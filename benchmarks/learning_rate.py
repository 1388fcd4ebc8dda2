"""Is `learning_rate = "auto"` as good as the best of seven learning rates?

    python benchmarks/learning_rate.py [--tasks digits diabetes …] [--seeds 3] [--processes 2]

For each task and total ε, PDSL is trained with the automatic rate and with ⅛, ¼, ½, 2, 4 and 8 times that rate. Scores
are means over the seeds, and over the agents' own models: test accuracy in per cent, or RMSE. The last column is the
distance to the best rate, ± its standard error over the seeds. The best of seven noisy means is above the automatic
rate's even if all rates are equally good, so a small test set (breast cancer: a record is 0.9 points) needs many seeds.
"""

import argparse
import math
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import pdsl
from pdsl.api import configure
from pdsl.training.experiment import Experiment, prepare
from pdsl.training.trainer import rounds

TIMES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
AGENTS = 10


def scaled(name: str) -> tuple[Tensor, Tensor]:
    """A data set of scikit-learn with standardised features."""
    from sklearn import datasets

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    x = (x - x.mean(0)) / x.std(0)
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y)


def parity() -> tuple[Tensor, Tensor]:
    """Digits that are odd or even."""
    from sklearn import datasets

    x, y = datasets.load_digits(return_X_y=True)
    return torch.from_numpy((x / 16).astype(np.float32)), torch.from_numpy(y % 2)


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, outputs))


@dataclass(frozen=True)
class Task:
    epsilons: tuple[float | None, ...]
    model: Callable[[], nn.Module | str] = lambda: "softmax"
    data: Callable[[], Any] = lambda: "digits"
    settings: dict[str, Any] = field(default_factory=dict)


BINARY = {"batch": {"size": 32}, "task": {"kind": "binary"}, "test_fraction": 0.4}
REGRESSION = {"batch": {"size": 32}, "task": {"kind": "regression"}, "test_fraction": 0.4}
TASKS = {
    "digits": Task((1, 2, 4, 8, None)),
    "digits, 30 rounds": Task((2, 8), settings={"rounds": 30}),
    "digits, 300 rounds": Task((8,), settings={"rounds": 300}),
    "digits, batch 16": Task((2, 8), settings={"batch": {"size": 16}}),
    "digits, MLP": Task((2, 8), lambda: "mlp"),
    "digits, CNN": Task((2, 8), lambda: "digits-cnn"),
    "breast cancer, one logit": Task(
        (1, 2, 4, 8, None), lambda: nn.Linear(30, 1), partial(scaled, "breast_cancer"), BINARY
    ),
    "odd digits, one logit": Task((1, 4), lambda: nn.Linear(64, 1), parity, BINARY),
    "diabetes, linear": Task((4, 8, None), lambda: nn.Linear(10, 1), partial(scaled, "diabetes"), REGRESSION),
    "diabetes, MLP": Task((8,), partial(mlp, 10, 1), partial(scaled, "diabetes"), REGRESSION),
}


def settings_of(name: str, epsilon: float | None, seed: int) -> dict[str, Any]:
    task = TASKS[name]
    torch.manual_seed(seed)  # initial weights of a task's own model
    return {
        "model": task.model(),
        "data": task.data(),
        "graph": pdsl.ring(AGENTS),
        "seed": seed,
        "privacy": {"mode": "none"} if epsilon is None else {"target_epsilon": epsilon},
        "engine": {"workers": 1},
        "rounds": 100,
        **task.settings,
    }


@dataclass(frozen=True)
class Outcome:
    """Automatic rate of one seed, and the score at each multiple of it."""

    rate: float
    scores: list[float]
    higher_is_better: bool


def run(job: tuple[str, float | None, int]) -> Outcome:
    torch.set_num_threads(1)
    settings = settings_of(*job)
    config, objects = configure(**settings, evaluate_every=settings["rounds"])
    e = prepare(config, **objects)
    scores = [score(e, times) for times in TIMES]
    return Outcome(e.learning_rates[0], scores, e.task.higher_is_better)


def score(e: Experiment, times: float) -> float:
    """Mean score of the agents' own models, with so many times the automatic rate."""
    rates = tuple(times * rate for rate in e.learning_rates)
    try:
        *_, last = rounds(replace(e, learning_rates=rates))
    except pdsl.PdslError:  # diverged
        return 0.0 if e.task.higher_is_better else float("inf")
    return fmean(e.task.score(e.network.outputs(x, e.test[0]), e.test[1]) for x in last.state.x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    print("| task | total ε | auto rate | score | best of seven | at times auto | worse by |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with multiprocessing.get_context("spawn").Pool(asked.processes) as pool:
        for name in asked.tasks:
            for epsilon in TASKS[name].epsilons:
                jobs = [(name, epsilon, seed) for seed in range(asked.seeds)]
                print(line(name, epsilon, pool.map(run, jobs, chunksize=1)), flush=True)


def line(name: str, epsilon: float | None, outcomes: list[Outcome]) -> str:
    scores = [fmean(found) for found in zip(*(outcome.scores for outcome in outcomes), strict=True)]
    higher = outcomes[0].higher_is_better
    best, auto = scores.index(max(scores) if higher else min(scores)), TIMES.index(1.0)
    shown = [f"{100 * scores[i]:.1f} %" if higher else f"{scores[i]:.1f}" for i in (auto, best)]
    unit, name_of_unit = (0.01, "points") if higher else (scores[best] / 100, "%")
    distances = [abs(scores[best] - scores[auto]) / unit]
    if len(outcomes) > 1:
        distances.append(stdev(o.scores[best] - o.scores[auto] for o in outcomes) / math.sqrt(len(outcomes)) / unit)
    worse = f"{' ± '.join(f'{value:.1f}' for value in distances)} {name_of_unit}"
    rates = [f"{rate:g}" for rate in sorted({outcome.rate for outcome in outcomes})]
    columns = [name, "no noise" if epsilon is None else f"{epsilon:g}", ", ".join(rates), *shown]
    return f"| {' | '.join(columns)} | {TIMES[best]:g} | {worse} |"


if __name__ == "__main__":
    main()
