"""Hugging Face data: `datasets.Dataset`, `DatasetDict`, and partitions of flwr-datasets, which are Datasets."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pdsl.data.items import LABELS, Items, from_items, image_array
from pdsl.data.validation import Array, Source, convert_inputs
from pdsl.settings import DataSettings
from pdsl.utils.errors import PdslError

TRAIN, TEST, PUBLIC = "train", "test", "validation"  # names of splits


def is_dataset(value: object) -> bool:
    """Whether a value is a Dataset of the package `datasets`, which is not imported for it."""
    return _kind(value) == ("datasets", "Dataset")


def is_dataset_dict(value: object) -> bool:
    return _kind(value) == ("datasets", "DatasetDict")


def is_iterable_dataset(value: object) -> bool:
    return _kind(value)[0] == "datasets" and _kind(value)[1].startswith("Iterable")


def _kind(value: object) -> tuple[str, str]:
    return type(value).__module__.partition(".")[0], type(value).__name__


def from_dataset(dataset: Any, where: str, settings: DataSettings) -> Source:
    """Records of a Dataset: target and owner columns by the settings, inputs from the other columns.

    One input column is a tensor, several are a mapping of tensors. Images become [channels, rows, columns] floats,
    divided by 255. A Dataset with a transform (`set_transform`) is read item by item.
    """
    if len(dataset) == 0:
        raise PdslError(f"{where}: the Dataset is empty; give at least one record")
    if dataset.format["type"] == "custom":
        items: Items = dataset
        return from_items(items, where, settings)
    names = list(dataset.column_names)
    target = _target(names, where, settings)
    wanted = settings.columns or tuple(name for name in names if name not in (target, settings.owner))
    if settings.owner is not None:
        _require(dataset, [settings.owner], where)
    if not wanted:
        raise PdslError(f"{where}: there is no input column besides {target}; columns: {', '.join(names)}")
    inputs, image = read_columns(dataset, wanted, where)
    x, pixels = convert_inputs(inputs, f"{where}: x", settings.pixels)
    feature = dataset.features[target]
    declared = tuple(feature.names) if _type(dataset, target) == "ClassLabel" else ()
    owner = None if settings.owner is None else np.asarray(_values(dataset, settings.owner))
    return Source(
        x,
        _values(dataset, target),
        where,
        target,
        class_names=declared,
        owner=owner,
        columns=tuple(wanted),
        pixels=pixels or image,
    )


def read_columns(dataset: Any, names: Sequence[str], where: str) -> tuple[object, bool]:
    """One column as an array, several as a mapping of arrays; and whether it is an image, divided by 255."""
    _require(dataset, names, where)
    arrays = {name: _column(dataset, name, where) for name in names}
    one = arrays[names[0]]
    inputs = arrays if len(arrays) > 1 else one[:, None] if one.ndim == 1 else one
    return inputs, len(names) == 1 and _type(dataset, names[0]) == "Image"


def _require(dataset: Any, names: Sequence[str], where: str) -> None:
    if missing := [name for name in names if name not in dataset.column_names]:
        raise PdslError(f"{where}: there is no column {missing[0]}; columns: {', '.join(dataset.column_names)}")


def splits(data: Any) -> tuple[Any, Any | None, Any | None]:
    """Training, test and public validation split of a DatasetDict."""
    if TRAIN not in data:
        raise PdslError(f"data: the DatasetDict has no split '{TRAIN}' (it has: {', '.join(data)}); rename one")
    test, public = data.get(TEST), data.get(PUBLIC)
    return (data[TRAIN], public, None) if test is None else (data[TRAIN], test, public)


def _target(names: list[str], where: str, settings: DataSettings) -> str:
    given = settings.target
    if isinstance(given, tuple):
        raise PdslError(f"{where}: several target columns are for tables; give one, or dataset.to_pandas()")
    target = given or next((name for name in LABELS if name in names), None)
    if target is None or target not in names:
        raise PdslError(
            f"{where}: there is no column {target or 'label'}; name that of the target, target='...' (columns:"
            f" {', '.join(names)})"
        )
    return target


def _type(dataset: Any, name: str) -> str:
    return type(dataset.features[name]).__name__


def _values(dataset: Any, name: str) -> list[Any]:
    """Plain Python values of a column."""
    return list(dataset.with_format(None)[name])


def _column(dataset: Any, name: str, where: str) -> Array:
    """A column as an array [n, ...]."""
    if _type(dataset, name) == "Image":
        images = [image_array(image, f"{where}: {name}[{i}]") for i, image in enumerate(_values(dataset, name))]
        for i, image in enumerate(images):
            if image.shape != images[0].shape:
                raise PdslError(
                    f"{where}: {name}[{i}] has shape {list(image.shape)}, {name}[0] {list(images[0].shape)}; bring all"
                    " images to one size and mode"
                )
        return np.stack(images).astype(np.float32) / np.float32(255)
    try:
        array = np.asarray(dataset.with_format("numpy").select_columns([name])[:][name])
    except ValueError:  # rows of different shapes
        array = np.empty(len(dataset), dtype=object)
    if array.dtype.kind == "O":
        values = _values(dataset, name)
        if any(value is None for value in values):
            raise PdslError(f"{where}: column {name} has missing values; fill them in, or filter these rows")
        if isinstance(values[0], list):
            raise PdslError(f"{where}: column {name} has lists of different lengths; pad them to one length")
    if array.dtype.kind not in "biuf":
        raise PdslError(
            f"{where}: column {name} is {dataset.features[name]}; tokenise or encode it, or choose columns=[...]"
        )
    return array
