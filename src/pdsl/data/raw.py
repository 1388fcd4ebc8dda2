"""Raw inputs for predictions, read as the training data were: columns by name, with their declared categories."""

import zipfile
from collections.abc import Container, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from pdsl.data import huggingface, tables
from pdsl.data.items import FIRST, LABELS, Items, is_image, seeded, stack_inputs
from pdsl.data.validation import Schema, as_array, to_integers
from pdsl.settings import DataSettings
from pdsl.utils.errors import PdslError

WHERE = "inputs"  # their name in messages


def read_raw(x: object, schema: Schema, single: bool) -> tuple[object, bool]:
    """Raw inputs as an array, or as a tuple or mapping of arrays; and whether bytes were divided by 255 already.

    `schema`: columns of the training data, empty if they had none. `single`: the model takes one tensor, not several.
    """
    if isinstance(x, str | PathLike):
        x = _read_file(Path(x).expanduser())
    if isinstance(x, Mapping) and "data" in x and "target" in x:  # a Bunch of scikit-learn
        x = x["data"]
    if huggingface.is_dataset_dict(x):
        raise PdslError(f"{WHERE}: a DatasetDict given; choose a split, like dataset['test']")
    if huggingface.is_dataset(x):
        return _read_dataset(x, schema, single)
    if isinstance(x, Dataset):
        items: Any = x
        return _read_items(items, schema)
    if isinstance(x, Mapping) and schema:
        x = _read_mapping(x, schema, single)
    if tables.is_series(x) and schema:
        row: Any = x
        x = row.to_frame().T.infer_objects()
    if tables.is_frame(x):
        return _read_frame(x, schema, single), False
    return x, False


def to_tensor(x: object) -> Tensor:
    """A tensor of float32 or int64."""
    if isinstance(x, Tensor):
        return x.float() if x.is_floating_point() else x.long()
    array = as_array(x, WHERE)
    if array.dtype.kind not in "biuf":
        raise PdslError(f"{WHERE}: the inputs are not numbers; encode text and categories as for training")
    if array.dtype.kind == "f":
        return torch.from_numpy(array.astype(np.float32))
    return to_integers(array, WHERE)


def _read_file(path: Path) -> object:
    """Content of a table or of the array x, or x.ids, x.mask and so on, of an .npz file."""
    if path.suffix.lower() != ".npz":
        return tables.read_table(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            fields = {name[2:]: file[name] for name in file.files if name.startswith("x.")}
            return fields or file["x"]
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as e:
        raise PdslError(f"{path}: cannot be read ({e}); write it with numpy.savez(path, x=...)") from e


def _read_dataset(dataset: Any, schema: Schema, single: bool) -> tuple[object, bool]:
    """Inputs of a Hugging Face Dataset."""
    if len(dataset) == 0:
        raise PdslError(f"{WHERE}: the Dataset is empty; give at least one record")
    if dataset.format["type"] == "custom":
        return _read_items(dataset, schema)
    if single and (len(schema) > 1 or any(schema.values())):  # the training data were a table
        return _read_frame(dataset.with_format(None).to_pandas(), schema, single), False
    names = list(schema) or [name for name in dataset.column_names if name not in LABELS]
    if not names or (single and len(names) > 1):
        raise PdslError(f"{WHERE}: choose the input column: dataset.select_columns(...) ({', '.join(names)})")
    return huggingface.read_columns(dataset, names, WHERE)


def _read_items(items: Items, schema: Schema) -> tuple[object, bool]:
    """Inputs of items that are (input, label), mappings, or inputs alone; random transforms have a fixed seed."""
    if not hasattr(items, "__len__"):
        raise PdslError(f"{WHERE}: {type(items).__name__} given, which has no length; give a map-style Dataset")
    values = []
    for i in range(len(items)):
        with seeded(FIRST):
            values.append(_input_of(items[i], schema))
    if not values:
        raise PdslError(f"{WHERE}: the Dataset is empty; give at least one record")
    return stack_inputs(values, WHERE), is_image(values[0])


def _input_of(item: object, schema: Schema) -> object:
    if isinstance(item, Mapping):
        names = [name for name in schema if name in item] or [name for name in item if name not in LABELS]
        return item[names[0]] if len(names) == 1 else {name: item[name] for name in names}
    return item[0] if isinstance(item, tuple | list) and len(item) in (1, 2) else item


def _read_frame(frame: Any, schema: Schema, single: bool) -> object:
    """Numbers [n, features] of the training columns, chosen by name; other columns are ignored."""
    if not schema:
        return frame.to_numpy()
    frame = frame.rename(columns=str)
    _require(schema, frame.columns, "column")
    lists = {name: _stack_lists(frame[name]) for name in schema if _has_lists(frame[name])}
    if not single:
        return {name: lists.get(name, frame[name].to_numpy()) for name in schema}
    if lists:
        return next(iter(lists.values()))
    types = tables.import_pandas().api.types
    for name, categories in schema.items():
        if not categories and not types.is_numeric_dtype(frame[name].dtype):
            raise PdslError(f"{WHERE}: column {name} is {frame[name].dtype}; the model was trained on numbers")
    declared = {name: values for name, values in schema.items() if values}
    settings = DataSettings(name="python", columns=tuple(schema), categories=declared or None)
    return tables.encode(frame, WHERE, settings)[0]


def _read_mapping(x: Mapping[Any, object], schema: Schema, single: bool) -> object:
    """Named inputs without those that the model does not take; for a table a data frame, of one row for scalars."""
    _require(schema, x, "column" if single else "input")
    given = {name: as_array(x[name], name) if isinstance(x[name], Tensor) else x[name] for name in schema}
    if not single:
        return given
    if len(schema) == 1 and np.ndim(first := next(iter(given.values()))) > 1:  # type: ignore[arg-type]
        return first
    scalars = all(np.ndim(value) == 0 for value in given.values())  # type: ignore[arg-type]
    return tables.import_pandas().DataFrame([given] if scalars else given)


def _require(schema: Schema, given: Container[object], kind: str) -> None:
    if missing := [name for name in schema if name not in given]:
        raise PdslError(
            f"{WHERE}: missing {kind}{'s' * (len(missing) > 1)} {tables.join_names(missing)}; the model was trained on"
            f" {tables.join_names(schema)}"
        )


def _has_lists(series: Any) -> bool:
    """Whether a column has an array or list per record, as one of a Hugging Face Dataset may have."""
    return series.ndim == 1 and len(series) > 0 and isinstance(series.iloc[0], list | np.ndarray)


def _stack_lists(series: Any) -> object:
    return np.stack([np.asarray(value) for value in series])
