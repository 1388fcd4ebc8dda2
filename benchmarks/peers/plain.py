"""Plain torch: D-PSGD on a ring in a loop over modules. python plain.py ROUNDS"""

import copy
import sys

import torch
from common import AGENTS, Stopwatch, cnn, local_step, parts, report
from torch import nn


@torch.no_grad()
def gossip(models: list[nn.Sequential]) -> None:
    """Replace every model by the mean of itself and its two neighbours."""
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
    report("torch", stopwatch, str(torch.get_num_threads()), "D-PSGD on a ring, agents in sequence")


if __name__ == "__main__":
    main(int(sys.argv[1]))
