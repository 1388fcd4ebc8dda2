"""Evaluation of the agents' models on the test set."""

import hashlib
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pdsl.gradients.clipping import row_digests
from pdsl.models.network import accuracy
from pdsl.training.experiment import Experiment
from pdsl.utils.workers import Workers


def distances(x: Tensor, mean: Tensor) -> list[float]:
    """Distance of each model from the mean [d]; not finite where the model is not."""
    return [float((row - mean).norm()) for row in x]


@dataclass(frozen=True)
class Evaluation:
    """Test accuracy and loss of the agents' models and of their mean."""

    accuracies: list[float]
    losses: list[float]
    accuracy_of_mean: float
    mean: Tensor = field(repr=False)  # [d] the mean model
    digests: list[str] = field(repr=False)  # of each agent's model

    @property
    def models_sha256(self) -> str:
        """Hash of all agents' models: of their digests, in agent order."""
        return hashlib.sha256(" ".join(self.digests).encode()).hexdigest()

    @property
    def accuracy(self) -> float:
        return sum(self.accuracies) / len(self.accuracies)

    @property
    def loss(self) -> float | None:
        """Mean over the agents; None if it is not finite."""
        return finite(sum(self.losses) / len(self.losses))

    def as_row(self) -> dict[str, float | None]:
        """The part of a round's record that is measured on the test set."""
        return {
            "accuracy": self.accuracy,
            "accuracy_min": min(self.accuracies),
            "accuracy_max": max(self.accuracies),
            "accuracy_of_mean": self.accuracy_of_mean,
            "loss": self.loss,
            "loss_min": finite(min(self.losses)),
            "loss_max": finite(max(self.losses)),
        }


def evaluate(e: Experiment, x: Tensor, mean: Tensor, workers: Workers) -> Evaluation:
    """Evaluate every agent's model x_i and the mean model [d] on the test set; equal models only once."""
    inputs, labels = (tensor.to(x.device) for tensor in e.test)
    everyone = torch.cat([x, mean.to(x.dtype)[None]])
    digests = row_digests(everyone)
    distinct = {digest: row for row, digest in enumerate(digests)}

    def one(row: int) -> tuple[float, float]:
        logits = e.network.logits(everyone[row], inputs)
        return accuracy(logits, labels), cross_entropy(logits.double(), labels).item()

    of = dict(zip(distinct, workers.map(one, distinct.values()), strict=True))
    results = e.engine.gather([(*of[digest], digest.hex()) for digest in digests[:-1]])
    accuracies, losses, names = (list(column) for column in zip(*results, strict=True))
    return Evaluation(accuracies, losses, of[digests[-1]][0], everyone[-1], names)


def final_evaluation(e: Experiment, x: Tensor) -> Evaluation:
    """`evaluate` after the last round."""
    with Workers(e.config.engine.workers) as workers:
        return evaluate(e, x, e.engine.mean(x), workers)


def finite(value: float) -> float | None:
    """The value, or None (null in JSON) if it is infinite or NaN."""
    return value if math.isfinite(value) else None
