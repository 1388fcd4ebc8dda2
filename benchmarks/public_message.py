"""Does the public set's own gradient help as one more message, without noise?

    python benchmarks/public_message.py [cifar10] [--epsilons 2 4] [--weights 0 0.02 0.1] [--seeds 2]

A simulation of the mean model on a full graph: the mean of all agents' clipped gradients with the noise of the mean
message, and with weight w the gradient of the public records that the start was not trained on. Features and start are
those of Tables I and II; the learning rate is the automatic one.
"""

import argparse

import torch
from torch import Tensor

from pdsl.reproduce.cells import Task, totals
from pdsl.reproduce.paper import EPSILONS, Setting
from pdsl.training.experiment import Experiment, prepare
from pdsl.training.learning_rate import noise_per_step

TABLES = {"mnist": "table1", "cifar10": "table2"}
MOMENTUM = 0.5


def experiment(data: str, epsilon: float) -> Experiment:
    table = TABLES[data]
    config = Task().config(Setting(table, EPSILONS[table][1], "pdsl", "full", 10), 0.0, seed=0)
    privacy = config.privacy.model_copy(update={"target_epsilon": epsilon})
    return prepare(config.model_copy(update={"privacy": privacy, "baselines": "none"}))


def gradient(w: Tensor, inputs: Tensor, labels: Tensor, clip: bool) -> Tensor:
    """Mean gradient of softmax regression with weights w [classes, features]; records may be clipped to norm 1."""
    p = (inputs @ w.T).softmax(1)
    p[torch.arange(len(labels)), labels] -= 1
    if clip:
        p = p / (p.norm(dim=1) * inputs.norm(dim=1)).clamp(min=1)[:, None]
    return p.T @ inputs / len(labels)


def accuracy(e: Experiment, weight: float, seed: int) -> float:
    sigma, _ = noise_per_step(e.mechanisms)
    generator = torch.Generator().manual_seed(seed)
    x, held_out = e.data.x, e.validation
    assert isinstance(x, Tensor) and isinstance(held_out[0], Tensor)
    w = e.network.initial_parameters().view(e.data.classes, -1)
    u = torch.zeros_like(w)
    for gamma in e.learning_rates:
        private = gradient(w, x, e.data.y, clip=True) + sigma * torch.randn(w.shape, generator=generator)
        public = gradient(w, held_out[0], held_out[1], clip=False)
        u = MOMENTUM * u + (1 - weight) * private + weight * public
        w = w - gamma * u
    return e.task.score(e.network.outputs(w.flatten(), e.test[0]), e.test[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", nargs="?", default="cifar10", choices=list(TABLES))
    parser.add_argument("--epsilons", type=float, nargs="+")
    parser.add_argument("--weights", type=float, nargs="+", default=[0.0, 0.02, 0.05, 0.1, 0.2])
    parser.add_argument("--seeds", type=int, default=2)
    asked = parser.parse_args()
    print("| ε | weight of the public gradient | accuracy by seed |")
    print("|---|---|---|", flush=True)
    for epsilon in asked.epsilons or totals(TABLES[asked.data])[:2]:
        e = experiment(asked.data, epsilon)
        for weight in asked.weights:
            found = ", ".join(f"{accuracy(e, weight, seed):.4f}" for seed in range(asked.seeds))
            print(f"| {epsilon:g} | {weight:g} | {found} |", flush=True)


if __name__ == "__main__":
    main()
