"""Is `fast` as good as the truth? Real MNIST, ten agents, full graph, total ε = 1, three seeds.

    python benchmarks/fidelity.py [rounds]

Each seed is trained twice, with the fast estimator and with Monte Carlo over true coalition models (R = 20); along the
fast run, one agent's values are compared with the exact Shapley values of the true models, all 1,024 coalitions.
"""

import statistics
import sys
from typing import Any

from scipy.stats import spearmanr

from pdsl.algorithms import PDSL
from pdsl.config import validate
from pdsl.settings import ShapleySettings
from pdsl.training.evaluation import evaluate
from pdsl.training.experiment import prepare
from pdsl.training.trainer import build_trainer, initial_state
from pdsl.utils.workers import Workers

SEEDS = (0, 1, 2)
SAMPLE = 200  # records of Q in a round


def settings(seed: int, rounds: int, estimator: str) -> dict[str, Any]:
    return {
        "rounds": rounds,
        "seed": seed,
        "data": {"name": "mnist"},
        "graph": {"kind": "full", "agents": 10},
        "model": {"name": "mnist-cnn", "channels": [8, 16], "activation": "tanh", "norm": "rms"},
        "batch": {"size": 250},
        "algorithm": {
            "name": "pdsl",
            "learning_rate": 2.0,
            "shapley": {
                "estimator": estimator,
                "permutations": 20,
                "orders": "independent",
                "sample": SAMPLE,
                "check_every": 0,
            },
        },
        "privacy": {"target_epsilon": 1.0},
    }


def train(seed: int, rounds: int, estimator: str, compare_at: tuple[int, ...] = ()) -> tuple[float, list[float]]:
    """Accuracy of the mean model, and the rank correlations found on the way."""
    e = prepare(validate(settings(seed, rounds, estimator), "fidelity"))
    algorithm = e.config.algorithm
    assert isinstance(algorithm, PDSL)
    found = []
    with Workers() as workers:
        parts, state = build_trainer(e, workers), initial_state(e)
        for t in range(1, rounds + 1):
            if t in compare_at:
                at = next(parts.round(t).cross_gradients(state.x))
                step = algorithm.shapley.step_fraction * algorithm.learning_rate
                candidates = [state.x[0] - step * at.split_by_agent(at.values)[0]]
                fast, true = (
                    parts.validation.contributions(
                        t, range(1), state.x[:1], candidates, ShapleySettings(estimator=how, sample=SAMPLE)
                    )[0].phi
                    for how in ("fast", "exact")
                )
                found.append(float(spearmanr(fast, true).statistic))
            state, _ = algorithm.step(state, parts.round(t))
        return evaluate(e, state.x, e.engine.mean(state.x), workers).accuracy_of_mean, found


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    at = tuple(sorted({max(1, rounds * n // 12) for n in (1, 3, 6, 12)}))
    correlations = []
    print(f"rounds {rounds}, Q sampled to {SAMPLE}; correlations at rounds {', '.join(map(str, at))}", flush=True)
    for seed in SEEDS:
        fast, found = train(seed, rounds, "fast", at)
        true, _ = train(seed, rounds, "montecarlo")
        correlations += found
        print(
            f"seed {seed}: fast {fast:.4f}, montecarlo {true:.4f}, difference {fast - true:+.4f};"
            f" rank correlation with exact values {', '.join(f'{c:.3f}' for c in found)}",
            flush=True,
        )
    print(f"mean rank correlation {statistics.mean(correlations):.3f}")


if __name__ == "__main__":
    main()
