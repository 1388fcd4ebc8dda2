"""Targets: labels of any kind become class numbers with names, label matrices or numbers."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.preprocessing import LabelEncoder, MultiLabelBinarizer

from pdsl.data import Data, from_python
from pdsl.utils.random import Streams
from tests.helpers.refusals import refused

N = 24
X = np.arange(N * 2.0).reshape(N, 2)


def converted(y: Any, **options: Any) -> Data:
    return from_python(((X, y), (X, y)), Streams(0), **options)


@pytest.mark.parametrize(
    "y",
    [
        np.array(["cat", "dog", "ant"] * 8),
        ["cat", "dog", "ant"] * 8,
        np.array(["cat", "dog", "ant"] * 8, dtype=object),
        pd.Series(["cat", "dog", "ant"] * 8),
        pd.Series(["cat", "dog", "ant"] * 8, dtype="category"),
        np.array([-1, 1] * 12),
        np.array([1, 2, 3] * 8),
    ],
)
def test_labels_are_numbered_in_sorted_order_and_keep_their_names(y: Any) -> None:
    encoder = LabelEncoder().fit(np.asarray(y))
    data = converted(y)
    assert data.y.tolist() == encoder.transform(np.asarray(y)).tolist()
    assert data.class_names == tuple(str(name) for name in encoder.classes_)
    assert data.classes == len(encoder.classes_)
    assert torch.equal(data.y, data.test_y)


def test_labels_from_zero_are_taken_as_they_are_even_with_gaps() -> None:
    data = converted(np.array([0, 3] * 12))
    assert data.y.tolist() == [0, 3] * 12
    assert (data.classes, data.class_names) == (4, ())
    assert converted([True, False] * 12).class_names == ("False", "True")
    assert converted([True, False] * 12).y.tolist() == [1, 0] * 12
    assert converted([True, False] * 12, classes=2).class_names == ()


def test_a_shifted_numbering_is_noted_and_an_odd_one_refused() -> None:
    data = converted(np.array([1, 2] * 12))
    assert data.note is not None
    assert "no record has label 0" in data.note
    assert "1, 2" in data.note
    with refused("no record has class 0", "2, 5", "classes=[...]"):
        converted(np.array([2, 5] * 12))
    with refused("y[0] is -1", "classes=[...]"):
        converted(np.array([-1, 0] * 12))
    assert converted(np.array([2, 5] * 12), classes=[5, 2]).y.tolist() == [1, 0] * 12
    assert converted(np.array([-1, 0] * 12), classes=[-1, 0]).class_names == ("-1", "0")
    assert converted(np.array([1, 2] * 12), classes=3).y.tolist() == [1, 2] * 12


def test_given_classes_are_all_classes() -> None:
    data = converted(["b", "a"] * 12, classes=["a", "b", "c"])
    assert data.y.tolist() == [1, 0] * 12
    assert (data.classes, data.class_names) == (3, ("a", "b", "c"))
    with refused("y[1] is a", "not one of the classes: b, c"):
        converted(["b", "a"] * 12, classes=["b", "c"])
    with refused("data.classes", "different"):
        converted(["b", "a"] * 12, classes=["b", "b"])
    with refused("data.classes: 1"):
        converted([0, 1] * 12, classes=1)


@pytest.mark.parametrize(
    "y", [["b", "a"] * 12, np.array([1, 2] * 12), np.array([-1, 1] * 12), [["a"], ["b", "a"]] * 12]
)
def test_a_private_run_takes_no_labels_from_private_records(y: Any) -> None:
    with refused("private run", "classes=[...]"):
        converted(y, private=True)


def test_a_private_run_takes_public_labels() -> None:
    assert converted(["b", "a"] * 12, private=True, classes=["a", "b"]).y.tolist() == [1, 0] * 12
    category = pd.Series(["b", "a"] * 12, dtype=pd.CategoricalDtype(["a", "b", "c"]))
    assert converted(category, private=True).class_names == ("a", "b", "c")
    assert converted([True, False] * 12, private=True).classes == 2
    assert converted(np.array([0, 1] * 12), private=True).classes == 2
    assert converted([["b"], []] * 12, private=True, classes=["a", "b"], task="multilabel").y.sum() == 12


def test_floats_are_numbers_unless_the_task_says_classes() -> None:
    y = np.arange(N) % 3 * 1.0
    assert converted(y).y.dtype == torch.float32
    assert converted(y).classes == 0
    assert converted(y, task="multiclass").y.tolist() == y.tolist()
    assert converted(y, task="multiclass").y.dtype == torch.int64
    assert converted(np.arange(N), task="regression").y.dtype == torch.float32
    with refused("y[1] is 0.5", "task=regression"):
        converted(y / 2, task="multiclass")
    with refused("text", "task=multiclass"):
        converted(["a"] * N, task="regression")
    with refused("y[3]", "NaN"):
        converted(np.where(np.arange(N) == 3, np.nan, y))


def test_shapes_of_targets() -> None:
    y = np.arange(N) % 3
    assert converted(y[:, None]).y.shape == (N,)
    assert converted(y[:, None] * 1.5).y.shape == (N,)
    assert converted(np.stack([y, y], 1) * 1.5).y.shape == (N, 2)
    assert converted(torch.tensor(y)).y.tolist() == y.tolist()
    with refused("shape [24, 2]", "one label per record"):
        converted(np.stack([y, y], 1), task="multiclass")


def test_several_labels_per_record() -> None:
    names = [["red"], ["red", "blue"], []] * 8
    expected = MultiLabelBinarizer().fit(names)
    data = converted(names)
    assert data.y.tolist() == expected.transform(names).tolist()
    assert data.class_names == tuple(expected.classes_)
    matrix = expected.transform(names)
    for given in (matrix, matrix.astype(bool), matrix.tolist()):
        assert converted(given).y.tolist() == matrix.tolist()
    assert converted(matrix.astype(float), task="multilabel").y.dtype == torch.int64
    assert converted(matrix, classes=["blue", "red"]).class_names == ("blue", "red")
    with refused("y[0]", "other than 0 and 1"):
        converted(matrix + 1)
    with refused("3 names", "2 labels"):
        converted(matrix, classes=["a", "b", "c"])


def test_targets_of_an_own_loss_are_kept() -> None:
    assert converted(np.array([-1, 1] * 12), task="custom").y.tolist() == [-1.0, 1.0] * 12
    assert converted(np.array([1, 2] * 12), task="custom").y.tolist() == [1, 2] * 12
    assert converted(np.array([0.5, 2] * 12), task="custom").y.dtype == torch.float32


@pytest.mark.parametrize(
    ("y", "parts"),
    [
        ([None, "a"] * 12, ["y[0] is missing"]),
        (np.array(["a", 1] * 12, dtype=object), ["int and str", "one type"]),
        (pd.Series(["a", None] * 12), ["column y has 12 missing values"]),
        ([0] * (N - 1), ["y has 23 records", "24 inputs"]),
        (np.array(["2020-01-01"] * N, dtype="datetime64[D]"), ["y has dtype"]),
        (np.array([2_000_000, 0] * 12), ["y[0] is 2000000", "task=regression"]),
    ],
)
def test_wrong_targets_are_refused(y: Any, parts: list[str]) -> None:
    with refused(*parts):
        converted(y)
