"""Is the recommended batch and number of rounds as good as the best of a search over 20 points?

    python benchmarks/recommendation.py digits [--epsilons 1 2 4 8] [--seeds 2] [--fresh 8] [--processes 1]

The search has five sampling rates and four numbers of rounds, each with the automatic learning rate. Ten agents on a
full graph. MNIST and CIFAR-10 with patch features and a start from the public set, as in Tables I and II but with fewer
filters. Scores are test accuracies of the mean model in per cent, means over seeds. The best of 20 noisy means is
biased upwards, so the recommended and the best point are compared once more on fresh seeds: mean paired difference with
its 95 % interval.
"""

import argparse
import multiprocessing
import os
import time
from statistics import fmean, stdev
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from scipy.stats import t as student

from pdsl.config import validate
from pdsl.privacy.recommendation import recommend
from pdsl.training.experiment import prepare
from pdsl.training.trainer import rounds

RECORDS = {"digits": 120, "mnist": 6000, "cifar10": 5000}
PUBLIC: dict[str, dict[str, Any]] = {
    "digits": {},
    "mnist": {"features": "patches", "filters": 100, "pool": 4, "components": 300, "start": "labels"},
    "cifar10": {"features": "patches", "filters": 200, "components": 500, "start": "labels"},
}
RATES, ROUNDS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0), (20, 40, 80, 160)
Point = tuple[int, int]  # batch, rounds


def score(job: tuple[str, float, Point, int]) -> float:
    torch.set_num_threads(1)
    data, epsilon, (batch, count), seed = job
    settings = {
        "seed": seed,
        "rounds": count,
        "evaluate_every": count,
        "data": {"name": data, "public_seed": 0},
        "graph": {"kind": "full", "agents": 10},
        "public": PUBLIC[data],
        "batch": {"size": batch},
        "privacy": {"target_epsilon": epsilon},
        "engine": {"workers": 1},
        "algorithm": {"name": "pdsl", "shapley": {"estimator": "fast", "sample": 50}},
    }
    e = prepare(validate(settings, "benchmark"))
    *_, last = rounds(e)
    return 100 * e.task.score(e.network.outputs(last.state.x.mean(0), e.test[0]), e.test[1])


def summarise(differences: list[float]) -> str:
    """Mean difference in points, with the half-width of its 95 % interval."""
    n = len(differences)
    if n < 2:
        return "–"
    half = float(student.ppf(0.975, n - 1)) * stdev(differences) / n**0.5
    return f"{fmean(differences):+.2f} ± {half:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", choices=list(RECORDS))
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 2.0, 4.0, 8.0])
    parser.add_argument("--seeds", type=int, default=2, help="for the search")
    parser.add_argument("--fresh", type=int, default=8, help="further seeds on which the two points are compared")
    parser.add_argument("--processes", type=int, default=1)
    asked = parser.parse_args()
    records = RECORDS[asked.data]
    grid = [(max(1, round(rate * records)), count) for count in ROUNDS for rate in RATES]
    print("| data | ε | recommended | seconds | its accuracy | best of 20 | at | worse by | on fresh seeds |")
    print("|---" * 9 + "|", flush=True)
    with multiprocessing.get_context("spawn").Pool(asked.processes) as pool:
        for epsilon in asked.epsilons:
            began = time.process_time()
            chosen = recommend(records=records, target_epsilon=epsilon, members=10).chosen
            seconds = time.process_time() - began
            points: list[Point] = list(dict.fromkeys([(chosen.batch, chosen.rounds), *grid]))
            jobs = [(asked.data, epsilon, point, seed) for point in points for seed in range(asked.seeds)]
            found = pool.map(score, jobs, chunksize=1)
            means = [fmean(found[k : k + asked.seeds]) for k in range(0, len(found), asked.seeds)]
            best = max(range(len(means)), key=lambda k: means[k])
            cells = [asked.data, f"{epsilon:g}", "batch {} · {} rounds".format(*points[0]), f"{seconds:.1f}"]
            cells += [f"{means[0]:.2f}", f"{means[best]:.2f}", "batch {} · {} rounds".format(*points[best])]
            fresh = range(asked.seeds, asked.seeds + asked.fresh)
            repeats = pool.map(
                score, [(asked.data, epsilon, points[k], seed) for k in (best, 0) for seed in fresh], chunksize=1
            )
            compared = summarise([b - c for b, c in zip(repeats[: asked.fresh], repeats[asked.fresh :], strict=True)])
            print(f"| {' | '.join(cells)} | {means[best] - means[0]:.2f} | {compared} |", flush=True)


if __name__ == "__main__":
    main()
