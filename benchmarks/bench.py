"""What speed is claimed, as ratios measured in one run, interleaved, median of several.

make bench
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from pdsl.gradients import batch_clipped, choose_per_sample, per_sample_clipped
from pdsl.models import Network, mnist_cnn
from pdsl.randomness import SecretStreams, Streams
from pdsl.settings import ModelSettings

REPEATS = 9
B = 250


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def ratio(ours: Callable[[], object], other: Callable[[], object]) -> tuple[float, float, float]:
    """Median seconds of both, taken in turns, and the median of ours over the other's."""
    ours(), other()
    pairs = [(seconds(ours), seconds(other)) for _ in range(REPEATS)]
    a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
    return a, b, statistics.median(x / y for x, y in pairs)


def clipping() -> tuple[float, float, float]:
    network = Network(mnist_cnn(torch.Size((1, 28, 28)), 10, ModelSettings()))
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(B, 1, 28, 28, generator=generator).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (B,), generator=generator)
    x = network.start()
    way = choose_per_sample(network, inputs, labels)
    return ratio(
        lambda: per_sample_clipped(network, x, inputs, labels, 1.0, float(B), way),
        lambda: batch_clipped(network, x, inputs, labels, 1.0, float(B)),
    )


def importing() -> tuple[float, float, float]:
    def imported(name: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, "-c", f"import {name}"], check=True)

    return ratio(imported("pdsl"), imported("torch"))


def noise() -> tuple[float, float, float]:
    d = 20_490
    secret, seeded = SecretStreams(0), Streams(0)
    return ratio(lambda: secret.normals(d, "noise", 0, 1, 2), lambda: seeded.normals(d, "noise", 0, 1, 2))


def main() -> None:
    torch.set_num_threads(1)
    table = Table("what", "ours", "compared with", "ratio", header_style="bold")
    for what, other, measure in (
        (f"gradient of {B} MNIST images, each clipped", "clipped as a batch", clipping),
        ("import pdsl", "import torch", importing),
        ("noise of one message, system entropy", "seeded", noise),
    ):
        a, b, r = measure()
        table.add_row(what, f"{a * 1e3:,.1f} ms", f"{other}: {b * 1e3:,.1f} ms", f"{r:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
