"""Tasks: the meaning of a model's outputs and of the targets. A task has a loss per record, metrics and predictions.

| task          | targets                      | outputs per record          | headline metric |
|---------------|------------------------------|-----------------------------|-----------------|
| `MultiClass`  | class numbers [n]            | a score per class           | accuracy        |
| `Binary`      | 0 or 1 [n]                   | one logit                   | accuracy        |
| `MultiLabel`  | 0 or 1 [n, labels]           | one logit per label         | accuracy        |
| `Regression`  | numbers [n] or [n, targets]  | one number per target       | rmse            |
| `CustomTask`  | anything                     | anything                    | loss            |

A loss must depend on one record only, because clipping bounds the effect of one record's loss. The built-in losses do
so by construction. A loss from a user, with any task, is given one record at a time (`Task.losses`).
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, huber_loss, mse_loss

from pdsl import metrics
from pdsl.metrics import Metrics
from pdsl.settings import TaskSettings
from pdsl.utils.errors import PdslError
from pdsl.utils.imports import import_object

MAX_LOSS = 20.0  # loss of one record in Shapley values; bounds the effect of a message that ruins the model
VMAP_LOCK = threading.RLock()  # torch.func's transforms are not thread-safe

Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs [n, ...], targets [n, ...]) → [n]
Metric = Callable[[Tensor, Tensor], float]  # (outputs [n, ...], targets [n, ...]) → number


@dataclass(frozen=True)
class Task:
    """Base of all tasks. `outputs` is the number of outputs per record that a built-in model needs."""

    kind: ClassVar[str]
    metric: ClassVar[str]  # name of the headline metric
    higher_is_better: ClassVar[bool] = True
    has_classes: ClassVar[bool] = True
    outputs: int = 0
    custom_metric: Metric | None = None
    loss: Loss | None = None  # the user's loss, instead of the task's own

    @property
    def max_loss(self) -> float:
        """Cap of a record's loss in Shapley values."""
        return MAX_LOSS

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Loss of each record [n]; record r's depends on outputs[r] and targets[r] only.

        A user's loss is given one record at a time (by vmap), so it cannot mix records.
        """
        if self.loss is None:
            return self.own_losses(outputs, targets)
        loss = self.loss
        if len(outputs) == 1:
            return loss(outputs, targets).reshape(1)
        with VMAP_LOCK:
            return torch.vmap(lambda output, target: loss(output[None], target[None]).reshape(()))(outputs, targets)

    def own_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The task's own loss of each record [n]."""
        raise NotImplementedError

    def centre(self, outputs: Tensor) -> Tensor:
        """Outputs of m models [m, n, ...] without their mean over the records, if the targets are classes."""
        return outputs - outputs.mean(1, keepdim=True) if self.has_classes and self.loss is None else outputs

    def score(self, outputs: Tensor, targets: Tensor) -> float:
        """The headline metric."""
        raise NotImplementedError

    def metrics(self, outputs: Tensor, targets: Tensor) -> Metrics:
        """All metrics by name."""
        raise NotImplementedError

    def predict(self, outputs: Tensor) -> Tensor:
        """Predictions in the units of the targets."""
        raise NotImplementedError

    def flip(self, targets: Tensor) -> Tensor:
        """Targets of a label-flipping attacker."""
        raise PdslError(f"attack.label_flip: targets of a {self.kind} task cannot be flipped; leave it out")

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise PdslError unless outputs of this shape fit the targets."""
        raise NotImplementedError

    def extra_metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """The user's metric by its name; empty without one."""
        if self.custom_metric is None:
            return {}
        name = getattr(self.custom_metric, "__name__", "metric")
        try:
            return {name: float(self.custom_metric(outputs, targets))}
        except (TypeError, ValueError, RuntimeError) as e:
            raise PdslError(f"the metric {name} failed: {e}; it gets (outputs, targets) and returns a number") from e


@dataclass(frozen=True)
class MultiClass(Task):
    """Classification into two or more classes with cross-entropy."""

    kind: ClassVar[str] = "multiclass"
    metric: ClassVar[str] = "accuracy"
    weights: Tensor | None = None  # [classes], at most 1
    label_smoothing: float = 0.0

    def own_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        weights = None
        if self.weights is not None:
            weights = self.weights.to(outputs)
            if outputs.shape[1] > len(weights):  # outputs beyond the classes never are a target
                weights = torch.nn.functional.pad(weights, (0, outputs.shape[1] - len(weights)), value=1.0)
        elif not torch.is_grad_enabled() and not self.label_smoothing and targets.ndim == 1:
            return outputs.logsumexp(1) - outputs.gather(1, targets[:, None])[:, 0]  # the same, five times faster
        return cross_entropy(outputs, targets, weights, reduction="none", label_smoothing=self.label_smoothing)

    def score(self, outputs: Tensor, targets: Tensor) -> float:
        return metrics.accuracy(outputs.argmax(-1), targets)

    def metrics(self, outputs: Tensor, targets: Tensor) -> Metrics:
        return metrics.of_classes(outputs, targets, self.outputs)

    def predict(self, outputs: Tensor) -> Tensor:
        return outputs[:, : self.outputs or None].argmax(-1)

    def flip(self, targets: Tensor) -> Tensor:
        """Reverse the order of labels: of ten classes, 0 becomes 9 and 1 becomes 8."""
        return self.outputs - 1 - targets

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        if outputs.ndim != 2 or outputs.shape[1] < self.outputs:
            raise PdslError(
                f"the model returns an output of shape {tuple(outputs.shape[1:])} per record; {self.outputs} classes"
                f" need a vector of at least {self.outputs} scores"
                + ("; for one logit set task=binary" if self.outputs == 2 else "")
            )


@dataclass(frozen=True)
class Binary(Task):
    """Two classes, one logit, binary cross-entropy."""

    kind: ClassVar[str] = "binary"
    metric: ClassVar[str] = "accuracy"
    outputs: int = 1
    weights: Tensor | None = None  # [2], of classes 0 and 1, at most 1
    label_smoothing: float = 0.0

    def own_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        y = targets.to(outputs.dtype)
        smooth = y * (1 - self.label_smoothing) + self.label_smoothing / 2
        losses = binary_cross_entropy_with_logits(outputs.reshape(len(y)), smooth, reduction="none")
        return losses if self.weights is None else losses * self.weights.to(outputs)[targets.long()]

    def score(self, outputs: Tensor, targets: Tensor) -> float:
        return metrics.accuracy(self.predict(outputs), targets)

    def metrics(self, outputs: Tensor, targets: Tensor) -> Metrics:
        logit = outputs.reshape(-1, 1)
        return metrics.of_classes(torch.cat([torch.zeros_like(logit), logit], dim=1), targets, 2)

    def predict(self, outputs: Tensor) -> Tensor:
        return (outputs.reshape(len(outputs)) > 0).long()

    def flip(self, targets: Tensor) -> Tensor:
        return 1 - targets

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        if outputs[0].numel() != 1:
            raise PdslError(
                f"the model returns an output of shape {tuple(outputs.shape[1:])} per record; a binary task needs one"
                " logit per record: end with nn.Linear(…, 1), or set task=multiclass"
            )


@dataclass(frozen=True)
class MultiLabel(Task):
    """Several yes-or-no labels per record, one logit each, binary cross-entropy averaged over labels."""

    kind: ClassVar[str] = "multilabel"
    metric: ClassVar[str] = "accuracy"
    weights: Tensor | None = None  # [labels], weight of a positive label relative to a negative one
    label_smoothing: float = 0.0

    def own_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        y = targets.to(outputs.dtype)
        smooth = y * (1 - self.label_smoothing) + self.label_smoothing / 2
        losses = binary_cross_entropy_with_logits(outputs, smooth, reduction="none")
        if self.weights is not None:
            w = self.weights.to(outputs)
            losses = losses * torch.where(targets > 0, w, 1.0) / w.clamp(min=1.0)  # the larger weight is 1
        return losses.mean(-1)

    def score(self, outputs: Tensor, targets: Tensor) -> float:
        return metrics.accuracy(self.predict(outputs), targets)

    def metrics(self, outputs: Tensor, targets: Tensor) -> Metrics:
        return metrics.of_labels(outputs, targets)

    def predict(self, outputs: Tensor) -> Tensor:
        return (outputs > 0).long()

    def flip(self, targets: Tensor) -> Tensor:
        return 1 - targets

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        if outputs.shape[1:] != targets.shape[1:]:
            raise PdslError(
                f"the model returns an output of shape {tuple(outputs.shape[1:])} per record; {targets.shape[1]} labels"
                f" need {targets.shape[1]} logits"
            )


@dataclass(frozen=True)
class Regression(Task):
    """Numbers with squared error, or Huber's loss, in units of `scale` around `mean`.

    Outputs of the model are standardised: prediction = mean + scale · output. Both constants come from the public set,
    so they cost no privacy.
    """

    kind: ClassVar[str] = "regression"
    metric: ClassVar[str] = "rmse"
    higher_is_better: ClassVar[bool] = False
    has_classes: ClassVar[bool] = False
    outputs: int = 1
    mean: Tensor | None = None  # [targets]
    scale: Tensor | None = None  # [targets]
    huber: float | None = None  # threshold between squared and absolute error, in units of scale

    def own_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        wanted = self._standardise(targets).to(outputs.dtype)
        given = outputs.reshape(wanted.shape)
        each = (
            mse_loss(given, wanted, reduction="none")
            if self.huber is None
            else huber_loss(given, wanted, reduction="none", delta=self.huber)
        )
        return each.mean(-1)

    def _standardise(self, targets: Tensor) -> Tensor:  # [n, targets]
        rows = targets.reshape(len(targets), -1)
        return rows if self.mean is None or self.scale is None else (rows - self.mean.to(rows)) / self.scale.to(rows)

    def score(self, outputs: Tensor, targets: Tensor) -> float:
        return metrics.rmse(self.predict(outputs).reshape(targets.shape), targets)

    def metrics(self, outputs: Tensor, targets: Tensor) -> Metrics:
        return metrics.of_numbers(self.predict(outputs).reshape(targets.shape), targets)

    def predict(self, outputs: Tensor) -> Tensor:
        rows = outputs.reshape(len(outputs), -1)
        if self.mean is not None and self.scale is not None:
            rows = self.mean.to(rows) + self.scale.to(rows) * rows
        return rows[:, 0] if rows.shape[1] == 1 else rows

    def flip(self, targets: Tensor) -> Tensor:
        """Reflect targets at the public mean."""
        mean = 0 if self.mean is None else self.mean.to(targets)
        return (2 * mean - targets.reshape(len(targets), -1)).reshape(targets.shape)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        wanted = targets[0].numel()
        if outputs[0].numel() != wanted:
            raise PdslError(
                f"the model returns an output of shape {tuple(outputs.shape[1:])} per record; regression needs"
                f" {wanted} number{'s' if wanted > 1 else ''} per record"
                + ("; for classes give whole numbers as integers, or set task=multiclass" if wanted == 1 else "")
            )


@dataclass(frozen=True)
class CustomTask(Task):
    """Outputs and targets of any meaning, with a loss from the user: `loss(outputs, targets) -> [n]`."""

    kind: ClassVar[str] = "custom"
    metric: ClassVar[str] = "loss"
    higher_is_better: ClassVar[bool] = False
    has_classes: ClassVar[bool] = False

    def score(self, outputs: Tensor, targets: Tensor) -> float:
        return float(self.losses(outputs, targets).double().mean())

    def metrics(self, outputs: Tensor, targets: Tensor) -> Metrics:
        return {}

    def predict(self, outputs: Tensor) -> Tensor:
        return outputs

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Do nothing: any shapes fit."""


def infer_kind(y: Tensor, model_outputs: int | None = None) -> str:
    """Kind of the task from the type and shape of the targets, which are public: numbers of records are not looked at.

    Floats are regression targets. Integers are classes, or labels if there are several per record. Two classes and a
    model with one output make a binary task.
    """
    if y.is_floating_point():
        return "regression"
    if y.ndim == 2:
        return "multilabel"
    return "binary" if model_outputs == 1 else "multiclass"


def build_task(
    settings: TaskSettings,
    kind: str,
    classes: int,
    public: Tensor,  # targets of the public set Q
    class_names: Sequence[str] = (),
    loss: Loss | None = None,
    metric: Metric | None = None,
) -> Task:
    """The task of the settings. Weights and scales come from the settings or from the public set."""
    metric = metric or cast(Metric | None, _import_function(settings.metric, "task.metric"))
    loss = loss or _import_function(settings.loss, "task.loss")
    if kind == "custom":
        return CustomTask(loss=loss, custom_metric=metric)
    if kind == "regression":
        task = Regression(outputs=public[0].numel(), huber=settings.huber, custom_metric=metric, loss=loss)
        if settings.standardise_targets and loss is None:
            rows = public.reshape(len(public), -1).double()
            scale = rows.std(0, correction=0)
            task = replace(task, mean=rows.mean(0).float(), scale=torch.where(scale > 0, scale, 1.0).float())
        return task
    weights = _class_weights(settings, kind, classes, public, class_names)
    smoothing = settings.label_smoothing
    if kind == "binary":
        if classes > 2:
            raise PdslError(f"task.kind=binary: the targets have {classes} classes; set task.kind=multiclass")
        return Binary(weights=weights, label_smoothing=smoothing, custom_metric=metric, loss=loss)
    if kind == "multilabel":
        return MultiLabel(outputs=classes, weights=weights, label_smoothing=smoothing, custom_metric=metric, loss=loss)
    return MultiClass(outputs=classes, weights=weights, label_smoothing=smoothing, custom_metric=metric, loss=loss)


def _import_function(path: str | None, setting: str) -> Callable[..., Tensor] | None:
    if path is None:
        return None
    if path == "python":
        raise PdslError(f"{setting} was a function given in Python, which a config cannot name; use pdsl.train")
    function = import_object(path, setting)
    if not callable(function):
        raise PdslError(f"{setting}={path}: it is not callable; give a function of (outputs, targets)")
    return function


def _class_weights(
    settings: TaskSettings, kind: str, classes: int, public: Tensor, names: Sequence[str]
) -> Tensor | None:
    """Weights of the classes, the largest 1: as given, or inversely proportional to their numbers in the public set.

    Only ratios matter, and clipping would undo weights above 1. For labels, the weight of a positive label.
    """
    given: str | Sequence[float] | Mapping[str, float] | None = settings.class_weights
    if given is None:
        return None
    count = 2 if kind == "binary" else classes
    if isinstance(given, str):  # public
        if kind == "multilabel":
            positive = public.double().mean(0).clamp(min=1 / len(public))
            return ((1 - positive) / positive).clamp(max=100.0).float()
        counts = torch.bincount(public, minlength=count).double().clamp(min=1)
        return (counts.min() / counts).float()
    if isinstance(given, Mapping):
        if odd := sorted(set(given) - set(names)) or sorted(set(names) - set(given)):
            fault = f"{odd[0]!r} is no class" if odd[0] in given else f"no weight for {odd[0]!r}"
            raise PdslError(f"task.class_weights: {fault}; give one for each of: {', '.join(names) or 'numbers only'}")
        given = [given[name] for name in names]
    if len(given) != count:
        raise PdslError(f"task.class_weights: {len(given)} given, but there are {count} classes; give one each")
    weights = torch.tensor(given, dtype=torch.float32)
    return weights if kind == "multilabel" else weights / weights.max()
