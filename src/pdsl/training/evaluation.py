"""Evaluation of the agents' models on the test set."""

import hashlib
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pdsl.gradients.clipping import row_digests
from pdsl.training.experiment import Experiment
from pdsl.utils.types import JsonDict
from pdsl.utils.workers import Workers


def distances(x: Tensor, mean: Tensor) -> list[float]:
    """Distance of each model from the mean [d]; not finite where the model is not."""
    return [float((row - mean).norm()) for row in x]


@dataclass(frozen=True)
class Evaluation:
    """Headline metric and loss of the agents' models and of their mean, on the test set."""

    metric: str  # name of the headline metric
    scores: list[float]  # of each agent's model
    losses: list[float]
    score_of_mean: float
    own: dict[str, float]  # the user's metric by name: mean over the agents
    mean: Tensor = field(repr=False)  # [d] the mean model
    digests: list[str] = field(repr=False)  # of each agent's model

    @property
    def models_sha256(self) -> str:
        """Hash of all agents' models: of their digests, in agent order."""
        return hashlib.sha256(" ".join(self.digests).encode()).hexdigest()

    @property
    def score(self) -> float:
        """Mean over the agents."""
        return sum(self.scores) / len(self.scores)

    @property
    def loss(self) -> float | None:
        """Mean over the agents; None if it is not finite."""
        return finite(sum(self.losses) / len(self.losses))

    def as_row(self) -> dict[str, object]:
        """The part of a round's record that is measured on the test set."""
        m = self.metric
        row: dict[str, object] = {
            m: finite(self.score),
            f"{m}_min": finite(min(self.scores)),
            f"{m}_max": finite(max(self.scores)),
            f"{m}_of_mean": finite(self.score_of_mean),
            "loss": self.loss,
            "loss_min": finite(min(self.losses)),
            "loss_max": finite(max(self.losses)),
            "per_agent": [finite(score) for score in self.scores],
        }
        return row | {name: finite(value) for name, value in self.own.items()}


def evaluate(e: Experiment, x: Tensor, mean: Tensor, workers: Workers) -> Evaluation:
    """Evaluate every agent's model x_i and the mean model [d] on the test set; equal models only once."""
    inputs, targets = e.test[0].to(x.device), e.test[1].to(x.device)
    everyone = torch.cat([x, mean.to(x.dtype)[None]])
    digests = row_digests(everyone)
    distinct = {digest: row for row, digest in enumerate(digests)}
    task = e.network.task

    def one(row: int) -> tuple[float, float, dict[str, float]]:
        outputs = e.network.outputs(everyone[row], inputs)
        loss = task.losses(outputs.double(), targets).mean().item()
        return task.score(outputs, targets), loss, task.extra_metrics(outputs, targets)

    of = dict(zip(distinct, workers.map(one, distinct.values()), strict=True))
    results = e.engine.gather([(*of[digest], digest.hex()) for digest in digests[:-1]])
    scores, losses, own, names = (list(column) for column in zip(*results, strict=True))
    means = {name: sum(values[name] for values in own) / len(own) for name in own[0]}
    return Evaluation(task.metric, scores, losses, of[digests[-1]][0], means, everyone[-1], names)


def measure_model(e: Experiment, x: Tensor) -> JsonDict:
    """All metrics of a model x [d] on the test set; recalls by the name of their class or label."""
    inputs, targets = e.test
    outputs = e.network.outputs(x, inputs.to(x.device)).cpu()
    found: JsonDict = {**e.task.metrics(outputs, targets), **e.task.extra_metrics(outputs, targets)}
    if "recall" in found:
        found["recall"] = dict(zip(e.class_names, found["recall"], strict=True))
    return found


def final_evaluation(e: Experiment, x: Tensor) -> Evaluation:
    """`evaluate` after the last round."""
    with Workers(e.config.engine.workers) as workers:
        return evaluate(e, x, e.engine.mean(x), workers)


def finite(value: float) -> float | None:
    """The value, or None (null in JSON) if it is infinite or NaN."""
    return value if math.isfinite(value) else None
