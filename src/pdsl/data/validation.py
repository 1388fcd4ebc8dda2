"""Checks and conversion of custom data.

Each error message names the source, the array, the first wrong record and what to do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdsl.utils.errors import PdslError
from pdsl.utils.inputs import Fields, Inputs, concat, describe_shape, tensors_of

Array = NDArray[Any]
Schema = Mapping[str, tuple[str, ...]]  # input columns in order, with their declared categories; () for numbers


class Records(NamedTuple):
    """Checked records and, for messages, their source."""

    x: Inputs  # [n, ...] float32 or int64
    y: Tensor  # [n] int64 classes, [n, labels] int64, or float32 numbers
    where: str


@dataclass(frozen=True)
class Source:
    """Records of one data set: converted inputs, and targets and owners as they were given."""

    x: Inputs
    y: object  # array, or a list with the label names of each record
    where: str
    y_name: str = "y"
    classes: tuple[object, ...] = ()  # all values of y, if the data set declares them
    class_names: tuple[str, ...] = ()  # names of the classes 0, 1, …, if the data set declares them
    owner: Array | None = None  # [n] agent of each record
    features: tuple[str, ...] = ()  # names of the features of a table
    columns: tuple[str, ...] = ()  # columns of the table that are inputs
    schema: Schema = field(default_factory=dict)  # of a table
    pixels: bool = False  # x was divided by 255


class Converted(NamedTuple):
    """Converted inputs, and whether bytes were divided by 255."""

    x: Inputs
    pixels: bool


def convert_inputs(value: object, name: str, pixels: bool | None = None) -> Converted:
    """Convert one array, or a tuple or mapping of arrays, to the inputs of a model.

    Floats become float32. Integers and booleans become int64. Bytes are divided by 255 if `pixels` says so.
    """
    if isinstance(value, Mapping | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        arrays = {str(key): as_array(item, f"{name}[{key!r}]") for key, item in items}
        if not arrays:
            raise PdslError(f"{name} has no tensors; give at least one")
        tensors = [_convert(array, f"{name}[{key!r}]", pixels, 1) for key, array in arrays.items()]
        if len(sizes := {len(tensor) for tensor in tensors}) > 1:
            raise PdslError(f"{name}: its tensors have {_join(sorted(sizes))} records; give a row per record in each")
        names = list(arrays) if isinstance(value, Mapping) else None
        converted: Inputs = Fields(tensors, names)
        bytes_given = any(array.dtype == np.uint8 for array in arrays.values())
    else:
        array = as_array(value, name)
        converted, bytes_given = _convert(array, name, pixels, 2), array.dtype == np.uint8
    if pixels and not bytes_given:
        raise PdslError(f"data.pixels: true, but {name} has no bytes (uint8); leave it out, and scale {name} yourself")
    return Converted(converted, bool(pixels))


def _convert(array: Array, name: str, pixels: bool | None, dimensions: int) -> Tensor:
    if array.dtype.kind in "OUS":
        raise PdslError(
            f"{name} has dtype {array.dtype}; give numbers: encode text as token ids, categories as integers"
        )
    if array.dtype.kind not in "biuf":
        raise PdslError(f"{name} has dtype {array.dtype}; give real numbers")
    if array.ndim < dimensions:
        raise PdslError(f"{name} has shape {list(array.shape)}; give [records, ...], one feature as [records, 1]")
    if array.size == 0:
        raise PdslError(f"{name} is empty (shape {list(array.shape)}); give at least one record")
    if array.dtype == np.uint8 and pixels is None and array.ndim in (3, 4):
        raise PdslError(
            f"{name} has bytes of shape {list(array.shape[1:])} per record; say whether they are pixels, divided by 255"
            " (pixels=True), or integers (pixels=False)"
        )
    if array.dtype == np.uint8 and pixels:
        return torch.from_numpy(array.astype(np.float32)) / 255
    return to_floats(array, name) if array.dtype.kind == "f" else to_integers(array, name)


def to_floats(values: Array, name: str) -> Tensor:
    """Convert to finite float32."""
    with np.errstate(over="ignore"):  # values too large for float32 become inf and are refused
        x = np.require(values, dtype=np.float32, requirements=["C", "W"])
    finite = np.isfinite(x)
    if not finite.all():
        i = int(np.argmin(finite.reshape(len(x), -1).all(axis=1)))
        raise PdslError(f"{name}[{i}] has NaN, inf or values too large for float32; remove or fill in such records")
    return torch.from_numpy(x)


def to_integers(values: Array, name: str) -> Tensor:
    """Convert integers or booleans to int64."""
    if values.dtype == np.uint64 and values.size and values.max() > np.iinfo(np.int64).max:
        raise PdslError(f"{name} has integers too large for int64; use smaller ones")
    return torch.from_numpy(np.require(values, dtype=np.int64, requirements=["C", "W"]))


def check_length(source: Source, n: int) -> None:
    if n != len(source.x):
        raise PdslError(
            f"{source.where}: {source.y_name} has {n} records, but there are {len(source.x)} inputs; give one target"
            " for each"
        )


def convert_owner(sources: Sequence[Source], name: str) -> tuple[Tensor, tuple[str, ...]]:
    """Agent of each record, and the names of the agents.

    Integers 0..M-1 are the agents' numbers. Other values are names, in sorted order.
    """
    given = np.concatenate([np.asarray(source.owner).reshape(-1) for source in sources])
    n = sum(len(source.x) for source in sources)
    if given.shape != (n,):
        raise PdslError(f"{name} has shape {list(given.shape)}, but there are {n} records; give one agent each")
    if given.dtype.kind == "f" and np.isfinite(given).all() and (given == np.floor(given)).all():
        given = given.astype(np.int64)
    if given.dtype.kind not in "iuOUSb":
        raise PdslError(f"{name} has dtype {given.dtype}; give an agent's number or name for each record")
    if given.dtype.kind in "iu":
        if given.min() == 0:
            missing = np.setdiff1d(np.arange(given.max()), given) if given.max() < n else np.array([])
            if given.max() >= n or len(missing):
                empty = int(missing[0]) if len(missing) else n
                raise PdslError(f"{name}: agent {empty} has no record; number the agents 0, 1, 2, ... without gaps")
            return torch.from_numpy(given.astype(np.int64)), ()
        if given.min() < 0:
            i = int(np.argmax(given < 0))
            raise PdslError(f"{name}[{i}] is {given[i]}; number the agents 0, 1, 2, ..., or give names")
    names, owner = np.unique(given if given.dtype.kind in "iu" else given.astype(str), return_inverse=True)
    return torch.from_numpy(owner.reshape(-1).astype(np.int64)), tuple(str(value) for value in names)


def check_shapes(parts: Sequence[Source | Records]) -> None:
    """Raise PdslError unless all records have the same form."""
    first = parts[0]
    for part in parts:
        if _form(part.x) != _form(first.x):
            raise PdslError(
                f"{part.where}: records have shape {describe_form(part.x)}, but those of {first.where}"
                f" {describe_form(first.x)}; bring all records to one shape and type"
            )


def describe_form(x: Inputs) -> str:
    """Shape of a record as a list, or the shapes of its tensors."""
    if isinstance(x, Tensor) and x.dtype == torch.float32:
        return str(list(x.shape[1:]))
    return describe_shape(x)


def _form(x: Inputs) -> object:
    names = x.names if isinstance(x, Fields) else None
    return names, [(tensor.shape[1:], tensor.dtype) for tensor in tensors_of(x)]


def check_classes(parts: Sequence[Records], classes: int) -> None:
    for part in parts:
        if len(bad := torch.nonzero((part.y >= classes) | (part.y < 0))):
            i = int(bad[0, 0])
            raise PdslError(
                f"{part.where}: label {int(part.y[i])} at index {i}, but there are {classes} classes; number them"
                f" 0 to {classes - 1}"
            )


def check_parts(parts: Sequence[Source], where: str) -> None:
    """Raise PdslError unless there are two or more agents with records of one form."""
    if len(parts) < 2:
        raise PdslError(
            f"{where}: data of {len(parts)} agents; give two or more, or one data set to split across agents"
        )
    check_shapes(parts)


def join_inputs(parts: Sequence[Source]) -> tuple[Inputs, Tensor]:
    """Concatenate the records of all agents; return them and the owner of each."""
    sizes = torch.tensor([len(part.x) for part in parts])
    return concat([part.x for part in parts]), torch.repeat_interleave(torch.arange(len(parts)), sizes)


def row_bytes(x: Inputs, y: Tensor) -> list[bytes]:
    """Each record as bytes (inputs and label): equal bytes mean equal records."""
    columns = [np.ascontiguousarray(tensor.detach().cpu().numpy()) for tensor in (*tensors_of(x), y)]
    return [b"".join(row.tobytes() for row in rows) for rows in zip(*columns, strict=True)]


def as_array(value: object, name: str) -> Array:
    """A tensor, array, column or nested list as an array."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        array: Array = (value.float() if value.is_floating_point() else value).numpy()  # numpy has no bfloat16
        return array
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, list | range):
        return _nested_list(list(value), name)
    if hasattr(value, "__array__") and not isinstance(value, type):
        return np.asarray(value)
    raise PdslError(f"{name}: {type(value).__name__} given; give a tensor or a numpy array")


def _nested_list(value: list[object], name: str) -> Array:
    if value and isinstance(value[0], Tensor | np.ndarray):
        value = [as_array(item, f"{name}[{i}]") for i, item in enumerate(value)]
    try:
        return np.asarray(value)
    except ValueError as error:
        raise PdslError(f"{name}: its lists have different lengths; pad them to one length") from error


def _join(values: Sequence[object]) -> str:
    return " and ".join(str(value) for value in values)
