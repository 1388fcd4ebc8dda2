"""pdsl: D-PSGD on a ring, without noise. python ours.py ROUNDS CLIPPING [WORKERS]"""

import os
import sys

from common import AGENTS, LEARNING_RATE, B, Stopwatch, report

from pdsl.config import load
from pdsl.training.experiment import prepare
from pdsl.training.trainer import rounds


def main(count: int, clipping: str, workers: str = "") -> None:
    settings = {
        "rounds": count + 1,
        "evaluate_every": 10**9,
        "data.name": "mnist",
        "partition.kind": "iid",
        "graph.kind": "ring",
        "graph.agents": AGENTS,
        "model.name": "mnist-cnn",
        "model.norm": "none",
        "batch.size": B,
        "batch.sampler": "fixed",
        "algorithm.name": "d-psgd",
        "algorithm.learning_rate": LEARNING_RATE,
        "privacy.mode": "none",
        "privacy.clipping": clipping,
        "engine.workers": workers,  # empty: the default
    }
    experiment = prepare(load(None, [f"{name}={value}" for name, value in settings.items()]))
    stopwatch = Stopwatch()
    for _ in rounds(experiment):
        stopwatch.round_ended()
    clipped = "each image's gradient clipped" if clipping == "per-sample" else "each batch's gradient clipped"
    report("pdsl", stopwatch, f"{workers or os.cpu_count()}×1", f"D-PSGD on a ring, {clipped}")


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
