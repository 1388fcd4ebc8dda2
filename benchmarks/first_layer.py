"""Would it pay to share the first layer between coalitions? Real MNIST, the paper's CNN with 16 and 32 channels.

    python benchmarks/first_layer.py

What the first layer gives is linear in its parameters, so a coalition's is the mean of its members': along a
permutation, one sum and one scaling of what is kept in memory could take the convolution's place. One thread, medians
in turns.
"""

import statistics
import sys
from pathlib import Path
from typing import cast

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before another package of this name

from benchmarks.speed.measure import mnist, seconds
from pdsl.models.network import EVALUATION_BLOCK
from pdsl.utils.inputs import channels_last
from pdsl.utils.workers import Workers

REPEATS = 41


def main() -> None:
    e = mnist("ring", 10)
    images = channels_last(e.validation[0][:EVALUATION_BLOCK])
    with Workers(1), torch.no_grad():
        network = cast(nn.Sequential, e.network.replica().load(e.network.initial_parameters()))
        first = network[0]
        member, total = first(images), first(images)
        ways = (lambda: network(images), lambda: first(images), lambda: total.add_(member) * 0.5)
        rounds = [[seconds(way) for way in ways] for _ in range(REPEATS + 1)][1:]
    whole, convolution, sharing = (statistics.median(times) for times in zip(*rounds, strict=True))
    print(f"the first layer is {convolution / whole:.2f} of a forward pass over {EVALUATION_BLOCK} images")
    print(f"a sum and a scaling in its place take {sharing / convolution:.2f} times as long as it does")


if __name__ == "__main__":
    main()
