"""Checks and conversion of custom data.

Each error message names the source, the array, the first wrong record and what to do.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdsl.utils.errors import PdslError
from pdsl.utils.inputs import Inputs, tensors_of

MAX_CLASSES = 1_000_000  # a larger label is an identifier or a regression target

Array = NDArray[Any]


class Records(NamedTuple):
    """Checked records and, for messages, their source."""

    x: Tensor  # [n, ...] float32
    y: Tensor  # [n] int64
    where: str


def check_records(x: object, y: object, where: str, names: tuple[str, str]) -> Records:
    """Convert two arrays, called `names` in messages, to records: any real x, and y of integers from 0."""
    x_name, y_name = (f"{where}: {name}" for name in names)
    inputs, labels = as_array(x, x_name), as_array(y, y_name)
    if inputs.dtype.kind not in "biuf":
        raise PdslError(f"{x_name} has dtype {inputs.dtype}; give real numbers")
    if inputs.ndim < 2:
        raise PdslError(f"{x_name} has shape {list(inputs.shape)}; give [records, ...], one feature as [records, 1]")
    if inputs.size == 0:
        raise PdslError(f"{x_name} is empty (shape {list(inputs.shape)}); give at least one record")
    if labels.shape != inputs.shape[:1]:
        shape = list(labels.shape)
        raise PdslError(f"{y_name} has shape {shape}, but {names[0]} has {len(inputs)} records; give one label each")
    return Records(_to_floats(inputs, x_name), _to_integers(labels, y_name), where)


def check_owner(agent: object, name: str, n: int) -> Tensor:  # [n]
    """Convert the owners of n records; each of the agents 0..M-1 must have at least one record."""
    agents = as_array(agent, name)
    if agents.shape != (n,):
        raise PdslError(f"{name} has shape {list(agents.shape)}, but there are {n} records; give one agent each")
    owner = _to_integers(agents, name)
    counts = torch.bincount(owner)
    if not counts.all():
        empty = int(counts.argmin())
        raise PdslError(f"{name}: agent {empty} has no record; number the agents 0, 1, 2, ... without gaps")
    return owner


def check_shapes(parts: list[Records]) -> None:
    first = parts[0]
    for part in parts:
        if part.x.shape[1:] != first.x.shape[1:]:
            raise PdslError(
                f"{part.where}: records have shape {list(part.x.shape[1:])}, but those of {first.where}"
                f" {list(first.x.shape[1:])}; bring all records to one shape"
            )


def check_classes(parts: list[Records], classes: int) -> None:
    for part in parts:
        if len(bad := torch.nonzero(part.y >= classes)):
            i = int(bad[0])
            raise PdslError(
                f"{part.where}: label {int(part.y[i])} at index {i}, but there are {classes} classes; number them"
                f" 0 to {classes - 1}"
            )


def join(parts: list[Records], where: str) -> tuple[Records, Tensor]:
    """Concatenate the records of all agents; return them and the owner of each."""
    if len(parts) < 2:
        raise PdslError(
            f"{where}: data of {len(parts)} agents; give two or more, or one data set to split across agents"
        )
    check_shapes(parts)
    sizes = torch.tensor([len(part.y) for part in parts])
    joined = Records(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]), where)
    return joined, torch.repeat_interleave(torch.arange(len(parts)), sizes)


def row_bytes(x: Inputs, y: Tensor) -> list[bytes]:
    """Each record as bytes (inputs and label): equal bytes mean equal records."""
    columns = [np.ascontiguousarray(tensor.detach().cpu().numpy()) for tensor in (*tensors_of(x), y)]
    return [b"".join(row.tobytes() for row in rows) for rows in zip(*columns, strict=True)]


def as_array(value: object, name: str) -> Array:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        array: Array = (value.float() if value.is_floating_point() else value).numpy()  # numpy has no bfloat16
        return array
    if isinstance(value, np.ndarray):
        return value
    raise PdslError(f"{name}: {type(value).__name__} given; give a tensor or a numpy array")


def _to_floats(inputs: Array, name: str) -> Tensor:
    """Convert to float32; bytes are divided by 255, other types are not scaled."""
    with np.errstate(over="ignore"):  # values too large for float32 become inf and are refused
        x = np.require(inputs, dtype=np.float32, requirements=["C", "W"])
    finite = np.isfinite(x)
    if not finite.all():
        i = int(np.argmin(finite.reshape(len(x), -1).all(axis=1)))
        raise PdslError(f"{name}[{i}] has NaN, inf or values too large for float32; remove or fill in such records")
    tensor = torch.from_numpy(x)
    return tensor / 255 if inputs.dtype == np.uint8 else tensor


def _to_integers(values: Array, name: str) -> Tensor:
    if values.dtype.kind not in "biuf":
        raise PdslError(f"{name} has dtype {values.dtype}; use whole numbers 0, 1, 2, ...")
    numbers = values.astype(np.float64)  # float16 cannot represent MAX_CLASSES
    bad = (numbers < 0) | (numbers >= MAX_CLASSES) | (numbers != np.floor(numbers))  # NaN fails the last test
    if bad.any():
        i = int(np.argmax(bad))
        raise PdslError(f"{name}[{i}] is {values[i]}; use whole numbers 0, 1, 2, ... (below {MAX_CLASSES})")
    return torch.from_numpy(np.require(values, dtype=np.int64, requirements=["C", "W"]))
