"""pdsl: D-PSGD on a ring, without noise. python ours.py ROUNDS CLIPPING"""

import os
import sys

from common import AGENTS, LEARNING_RATE, B, Stopwatch, answer

from pdsl.config import load
from pdsl.train import prepare, rounds


def main(count: int, clipping: str) -> None:
    threads = os.environ.get("OMP_NUM_THREADS", "")
    settings = {
        "rounds": count + 1,
        "evaluate_every": 10**9,
        "data.name": "mnist",
        "partition.kind": "iid",
        "graph.kind": "ring",
        "graph.agents": AGENTS,
        "model.name": "mnist-cnn",
        "batch.size": B,
        "batch.sampler": "fixed",
        "algorithm.name": "d-psgd",
        "algorithm.learning_rate": LEARNING_RATE,
        "privacy.mode": "none",
        "privacy.clipping": clipping,
        "engine.workers": threads,  # empty: as many as pdsl takes by itself
    }
    experiment = prepare(load(None, [f"{name}={value}" for name, value in settings.items()]))
    stopwatch = Stopwatch()
    for _ in rounds(experiment):
        stopwatch.round_ended()
    clipped = "each image's gradient" if clipping == "per-sample" else "the batch's gradient"
    what = f"D-PSGD on a ring, {B} of {len(experiment.parts[0]):,} images each, {clipped} clipped"
    answer("pdsl", stopwatch.seconds, what, int(threads or os.cpu_count() or 1))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
