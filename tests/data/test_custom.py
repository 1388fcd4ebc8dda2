"""A user's own data: what is accepted, what is held out, and a one-line refusal for everything that is wrong."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from pdsl.data import Data, from_python, load
from pdsl.settings import DataSettings
from pdsl.utils.inputs import Fields, same
from pdsl.utils.random import Streams
from tests.helpers.refusals import refused

N = 20
X = np.arange(N * 3, dtype=np.float64).reshape(N, 3)  # a record is known by its first value
Y = np.arange(N) % 4


def load_npz(path: Path, agents: int | None = None, **settings: Any) -> Data:
    return load(DataSettings(name="npz", path=str(path), **settings), Streams(0), agents)


def saved(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def numbers(x: torch.Tensor) -> list[int]:
    return (x[:, 0] / 3).long().tolist()


def test_a_file_with_everything_is_taken_as_it_is(tmp_path: Path) -> None:
    arrays = {"x": X, "y": Y, "x_test": X[:5], "y_test": Y[:5], "x_validation": X[:2], "y_validation": Y[:2] + 5}
    data = load_npz(saved(tmp_path / "a.npz", **arrays, agent=np.arange(N) // 10))
    assert data.x.dtype == torch.float32
    assert np.array_equal(data.x.numpy(), X)
    assert np.array_equal(data.y.numpy(), Y)
    assert numbers(data.test_x) == [0, 1, 2, 3, 4]
    assert data.validation is not None
    assert data.validation[1].tolist() == [5, 6]
    assert data.classes == 7  # over all three
    assert data.owner is not None
    assert torch.bincount(data.owner).tolist() == [10, 10]
    assert data.note is None


@pytest.mark.parametrize("dtype", ["uint8", "int16", ">i4", "uint64", "float16", ">f8", "bool"])
def test_floats_become_float32_and_all_other_numbers_int64(dtype: str, tmp_path: Path) -> None:
    x, y = (X % 2).astype(dtype), (Y % 2).astype(dtype)
    data = load_npz(saved(tmp_path / "a.npz", x=x, y=y, x_test=x, y_test=y))
    np.testing.assert_array_equal(data.x.numpy(), X % 2)
    assert data.y.tolist() == (Y % 2).tolist()
    expected = torch.float32 if "f" in dtype else torch.int64
    assert (data.x.dtype, data.y.dtype) == (expected, expected)
    assert data.classes == (0 if "f" in dtype else 2)


IMAGES = np.arange(N * 4, dtype=np.uint8).reshape(N, 2, 2)


@pytest.mark.parametrize("images", [IMAGES, IMAGES[:, None]])
def test_bytes_are_scaled_only_where_they_are_said_to_be_pixels(images: np.ndarray, tmp_path: Path) -> None:
    with refused("mine.npz: x", "pixels=True", "pixels=False"):
        load_npz(saved(tmp_path / "mine.npz", x=images, y=Y, x_test=images, y_test=Y))
    integers = load_npz(tmp_path / "mine.npz", pixels=False)
    assert integers.x.dtype == torch.int64
    assert integers.scaling is None
    for data in (
        load_npz(tmp_path / "mine.npz", pixels=True),
        load_npz(saved(tmp_path / "said.npz", x=images, y=Y, x_test=images, y_test=Y, pixels=True)),
    ):
        assert torch.equal(data.x, integers.x.float() / 255)
        assert data.scaling is not None
        assert torch.equal(data.scaling.apply(integers.x), data.x)
    with refused("data.pixels", "no bytes"):
        from_python((X, Y), Streams(0), pixels=True)


def test_inputs_of_several_tensors_are_kept_by_name_or_by_place(tmp_path: Path) -> None:
    ids, mask = np.arange(N * 3).reshape(N, 3), np.ones((N, 3), dtype=bool)
    named = ({"ids": ids, "mask": mask}, Y)
    npz = {"x.ids": ids, "x.mask": mask, "y": Y, "x_test.ids": ids, "x_test.mask": mask, "y_test": Y}
    items = [({"ids": i, "mask": m}, int(label)) for i, m, label in zip(ids, mask, Y, strict=True)]
    flat = [{"ids": i, "mask": m, "label": int(label)} for i, m, label in zip(ids, mask, Y, strict=True)]
    for data in (
        from_python((named, named), Streams(0)),
        from_python((Items(*items), Items(*flat)), Streams(0)),
        load_npz(saved(tmp_path / "a.npz", **npz)),
    ):
        assert isinstance(data.x, Fields)
        assert data.x.names == ("ids", "mask")
        assert [tensor.dtype for tensor in data.x.tensors] == [torch.int64] * 2
        assert torch.equal(data.x.tensors[0], torch.tensor(ids))
        assert same(data.x, data.test_x)
    positional = from_python((((ids, X), Y), ((ids, X), Y)), Streams(0)).x
    assert isinstance(positional, Fields)
    assert positional.names is None
    assert [tensor.dtype for tensor in positional.tensors] == [torch.int64, torch.float32]
    with refused("19 and 20 records"):
        from_python(((ids, X[:-1]), Y), Streams(0))
    with refused("test data", "ids (3,) int64 and mask (3,) int64"):
        from_python((named, (X, Y)), Streams(0))
    with refused("x and x.ids"):
        load_npz(saved(tmp_path / "b.npz", x=X, y=Y, **{"x.ids": ids}))


@pytest.mark.parametrize("fraction", [0.2, 0.5])
def test_without_test_data_records_are_taken_out_of_training(fraction: float, tmp_path: Path) -> None:
    data = load_npz(saved(tmp_path / "a.npz", x=X, y=Y), test_fraction=fraction)
    assert abs(len(data.test_y) - fraction * N) <= 5  # a coin for each
    assert sorted(numbers(data.x) + numbers(data.test_x)) == list(range(N))
    assert [Y[i] for i in numbers(data.test_x)] == data.test_y.tolist()
    assert data.note is not None
    assert f"{len(data.test_y)} of {N} records" in data.note
    assert "public" in data.note
    assert "\n" not in data.note


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_too_few_records_to_hold_out_or_to_learn_from_are_refused(fraction: float, tmp_path: Path) -> None:
    with refused("too few records", "give test data"):
        load_npz(saved(tmp_path / "a.npz", x=X, y=Y), test_fraction=fraction)


def test_held_out_records_stay_the_same_when_a_record_is_added_removed_or_moved() -> None:
    """Finding D5: neighbouring data give neighbouring runs."""
    x, y = torch.rand(300, 3, generator=torch.Generator().manual_seed(1)), torch.arange(300) % 3
    base = from_python((x, y), Streams(0))
    held = {tuple(row) for row in base.test_x.tolist()}
    order = torch.randperm(300, generator=torch.Generator().manual_seed(2))
    for other_x, other_y in ((x[1:], y[1:]), (x[order], y[order]), (torch.cat([x, x[:1] + 1]), torch.cat([y, y[:1]]))):
        other = {tuple(row) for row in from_python((other_x, other_y), Streams(0)).test_x.tolist()}
        assert len(held ^ other) <= 1
    assert held != {tuple(row) for row in from_python((x, y), Streams(1)).test_x.tolist()}


def test_each_agent_gives_a_share_of_the_test_set(tmp_path: Path) -> None:
    agent = np.array([0] * 10 + [1] * 10)
    data = load_npz(saved(tmp_path / "a.npz", x=X, y=Y, agent=agent))
    assert data.owner is not None
    assert data.owner.tolist() == agent[numbers(data.x)].tolist()


def test_with_a_public_q_the_held_out_records_stay_private(tmp_path: Path) -> None:
    data = load_npz(saved(tmp_path / "a.npz", x=X, y=Y, x_validation=X[:2], y_validation=Y[:2]))
    assert data.note is not None
    assert "Q" not in data.note


def test_a_folder_has_one_file_per_agent(tmp_path: Path) -> None:
    for name, part in [("b", slice(10, 20)), ("a", slice(0, 10)), ("test", slice(0, 3)), ("validation", slice(3, 5))]:
        saved(tmp_path / f"{name}.npz", x=X[part], y=Y[part])
    data = load_npz(tmp_path, agents=2)
    assert numbers(data.x) == list(range(N))
    assert data.owner is not None
    assert data.owner.tolist() == [0] * 10 + [1] * 10
    assert numbers(data.test_x) == [0, 1, 2]
    assert data.validation is not None
    assert numbers(data.validation[0]) == [3, 4]
    with refused("graph.agents: 5", str(tmp_path), "graph.agents=2"):
        load_npz(tmp_path, agents=5)


def test_folders_that_are_no_data_are_refused(tmp_path: Path) -> None:
    with refused(str(tmp_path), "0 agents"):
        load_npz(tmp_path)
    saved(tmp_path / "a.npz", x=X, y=Y)
    saved(tmp_path / "b.npz", x=X[:, :2], y=Y)
    with refused("b.npz", "[2]", "a.npz", "[3]"):
        load_npz(tmp_path)
    saved(tmp_path / "b.npz", x=X, y=Y, x_test=X)
    with refused("b.npz", "x_test"):
        load_npz(tmp_path)


def changed(array: np.ndarray, index: Any, value: Any) -> np.ndarray:
    array = array.astype(np.float64)
    array[index] = value
    return array


@pytest.mark.parametrize(
    ("arrays", "parts"),
    [
        ({"x": X}, ["no array 'y'", "it has: x"]),
        ({"y": Y}, ["no array 'x'"]),
        ({}, ["no array 'x'"]),
        ({"X": X, "y": Y}, ["unknown array X"]),
        ({"x": X, "y": Y, "x_test": X}, ["no array 'y_test'"]),
        ({"x": X, "y": Y, "y_validation": Y}, ["no array 'x_validation'"]),
        ({"x": X, "y": Y[:-1]}, ["y has 19 records", "20 inputs"]),
        ({"x": X, "y": np.stack([Y, Y], 1)}, ["y[2]", "task=regression"]),
        ({"x": X[:0], "y": Y[:0]}, ["x is empty"]),
        ({"x": X[:, :0], "y": Y}, ["x is empty"]),
        ({"x": X[:, 0], "y": Y}, ["x has shape [20]", "[records, 1]"]),
        ({"x": changed(X, (7, 1), np.nan), "y": Y}, ["x[7]", "NaN"]),
        ({"x": changed(X, (8, 2), -np.inf), "y": Y}, ["x[8]", "inf"]),
        ({"x": changed(X, (9, 2), 1e300), "y": Y}, ["x[9]", "float32"]),
        ({"x": X, "y": Y, "x_test": changed(X, (3, 0), np.nan), "y_test": Y}, ["x_test[3]"]),
        ({"x": X.astype(complex), "y": Y}, ["x has dtype complex128"]),
        ({"x": X.astype(str), "y": Y}, ["x has dtype"]),
        ({"x": X, "y": Y.astype(complex)}, ["y has dtype"]),
        ({"x": X, "y": changed(Y, 4, -1).astype(int)}, ["y[4] is -1"]),
        ({"x": X, "y": changed(Y, 6, np.nan)}, ["y[6]", "NaN"]),
        ({"x": X, "y": changed(Y, 6, np.inf)}, ["y[6]", "inf"]),
        ({"x": X, "y": changed(Y, 6, 1e18).astype(int)}, ["y[6] is 1000000000000000000"]),
        ({"x": X, "y": Y, "x_test": X[:, :2], "y_test": Y}, ["shape [2]", "[3]"]),
        ({"x": X, "y": Y, "agent": Y[:-1]}, ["agent has shape [19]", "20 records"]),
        ({"x": X, "y": Y, "agent": Y - 1}, ["agent[0] is -1"]),
        ({"x": X, "y": Y, "agent": Y * 2}, ["agent 1 has no record"]),
        ({"x": X.astype(object), "y": Y}, ["cannot be read", "Object arrays"]),
        ({"x": X[:1], "y": Y[:1]}, ["too few records", "give test data"]),
    ],
)
def test_wrong_arrays_are_refused(arrays: dict[str, Any], parts: list[str], tmp_path: Path) -> None:
    with refused("mine.npz", *parts):
        load_npz(saved(tmp_path / "mine.npz", **arrays))


def npz() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, x=X, y=Y)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: b"x,y\n1,2\n",
        lambda content: content[: len(content) // 2],
        lambda content: content[:300] + b"!" + content[301:],
        lambda content: b"before" + content,
    ],
)
def test_damaged_files_are_refused(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    path.write_bytes(damage(npz()))
    with refused("mine.npz", "numpy.savez"):
        load_npz(path)


def test_a_pickle_is_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
            return breakpoint, ()

    with refused("mine.npz"):
        load_npz(saved(tmp_path / "mine.npz", x=np.array([Trap()], dtype=object), y=Y[:1]))


def test_a_path_is_needed_and_must_exist(tmp_path: Path) -> None:
    with refused("data.path"):
        load(DataSettings(name="npz"), Streams(0))
    with refused("data.path", "nowhere.npz"):
        load_npz(tmp_path / "nowhere.npz")


class Items(Dataset[Any]):
    """A map-style Dataset of the given items."""

    def __init__(self, *items: Any):
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


TENSORS = (torch.tensor(X), torch.tensor(Y))
DATASET = TensorDataset(*TENSORS)


@pytest.mark.parametrize(
    "train",
    [
        (X, Y),
        TENSORS,
        (X, TENSORS[1]),
        DATASET,
        Items(*zip(X, Y, strict=True)),
        Items(*zip(X, Y.tolist(), strict=True)),
        (X.tolist(), Y.tolist()),
        (X, Y.tolist()),
        (X, Y[:, None]),
    ],
)
def test_python_data_of_any_form_are_the_same(train: Any) -> None:
    data = from_python((train, (X[:5], Y[:5])), Streams(0))
    assert np.array_equal(data.x.numpy(), X)
    assert data.y.tolist() == Y.tolist()
    assert numbers(data.test_x) == [0, 1, 2, 3, 4]
    assert (data.classes, data.owner, data.note) == (4, None, None)
    held = from_python(train, Streams(0), test_fraction=0.25)
    assert 2 <= len(held.test_y) <= 9
    assert held.note is not None


def test_a_list_is_a_natural_partition() -> None:
    data = from_python([(X[:5], Y[:5]), Subset(DATASET, range(5, 20))], Streams(0))
    assert data.owner is not None
    assert set(data.owner.tolist()) == {0, 1}
    assert sorted(numbers(data.x) + numbers(data.test_x)) == list(range(N))
    assert (torch.tensor(numbers(data.x)) >= 5).long().equal(data.owner)


def test_names_of_agents_come_from_mappings_files_and_owners(tmp_path: Path) -> None:
    parts = {"hospital-b": (X[:12], Y[:12]), "hospital-a": DATASET}
    data = from_python((parts, (X, Y)), Streams(0))
    assert data.agent_names == ("hospital-b", "hospital-a")  # in the order given
    assert data.owner is not None
    assert torch.bincount(data.owner).tolist() == [12, 20]
    assert data.agents == 2
    for name in ("bonn", "aachen", "test"):
        saved(tmp_path / f"{name}.npz", x=X, y=Y)
    assert load_npz(tmp_path).agent_names == ("aachen", "bonn")
    owned = load_npz(saved(tmp_path / "all.npz", x=X, y=Y, agent=np.array(["x", "y"] * 10), x_test=X, y_test=Y))
    assert owned.agent_names == ("x", "y")
    assert owned.owner is not None
    assert owned.owner.tolist() == [0, 1] * 10
    numbered = load_npz(saved(tmp_path / "all.npz", x=X, y=Y, agent=np.arange(N) % 2 + 7, x_test=X, y_test=Y))
    assert numbered.agent_names == ("7", "8")
    pooled = from_python((X, Y), Streams(0))
    assert (pooled.agents, pooled.agent_names) == (None, ())


def test_lower_precision_tensors_are_taken() -> None:
    x = torch.ones(4, 2, dtype=torch.bfloat16, requires_grad=True)
    data = from_python(((x, torch.arange(4)), (x, torch.arange(4))), Streams(0))
    assert data.x.dtype == torch.float32
    assert not data.x.requires_grad


def test_data_themselves_are_checked_and_kept() -> None:
    x, y = torch.rand(6, 2), torch.arange(6) % 3
    data = Data("mine", x, y, x, y, classes=5, owner=y, validation=(x, y), note="mind")
    kept = from_python(data, Streams(0))
    assert (kept.name, kept.classes, kept.note) == ("mine", 5, "mind")
    assert torch.equal(kept.x, x)
    assert kept.owner is not None
    assert torch.equal(kept.owner, y)
    with refused("label 2 at index 2", "2 classes"):
        from_python(Data("mine", x, y, x, y, classes=2), Streams(0))
    with refused("data: test_x", "NaN"):
        from_python(Data("mine", x, y, x * torch.nan, y, classes=3), Streams(0))


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(lambda: (X[0], 0), None)


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (X, ["data: ndarray given", "(x, y)"]),
        ("mnist.npz", ["data: str given"]),
        ((X, Y, Y), ["data: tuple given"]),
        ([X, Y], ["agent 0: ndarray given", "a tuple (x, y)"]),
        ({"a": X, "b": Y}, ["a: ndarray given"]),
        ({"a": (X, Y)}, ["1 agents"]),
        (DataLoader(DATASET), ["DataLoader", "loader.dataset"]),
        ([DataLoader(DATASET)] * 2, ["agent 0", "loader.dataset"]),
        (([[1.0], [2.0, 3.0]], [0, 1]), ["different lengths"]),
        ([(X, Y)], ["1 agents"]),
        ([], ["0 agents"]),
        ([(X, Y), (X[:, :2], Y)], ["agent 1", "shape [2]"]),
        ([(X, Y), (X, Y - 1)], ["agent 1", "y[0] is -1"]),
        (((X, Y), (X, Y[:3])), ["test data: y has 3 records"]),
        (Endless(), ["data: Endless given"]),
        (Items(), ["Dataset is empty"]),
        (Items((X[0], 1), X[0]), ["item 1", "(input, label)"]),
        (Items((X[0], 1), (X[0, :2], 1)), ["item 1 has shape [2]"]),
        (Items((X[0], 1), ("text", 1)), ["item 1", "str given"]),
        (Items((X[0], 1), (X[0], [0, 1])), ["y has int and list"]),
        (Items((X[0], X[0], 1)), ["item 0", "((a, b), label)"]),
        (Items({"ids": X[0], "kind": 1}), ["item 0 has no label", "target='...'", "ids, kind"]),
    ],
)
def test_wrong_python_data_are_refused(data: Any, parts: list[str]) -> None:
    with refused(*parts):
        from_python(data, Streams(0))
