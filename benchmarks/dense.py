"""What a full graph's M² messages take: two PDSL rounds of 100 agents, real MNIST CNN 16/32, some agents at a time.

    python benchmarks/dense.py [agents] [MiB]

MiB: of answers held at once, in the place of the program's own limit. 100,000 holds all at once.
"""

import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before another package of this name

from benchmarks.speed.measure import mnist
from pdsl.engine import base
from pdsl.training.trainer import rounds


def main() -> None:
    agents = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    if len(sys.argv) > 2:
        base.MAX_BYTES_IN_FLIGHT = int(sys.argv[2]) * 2**20
    experiment = mnist(
        "full",
        agents,
        rounds=2,
        evaluate_every=1000,
        batch={"size": 32},
        partition={"kind": "iid"},
        shapley={"estimator": "fast", "sample": 20, "permutations": 5, "check_every": 0},
        engine={"workers": 1},
    )
    before, start = memory(), time.perf_counter()
    for _ in rounds(experiment):
        pass
    seconds = time.perf_counter() - start
    print(f"full graph of {agents}, {base.MAX_BYTES_IN_FLIGHT // 2**20} MiB of answers at once:")
    print(f"{before:.2f} GiB before the first round, {memory():.2f} GiB at the peak")
    print(f"{seconds / 2:.0f} s a round, one worker")


def memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
