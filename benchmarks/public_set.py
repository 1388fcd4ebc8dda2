"""How much public data does collaboration need? Accuracy against the size of the public set Q.

    python benchmarks/public_set.py mnist [--sizes 20 50 100] [--seeds 10] [--epsilon 2] [--out docs/results/public-set]

For each size and seed: the public set alone (a linear model on patch features of Q), private training from scratch (the
network of Table I), private training of a linear model on patch features, and the same after a start from Q's labels.
Ten agents on a full graph, Dirichlet μ = 0.25. Results are added to OUT/<data>.csv line by line, and finished lines are
skipped. `--figure FILE` draws all kept lines.
"""

import argparse
import csv
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from pdsl.config import Config, validate
from pdsl.report.line_chart import Points, line_chart
from pdsl.training.baselines import compute_baselines
from pdsl.training.experiment import prepare
from pdsl.training.trainer import rounds

SIZES = (20, 50, 100, 200, 500, 1000, 2000)
RECORDS = {"mnist": 6000, "cifar10": 5000, "digits": 120}
FEATURES: dict[str, dict[str, Any]] = {
    "mnist": {"features": "patches", "filters": 100, "patch": 6, "pool": 4, "components": 300},
    "cifar10": {"features": "patches", "filters": 200, "patch": 6, "pool": 3, "components": 500},
    "digits": {"features": "patches", "filters": 50, "patch": 3, "pool": 2, "components": 100},
}
SCRATCH = {
    "rounds": 40,
    "batch": {"size": 500},
    "model": {"channels": [8, 16], "norm": "centred", "activation": "relu"},
}
NAMES = {
    "public": "public set alone",
    "scratch": "private, from scratch",
    "features": "private, public features",
    "start": "private, public features and start",
}
FIELDS = ("data", "epsilon", "size", "seed", "method", "accuracy")


def config(data: str, size: int, seed: int, epsilon: float, method: str) -> Config:
    settings: dict[str, Any] = {
        "seed": seed,
        "evaluate_every": 1000,
        "baselines": "public" if method == "features" else "none",
        "data": {"name": data, "validation": size},
        "graph": {"kind": "full", "agents": 10},
        "privacy": {"target_epsilon": epsilon},
        "engine": {"workers": 1},
        "algorithm": {"name": "pdsl", "shapley": {"estimator": "fast", "sample": min(100, max(2, size // 10))}},
    }
    if method == "scratch":
        return validate({**settings, **SCRATCH}, "scratch")
    public = FEATURES[data] | {"start": "labels" if method == "start" else "none"}
    return validate({**settings, "rounds": 20, "batch": {"size": RECORDS[data]}, "public": public}, "features")


def measure(data: str, size: int, seed: int, epsilon: float, method: str) -> dict[str, float]:
    """Accuracy of the mean model; with features also that of the public set alone."""
    e = prepare(config(data, size, seed, epsilon, method))
    *_, last = rounds(e)
    found = {method: e.task.score(e.network.outputs(last.state.x.mean(0), e.test[0]), e.test[1])}
    if method == "features":
        public = compute_baselines(replace(e)).get("public")
        found |= {} if public is None else {"public": public}
    return found


def read(file: Path) -> list[dict[str, str]]:
    if not file.exists():
        return []
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def run(asked: argparse.Namespace, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    for size, seed, method in jobs(asked):
        done = {(row["epsilon"], row["size"], row["seed"], row["method"]) for row in read(file)}
        if (f"{asked.epsilon:g}", f"{size}", f"{seed}", method) in done:
            continue
        found = measure(asked.data, size, seed, asked.epsilon, method)
        new = not file.exists()
        with file.open("a", encoding="utf-8", newline="") as lines:
            writer = csv.writer(lines, lineterminator="\n")
            if new:
                writer.writerow(FIELDS)
            for name, accuracy in found.items():
                writer.writerow([asked.data, f"{asked.epsilon:g}", size, seed, name, f"{accuracy:.5f}"])
        print(size, seed, {name: round(value, 4) for name, value in found.items()}, flush=True)


def jobs(asked: argparse.Namespace) -> Iterator[tuple[int, int, str]]:
    for seed in range(asked.seeds):
        for size in asked.sizes:
            for method in asked.methods:
                yield size, seed, method


def table(rows: list[dict[str, str]]) -> None:
    """Print mean ± deviation over seeds."""
    sizes = sorted({int(row["size"]) for row in rows})
    methods = [name for name in NAMES if any(row["method"] == name for row in rows)]
    print("| size of Q | " + " | ".join(NAMES[name] for name in methods) + " |")
    print("|---" * (len(methods) + 1) + "|")
    for size in sizes:
        cells = []
        for method in methods:
            values = [float(r["accuracy"]) for r in rows if r["method"] == method and int(r["size"]) == size]
            spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
            cells.append(f"{fmean(values):.3f}{spread} ({len(values)})" if values else "—")
        print(f"| {size} | {' | '.join(cells)} |")


def draw(rows: list[dict[str, str]], file: Path) -> None:
    series: dict[str, Points] = {}
    for method, name in NAMES.items():
        found: dict[int, list[float]] = {}
        for row in rows:
            if row["method"] == method:
                found.setdefault(int(row["size"]), []).append(float(row["accuracy"]))
        if found:
            series[name] = [(float(size), fmean(found[size])) for size in sorted(found)]
    picture = line_chart(series, "accuracy")
    assert picture is not None
    file.write_text(picture.svg("Accuracy against the size of the public set"), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", choices=list(RECORDS))
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epsilon", type=float, default=2.0)
    parser.add_argument("--methods", nargs="+", default=["features", "start", "scratch"], choices=list(NAMES))
    parser.add_argument("--out", type=Path, default=Path("docs/results/public-set"))
    parser.add_argument("--figure", type=Path)
    asked = parser.parse_args()
    file = asked.out / f"{asked.data}.csv"
    run(asked, file)
    table(read(file))
    if asked.figure is not None:
        draw(read(file), asked.figure)


if __name__ == "__main__":
    main()
