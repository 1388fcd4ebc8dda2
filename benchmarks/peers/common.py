"""Shared code of all contestants: data, network, stopwatch and the report to `peers.py`.

It runs in the environment of every contestant, so it needs only torch and numpy. Linux only, because memory is read
from /proc.
"""

import json
import os
import re
import statistics
import time
from collections.abc import Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

AGENTS = 20
B = 250
LEARNING_RATE = 0.1


def parts() -> list[tuple[Tensor, Tensor]]:
    """MNIST images [n, 1, 28, 28] and labels [n] of every agent, as written by `peers.py`."""
    folder = Path(os.environ["PEERS_DATA"])
    x, y = (torch.from_numpy(np.load(folder / f"{name}.npy")) for name in "xy")
    return list(zip(x, y, strict=True))


def cnn() -> nn.Sequential:
    """Two 3×3 convolutions, each with tanh and 2×2 pooling, and one linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


def local_step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """One step of SGD on B images of the agent."""
    chosen = torch.randperm(len(y))[:B]
    model.zero_grad()
    nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= LEARNING_RATE * p.grad


class Stopwatch:
    """Wall time and CPU time between the ends of rounds; the first round is a warm-up and not counted."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def round_ended(self) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))

    def seconds(self) -> tuple[list[float], list[float]]:
        """Wall times and CPU times of all measured rounds."""
        clock, cpu = (list(column) for column in zip(*self.ends, strict=True))
        return _differences(clock), _differences(cpu)


def _differences(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def peak_megabytes() -> float:
    """Peak memory of this process. ru_maxrss is not used, because it starts at the parent's memory at the fork.

    No contestant uses child processes here.
    """
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found
    return int(found[1]) / 1024


def report(package: str, stopwatch: Stopwatch, threads: str, what: str, notes: Sequence[str] = ()) -> None:
    """Print the measurements for `peers.py` on the last line of the output."""
    clock, cpu = stopwatch.seconds()
    row = {
        "version": version(package),
        "torch": torch.__version__,
        "threads": threads,
        "seconds": statistics.median(clock),
        "cpu_seconds": statistics.median(cpu),
        "all_seconds": clock,
        "megabytes": peak_megabytes(),
        "what": what,
        "notes": list(notes),
    }
    print("\n" + json.dumps(row), flush=True)


def participation(steps: float) -> str:
    """Text on the mean number of agents that took a step in a round."""
    return "all agents train" if steps == AGENTS else f"only {steps:.1f} of {AGENTS} agents train in a round"
