"""Do estimated contributions find poor data and free riders, and which parties can be left out?

    python -m benchmarks.party_tasks [--kinds clean label_noise_20 ...] [--epsilons none 8] [--seeds 10]
        [--processes 1] [--out docs/results/contributions]

Six agents learn digits on a full graph, as in `benchmarks.contributions`. Kinds: clean (Dirichlet, μ = 0.25), and with
equal shares of all classes: two parties with 20 or 40 % of their labels changed at random, with noise of standard
deviation 1 in all pixels, or with flipped labels; two free riders that send nothing, noise or an echo, and one
duplicate of another party. The truth is the data Shapley value of test accuracy by retraining all 64 subsets; free
riders have no records. Printed for every estimator: mean rank correlation with the truth, the part of pairs of a bad
and an honest party in which the bad one has the lower value (0.5: chance), and removal curves: test accuracy of a
model that is retrained without the 1, 2 or 3 parties with the lowest, or with the highest values. For the estimator
"random" this is the mean over all subsets of this size. Finished lines in --out are skipped.
"""

import argparse
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from benchmarks import read_rows, run_jobs
from benchmarks.contributions import AGENTS, Floats, config, estimates, retrain_subsets, shapley
from pdsl.config import validate
from pdsl.training.experiment import Experiment, prepare
from pdsl.training.trainer import rounds

ATTACKS = {"label_flip": 2, "free_rider": 2, "gaussian": 2, "echo": 2, "duplicate": 1}  # settings of [attack]
LABEL_NOISE = {"label_noise_20": 0.2, "label_noise_40": 0.4}
KINDS = ("clean", *LABEL_NOISE, "feature_noise", *ATTACKS)
BAD = (0, 1)  # parties with noise in labels or pixels
FEATURE_NOISE = 1.0  # standard deviation; pixels are from 0 to 1
DROPPED = (1, 2, 3)  # parties
FIELDS = ("kind", "epsilon", "seed", "estimator", "spearman", "below",
          *(f"low_{k}" for k in DROPPED), *(f"high_{k}" for k in DROPPED))  # fmt: skip
Job = tuple[str, str, int]  # kind, ε, seed


def load_experiment(job: Job) -> tuple[Experiment, list[int]]:
    """The experiment and its bad parties."""
    kind, epsilon, seed = job
    settings = config(("digits", "full", epsilon, seed))
    if kind != "clean":
        settings["partition"] = {"kind": "iid"}
    if kind in ATTACKS:
        settings["attack"] = {kind: ATTACKS[kind]}
    e = prepare(validate(settings, "benchmark"))
    if kind in ATTACKS or kind == "clean":
        return e, sorted(e.attackers)
    return spoil(e, kind, np.random.default_rng(seed)), list(BAD)


def spoil(e: Experiment, kind: str, generator: np.random.Generator) -> Experiment:
    """The experiment with noise in the labels or pixels of the parties BAD."""
    x, y = e.data.x.clone(), e.data.y.clone()
    own = torch.cat([e.parts[j] for j in BAD])
    if kind == "feature_noise":
        x[own] += FEATURE_NOISE * torch.from_numpy(generator.standard_normal(x[own].shape)).to(x.dtype)
    else:
        changed = own[torch.from_numpy(generator.random(len(own)) < LABEL_NOISE[kind])]
        shift = torch.from_numpy(generator.integers(1, e.data.classes, len(changed)))
        y[changed] = (y[changed] + shift) % e.data.classes
    return replace(e, data=replace(e.data, x=x, y=y))


def count_below(values: Floats, bad: list[int]) -> float | None:
    """Part of pairs of a bad and an honest party in which the bad one has the lower value; ties count half."""
    if not bad:
        return None
    honest = [j for j in range(len(values)) if j not in bad]
    difference = values[honest][:, None] - values[bad]
    return float((np.sign(difference) / 2 + 0.5).mean())


def removal_curve(order: list[int], accuracy: Floats) -> list[float]:
    """Accuracy without the first 1, 2, … parties in this order, from that of all subsets [2^n]."""
    return [float(accuracy[sum(1 << j for j in order[k:])]) for k in DROPPED]


def random_curve(accuracy: Floats) -> list[float]:
    """Mean accuracy of all subsets without 1, 2, … parties."""
    return [
        fmean(float(accuracy[sum(1 << j for j in kept)]) for kept in combinations(range(AGENTS), AGENTS - k))
        for k in DROPPED
    ]


def measure(job: Job) -> tuple[Job, list[list[Any]]]:
    torch.set_num_threads(1)
    e, bad = load_experiment(job)
    rows = []
    for last in rounds(e):
        rows.append(last.row)
    accuracy = retrain_subsets(e, len(rows))[0]
    truth = shapley(accuracy, AGENTS)
    found = {"truth": truth, **estimates(e, last, rows)[0]}
    lines: list[list[Any]] = []
    for name, values in found.items():
        order = np.argsort(values, kind="stable").tolist()
        curves = [*removal_curve(order, accuracy), *removal_curve(order[::-1], accuracy)]
        lines.append([name, float(spearmanr(values, truth)[0]), count_below(values, bad), *curves])
    return job, [*lines, ["random", None, None, *random_curve(accuracy), *random_curve(accuracy)]]


def table(rows: list[dict[str, str]]) -> None:
    names = [f"{'lowest' if way == 'low' else 'highest'} {k} dropped" for way in ("low", "high") for k in DROPPED]
    head = ["kind", "ε", "estimator", "seeds", "rank correlation", "bad below honest", *names]
    print("| " + " | ".join(head) + " |")
    print("|---" * len(head) + "|")
    groups: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault((row["kind"], row["epsilon"], row["estimator"]), []).append(row)
    for key, own in groups.items():
        columns = [[float(row[name]) for row in own if row[name]] for name in FIELDS[4:]]
        means = [f"{fmean(column):.{2 if k < 2 else 3}f}" if column else "" for k, column in enumerate(columns)]
        print("| " + " | ".join([*key, str(len(own)), *means]) + " |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--epsilons", nargs="+", default=["none"])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("docs/results/contributions"))
    asked = parser.parse_args()
    file = asked.out / "party-tasks.csv"
    done = {(r["kind"], r["epsilon"], int(r["seed"])) for r in read_rows(file)}
    jobs = [(kind, epsilon, seed) for epsilon in asked.epsilons for seed in range(asked.seeds) for kind in asked.kinds]
    run_jobs(measure, [job for job in jobs if job not in done], file, FIELDS, asked.processes)
    table(read_rows(file))


if __name__ == "__main__":
    main()
