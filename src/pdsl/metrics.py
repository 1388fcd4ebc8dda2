"""Metrics of predictions: of classes, of labels and of numbers."""

import math
from collections.abc import Mapping
from typing import TypedDict

import torch
from torch import Tensor

RESIDUAL_BINS = 21  # bins of the histogram of residuals

# Baselines of a run, in words
BASELINES = {
    "public": "the public set alone",
    "alone": "each agent alone, without privacy",
    "alone_private": "each agent alone, with the same ε",
    "pooled": "pooled data without privacy",
    "central": "a trusted server with the same ε",
}


class Residuals(TypedDict):
    """Histogram of prediction minus target."""

    bins: list[float]  # edges
    counts: list[int]


class Metrics(TypedDict, total=False):
    """Metrics of one model on the test set. A value is None where it is not defined, for example without positives."""

    accuracy: float
    balanced_accuracy: float | None  # mean recall over classes
    macro_f1: float | None  # mean F1 over classes
    auc: float | None  # area under the ROC curve; with several classes the mean of one against the rest
    recall: list[float | None]  # by class or label
    confusion: list[list[int]]  # rows: true class; columns: predicted class
    mae: float
    rmse: float
    r2: float | None
    residuals: Residuals


def accuracy(predictions: Tensor, targets: Tensor) -> float:
    """Fraction of correct predictions."""
    return (predictions == targets).double().mean().item()


def confusion_matrix(predictions: Tensor, targets: Tensor, classes: int) -> Tensor:  # [classes, classes]
    """Number of records by true class (row) and predicted class (column)."""
    cells = targets.long() * classes + predictions.long()
    return torch.bincount(cells, minlength=classes * classes).view(classes, classes)


def of_classes(outputs: Tensor, targets: Tensor, classes: int) -> Metrics:
    """Metrics of a classifier with scores [n, at least classes]."""
    outputs, targets = outputs[:, :classes].detach().cpu(), targets.cpu()
    confusion = confusion_matrix(outputs.argmax(1), targets, classes)
    recalls, f1 = recall_and_f1(confusion)
    scores = outputs.double().softmax(1)
    aucs = [auc(scores[:, c], targets == c) for c in ([1] if classes == 2 else range(classes))]
    return {
        "accuracy": accuracy(outputs.argmax(1), targets),
        "balanced_accuracy": _mean(recalls),
        "macro_f1": _mean(f1),
        "auc": _mean(aucs),
        "recall": recalls,
        "confusion": confusion.tolist(),
    }


def of_labels(outputs: Tensor, targets: Tensor) -> Metrics:
    """Metrics of several yes-or-no labels with logits [n, labels]; the mean over labels."""
    outputs, targets = outputs.detach().cpu(), targets.cpu()
    predicted = (outputs > 0).long()
    per_label = [
        recall_and_f1(confusion_matrix(p, y, 2)) for p, y in zip(predicted.unbind(1), targets.unbind(1), strict=True)
    ]
    return {
        "accuracy": accuracy(predicted, targets),
        "macro_f1": _mean([f1[1] for _, f1 in per_label]),
        "auc": _mean([auc(s, y > 0) for s, y in zip(outputs.unbind(1), targets.unbind(1), strict=True)]),
        "recall": [recalls[1] for recalls, _ in per_label],
    }


def of_numbers(predictions: Tensor, targets: Tensor) -> Metrics:
    """Metrics of regression."""
    errors = (predictions.double() - targets.double()).cpu().reshape(len(targets), -1)
    variance = (targets.double().cpu().reshape(len(targets), -1)).var(0, correction=0).mean().item()
    mean_square = errors.square().mean().item()
    if not math.isfinite(mean_square):
        return {"mae": math.inf, "rmse": math.inf, "r2": None}
    return {
        "mae": errors.abs().mean().item(),
        "rmse": math.sqrt(mean_square),
        "r2": 1 - mean_square / variance if variance > 0 else None,
        "residuals": _histogram(errors.reshape(-1)),
    }


def rmse(predictions: Tensor, targets: Tensor) -> float:
    """Root mean squared error."""
    return math.sqrt((predictions.double() - targets.double()).square().mean().item())


def recall_and_f1(confusion: Tensor) -> tuple[list[float | None], list[float | None]]:
    """Recall and F1 of each class; None for a class without records."""
    hits, true, predicted = confusion.diagonal().tolist(), confusion.sum(1).tolist(), confusion.sum(0).tolist()
    recalls = [hit / n if n else None for hit, n in zip(hits, true, strict=True)]
    f1 = [2 * hit / (n + m) if n else None for hit, n, m in zip(hits, true, predicted, strict=True)]
    return recalls, f1


def auc(scores: Tensor, positive: Tensor) -> float | None:
    """Area under the ROC curve: the chance that a positive record has a higher score, ties counted half.

    None without positive or without negative records.
    """
    n_positive = int(positive.sum())
    n_negative = len(positive) - n_positive
    if n_positive == 0 or n_negative == 0 or not bool(torch.isfinite(scores).all()):
        return None
    _, group, sizes = torch.unique(scores, return_inverse=True, return_counts=True)
    last = sizes.cumsum(0)
    ranks = (last - (sizes - 1) / 2)[group].double()  # mean rank of equal scores, from 1
    total = float(ranks[positive].sum())
    return (total - n_positive * (n_positive + 1) / 2) / (n_positive * n_negative)


def scalars(metrics: Mapping[str, object]) -> dict[str, float]:
    """The metrics that are single numbers."""
    return {name: value for name, value in metrics.items() if isinstance(value, float)}


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _histogram(errors: Tensor) -> Residuals:
    reach = max(float(errors.abs().max()), 1e-12)
    counts = torch.histc(errors, RESIDUAL_BINS, -reach, reach)
    edges = torch.linspace(-reach, reach, RESIDUAL_BINS + 1, dtype=torch.float64)
    return {"bins": edges.tolist(), "counts": counts.long().tolist()}
