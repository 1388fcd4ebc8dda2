"""What a round costs when Algorithms 1 and 2 are carried out as they stand, in plain torch.

Every coalition is valued whenever it comes up, by its own model on all of Q in one batch; every pair of agents has its
gradient computed. One evaluation and one gradient are timed; the round's time is their count times that, and nothing
else is charged to it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pdsl.topology import Graph


def plain_mnist_cnn() -> nn.Module:
    """The paper's network in torch's own words and layout: `mnist_cnn`, but for the order of the last features."""
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


@dataclass(frozen=True)
class LiteralRound:
    """How often a literal round evaluates a model on Q, and how many gradients it takes."""

    evaluations: int
    gradients: int

    @classmethod
    def monte_carlo(cls, graph: Graph, R: int) -> "LiteralRound":
        """Algorithm 2: R permutations of each neighbourhood, one evaluation per arrival."""
        pairs = int(graph.degrees.sum())
        return cls(evaluations=R * pairs, gradients=pairs)

    @classmethod
    def exact(cls, graph: Graph) -> "LiteralRound":
        """Equation (18): for each member, v with and without it, for every coalition of the others."""
        evaluations = sum(int(k) * 2 ** (int(k) - 1) * 2 for k in graph.degrees)
        return cls(evaluations, gradients=int(graph.degrees.sum()))

    def seconds(self, evaluation: float, gradient: float) -> float:
        return self.evaluations * evaluation + self.gradients * gradient


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, inputs: Tensor, labels: Tensor) -> float:
    """v of a coalition whose model has the parameters x."""
    nn.utils.vector_to_parameters(x, model.parameters())
    return float((model(inputs).argmax(-1) == labels).double().mean())


def gradient(model: nn.Module, x: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
    """One cross-gradient, the batch as a whole."""
    nn.utils.vector_to_parameters(x, model.parameters())
    loss = cross_entropy(model(inputs), labels)
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])
