"""Does a settlement name honest statements as different, and does it find a false one?

    python benchmarks/settlement.py [--seeds 20]

For each setting and seed, digits are trained with PDSL, and every receiver's sums are compared (`shapley.agreement`).
Printed: in how many runs an honest receiver was named, and in how many the receiver was named that had multiplied its
measurement of one sender by 0.5, or by 2.
"""

import argparse
import os
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from pdsl.config import validate
from pdsl.shapley.agreement import find_disagreements
from pdsl.shapley.coalitions import Values
from pdsl.training.experiment import prepare
from pdsl.training.trainer import rounds, state_tensors

SETTINGS = [("full", 4, 40, 4.0), ("ring", 4, 40, 4.0), ("full", 6, 100, 2.0), ("full", 4, 10, 1.0)]
FACTORS = (0.5, 2.0)
Measured = dict[int, dict[int, Values]]


def config(graph: str, agents: int, count: int, epsilon: float, seed: int) -> dict[str, Any]:
    return {
        "data": {"name": "digits"},
        "graph": {"kind": graph, "agents": agents},
        "rounds": count,
        "batch": {"size": 64},
        "model": {"name": "softmax"},
        "privacy": {"target_epsilon": epsilon},
        "evaluate_every": 1000,
        "seed": seed,
        "engine": {"workers": 1},
    }


def measure(values: dict[str, Any]) -> Measured:
    """Sums of each sender by each of its neighbours."""
    e = prepare(validate(values, "benchmark"))
    *_, last = rounds(e)
    sums = state_tensors(last.state)["sums"].numpy()
    members = [e.graph.neighbourhood(i).tolist() for i in range(e.graph.agents)]
    return {
        j: {i: sums[i][:, members[i].index(j)] for i in members[j] if i != j}
        for j in range(e.graph.agents)
    }  # fmt: skip


def is_found(measured: Measured, factor: float) -> bool:
    """Whether the first neighbour of agent 1 is named after it has multiplied its products with agent 1's messages."""
    liar = min(measured[1])
    false = measured[1][liar].copy()
    false[:, -1] *= factor
    found = find_disagreements({**measured, 1: {**measured[1], liar: false}})
    return any(each.sender == 1 and liar in each.receivers for each in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    seeds = parser.parse_args().seeds
    print("| graph | agents | rounds | ε | runs | honest named | halved found | doubled found |\n" + "|---" * 8 + "|")
    for graph, agents, count, epsilon in SETTINGS:
        runs = [measure(config(graph, agents, count, epsilon, seed)) for seed in range(seeds)]
        honest = sum(bool(find_disagreements(measured)) for measured in runs)
        halved, doubled = (sum(is_found(measured, factor) for measured in runs) for factor in FACTORS)
        print(f"| {graph} | {agents} | {count} | {epsilon:g} | {seeds} | {honest} | {halved} | {doubled} |", flush=True)


if __name__ == "__main__":
    main()
