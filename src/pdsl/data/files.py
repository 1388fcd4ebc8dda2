"""Custom data in files: .npz, CSV and Parquet; one file, or a folder with one file per agent.

An .npz file has arrays x [n, ...] and y [n]; several inputs are x.ids, x.mask and so on. Optional arrays are x_test and
y_test, x_validation and y_validation (a public set Q), agent [n], the owner of each record by number or name, and
pixels, true if bytes are divided by 255.
"""

import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path

import numpy as np

from pdsl.data.custom import assemble, public_options
from pdsl.data.datasets import Data
from pdsl.data.tables import from_frame, read_table
from pdsl.data.targets import MAX_CLASSES
from pdsl.data.validation import Array, Records, Source, check_parts, convert_inputs, to_floats, to_integers
from pdsl.settings import DataSettings, file_kind
from pdsl.utils.errors import PdslError
from pdsl.utils.inputs import Fields
from pdsl.utils.random import Streams

MAX_PUBLIC_BYTES = 2**31  # of the arrays of a public file, which comes from another organisation


def data_path(text: str) -> dict[str, str]:
    """Settings of a data set that is given as one string: the path of a file, like patients.csv, or a name."""
    kind = file_kind(text)
    return {"name": text} if kind is None else {"name": kind, "path": text}


def load_files(
    settings: DataSettings, streams: Streams, agents: int | None = None, task: str = "auto", private: bool = False
) -> Data:
    """Load the file or folder at `data.path`; a folder must have one file for each of `agents`, if that is given."""
    kind = settings.name
    if settings.path is None:
        raise PdslError(
            f"data.path: not set, but data.name is {kind}; give a .{kind} file or a folder with one per agent"
        )
    path = Path(settings.path).expanduser()
    if not path.exists():
        raise PdslError(f"data.path: there is no {path}; give a .{kind} file or a folder with one per agent")
    names: tuple[str, ...] = ()
    train: Source | list[Source]
    if path.is_dir():
        paths = {file.stem: file for file in sorted(path.glob(f"*.{kind}"))}
        if settings.owner is not None:
            raise PdslError(f"data.owner: {path} has one file per agent already; leave data.owner out")
        public = [paths.pop(name, None) for name in ("test", "validation")]
        train = [_load(file, settings) for file in paths.values()]
        names = tuple(paths)
        check_parts(train, str(path))
        if agents is not None and len(paths) != agents:
            raise PdslError(
                f"graph.agents: {agents}, but {path} has files of {len(paths)} agents (*.{kind} without test.{kind} and"
                f" validation.{kind}); try graph.agents={len(paths)}, or add or remove files"
            )
        options = public_options(settings, train[0])
        test, validation = (None if file is None else _load(file, options) for file in public)
    elif kind == "npz":
        arrays = _read(path, ("x", "y", "x_test", "y_test", "x_validation", "y_validation", "agent", "pixels"))
        train = _source(arrays, "", path, settings.pixels)
        test, validation = (
            _source(arrays, suffix, path, settings.pixels) if _has(arrays, suffix) else None
            for suffix in ("_test", "_validation")
        )
    else:
        train, test, validation = from_frame(read_table(path), str(path), settings), None, None
    if settings.test_path is not None:
        if kind == "npz" or test is not None:
            raise PdslError("data.test_path: the test records are in data.path already; leave data.test_path out")
        options = public_options(settings, train[0] if isinstance(train, list) else train)
        test = _load(Path(settings.test_path).expanduser(), options)
    name = path.stem
    return assemble(name, train, (test, validation), settings, streams, task, private, names)


def load_records(path: Path, integers: bool = False) -> Records:
    """Load the records of one agent from a file with x and y. Inputs become floats, or stay integers."""
    return _single_input(_read(_require_file(path), ("x", "y", "pixels")), "", path, integers)


def load_public(path: Path, integers: bool = False) -> tuple[Records, Records]:
    """Load the test set and Q from a file with x_test, y_test, x_validation and y_validation."""
    known = ("x_test", "y_test", "x_validation", "y_validation", "pixels")
    arrays = _read(_require_file(path), known, MAX_PUBLIC_BYTES)
    return _single_input(arrays, "_test", path, integers), _single_input(arrays, "_validation", path, integers)


def _load(path: Path, settings: DataSettings) -> Source:
    if settings.name != "npz":
        return from_frame(read_table(path), str(path), settings)
    return _source(_read(path, ("x", "y", "pixels")), "", path, settings.pixels)


def _single_input(arrays: dict[str, Array], suffix: str, path: Path, integers: bool) -> Records:
    """Records whose inputs are one tensor of floats, or of integers.

    The type of y decides on their targets: numbers, classes or labels. Unlike `convert_targets`, this looks at no other
    record: organisations must agree without comparing theirs.
    """
    source = _source(arrays, suffix, path, None)
    if isinstance(source.x, Fields):
        raise PdslError(f"{path}: several inputs, x{suffix}.*; peers train on one array, x{suffix}")
    name, y = f"{path}: {source.y_name}", np.asarray(source.y)
    if y.dtype.kind not in "biuf":
        raise PdslError(f"{name} has dtype {y.dtype}; use whole numbers 0, 1, 2, ... for classes")
    if y.ndim not in (1, 2) or len(y) != len(source.x):
        raise PdslError(
            f"{name} has shape {list(y.shape)}, but there are {len(source.x)} records; give one target each"
        )
    if y.dtype.kind == "f":
        targets = to_floats(y, name)
    else:
        targets = to_integers(y, name)
        bad = (targets < 0) | (targets >= (MAX_CLASSES if y.ndim == 1 else 2))
        if bad.any():
            i = int(bad.reshape(len(y), -1).any(1).int().argmax())
            wanted = "classes are whole numbers 0, 1, 2, ..." if y.ndim == 1 else "labels are 0 or 1"
            raise PdslError(f"{name}[{i}] is {y[i]}; {wanted}")
    if integers and source.x.is_floating_point():
        raise PdslError(f"{path}: x{suffix} has floats, but the model starts with an embedding; give whole numbers")
    return Records(source.x if integers else source.x.float(), targets, str(path))


def _require_file(path: Path) -> Path:
    if not path.is_file():
        raise PdslError(f"there is no {path}; write it with numpy.savez")
    return path


def _read(path: Path, known: Collection[str], max_bytes: int | None = None) -> dict[str, Array]:
    """Read the arrays of an .npz file. Pickled objects are refused, because loading one can run any code.

    Names and sizes are checked before anything is unpacked: a small file can unpack to any size.
    """
    if not path.is_file():
        raise PdslError(f"{path}: not a file; remove it, or write one with numpy.savez(path, x=..., y=...)")
    if not zipfile.is_zipfile(path):
        raise PdslError(f"{path}: not an .npz file, or cut off; write it with numpy.savez(path, x=..., y=...)")
    try:
        _check_content(path, known, max_bytes)
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except MemoryError as error:
        raise PdslError(f"{path}: its arrays do not fit into memory; save fewer records") from error
    except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PdslError(f"{path}: cannot be read ({reason}); save plain numbers with numpy.savez") from error


def _check_content(path: Path, known: Collection[str], max_bytes: int | None) -> None:
    """Raise PdslError if an .npz file has unknown arrays, or more bytes than allowed."""
    with zipfile.ZipFile(path) as file:
        content = {info.filename.removesuffix(".npy"): info.file_size for info in file.infolist()}
    if unknown := [name for name in content if name not in known and not _is_field(name, known)]:
        raise PdslError(
            f"{path}: unknown array {_join_names(unknown)}; rename or remove it (known: {_join_names(known)})"
        )
    if max_bytes is not None and sum(content.values()) > max_bytes:
        raise PdslError(f"{path}: its arrays have more than {max_bytes:,} bytes; agree on fewer public records")


def _is_field(name: str, known: Collection[str]) -> bool:
    """Whether an array is one of several inputs, like x.ids."""
    base, dot, field = name.partition(".")
    return bool(dot and field) and base.startswith("x") and base in known


def _has(arrays: dict[str, Array], suffix: str) -> bool:
    return any(name.partition(".")[0] in (f"x{suffix}", f"y{suffix}") for name in arrays)


def _source(arrays: dict[str, Array], suffix: str, path: Path, pixels: bool | None) -> Source:
    x_name, y_name = f"x{suffix}", f"y{suffix}"
    fields = {name.partition(".")[2]: array for name, array in arrays.items() if name.startswith(f"{x_name}.")}
    for name in (x_name, y_name):
        if name not in arrays and not (name == x_name and fields):
            raise PdslError(f"{path}: no array '{name}' (it has: {_join_names(arrays) or 'none'}); save both x and y")
    if fields and x_name in arrays:
        raise PdslError(
            f"{path}: arrays {x_name} and {x_name}.{next(iter(fields))}; give one input or several, not both"
        )
    if "pixels" in arrays and pixels is None:
        pixels = bool(np.all(arrays["pixels"]))
    x, scaled = convert_inputs(fields or arrays[x_name], f"{path}: {x_name}", pixels)
    owner = arrays["agent"] if suffix == "" and "agent" in arrays else None
    if owner is not None and owner.shape != (len(x),):
        raise PdslError(
            f"{path}: agent has shape {list(owner.shape)}, but there are {len(x)} records; give one agent each"
        )
    return Source(x, arrays[y_name], str(path), y_name, owner=owner, pixels=scaled)


def _join_names(names: Collection[str]) -> str:
    return ", ".join(sorted(names))
