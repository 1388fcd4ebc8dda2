"""The user's own data, from .npz files or from Python.

A file has arrays x [n, ...] and y [n], and may have x_test and y_test, x_validation and y_validation (a public Q) and
agent [n], the owner of each record. A folder has one file with x and y per agent, in the order of their names, and
may have test.npz and validation.npz. Values of x are taken as they are, but bytes are divided by 255.
"""

import hashlib
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from pdsl.data.datasets import Data
from pdsl.data.records import (
    Records,
    as_array,
    check_classes,
    check_owner,
    check_records,
    check_shapes,
    join,
    row_bytes,
)
from pdsl.errors import PdslError
from pdsl.randomness import Streams
from pdsl.settings import DataSettings


def load_npz(settings: DataSettings, streams: Streams, agents: int | None = None) -> Data:
    """The file or the folder at `data.path`; a folder must have as many agents as the graph, if that is given."""
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
    return _assembled(settings.name, train, owner, test, validation, settings.test_fraction, streams)


def load_records(path: Path) -> Records:
    """One owner's records, from a file with x and y."""
    return _named_records(_read(_there(path), {"x", "y"}), "", path)


def load_public(path: Path) -> tuple[Records, Records]:
    """The test set and Q, from a file with x_test, y_test, x_validation and y_validation."""
    arrays = _read(_there(path), {"x_test", "y_test", "x_validation", "y_validation"})
    return _named_records(arrays, "_test", path), _named_records(arrays, "_validation", path)


def _there(path: Path) -> Path:
    if not path.is_file():
        raise PdslError(f"there is no {path}; write it with numpy.savez")
    return path


def from_python(data: object, streams: Streams, test_fraction: float = 0.2) -> Data:
    """Data from tensors, arrays or map-style Datasets of (input, label) items.

    data: (x, y) or a Dataset; a list of those, one per agent (a natural partition); any of these with test data, as
    a tuple (training data, (test_x, test_y) or a Dataset); or a Data. Without test data, test_fraction of the records
    are held out. A Dataset is read once: a random transform in it is drawn once for each record.
    """
    if isinstance(data, Data):
        return _checked(data)
    test = None
    if isinstance(data, tuple) and len(data) == 2 and not isinstance(data[0], Tensor | np.ndarray):
        data, second = data
        test = _pair(second, "test data")
    if isinstance(data, list):
        train, owner = join([_pair(part, f"agent {agent}") for agent, part in enumerate(data)], "data")
    else:
        train, owner = _pair(data, "data"), None
    return _assembled("python", train, owner, test, None, test_fraction, streams)


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
    return _assembled(settings.name, train, owner, test, validation, settings.test_fraction, streams)


def _checked(data: Data) -> Data:
    """A Data that somebody made by hand, after the checks that any other data go through."""
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


def _assembled(
    name: str,
    train: Records,
    owner: Tensor | None,
    test: Records | None,
    validation: Records | None,
    test_fraction: float,
    streams: Streams,
) -> Data:
    """One Data of these records; without test data, some of the training records become the test set."""
    given = [part for part in (train, test, validation) if part is not None]
    check_shapes(given)
    classes = 1 + max(int(part.y.max()) for part in given)
    q = None if validation is None else (validation.x, validation.y)
    if test is not None:
        return Data(name, train.x, train.y, test.x, test.y, classes, owner, q)
    held = _held_out(train, owner, test_fraction, streams)
    kept_owner = None if owner is None else owner[~held]
    note = f"{int(held.sum())} of {len(held)} records were taken out of training to test on, as no test data were given"
    if q is None:
        note += (
            "; the public set Q is drawn from them, so those records are shown to everyone who uses Q:"
            " if no record may be public, give public validation data"
        )
    return Data(name, train.x[~held], train.y[~held], train.x[held], train.y[held], classes, kept_owner, q, note)


def _held_out(train: Records, owner: Tensor | None, fraction: float, streams: Streams) -> Tensor:  # [n] bool
    """A coin for each record, which depends on the seed and on this record alone.

    So a record more or less moves no other record between training and testing, whichever place it has.
    """
    key = f"held-out/{streams.seed}".encode()
    coins = [hashlib.blake2b(row, key=key, digest_size=8).digest() for row in row_bytes(train.x, train.y)]
    held = torch.tensor([int.from_bytes(coin, "big") < fraction * 2**64 for coin in coins])
    owners = torch.zeros_like(train.y) if owner is None else owner
    emptied = set(owners[held].tolist()) - set(owners[~held].tolist())
    if not held.any() or emptied:
        raise PdslError(
            f"{train.where}: too few records to hold some out to test on and learn from the others; give test data"
        )
    return held


def _read(path: Path, known: set[str]) -> dict[str, Any]:
    """The arrays of an .npz file. Pickled objects are refused: to load one is to run what it says."""
    if not zipfile.is_zipfile(path):
        raise PdslError(f"{path}: not an .npz file, or cut off; write it with numpy.savez(path, x=..., y=...)")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PdslError(f"{path}: cannot be read ({reason}); save plain numbers with numpy.savez") from error
    if unknown := arrays.keys() - known:
        raise PdslError(f"{path}: unknown array {_listed(unknown)}; rename or remove it (known: {_listed(known)})")
    return arrays


def _named_records(arrays: dict[str, Any], suffix: str, path: Path) -> Records:
    names = (f"x{suffix}", f"y{suffix}")
    for name in names:
        if name not in arrays:
            raise PdslError(f"{path}: no array '{name}' (it has: {_listed(arrays) or 'none'}); save both x and y")
    return check_records(arrays[names[0]], arrays[names[1]], str(path), names)


def _pair(data: object, where: str) -> Records:
    """Records of an (x, y) pair or of a map-style Dataset."""
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset) and hasattr(data, "__len__"):
        data = _stacked(data, len(data), where)
    if not (isinstance(data, tuple) and len(data) == 2):
        raise PdslError(
            f"{where}: {type(data).__name__} given; give (x, y) tensors or arrays, or a Dataset with a length,"
            " and a list of those for one per agent"
        )
    return check_records(data[0], data[1], where, ("x", "y"))


def _stacked(dataset: Dataset[Any], n: int, where: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """x and y of a Dataset's items."""
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


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names))
