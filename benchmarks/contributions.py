"""Does the account of contributions agree with the truth? Data Shapley values by retraining every subset of agents.

    python -m benchmarks.contributions digits [--graphs full ring star] [--epsilons none 8 2] [--seeds 10]
        [--first-seed 0] [--processes 1] [--out docs/results/contributions]

Tasks: digits, mnist (public features), and segment: the UCI table of image segments (2,310 records, 18 numbers, 7
classes), which the package river contains. For each seed all 2^n subsets of the agents are retrained from their true
records, without noise and with full batches, by the program in this file, which shares no code with the estimators.
The value of a subset is its test accuracy. The truth does not depend on the graph: agents of a subset always average
their gradients. Printed for every estimator: mean rank correlation and linear correlation with the truth, the lowest
rank correlation of a seed, and for the account the part of true values that its 95 % intervals contain. The estimator
"retrained, on Q" is a limit: it knows all private records, and measures accuracy on Q instead of the test set. The last
columns compare with this limit instead: the account is about accuracy on Q, which the parties can measure. Finished
lines in --out are skipped.
"""

import argparse
import csv
import importlib.util
import io
import math
import os
import sys
import zipfile
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import pearsonr, spearmanr
from torch import Tensor
from torch.nn.functional import one_hot

from benchmarks import read_rows, run_jobs
from pdsl.attacks import find_victim
from pdsl.config import validate
from pdsl.data import Data, from_python
from pdsl.shapley.masses import estimate_masses
from pdsl.training.contributions import build_game, make_run_account, significant, sums_by_sender
from pdsl.training.experiment import Experiment, prepare
from pdsl.training.trainer import CompletedRound, rounds
from pdsl.utils.random import Streams

AGENTS = 6
TASKS: dict[str, dict[str, Any]] = {
    "digits": {"data": {"name": "digits", "validation": 299}, "batch": {"size": 200}, "rounds": 60},
    "mnist": {
        "data": {"name": "mnist", "public_seed": 0, "validation": 1000},
        "public": {"features": "patches", "filters": 60, "pool": 3, "components": 200},
        "batch": {"size": 10000},
        "rounds": 20,
    },
    "segment": {
        "data": {"name": "python", "validation": 300, "scale": "public"},
        "model": {"name": "linear"},
        "batch": {"size": 272, "records": 272},
        "rounds": 60,
    },
}
SEGMENT_TEST = 0.3  # fraction of the table that is Q and the test set
FIELDS = ("data", "graph", "epsilon", "seed", "estimator", "spearman", "pearson", "covered", "margin",
          "spearman_on_q", "pearson_on_q", "covered_on_q")  # fmt: skip
Floats = NDArray[np.float64]
Job = tuple[str, str, str, int]  # data, graph, ε, seed


def config(job: Job) -> dict[str, Any]:
    data, graph, epsilon, seed = job
    privacy = {"mode": "none", "clipping": "per-sample"} if epsilon == "none" else {"target_epsilon": float(epsilon)}
    return {
        **TASKS[data],
        "seed": seed,
        "evaluate_every": 1000,
        "baselines": "none",
        "graph": {"kind": graph, "agents": AGENTS},
        "privacy": privacy,
        "engine": {"workers": 1},
        "algorithm": {"name": "pdsl", "shapley": {"estimator": "fast", "check_every": 0}},
    }


def load_experiment(job: Job) -> Experiment:
    return prepare(validate(config(job), "benchmark"), data=read_segment(job[3]) if job[0] == "segment" else None)


def find_segment() -> Path | None:
    """The zipped table of image segments in the package river; None if it is not installed."""
    river = importlib.util.find_spec("river")
    file = Path(river.origin).parent / "datasets" / "segment.csv.zip" if river and river.origin else None
    return file if file and file.exists() else None


def read_segment(seed: int) -> Data:
    """The table of image segments; the seed decides on test records."""
    file = find_segment()
    assert file is not None
    with zipfile.ZipFile(file) as archive, archive.open(archive.namelist()[0]) as text:
        rows = list(csv.DictReader(io.TextIOWrapper(text, encoding="utf-8")))
    names = sorted({row["category"] for row in rows})
    y = np.array([names.index(row["category"]) for row in rows])
    x = np.array([[float(value) for name, value in row.items() if name != "category"] for row in rows])
    return from_python((x.astype(np.float32), y), Streams(seed), SEGMENT_TEST)


def true_records(e: Experiment) -> list[tuple[Tensor, Tensor]]:
    """Inputs and labels of each agent; none for free riders and echoes, those of the victim for duplicates."""
    found = []
    for j in range(e.graph.agents):
        kind = e.attackers.get(j)
        source = find_victim(e.attackers, e.graph, j) if kind == "duplicate" else j
        count = 0 if kind in ("free-rider", "gaussian", "echo") else len(e.parts[source])
        found.append((flat(e.data.x[e.parts[source]])[:count], e.training_labels(source).long()[:count]))
    return found


def retrain_subsets(e: Experiment, count: int) -> tuple[Floats, Floats]:
    """Accuracy on the test set and on Q of the linear model of every subset [2^n], trained on its true records."""
    n, classes = e.graph.agents, e.data.classes
    masks = torch.tensor([[subset >> j & 1 for j in range(n)] for subset in range(2**n)], dtype=torch.float32)
    shares = masks / masks.sum(1, keepdim=True).clamp(min=1)
    bias = e.network.num_parameters > classes * flat(e.test[0]).shape[1]
    start = e.network.initial_parameters()
    weight = start[: classes * flat(e.test[0]).shape[1]].view(classes, -1)
    w = (torch.cat([weight, start[weight.numel() :, None]], dim=1) if bias else weight).repeat(2**n, 1, 1)
    velocity = torch.zeros_like(w)
    records = [(with_bias(x, bias), one_hot(y, classes).float()) for x, y in true_records(e)]
    alpha = float(getattr(e.config.algorithm, "momentum", 0.0))
    for rate in e.learning_rates[:count]:
        step = torch.zeros_like(w)
        for j, (x, y) in enumerate(records):
            rows = masks[:, j].bool()
            residual = torch.einsum("scf,nf->snc", w[rows], x).softmax(-1) - y
            norms = residual.norm(dim=2) * x.norm(dim=1)
            clipped = residual * (e.config.privacy.max_grad_norm / norms.clamp(min=1e-12)).clamp(max=1.0)[..., None]
            step[rows] += shares[rows, j, None, None] * torch.einsum("snc,nf->scf", clipped, x) / e.batches.records
        velocity = alpha * velocity + step
        w = w - rate * velocity

    def accuracy(x: Any, labels: Tensor) -> Floats:
        outputs = torch.einsum("scf,nf->snc", w, with_bias(flat(x), bias))
        return (outputs.argmax(2) == labels).double().mean(1).numpy()

    return accuracy(*e.test), accuracy(*e.validation)


def flat(x: Any) -> Tensor:
    tensor: Tensor = x.flatten(1).float()
    return tensor


def with_bias(x: Tensor, bias: bool) -> Tensor:
    return torch.cat([x, torch.ones(len(x), 1)], dim=1) if bias else x


def semivalues(values: Floats, n: int, weight: Any) -> Floats:
    """Σ over subsets S without j of weight(|S|)·(v(S ∪ j) − v(S)), by definition."""
    found = np.zeros(n)
    for j in range(n):
        others = [i for i in range(n) if i != j]
        for size in range(n):
            for subset in combinations(others, size):
                mask = sum(1 << i for i in subset)
                found[j] += weight(size) * (values[mask | 1 << j] - values[mask])
    return found


def shapley(values: Floats, n: int) -> Floats:
    return semivalues(values, n, lambda size: 1 / (n * math.comb(n - 1, size)))


def estimates(e: Experiment, last: CompletedRound, rows: list[Any]) -> tuple[dict[str, Floats], Floats]:
    """Estimated values of each agent by estimator, and half-widths of the account's intervals."""
    n = e.graph.agents
    mean = e.engine.mean(last.state.x)
    account = make_run_account(e, last.state, mean, len(rows))
    phi = np.array([row["shapley"]["phi"] for row in rows], dtype=np.float64)
    by_sender = np.stack([np.bincount(e.graph.sender, weights=of_round, minlength=n) for of_round in phi])
    sums = sums_by_sender(e, last.state)
    masses = significant(estimate_masses(sums))
    game = build_game(e, mean, len(rows)).values(masses, range(2**n))
    positive = np.maximum(by_sender.sum(1, keepdims=True), 0)
    size = np.bincount(game_groups(e), minlength=masses.shape[1])
    return {
        "account": account.values,
        "banzhaf": semivalues(game, n, lambda s: 0.5 ** (n - 1)),
        "beta(4,1)": semivalues(game, n, lambda s: beta_weight(s, n, 4.0, 1.0)),
        "sum of φ": by_sender.sum(0),
        "φ by round": (by_sender * positive).sum(0),
        "first order": sums.sum(0)[:, -1] @ (size / size.sum()),
        "mass": masses.sum(1),
    }, account.margins


def game_groups(e: Experiment) -> NDArray[np.int64]:
    return np.unique(e.validation[1].numpy(), return_inverse=True)[1]


def beta_weight(size: int, n: int, alpha: float, beta: float) -> float:
    """Weight of a subset of `size` others in Beta Shapley: Beta(α, β) over the position of arrival."""
    log = math.lgamma
    return math.exp(
        log(alpha + beta)
        - log(alpha)
        - log(beta)
        + log(size + beta)
        + log(n - 1 - size + alpha)
        - log(n - 1 + alpha + beta)
    )


def measure(job: Job) -> tuple[Job, list[list[Any]]]:
    torch.set_num_threads(1)
    e = load_experiment(job)
    rows = []
    for last in rounds(e):
        rows.append(last.row)
    truth, on_q = (shapley(values, e.graph.agents) for values in retrain_subsets(e, len(rows)))
    found, margins = estimates(e, last, rows)
    found["retrained, on Q"] = on_q
    lines = []
    for name, values in found.items():
        margin = float(margins.mean()) if name == "account" else None
        on_test, on_public = (
            compare(values, target, margins if name == "account" else None) for target in (truth, on_q)
        )
        lines.append([name, *on_test, margin, *on_public])
    return job, lines


def compare(values: Floats, truth: Floats, margins: Floats | None) -> list[float | None]:
    """Rank correlation, linear correlation, and the part of true values within the margins."""
    covered = None if margins is None else float((np.abs(values - truth) <= margins).mean())
    return [spearmanr(values, truth)[0], pearsonr(values, truth)[0], covered]


def table(rows: list[dict[str, str]]) -> None:
    print("| data | graph | ε | estimator | seeds | rank correlation | lowest | linear | covered | half-width"
          " | on Q: rank correlation | linear | covered |")  # fmt: skip
    print("|---" * 13 + "|")
    keys = list(dict.fromkeys((r["data"], r["graph"], r["epsilon"], r["estimator"]) for r in rows))
    for key in keys:
        own = [r for r in rows if (r["data"], r["graph"], r["epsilon"], r["estimator"]) == key]
        ranks, linear = ([float(r[name]) for r in own] for name in ("spearman", "pearson"))
        covered, margin = ([float(r[name]) for r in own if r[name]] for name in ("covered", "margin"))
        cells = [*key, str(len(own)), f"{fmean(ranks):.2f}", f"{min(ranks):.2f}", f"{fmean(linear):.2f}"]
        cells += [f"{100 * fmean(covered):.0f} %" if covered else "", f"{fmean(margin):.3f}" if margin else ""]
        for name in ("spearman_on_q", "pearson_on_q", "covered_on_q"):
            found = [float(r[name]) for r in own if r[name]]
            cells.append(f"{fmean(found):.2f}" if found else "")
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", choices=list(TASKS))
    parser.add_argument("--graphs", nargs="+", default=["full", "ring", "star"])
    parser.add_argument("--epsilons", nargs="+", default=["none", "8", "2"])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("docs/results/contributions"))
    asked = parser.parse_args()
    if asked.data == "segment" and find_segment() is None:
        print("segment is a file of the package river: pip install --no-deps river", file=sys.stderr)
        sys.exit(2)
    file = asked.out / f"{asked.data}.csv"
    done = {(r["data"], r["graph"], r["epsilon"], int(r["seed"])) for r in read_rows(file)}
    seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
    jobs = [(asked.data, g, eps, s) for eps in asked.epsilons for g in asked.graphs for s in seeds]
    run_jobs(measure, [job for job in jobs if job not in done], file, FIELDS, asked.processes)
    table(read_rows(file))


if __name__ == "__main__":
    main()
