"""Hugging Face data sets and partitions of flwr-datasets."""

from typing import Any

import datasets
import numpy as np
import pytest
import torch
from flwr_datasets.partitioner import IidPartitioner, NaturalIdPartitioner
from PIL import Image

from pdsl.data import from_python
from pdsl.utils.inputs import AugmentedFields, Fields
from pdsl.utils.random import Streams
from tests.helpers.refusals import refused

N = 30
IDS = np.arange(N * 4).reshape(N, 4)
LABELS = ["neg", "pos", "neutral"] * 10
CLASSES = datasets.ClassLabel(names=["neg", "neutral", "pos"])


def text() -> Any:
    columns = {"input_ids": IDS.tolist(), "attention_mask": np.ones((N, 4), int).tolist(), "label": LABELS}
    return datasets.Dataset.from_dict(columns).cast_column("label", CLASSES)


def images(mode: str) -> Any:
    shape = (N, 6, 5) if mode == "L" else (N, 6, 5, 3)
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    columns = {"image": [Image.fromarray(p) for p in pixels], "label": np.arange(N) % 2}
    return datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image()), pixels


def test_several_columns_are_a_mapping_and_class_names_are_kept() -> None:
    data = from_python((text(), text()), Streams(0), private=True)
    assert isinstance(data.x, Fields)
    assert data.x.names == ("input_ids", "attention_mask")
    assert torch.equal(data.x.tensors[0], torch.tensor(IDS))
    assert data.class_names == ("neg", "neutral", "pos")
    assert [data.class_names[k] for k in data.y] == LABELS


@pytest.mark.parametrize("form", [None, "torch", "numpy", "pandas"])
def test_one_column_is_a_tensor_in_any_format(form: str | None) -> None:
    dataset = text().remove_columns("attention_mask").with_format(form)
    data = from_python((dataset, dataset), Streams(0))
    assert torch.equal(data.x, torch.tensor(IDS))
    assert data.x.dtype == torch.int64


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_images_are_scaled_because_the_feature_says_so(mode: str) -> None:
    dataset, pixels = images(mode)
    data = from_python((dataset, dataset), Streams(0))
    expected = pixels[:, None] if mode == "L" else pixels.transpose(0, 3, 1, 2)
    assert torch.equal(data.x, torch.tensor(expected).float() / 255)
    assert data.scaling is not None
    assert torch.equal(data.scaling.apply(torch.tensor(expected)), data.x)


def test_splits_and_targets_are_named() -> None:
    whole = text()
    splits = datasets.DatasetDict(train=whole, test=whole.select(range(9)), validation=whole.select(range(6)))
    data = from_python(splits, Streams(0))
    assert [len(data.y), len(data.test_y)] == [N, 9]
    assert data.validation is not None
    assert len(data.validation[1]) == 6
    del splits["test"]
    assert len(from_python(splits, Streams(0)).test_y) == 6
    renamed = whole.rename_column("label", "mood")
    assert from_python(renamed, Streams(0), target="mood", columns=["input_ids"]).classes == 3
    with refused("no split 'train'", "other"):
        from_python(datasets.DatasetDict(other=whole), Streams(0))


def test_partitions_are_agents() -> None:
    partitioner = IidPartitioner(num_partitions=3)
    partitioner.dataset = text()
    parts = [partitioner.load_partition(k) for k in range(3)]
    data = from_python(parts, Streams(0))
    assert data.agents == 3
    named = from_python({f"clinic-{k}": part for k, part in enumerate(parts)}, Streams(0))
    assert named.agent_names == ("clinic-0", "clinic-1", "clinic-2")
    with refused("load_partition(i)"):
        from_python(partitioner, Streams(0))
    owners = ["b", "a", "c"] * 10
    natural = NaturalIdPartitioner(partition_by="site")
    natural.dataset = text().add_column("site", owners)
    by_column = from_python(natural.dataset, Streams(0), owner="site")
    assert by_column.agent_names == ("a", "b", "c")
    assert len(natural.load_partition(0)) == 10


def test_transforms_are_read_item_by_item() -> None:
    def noisy(batch: dict[str, Any]) -> dict[str, Any]:
        ids = torch.tensor(batch["input_ids"]).float()
        return {"x": list(ids + torch.rand(ids.shape)), "label": batch["label"]}

    data = from_python(text().with_transform(noisy), Streams(0))
    assert isinstance(data.x, AugmentedFields)


@pytest.mark.parametrize(
    ("columns", "parts"),
    [
        ({"label": [0, 1]}, ["no input column"]),
        ({"x": [[1.0], [2.0]]}, ["no column label", "target='...'", "x"]),
        ({"x": [[1.0], [2.0, 3.0]], "label": [0, 1]}, ["column x", "different lengths"]),
        ({"x": ["a", "b"], "label": [0, 1]}, ["column x", "tokenise"]),
        ({"x": [[1.0], None], "label": [0, 1]}, ["column x has missing"]),
        ({"x": [[1.0], [2.0]], "label": [0, None]}, ["label[1] is missing"]),
        ({"x": [], "label": []}, ["is empty"]),
    ],
)
def test_wrong_data_sets_are_refused(columns: dict[str, Any], parts: list[str]) -> None:
    with refused(*parts):
        from_python(datasets.Dataset.from_dict(columns), Streams(0))


def test_streams_and_other_images_are_refused() -> None:
    with refused("IterableDataset", "no length"):
        from_python(text().to_iterable_dataset(), Streams(0))
    mixed = datasets.Dataset.from_dict(
        {"image": [Image.new("L", (4, 4)), Image.new("L", (5, 4))], "label": [0, 1]}
    ).cast_column("image", datasets.Image())
    with refused("image[1]", "one size"):
        from_python(mixed, Streams(0))
    missing = text().map(lambda row: {"label": -1})
    with refused("label[0] is -1"):
        from_python(missing, Streams(0))
