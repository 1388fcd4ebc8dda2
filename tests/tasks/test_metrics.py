"""Metrics against scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from pdsl import metrics


def scores(seed: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(k, (n,), generator=generator)
    noise = torch.randn(n, k, generator=generator)
    return (torch.nn.functional.one_hot(targets, k) + noise).mul(4).round() / 4, targets  # rounded: many ties


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_class_metrics_equal_scikit_learn(classes: int) -> None:
    outputs, y = scores(classes, 300, classes)
    found = metrics.of_classes(outputs, y, classes)
    predicted, p = outputs.argmax(1), outputs.double().softmax(1)
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(y, predicted))
    assert found["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(y, predicted))
    assert found["macro_f1"] == pytest.approx(sk.f1_score(y, predicted, average="macro"))
    assert found["recall"] == pytest.approx(sk.recall_score(y, predicted, average=None))
    assert found["confusion"] == sk.confusion_matrix(y, predicted).tolist()
    wanted = sk.roc_auc_score(y, p[:, 1]) if classes == 2 else sk.roc_auc_score(y, p, multi_class="ovr")
    assert found["auc"] == pytest.approx(wanted)


def test_label_metrics_equal_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(2, (200, 4), generator=generator)
    outputs = y + 1.5 * torch.randn(200, 4, generator=generator) - 0.5
    found = metrics.of_labels(outputs, y)
    predicted = (outputs > 0).long()
    assert found["accuracy"] == pytest.approx(float((predicted == y).double().mean()))
    assert found["recall"] == pytest.approx(sk.recall_score(y, predicted, average=None))
    assert found["macro_f1"] == pytest.approx(sk.f1_score(y, predicted, average="macro"))
    assert found["auc"] == pytest.approx(sk.roc_auc_score(y, outputs, average="macro"))


def test_regression_metrics_equal_scikit_learn() -> None:
    generator = np.random.default_rng(0)
    y = generator.normal(150, 70, 100)
    predicted = y + generator.normal(0, 30, 100)
    found = metrics.of_numbers(torch.tensor(predicted), torch.tensor(y))
    assert found["mae"] == pytest.approx(sk.mean_absolute_error(y, predicted))
    assert found["rmse"] == pytest.approx(sk.mean_squared_error(y, predicted) ** 0.5)
    assert found["r2"] == pytest.approx(sk.r2_score(y, predicted))
    assert sum(found["residuals"]["counts"]) == 100
    assert metrics.rmse(torch.tensor(predicted), torch.tensor(y)) == pytest.approx(found["rmse"])


def test_metrics_without_positives_are_undefined() -> None:
    assert metrics.auc(torch.tensor([0.1, 0.2]), torch.tensor([False, False])) is None
    outputs = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    found = metrics.of_classes(outputs, torch.tensor([0, 1]), 3)
    assert found["recall"] == [1.0, 1.0, None]
    assert found["balanced_accuracy"] == 1.0
