"""The public data sets, their formats, and the public set Q."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from pdsl.data import Data, load, split_public
from pdsl.data.datasets import parse_cifar10, parse_idx
from pdsl.settings import DataSettings
from pdsl.utils.random import Streams
from tests.helpers.real_data import real
from tests.helpers.refusals import refused


def loaded(name: str) -> Data:
    return load(DataSettings.model_validate({"name": name}), Streams(0))


def numbered(n: int, validation: int | None = None) -> Data:
    """Data whose test records hold their own numbers, and those of Q negative ones."""
    x, y = torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64)
    q = None
    if validation is not None:
        q = (-1 - torch.arange(validation).float()[:, None], torch.arange(validation))
    return Data("numbered", x, y, torch.arange(n).float()[:, None], torch.arange(n), classes=n, validation=q)


def test_digits_are_all_of_scikit_learns_standardised_and_stratified() -> None:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    data = loaded("digits")
    assert data.x.shape[1:] == (1, 8, 8)
    assert data.x.dtype == torch.float32
    x, y = torch.cat([data.x, data.test_x]), torch.cat([data.y, data.test_y])
    greys = (x * 0.3760 + 0.3053).mul(16).round().flatten(1).int().tolist()
    rows = sorted(zip(greys, y.tolist(), strict=True))
    assert rows == sorted(zip(images.astype(int).tolist(), labels.tolist(), strict=True))
    assert float(x.mean()) == pytest.approx(0, abs=1e-3)
    assert float(x.std()) == pytest.approx(1, abs=1e-3)
    thirds = torch.bincount(data.test_y) / torch.bincount(y)
    assert thirds.sub(1 / 3).abs().max() < 0.01


def test_the_digits_split_does_not_depend_on_the_seed() -> None:
    one, other = (load(DataSettings(), Streams(seed)) for seed in (0, 1))
    assert torch.equal(one.test_x, other.test_x)


# Counts published with the data: yann.lecun.com for MNIST; CIFAR-10 has 5000 and 1000 of each class.
@pytest.mark.parametrize(
    ("name", "shape", "train", "test"),
    [
        (
            "mnist",
            (1, 28, 28),
            [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
            [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
        ),
        ("fashion-mnist", (1, 28, 28), [6000] * 10, [1000] * 10),
        ("cifar10", (3, 32, 32), [5000] * 10, [1000] * 10),
    ],
)
def test_real_data(
    name: str, shape: tuple[int, ...], train: list[int], test: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSL_DATA", str(real(name)))
    data = loaded(name)
    assert data.x.shape == (sum(train), *shape)
    assert data.test_x.shape == (sum(test), *shape)
    assert torch.bincount(data.y).tolist() == train
    assert torch.bincount(data.test_y).tolist() == test
    if name == "cifar10":
        assert data.x.mean(dim=(0, 2, 3)).abs().max() < 2e-3
    else:
        assert data.x.min() == 0  # black
    assert data.x.transpose(0, 1).flatten(1).std(dim=1).sub(1).abs().max() < 2e-3


def test_idx_is_read_as_specified() -> None:
    values = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    content = struct.pack(">BBBBIII", 0, 0, 8, 3, 2, 3, 4) + values.tobytes()
    assert np.array_equal(parse_idx(content, "file"), values)


def test_idx_with_a_wrong_header_or_length_is_refused() -> None:
    good = struct.pack(">BBBBI", 0, 0, 8, 1, 3) + b"abc"
    for content, part in [
        (b"", "not an IDX"),
        (b"\x1f\x8b\x08\x00", "not an IDX"),
        (b"\x00\x00\x0d\x01" + good[4:], "not an IDX"),
        (good[:6], "cut off after 6"),
        (good[:-1], "10 bytes, but its header says 11"),
        (good + b"d", "12 bytes, but its header says 11"),
        (struct.pack(">BBBBIII", 0, 0, 8, 3, 2**31, 2**31, 2**31), "16 bytes"),
    ]:
        with refused("images.gz", part):
            parse_idx(content, "images.gz")


def test_cifar10_is_read_as_specified() -> None:
    planes = [np.full((32, 32), value, dtype=np.uint8) for value in (10, 20, 30)]
    planes[1][2, 5] = 99  # green, third row, sixth column
    content = bytes([7]) + b"".join(plane.tobytes() for plane in planes) + bytes([3]) + bytes(3072)
    images, labels = parse_cifar10(content, "file")
    assert labels.tolist() == [7, 3]
    assert images.shape == (2, 3, 32, 32)
    assert np.array_equal(images[0], np.stack(planes))
    for damaged in (b"", content[:-1], content + b"0"):
        with refused("batch.bin", f"{len(damaged)} bytes"):
            parse_cifar10(damaged, "batch.bin")


@pytest.mark.parametrize(("n", "size", "expected"), [(10, None, 5), (3999, None, 1999), (5000, None, 2000), (10, 9, 9)])
def test_q_and_the_test_set_are_disjoint_and_complete(n: int, size: int | None, expected: int) -> None:
    (q, q_labels), (test, test_labels) = split_public(numbered(n), size, Streams(0))
    assert len(q) == expected
    assert sorted([*q.flatten().tolist(), *test.flatten().tolist()]) == list(range(n))
    assert torch.equal(q.flatten().long(), q_labels)
    assert torch.equal(test.flatten().long(), test_labels)
    assert (test_labels.diff() > 0).all()  # in their order


def test_q_is_drawn_uniformly_by_the_seed() -> None:
    counts = torch.zeros(20)
    for seed in range(500):
        counts[split_public(numbered(20), 5, Streams(seed))[0][1]] += 1
    assert (counts - 125).abs().max() < 5 * np.sqrt(500 * 0.25 * 0.75)


def test_a_q_that_came_with_the_data_leaves_the_test_set_whole() -> None:
    data = numbered(10, validation=6)
    for size, expected in [(None, 6), (4, 4), (100, 6)]:
        (q, _), (test, _) = split_public(data, size, Streams(0))
        assert len(q) == len(set(q.flatten().tolist())) == expected
        assert (q < 0).all()
        assert torch.equal(test, data.test_x)


@pytest.mark.parametrize(("n", "size"), [(10, 10), (10, 50), (1, None)])
def test_a_q_that_leaves_no_test_record_is_refused(n: int, size: int | None) -> None:
    with refused("data.validation", "numbered", f"test set of {n}"):
        split_public(numbered(n), size, Streams(0))


def test_absent_data_say_where_to_put_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSL_DATA", str(tmp_path))
    with refused("mnist: no train-images-idx3-ubyte.gz in", str(tmp_path), "pdsl data fetch mnist", "PDSL_DATA"):
        loaded("mnist")
    with refused("cifar10: no data_batch_1.bin in", str(tmp_path), "pdsl data fetch cifar10"):
        loaded("cifar10")


def test_without_scikit_learns_file_there_is_one_line_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdsl.data.datasets.find_spec", lambda name: None)
    with refused("digits", "pip install scikit-learn"):
        loaded("digits")
