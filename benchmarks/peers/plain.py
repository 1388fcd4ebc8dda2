"""Plain torch: D-PSGD on a ring as a loop over 20 modules. python plain.py ROUNDS"""

import copy
import sys

import torch
from common import AGENTS, LEARNING_RATE, B, Stopwatch, answer, cnn, parts
from torch import Tensor, nn


def local_step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """One step of SGD on B of the agent's images."""
    chosen = torch.randperm(len(y))[:B]
    model.zero_grad()
    nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= LEARNING_RATE * p.grad


@torch.no_grad()
def gossip(models: list[nn.Module]) -> None:
    """Every model becomes the mean of itself and its two neighbours."""
    x = torch.stack([nn.utils.parameters_to_vector(model.parameters()) for model in models])
    mixed = (x + x.roll(1, dims=0) + x.roll(-1, dims=0)) / 3
    for model, row in zip(models, mixed, strict=True):
        nn.utils.vector_to_parameters(row.clone(), model.parameters())


def main(rounds: int) -> None:
    data = parts()
    first = cnn()
    models = [copy.deepcopy(first) for _ in range(AGENTS)]
    stopwatch = Stopwatch()
    for _ in range(rounds + 1):
        for model, (x, y) in zip(models, data, strict=True):
            local_step(model, x, y)
        gossip(models)
        stopwatch.round_ended()
    answer("torch", stopwatch.seconds, f"D-PSGD on a ring, {B} of {len(data[0][1]):,} images each")


if __name__ == "__main__":
    main(int(sys.argv[1]))
