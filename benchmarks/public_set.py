"""How much public data does collaboration need? Accuracy against the size of the public set Q.

    python benchmarks/public_set.py mnist [--sizes 20 50 100] [--seeds 10] [--epsilon 2] [--processes 2]
    python benchmarks/public_set.py --figure docs/images/public-set.svg

For each size and seed: the public set alone (a linear model on patch features of Q), private training from scratch (the
network of Table I or II), private training of a linear model on patch features, and the same after a start from Q's
labels. PDSL, ten agents on a full graph, Dirichlet μ = 0.25; accuracy of the mean model. Results are added to
docs/results/public-set/<data>.csv line by line, and finished lines are skipped. `--figure` draws all of them.
"""

import argparse
import csv
import math
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from markupsafe import Markup

from pdsl.config import Config, validate
from pdsl.report.svg import Point, drawing, element, path, text
from pdsl.training.baselines import compute_baselines
from pdsl.training.experiment import prepare
from pdsl.training.trainer import rounds

SIZES = (20, 50, 100, 200, 500, 1000, 2000)
RECORDS = {"mnist": 6000, "cifar10": 5000, "digits": 120}
TITLES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "digits": "Digits"}
FEATURES: dict[str, dict[str, Any]] = {
    "mnist": {"features": "patches", "filters": 100, "patch": 6, "pool": 4, "components": 300},
    "cifar10": {"features": "patches", "filters": 200, "patch": 6, "pool": 3, "components": 500},
    "digits": {"features": "patches", "filters": 50, "patch": 3, "pool": 2, "components": 100},
}
SCRATCH_RATES = {"mnist": 3.0, "cifar10": 4.0, "digits": 1.0}  # as in Tables I and II from scratch
SCRATCH = {
    "rounds": 40,
    "ema_decay": 0.8,
    "batch": {"size": 500},
    "model": {"channels": [8, 16], "norm": "centred", "activation": "relu"},
}
NAMES = {
    "start": "private, public features and start",
    "features": "private, public features",
    "public": "public set alone",
    "scratch": "private, from scratch",
}
METHODS = ["features", "start", "scratch"]  # that are run; the public set alone is measured with the features
COLOURS = {"start": "#1d4ed8", "features": "#0f766e", "public": "#b45309", "scratch": "#6b7280"}
FIELDS = ("data", "epsilon", "size", "seed", "method", "accuracy")
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 400, 260, 48, 30, 40  # of a panel
Job = tuple[str, int, int, float, tuple[str, ...]]  # data, size, seed, ε, methods
Rows = list[dict[str, str]]


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
        settings["algorithm"]["learning_rate"] = SCRATCH_RATES[data]
        return validate({**settings, **SCRATCH}, "scratch")
    public = FEATURES[data] | {"start": "labels" if method == "start" else "none"}
    return validate({**settings, "rounds": 20, "batch": {"size": RECORDS[data]}, "public": public}, "features")


def measure(job: Job) -> tuple[Job, dict[str, float]]:
    """Accuracy of the mean model of each method; with features also that of the public set alone."""
    torch.set_num_threads(1)
    data, size, seed, epsilon, methods = job
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as cache:  # features of this Q are used by this job only
        os.environ["PDSL_CACHE"] = cache
        for method in methods:
            e = prepare(config(data, size, seed, epsilon, method))
            *_, last = rounds(e)
            found[method] = e.task.score(e.network.outputs(last.state.x.mean(0), e.test[0]), e.test[1])
            public = compute_baselines(e).get("public") if method == "features" else None
            found |= {} if public is None else {"public": public}
    return job, found


def read(file: Path) -> Rows:
    if not file.exists():
        return []
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def run(asked: argparse.Namespace, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    done = {(row["epsilon"], row["size"], row["seed"], row["method"]) for row in read(file)}
    jobs: list[Job] = []
    for seed in range(asked.seeds):
        for size in asked.sizes:
            missing = (m for m in asked.methods if (f"{asked.epsilon:g}", f"{size}", f"{seed}", m) not in done)
            jobs.append((asked.data, size, seed, asked.epsilon, tuple(missing)))
    with multiprocessing.get_context("spawn").Pool(asked.processes) as pool:
        for (data, size, seed, epsilon, _), found in pool.imap_unordered(measure, [job for job in jobs if job[-1]]):
            new = not file.exists()
            with file.open("a", encoding="utf-8", newline="") as lines:
                writer = csv.writer(lines, lineterminator="\n")
                if new:
                    writer.writerow(FIELDS)
                for name, accuracy in found.items():
                    writer.writerow([data, f"{epsilon:g}", size, seed, name, f"{accuracy:.5f}"])
            print(size, seed, {name: round(value, 4) for name, value in found.items()}, flush=True)


def accuracies(rows: Rows, method: str) -> dict[int, list[float]]:
    """Accuracies of all seeds, by size of Q."""
    found: dict[int, list[float]] = {}
    for row in sorted(rows, key=lambda row: int(row["size"])):
        if row["method"] == method:
            found.setdefault(int(row["size"]), []).append(float(row["accuracy"]))
    return found


def table(rows: Rows) -> None:
    """Print mean ± deviation over seeds, and the gain of the best private method over the public set alone."""
    found = {name: accuracies(rows, name) for name in NAMES}
    methods = [name for name in NAMES if found[name]]
    print("| size of Q | " + " | ".join(NAMES[name] for name in methods) + " |")
    print("|---" * (len(methods) + 1) + "|")
    for size in sorted({int(row["size"]) for row in rows}):
        cells = [_cell(found[name].get(size, [])) for name in methods]
        print(f"| {size} | {' | '.join(cells)} |")


def _cell(values: Sequence[float]) -> str:
    spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{fmean(values):.3f}{spread} ({len(values)})" if values else "—"


def panel(data: str, rows: Rows) -> Markup:
    """Mean accuracy over the size of Q, on a logarithmic axis; vertical lines from the lowest seed to the highest."""
    found = {name: accuracies(rows, name) for name in NAMES}
    means = {name: {size: fmean(values) for size, values in sizes.items()} for name, sizes in found.items() if sizes}
    every = [value for sizes in found.values() for values in sizes.values() for value in values]
    lowest, highest = math.floor(10 * min(every)) / 10, math.ceil(10 * max(every)) / 10

    def place(size: int, accuracy: float) -> Point:
        across = math.log(size / SIZES[0]) / math.log(SIZES[-1] / SIZES[0])
        up = (accuracy - lowest) / (highest - lowest)
        return LEFT + (WIDTH - LEFT - 12) * across, HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * up

    marks = [text(f"{TITLES[data]}, total ε = {rows[0]['epsilon']}", LEFT, 16, font_weight="bold")]
    for tick in range(round(10 * lowest), round(10 * highest) + 1):
        x, y = place(SIZES[0], tick / 10)
        marks.append(element("path", d=f"M{x:.0f} {y:.1f}H{WIDTH - 12}", stroke="#ddd"))
        marks.append(text(f"{tick / 10:.1f}", x - 8, y + 4, text_anchor="end"))
    for size in SIZES:
        x, y = place(size, lowest)
        marks.append(text(f"{size:,}", x, y + 16, text_anchor="middle"))
    marks.append(text("public records", (LEFT + WIDTH) / 2, HEIGHT - 6, text_anchor="middle"))
    for name, sizes in means.items():
        colour, points = COLOURS[name], [place(size, mean) for size, mean in sizes.items()]
        marks.append(element("path", d=path(points), fill="none", stroke=colour, stroke_width=2))
        for size, mean in sizes.items():
            (x, bottom), (_, top) = (place(size, value) for value in (min(found[name][size]), max(found[name][size])))
            marks.append(element("path", d=f"M{x:.1f} {top:.1f}V{bottom:.1f}", stroke=colour, stroke_width=1))
            marks.append(element("circle", cx=x, cy=place(size, mean)[1], r=3, fill=colour))
    return element("g", *marks)


def draw(folder: Path, file: Path, epsilon: float) -> None:
    kept = {data: [row for row in read(folder / f"{data}.csv") if row["epsilon"] == f"{epsilon:g}"] for data in TITLES}
    kept = {data: rows for data, rows in kept.items() if rows}
    panels = [
        element("g", panel(data, rows), transform=f"translate({n * (WIDTH + 16)} 26)")
        for n, (data, rows) in enumerate(kept.items())
    ]
    legend, x = [], 8.0
    shown = {row["method"] for rows in kept.values() for row in rows}
    for name in (name for name in NAMES if name in shown):
        legend.append(element("rect", x=x, y=6, width=14, height=4, fill=COLOURS[name]))
        legend.append(text(NAMES[name], x + 20, 13))
        x += 34 + 6.4 * len(NAMES[name])
    width = len(panels) * (WIDTH + 16)
    inside = element("g", *legend, *panels, font_family="sans-serif", font_size=12, fill="#444")
    background = element("rect", width=width, height=HEIGHT + 26, fill="#fff")
    label, space = "Accuracy over the size of the public set", "http://www.w3.org/2000/svg"
    file.write_text(drawing(width, HEIGHT + 26, label, background, inside, xmlns=space) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", choices=list(RECORDS), nargs="?")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epsilon", type=float, default=2.0)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("docs/results/public-set"))
    parser.add_argument("--figure", type=Path)
    asked = parser.parse_args()
    if asked.data is not None:
        file = asked.out / f"{asked.data}.csv"
        run(asked, file)
        table([row for row in read(file) if row["epsilon"] == f"{asked.epsilon:g}"])
    if asked.figure is not None:
        draw(asked.out, asked.figure, asked.epsilon)


if __name__ == "__main__":
    main()
