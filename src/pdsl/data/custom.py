"""Custom data, from .npz files or from Python.

A file has arrays x [n, ...] and y [n]. Optional arrays are x_test and y_test, x_validation and y_validation (a public
set Q), and agent [n], the owner of each record. A folder has one file with x and y per agent, in the order of their
names, and optionally test.npz and validation.npz. Values of x are not scaled, except that bytes are divided by 255.
"""

import hashlib
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from pdsl.data.datasets import Data
from pdsl.data.validation import (
    Array,
    Records,
    as_array,
    check_classes,
    check_owner,
    check_records,
    check_shapes,
    join,
    row_bytes,
)
from pdsl.settings import DataSettings
from pdsl.utils.errors import PdslError
from pdsl.utils.random import Streams


def load_npz(settings: DataSettings, streams: Streams, agents: int | None = None) -> Data:
    """Load the file or folder at `data.path`; a folder must have one file for each of `agents`, if that is given."""
    if settings.path is None:
        raise PdslError("data.path: not set, but data.name is npz; give a .npz file or a folder with one per agent")
    path = Path(settings.path).expanduser()
    if not path.exists():
        raise PdslError(f"data.path: there is no {path}; give a .npz file or a folder with one per agent")
    if path.is_dir():
        return _load_folder(path, settings, streams, agents)
    arrays = _read(path, {"x", "y", "x_test", "y_test", "x_validation", "y_validation", "agent"})
    train = _named_records(arrays, "", path)
    test, validation = (
        _named_records(arrays, suffix, path) if {f"x{suffix}", f"y{suffix}"} & arrays.keys() else None
        for suffix in ("_test", "_validation")
    )
    owner = check_owner(arrays["agent"], f"{path}: agent", len(train.y)) if "agent" in arrays else None
    return _assemble(settings.name, train, owner, test, validation, settings.test_fraction, streams)


def load_records(path: Path) -> Records:
    """Load the records of one agent from a file with x and y."""
    return _named_records(_read(_require_file(path), {"x", "y"}), "", path)


def load_public(path: Path) -> tuple[Records, Records]:
    """Load the test set and Q from a file with x_test, y_test, x_validation and y_validation."""
    arrays = _read(_require_file(path), {"x_test", "y_test", "x_validation", "y_validation"})
    return _named_records(arrays, "_test", path), _named_records(arrays, "_validation", path)


def _require_file(path: Path) -> Path:
    if not path.is_file():
        raise PdslError(f"there is no {path}; write it with numpy.savez")
    return path


def from_python(data: object, streams: Streams, test_fraction: float = 0.2) -> Data:
    """Convert tensors, arrays or map-style Datasets of (input, label) items to Data.

    `data` is (x, y), a Dataset, or a list of these with one item per agent (a natural partition). A tuple
    (training data, test data) adds test data, which is (x, y) or a Dataset. A `Data` is checked and returned. Without
    test data, test_fraction of the records is held out. A Dataset is read once, so a random transform is drawn once
    per record.
    """
    if isinstance(data, Data):
        return _check_data(data)
    test = None
    if isinstance(data, tuple) and len(data) == 2 and not isinstance(data[0], Tensor | np.ndarray):
        data, second = data
        test = _to_records(second, "test data")
    if isinstance(data, list):
        train, owner = join([_to_records(part, f"agent {agent}") for agent, part in enumerate(data)], "data")
    else:
        train, owner = _to_records(data, "data"), None
    return _assemble("python", train, owner, test, None, test_fraction, streams)


def _load_folder(folder: Path, settings: DataSettings, streams: Streams, agents: int | None) -> Data:
    paths = {path.name: path for path in sorted(folder.glob("*.npz"))}
    test, validation = (
        _named_records(_read(path, {"x", "y"}), "", path) if (path := paths.pop(name, None)) else None
        for name in ("test.npz", "validation.npz")
    )
    train, owner = join([_named_records(_read(path, {"x", "y"}), "", path) for path in paths.values()], str(folder))
    if agents is not None and len(paths) != agents:
        raise PdslError(
            f"graph.agents: {agents}, but {folder} has files of {len(paths)} agents (*.npz without test.npz and"
            f" validation.npz); try graph.agents={len(paths)}, or add or remove files"
        )
    return _assemble(settings.name, train, owner, test, validation, settings.test_fraction, streams)


def _check_data(data: Data) -> Data:
    """Apply the checks of custom data to a Data that the user built."""
    train = check_records(data.x, data.y, "data", ("x", "y"))
    test = check_records(data.test_x, data.test_y, "data", ("test_x", "test_y"))
    owner = None if data.owner is None else check_owner(data.owner, "data: owner", len(train.y))
    parts, q = [train, test], None
    if data.validation is not None:
        validation = check_records(*data.validation, "data.validation", ("x", "y"))
        parts, q = [*parts, validation], (validation.x, validation.y)
    check_shapes(parts)
    check_classes(parts, data.classes)
    return Data(data.name, train.x, train.y, test.x, test.y, data.classes, owner, q, data.note)


def _assemble(
    name: str,
    train: Records,
    owner: Tensor | None,
    test: Records | None,
    validation: Records | None,
    test_fraction: float,
    streams: Streams,
) -> Data:
    """Build a Data from checked records; without test data, hold out some training records."""
    given = [part for part in (train, test, validation) if part is not None]
    check_shapes(given)
    classes = 1 + max(int(part.y.max()) for part in given)
    q = None if validation is None else (validation.x, validation.y)
    if test is not None:
        return Data(name, train.x, train.y, test.x, test.y, classes, owner, q)
    held = _hold_out(train, owner, test_fraction, streams)
    kept_owner = None if owner is None else owner[~held]
    note = f"{int(held.sum())} of {len(held)} records were held out of training for testing, as no test data were given"
    if q is None:
        note += (
            "; the public set Q is drawn from them, so these records become public:"
            " if no record may be public, give public validation data"
        )
    return Data(name, train.x[~held], train.y[~held], train.x[held], train.y[held], classes, kept_owner, q, note)


def _hold_out(train: Records, owner: Tensor | None, fraction: float, streams: Streams) -> Tensor:  # [n] bool
    """Choose the test records by a coin per record that depends only on the seed and on the record itself.

    So adding or removing a record moves no other record between training and test set.
    """
    key = f"held-out/{streams.seed}".encode()
    coins = [hashlib.blake2b(row, key=key, digest_size=8).digest() for row in row_bytes(train.x, train.y)]
    held = torch.tensor([int.from_bytes(coin, "big") < fraction * 2**64 for coin in coins])
    local = torch.zeros_like(train.y) if owner is None else owner
    emptied = set(local[held].tolist()) - set(local[~held].tolist())
    if not held.any() or emptied:
        raise PdslError(f"{train.where}: too few records to split into training and test records; give test data")
    return held


def _read(path: Path, known: set[str]) -> dict[str, Array]:
    """Read the arrays of an .npz file. Pickled objects are refused, because loading one can run any code."""
    if not zipfile.is_zipfile(path):
        raise PdslError(f"{path}: not an .npz file, or cut off; write it with numpy.savez(path, x=..., y=...)")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PdslError(f"{path}: cannot be read ({reason}); save plain numbers with numpy.savez") from error
    if unknown := arrays.keys() - known:
        raise PdslError(
            f"{path}: unknown array {_join_names(unknown)}; rename or remove it (known: {_join_names(known)})"
        )
    return arrays


def _named_records(arrays: dict[str, Array], suffix: str, path: Path) -> Records:
    names = (f"x{suffix}", f"y{suffix}")
    for name in names:
        if name not in arrays:
            raise PdslError(f"{path}: no array '{name}' (it has: {_join_names(arrays) or 'none'}); save both x and y")
    return check_records(arrays[names[0]], arrays[names[1]], str(path), names)


def _to_records(data: object, where: str) -> Records:
    """Convert an (x, y) pair or a map-style Dataset to records."""
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset) and hasattr(data, "__len__"):
        data = _stack_items(data, len(data), where)
    if not (isinstance(data, tuple) and len(data) == 2):
        raise PdslError(
            f"{where}: {type(data).__name__} given; give (x, y) tensors or arrays, or a Dataset with a length,"
            " and a list of those for one per agent"
        )
    return check_records(data[0], data[1], where, ("x", "y"))


def _stack_items(dataset: Dataset[object], n: int, where: str) -> tuple[Array, Array]:
    """Stack the items of a Dataset into x and y."""
    if n == 0:
        raise PdslError(f"{where}: the Dataset is empty; give at least one record")
    inputs, labels = [], []
    for i in range(n):
        item = dataset[i]
        if not (isinstance(item, tuple | list) and len(item) == 2):
            raise PdslError(f"{where}: item {i} of the Dataset is not (input, label); wrap it so that it is")
        inputs.append(as_array(item[0], f"{where}: input of item {i}"))
        labels.append(np.asarray(item[1]))
        if inputs[i].shape != inputs[0].shape:
            shapes = f"shape {list(inputs[i].shape)}, item 0 {list(inputs[0].shape)}"
            raise PdslError(f"{where}: item {i} has {shapes}; bring all inputs to one shape")
        if labels[i].shape != ():
            raise PdslError(f"{where}: the label of item {i} has shape {list(labels[i].shape)}; give one number")
    return np.stack(inputs), np.stack(labels)


def _join_names(names: Collection[str]) -> str:
    return ", ".join(sorted(names))
