"""Tasks: losses against torch, per record; class weights and scales from the public set; refusals."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pdsl.models.network import check_loss
from pdsl.settings import TaskSettings
from pdsl.tasks import (
    Binary,
    CustomTask,
    MultiClass,
    MultiLabel,
    Regression,
    Task,
    build_task,
    infer_kind,
)
from tests.helpers.refusals import refused

N = 24


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


CLASSES = torch.arange(N) % 3
CASES: dict[str, tuple[Task, Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]] = {
    "multiclass": (
        MultiClass(outputs=3),
        normal(0, N, 3),
        CLASSES,
        lambda o, y: functional.cross_entropy(o, y, reduction="sum"),
    ),
    "weights and smoothing": (
        MultiClass(outputs=3, weights=torch.tensor([1.0, 2.0, 0.5]), label_smoothing=0.1),
        normal(0, N, 3),
        CLASSES,
        lambda o, y: functional.cross_entropy(
            o, y, torch.tensor([1.0, 2.0, 0.5]), reduction="sum", label_smoothing=0.1
        ),
    ),
    "binary": (
        Binary(),
        normal(0, N, 1),
        CLASSES.clamp(max=1),
        lambda o, y: functional.binary_cross_entropy_with_logits(o[:, 0], y.float(), reduction="sum"),
    ),
    "binary without a dimension": (
        Binary(),
        normal(0, N),
        CLASSES.clamp(max=1),
        lambda o, y: functional.binary_cross_entropy_with_logits(o, y.float(), reduction="sum"),
    ),
    "multilabel": (
        MultiLabel(outputs=4),
        normal(0, N, 4),
        (normal(1, N, 4) > 0).long(),
        lambda o, y: functional.binary_cross_entropy_with_logits(o, y.float(), reduction="sum") / 4,
    ),
    "regression": (
        Regression(mean=torch.tensor([5.0]), scale=torch.tensor([2.0])),
        normal(0, N, 1),
        3 * normal(1, N),
        lambda o, y: functional.mse_loss(o[:, 0], (y - 5) / 2, reduction="sum"),
    ),
    "huber": (
        Regression(huber=0.5, outputs=2),
        normal(0, N, 2),
        normal(1, N, 2),
        lambda o, y: functional.huber_loss(o, y, reduction="sum", delta=0.5) / 2,
    ),
    "custom": (
        CustomTask(loss=lambda o, y: (o[:, 0] - y).abs()),
        normal(0, N, 1),
        normal(1, N),
        lambda o, y: functional.l1_loss(o[:, 0], y, reduction="sum"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_are_torchs_and_each_depends_on_its_record_only(case: str) -> None:
    task, outputs, targets, oracle = CASES[case]
    task.check(outputs, targets)
    losses = task.losses(outputs, targets)
    assert losses.shape == (N,)
    torch.testing.assert_close(losses.sum(), oracle(outputs, targets), rtol=1e-5, atol=1e-5)
    alone = torch.cat([task.losses(outputs[n : n + 1], targets[n : n + 1]) for n in range(N)])
    torch.testing.assert_close(losses, alone, rtol=1e-6, atol=1e-7)


def test_predictions_are_in_the_units_of_the_targets() -> None:
    task = Regression(mean=torch.tensor([5.0]), scale=torch.tensor([2.0]))
    assert task.predict(torch.tensor([[0.0], [1.5]])).tolist() == [5.0, 8.0]
    assert Binary().predict(torch.tensor([[-1.0], [2.0]])).tolist() == [0, 1]
    assert MultiLabel().predict(torch.tensor([[-1.0, 3.0]])).tolist() == [[0, 1]]
    assert MultiClass(outputs=2).predict(torch.tensor([[0.0, 1.0, 9.0]])).tolist() == [1]  # the third is no class


def test_the_kind_follows_from_type_and_shape() -> None:
    assert infer_kind(torch.tensor([1.0, 2.0])) == "regression"
    assert infer_kind(torch.tensor([1, 2])) == "multiclass"
    assert infer_kind(torch.tensor([1, 0]), model_outputs=1) == "binary"
    assert infer_kind(torch.tensor([[1, 0], [1, 1]])) == "multilabel"


def test_public_weights_balance_the_classes_of_the_public_set() -> None:
    public = torch.tensor([0] * 90 + [1] * 6 + [2] * 3 + [3])
    task = build_task(TaskSettings(class_weights="public"), "multiclass", 4, public)
    assert isinstance(task, MultiClass) and task.weights is not None
    totals = [float(task.weights[c]) * int((public == c).sum()) for c in range(4)]
    assert totals == pytest.approx([1.0] * 4)
    assert float(task.weights.max()) == 1.0


def test_weights_are_given_by_number_or_by_name() -> None:
    public = torch.tensor([0, 1])
    by_name = TaskSettings(class_weights={"benign": 1.0, "malignant": 3.0})
    task = build_task(by_name, "binary", 2, public, ("benign", "malignant"))
    assert (
        isinstance(task, Binary) and task.weights is not None and task.weights.tolist() == pytest.approx([1 / 3, 1.0])
    )
    with refused("class_weights", "benign, malignant"):
        build_task(TaskSettings(class_weights={"benign": 1.0}), "binary", 2, public, ("benign", "malignant"))
    with refused("class_weights", "3 given", "2 classes"):
        build_task(TaskSettings(class_weights=(1, 2, 3)), "multiclass", 2, public)


def test_regression_scales_come_from_the_public_set() -> None:
    public = torch.tensor([10.0, 20.0, 30.0])
    task = build_task(TaskSettings(), "regression", 0, public)
    assert isinstance(task, Regression) and task.mean is not None and task.scale is not None
    assert task.mean.tolist() == [20.0]
    assert task.scale.tolist() == pytest.approx([public.std(correction=0).item()])
    constant = build_task(TaskSettings(), "regression", 0, torch.ones(5))
    assert isinstance(constant, Regression) and constant.scale is not None and constant.scale.tolist() == [1.0]


@pytest.mark.parametrize(("loss", "parts"), [
    (nn.functional.mse_loss, ["one number per record", "reduction"]),
    (lambda o, y: (o[:, 0] - o.mean()).square(), ["depends on the other records"]),
    (lambda o, y: o[:, 7], ["loss:", "index 7"]),
    (lambda o, y: 3.0, ["float", "one number per record"]),
], ids=["mean", "mixes", "raises", "number"])  # fmt: skip
def test_a_loss_that_is_not_per_record_is_refused(loss: Callable[[Tensor, Tensor], Tensor], parts: list[str]) -> None:
    with refused(*parts):
        check_loss(loss, normal(0, 5, 1), normal(1, 5, 1))


def test_a_model_that_does_not_fit_the_task_is_refused() -> None:
    with refused("(3,)", "one logit"):
        Binary().check(normal(0, 5, 3), torch.zeros(5, dtype=torch.int64))
    with refused("(3,)", "regression needs 1 number", "task=multiclass"):
        Regression().check(normal(0, 5, 3), torch.zeros(5))
    with refused("4 labels need 4 logits"):
        MultiLabel(outputs=4).check(normal(0, 5, 3), torch.zeros(5, 4))
    with refused("2 classes", "task=binary"):
        MultiClass(outputs=2).check(normal(0, 5, 1), torch.zeros(5, dtype=torch.int64))


def test_custom_kind_and_loss_belong_together() -> None:
    with pytest.raises(ValueError, match="set both"):
        TaskSettings(kind="custom")


@pytest.mark.parametrize("case", ["multiclass", "binary", "multilabel", "regression"])
def test_an_own_loss_replaces_only_the_loss(case: str) -> None:
    task, outputs, targets, _ = CASES[case]
    doubled = replace(task, loss=lambda o, y: 2 * task.losses(o, y))
    torch.testing.assert_close(doubled.losses(outputs, targets), 2 * task.losses(outputs, targets))
    assert doubled.metrics(outputs, targets) == task.metrics(outputs, targets)
    assert torch.equal(doubled.predict(outputs), task.predict(outputs))


def test_positive_weights_of_labels_are_relative() -> None:
    outputs, y = normal(0, N, 2), (normal(1, N, 2) > 0).long()
    weighted = MultiLabel(outputs=2, weights=torch.tensor([3.0, 0.5])).losses(outputs, y)
    plain = functional.binary_cross_entropy_with_logits(outputs, y.float(), reduction="none")
    factors = torch.where(y > 0, torch.tensor([1.0, 0.5]), torch.tensor([1 / 3, 1.0]))
    torch.testing.assert_close(weighted, (plain * factors).mean(1))
