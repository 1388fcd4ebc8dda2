"""What all contestants share: MNIST, the network, the stopwatch and the answer to `peers.py`.

Runs in every contestant's own environment, so it takes no more than torch and numpy.
"""

import gzip
import json
import os
import resource
import statistics
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

AGENTS = 20
B = 250
LEARNING_RATE = 0.1


def mnist() -> tuple[Tensor, Tensor]:
    """The 60,000 training images [n, 1, 28, 28] and their labels, scaled as pdsl does it."""
    folder = Path(os.environ["PDSL_DATA"]) / "MNIST" / "raw"

    def array(name: str) -> np.ndarray:
        content = gzip.decompress((folder / name).read_bytes())
        start = 4 + 4 * content[3]
        shape = np.frombuffer(content[4:start], dtype=">u4").tolist()
        return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)

    images = torch.from_numpy(array("train-images-idx3-ubyte.gz").astype(np.float32))[:, None]
    labels = torch.from_numpy(array("train-labels-idx1-ubyte.gz").astype(np.int64))
    return images.div_(255).div_(0.3081), labels


def parts() -> list[tuple[Tensor, Tensor]]:
    """An equal share of the images for every agent, at random."""
    x, y = mnist()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    return [(x[part].contiguous(), y[part]) for part in order.chunk(AGENTS)]


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


def declare_torchvision_operators() -> list[str]:
    """Let torchvision be imported where its compiled operators do not fit this torch; notes on it, if so.

    A CPU build of torch beside the torchvision of PyPI, built for CUDA, is such a case. Both peers import torchvision
    at start; neither uses its operators for anything measured here.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError as e:
        if "operator torchvision::" not in str(e):
            raise
    else:
        return []
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return ["its torchvision does not fit this build of torch: imported without its operators, which nothing here uses"]


class Stopwatch:
    """Seconds between the ends of rounds; the first round is the warm-up and is not counted."""

    def __init__(self) -> None:
        self.ends = [time.perf_counter()]

    def round_ended(self) -> None:
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        return [after - before for before, after in zip(self.ends[1:], self.ends[2:], strict=False)]


def peak_megabytes() -> float:
    """The most memory this process has held, plus the most that any one of its ended children has."""
    kilobytes = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return kilobytes / 1024


def answer(
    package: str, seconds: list[float], what: str, threads: int | None = None, notes: Sequence[str] = ()
) -> None:
    """Tell `peers.py`, on the last line of the output, what was measured."""
    row = {
        "version": version(package),
        "torch": torch.__version__,
        "threads": threads or torch.get_num_threads(),
        "seconds": statistics.median(seconds),
        "rounds": len(seconds),
        "megabytes": peak_megabytes(),
        "what": what,
        "notes": list(notes),
    }
    print("\n" + json.dumps(row), flush=True)
