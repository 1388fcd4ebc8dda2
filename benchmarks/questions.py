"""Does Shapley weighting help, and when? PDSL against the same with uniform weights and with the paper's.

    python benchmarks/questions.py [clean flipped1 flipped3 noise3 idle3 without3 mu0.05 mu1 mu10 settings paper]
        [--weights ours uniform paper] [--seeds 3] [--rounds 40] [--first-seed 0] [--graph full]

Real MNIST, ten agents, total ε = 4, Dirichlet μ = 0.25 unless the name says otherwise. `settings`: our weights with one
setting changed, with three agents that train on flipped labels. `paper`: the paper's weights with one setting changed,
all agents honest. If interrupted, run the command again: finished runs in --out are skipped. The result is a Markdown
table.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from pdsl.config import load
from pdsl.sweep.job import Job, Score
from pdsl.sweep.scheduler import run_jobs

BASE = {
    "data.name": "mnist",
    "graph.agents": 10,
    "model.name": "mnist-cnn",
    "model.channels": "[8, 16]",
    "batch.size": 250,
    "algorithm.learning_rate": 3.0,
    "privacy.target_epsilon": 4.0,
    "algorithm.shapley.sample": 100,
    "algorithm.shapley.check_every": 0,
    "evaluate_every": 10,
    "engine.workers": 1,
}
PAPER = {
    "algorithm.shapley.weighting": "minmax",
    "algorithm.shapley.value": "accuracy",
    "algorithm.shapley.step_fraction": 1,
    "algorithm.shapley.floor": 0,
}
WEIGHTS: dict[str, dict[str, Any]] = {
    "ours": {},
    "uniform": {"algorithm.shapley.weighting": "uniform"},
    "paper": PAPER,
}
AGENTS: dict[str, dict[str, Any]] = {
    "clean": {},
    "flipped1": {"attack.label_flip": 1},
    "flipped3": {"attack.label_flip": 3},
    "noise3": {"attack.gaussian": 3},
    "idle3": {"attack.free_rider": 3},
    "without3": {  # the step of seven messages is as long as that of ten
        "attack.free_rider": 3,
        "algorithm.learning_rate": 4.0,
    },
    "mu0.05": {"partition.mu": 0.05},
    "mu1": {"partition.mu": 1},
    "mu10": {"partition.mu": 10},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "worth by accuracy": {"algorithm.shapley.value": "accuracy"},
    "worth by plain loss": {"algorithm.shapley.value": "loss"},
    "a whole step": {"algorithm.shapley.step_fraction": 1},
    "memory 0.5": {"algorithm.shapley.memory": 0.5},
    "memory 0.9": {"algorithm.shapley.memory": 0.9},
    "min-max": {"algorithm.shapley.weighting": "minmax"},
    "λ = 0.1": {"algorithm.shapley.floor": 0.1},
    "λ = 0.5": {"algorithm.shapley.floor": 0.5},
    "Monte Carlo, R = 5": {"algorithm.shapley.estimator": "montecarlo", "algorithm.shapley.permutations": 5},
    "Monte Carlo, R = 20": {"algorithm.shapley.estimator": "montecarlo", "algorithm.shapley.permutations": 20},
}
NEAR_THE_PAPER: dict[str, dict[str, Any]] = {
    "v(∅) = 0": PAPER | {"algorithm.shapley.empty_value": "zero"},
    "λ = 0.5": PAPER | {"algorithm.shapley.floor": 0.5},
    "worth by loss": PAPER | {"algorithm.shapley.value": "loss"},
    "a tenth of a step": PAPER | {"algorithm.shapley.step_fraction": 0.1},
}
SLUG = str.maketrans({" ": "-", "(": "", ")": "", "λ": "floor", "=": "", ",": "", "∅": "empty"})


def questions(asked: list[str], weights: list[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """Settings of every line of the table, by (agents, weights)."""
    found = {(who, how): AGENTS[who] | WEIGHTS[how] for who in asked if who in AGENTS for how in weights}
    if "settings" in asked:
        found |= {("flipped3", name): AGENTS["flipped3"] | change for name, change in SETTINGS.items()}
    if "paper" in asked:
        found |= {("clean", f"paper, {name}"): change for name, change in NEAR_THE_PAPER.items()}
    return found


def job_of(question: tuple[str, str], change: dict[str, Any], graph: str, rounds: int, seed: int) -> Job:
    values = BASE | change | {"graph.kind": graph, "rounds": rounds, "seed": seed}
    name = f"{question[0]}-{question[1]}-{graph}-{rounds}-{seed}".translate(SLUG)
    return Job(name, load(None, [f"{key}={value}" for key, value in values.items()]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("asked", nargs="*", choices=[*AGENTS, "settings", "paper"], default=["clean", "flipped3"])
    parser.add_argument("--weights", nargs="*", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--graph", default="full")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--processes", type=int)
    parser.add_argument("--out", type=Path, default=Path("runs/questions"))
    options = parser.parse_args()
    asked = questions(options.asked, options.weights)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    jobs = {
        (question, seed): job_of(question, change, options.graph, options.rounds, seed)
        for question, change in asked.items()
        for seed in seeds
    }

    def on_score(score: Score, done: int, new: bool) -> None:
        print(f"[{done}/{len(jobs)}] {score.name} {score.failed or f'{score.accuracy_of_mean:.4f}'}", file=sys.stderr)

    scores = run_jobs(lambda _: list(jobs.values()), options.out, on_score, options.processes)
    print(f"{options.graph}, {options.rounds} rounds, seeds {seeds[0]} to {seeds[-1]}; accuracy of the mean model\n")
    print("| agents | weights | accuracy | each seed |\n|---|---|---|---|")
    for who, how in asked:
        found = [scores[jobs[(who, how), seed].name] for seed in seeds]
        accuracies = [score.accuracy_of_mean for score in found if score.failed is None]
        each = ", ".join(score.failed or f"{score.accuracy_of_mean:.4f}" for score in found)
        mean = f"{statistics.mean(accuracies):.4f}" if accuracies else "none"
        print(f"| {who} | {how} | {mean} | {each} |")


if __name__ == "__main__":
    main()
