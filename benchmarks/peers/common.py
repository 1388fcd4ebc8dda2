"""What all contestants share: their data, the network, the stopwatch and the answer to `peers.py`.

Runs in every contestant's own environment, so it takes no more than torch and numpy. Linux only: memory is in /proc.
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
    """The MNIST images [n, 1, 28, 28] and labels [n] of every agent, as `peers.py` has dealt them."""
    folder = Path(os.environ["PEERS_DATA"])
    x, y = (torch.from_numpy(np.load(folder / f"{name}.npy")) for name in "xy")
    return list(zip(x, y, strict=True))


def cnn() -> nn.Sequential:
    """The network as one writes it down: two 3×3 convolutions, each with tanh and 2×2 pooling, and one linear layer."""
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
    """One step of SGD on B of the agent's images."""
    chosen = torch.randperm(len(y))[:B]
    model.zero_grad()
    nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= LEARNING_RATE * p.grad


class Stopwatch:
    """Time between the ends of rounds, by the clock and of the CPU; the first round is the warm-up and not counted."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def round_ended(self) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))

    def seconds(self) -> tuple[list[float], list[float]]:
        """Of every round that counts: (by the clock, of the CPU, which waiting does not use)."""
        clock, cpu = (list(column) for column in zip(*self.ends, strict=True))
        return _differences(clock), _differences(cpu)


def _differences(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def peak_megabytes() -> float:
    """The most memory this process has held. Not ru_maxrss, which starts at what the parent held when it forked.

    No contestant, as it is run here, works in child processes.
    """
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found
    return int(found[1]) / 1024


def answer(package: str, stopwatch: Stopwatch, threads: str, what: str, notes: Sequence[str] = ()) -> None:
    """Tell `peers.py`, on the last line of the output, what was measured."""
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


def who_trained(steps: float) -> str:
    """In words: the agents that took a step, on average over rounds."""
    return "all agents train" if steps == AGENTS else f"only {steps:.1f} of {AGENTS} agents train in a round"
