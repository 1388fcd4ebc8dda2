"""Do free riders and harmful agents lose their weight, and what does that cost honest agents?

    python -m benchmarks.free_riders [--kinds none free_rider gaussian echo label_flip] [--graphs ring full]
        [--weightings uniform minmax evidence contribution] [--seeds 10] [--processes 1] [--out DIR]

Ten agents learn digits with a total ε of 8; two of them misbehave, three with label_flip. Printed are the mean accuracy
of the honest agents' models, the attackers' weight in the middle of the run in units of an even share (mean over their
neighbours), and in how many seeds the attackers have the lowest contributions. Finished lines in --out are skipped.
"""

import argparse
import multiprocessing
import os
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from benchmarks import append_rows, read_rows
from pdsl.config import validate
from pdsl.training.contributions import make_run_account
from pdsl.training.experiment import Experiment, prepare
from pdsl.training.trainer import rounds

KINDS = {"none": 0, "free_rider": 2, "gaussian": 2, "echo": 2, "label_flip": 3}
WEIGHTINGS = ("uniform", "minmax", "evidence", "contribution")
FIELDS = ("kind", "graph", "weighting", "seed", "accuracy", "weight", "lowest")
Job = tuple[str, str, str, int]  # kind, graph, weighting, seed


def config(job: Job) -> dict[str, Any]:
    kind, graph, weighting, seed = job
    return {
        "seed": seed,
        "evaluate_every": 1000,
        "baselines": "none",
        "engine": {"workers": 1},
        "graph": {"kind": graph},
        "attack": {kind: KINDS[kind]} if kind != "none" else {},
        "algorithm": {"name": "pdsl", "shapley": {"estimator": "fast", "check_every": 0, "weighting": weighting}},
    }


def attackers_weight(e: Experiment, shares: list[float | None]) -> float | None:
    """Mean weight of attackers at their honest neighbours, in units of what a sender has with uniform weights."""
    edges = zip(e.graph.receiver, e.graph.sender, shares, strict=True)
    even = e.graph.W
    found = [s / even[i, j] for i, j, s in edges if s is not None and j in e.attackers and i not in e.attackers]
    return fmean(found) if found else None


def measure(job: Job) -> tuple[Job, list[float | None]]:
    torch.set_num_threads(1)
    e = prepare(validate(config(job), "benchmark"))
    weight, rows = None, 0
    for last in rounds(e):
        rows += 1
        if rows == e.config.rounds // 2:
            weight = attackers_weight(e, last.row["shapley"]["share"])
    x = last.state.x
    honest = [i for i in range(e.graph.agents) if i not in e.attackers]
    accuracy = fmean(e.task.score(e.network.outputs(x[i], e.test[0]), e.test[1]) for i in honest)
    lowest = None
    if e.attackers and job[2] != "uniform":
        values = make_run_account(e, last.state, e.engine.mean(x), rows).values
        lowest = float(set(np.argsort(values)[: len(e.attackers)].tolist()) == set(e.attackers))
    return job, [accuracy, weight, lowest]


def table(rows: list[dict[str, str]]) -> None:
    print("| misbehaviour | graph | weights | seeds | accuracy | minus uniform | weight at half time | lowest |")
    print("|---" * 8 + "|")
    by_key: dict[tuple[str, str, str], dict[str, dict[str, str]]] = {}
    for row in rows:
        by_key.setdefault((row["kind"], row["graph"], row["weighting"]), {})[row["seed"]] = row
    for (kind, graph, weighting), own in by_key.items():
        uniform = by_key.get((kind, graph, "uniform"), {})
        paired = [100 * (float(own[s]["accuracy"]) - float(uniform[s]["accuracy"])) for s in own if s in uniform]
        spread = 1.96 * stdev(paired) / len(paired) ** 0.5 if len(paired) > 1 else float("nan")
        weights, lowest = ([float(r[name]) for r in own.values() if r[name]] for name in ("weight", "lowest"))
        cells = [kind, graph, weighting, str(len(own)), f"{fmean(float(r['accuracy']) for r in own.values()):.4f}"]
        cells += [f"{fmean(paired):+.2f} ± {spread:.2f}" if paired and weighting != "uniform" else ""]
        cells += [f"{fmean(weights):.2f}" if weights else "", f"{sum(lowest):.0f} of {len(lowest)}" if lowest else ""]
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--graphs", nargs="+", default=["ring", "full"])
    parser.add_argument("--weightings", nargs="+", default=list(WEIGHTINGS), choices=WEIGHTINGS)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("docs/results/free-riders"))
    asked = parser.parse_args()
    file = asked.out / "digits.csv"
    done = {(r["kind"], r["graph"], r["weighting"], int(r["seed"])) for r in read_rows(file)}
    jobs = [
        (kind, graph, weighting, seed)
        for graph in asked.graphs
        for seed in range(asked.seeds)
        for kind in asked.kinds
        for weighting in asked.weightings
    ]
    with multiprocessing.get_context("spawn").Pool(asked.processes) as pool:
        for job, numbers in pool.imap_unordered(measure, [job for job in jobs if job not in done]):
            append_rows(file, FIELDS, [[*job, *numbers]])
    table(read_rows(file))


if __name__ == "__main__":
    main()
