"""Does Shapley weighting help, and when? PDSL against the same with uniform weights and with the paper's.

    python benchmarks/questions.py [clean flipped1 flipped3 noise3 idle3 without3 mu0.05 mu1 mu10 settings paper]
        [--weights ours uniform paper] [--seeds 3] [--rounds 40] [--first-seed 0] [--graph full]

Real MNIST, ten agents, total ε = 4, Dirichlet μ = 0.25 where nothing else is said. `settings` are ours with one of them
changed, against three agents with flipped labels; `paper` are the paper's, among honest agents. Each line is so many
runs; interrupted, the same command goes on with what is missing. Results stay in --out, and are printed as a Markdown
table.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from pdsl.cells import carry_out
from pdsl.cells.one import Score
from pdsl.config import Config, load

BASE = {
    "data.name": "mnist",
    "graph.agents": 10,
    "model.name": "mnist-cnn",
    "model.channels": "[8, 16]",
    "batch.size": 250,
    "algorithm.learning_rate": 3.0,
    "privacy.target_epsilon": 4.0,
    "shapley.sample": 100,
    "shapley.check_every": 0,
    "evaluate_every": 10,
    "engine.workers": 1,
}
PAPER = {"shapley.weighting": "minmax", "shapley.value": "accuracy", "shapley.probe": 1, "shapley.floor": 0}
WEIGHTS: dict[str, dict[str, Any]] = {
    "ours": {},
    "uniform": {"shapley.weighting": "uniform"},
    "paper": PAPER,
}
AGENTS: dict[str, dict[str, Any]] = {
    "clean": {},
    "flipped1": {"rogue.flipped": 1},
    "flipped3": {"rogue.flipped": 3},
    "noise3": {"rogue.noise": 3},
    "idle3": {"rogue.idle": 3},
    "without3": {"rogue.idle": 3, "algorithm.learning_rate": 4.0},  # seven messages of ten, in steps as long as ten's
    "mu0.05": {"partition.mu": 0.05},
    "mu1": {"partition.mu": 1},
    "mu10": {"partition.mu": 10},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "worth by accuracy": {"shapley.value": "accuracy"},
    "worth by plain loss": {"shapley.value": "loss"},
    "a whole step": {"shapley.probe": 1},
    "memory 0.5": {"shapley.memory": 0.5},
    "memory 0.9": {"shapley.memory": 0.9},
    "min-max": {"shapley.weighting": "minmax"},
    "λ = 0.1": {"shapley.floor": 0.1},
    "λ = 0.5": {"shapley.floor": 0.5},
    "Monte Carlo, R = 5": {"shapley.estimator": "montecarlo", "shapley.permutations": 5},
    "Monte Carlo, R = 20": {"shapley.estimator": "montecarlo", "shapley.permutations": 20},
}
NEAR_THE_PAPER: dict[str, dict[str, Any]] = {
    "v(∅) = 0": PAPER | {"shapley.empty": "zero"},
    "λ = 0.5": PAPER | {"shapley.floor": 0.5},
    "worth by loss": PAPER | {"shapley.value": "loss"},
    "a tenth of a step": PAPER | {"shapley.probe": 0.1},
}
SLUG = str.maketrans({" ": "-", "(": "", ")": "", "λ": "floor", "=": "", ",": "", "∅": "empty"})


def questions(asked: list[str], weights: list[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """(agents, weights) of every line, and what it sets."""
    found = {(who, how): AGENTS[who] | WEIGHTS[how] for who in asked if who in AGENTS for how in weights}
    if "settings" in asked:
        found |= {("flipped3", name): AGENTS["flipped3"] | change for name, change in SETTINGS.items()}
    if "paper" in asked:
        found |= {("clean", f"paper, {name}"): change for name, change in NEAR_THE_PAPER.items()}
    return found


def cell(question: tuple[str, str], change: dict[str, Any], graph: str, rounds: int, seed: int) -> tuple[str, Config]:
    values = BASE | change | {"graph.kind": graph, "rounds": rounds, "seed": seed}
    name = f"{question[0]}-{question[1]}-{graph}-{rounds}-{seed}".translate(SLUG)
    return name, load(None, [f"{key}={value}" for key, value in values.items()])


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
    cells = {
        (question, seed): cell(question, change, options.graph, options.rounds, seed)
        for question, change in asked.items()
        for seed in seeds
    }

    def told(score: Score, done: int, new: bool) -> None:
        print(f"[{done}/{len(cells)}] {score.name} {score.failed or f'{score.accuracy_of_mean:.4f}'}", file=sys.stderr)

    scores = carry_out(lambda _: dict(cells.values()), options.out, told, options.processes)
    print(f"{options.graph}, {options.rounds} rounds, seeds {seeds[0]} to {seeds[-1]}; accuracy of the mean model\n")
    print("| agents | weights | accuracy | each seed |\n|---|---|---|---|")
    for who, how in asked:
        found = [scores[cells[(who, how), seed][0]] for seed in seeds]
        accuracies = [score.accuracy_of_mean for score in found if score.failed is None]
        each = ", ".join(score.failed or f"{score.accuracy_of_mean:.4f}" for score in found)
        mean = f"{statistics.mean(accuracies):.4f}" if accuracies else "none"
        print(f"| {who} | {how} | {mean} | {each} |")


if __name__ == "__main__":
    main()
