"""Custom data from Python: tensors, arrays, tables, torch and Hugging Face data sets, pooled or one per agent."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pdsl.data import huggingface, tables
from pdsl.data.datasets import Data
from pdsl.data.items import Items, from_items
from pdsl.data.scaling import pixel_scaling
from pdsl.data.targets import convert_targets
from pdsl.data.validation import (
    Records,
    Schema,
    Source,
    as_array,
    check_classes,
    check_parts,
    check_shapes,
    convert_inputs,
    convert_owner,
    join_inputs,
    row_bytes,
    to_floats,
    to_integers,
)
from pdsl.settings import DataSettings
from pdsl.utils.errors import PdslError
from pdsl.utils.inputs import AugmentedFields, Fields, Inputs, fixed_reading
from pdsl.utils.random import Streams

HINT = (
    "give (x, y) tensors or arrays, a Dataset with a length, a data frame or a Hugging Face Dataset, or a list or"
    " mapping of these with one entry per agent"
)


def from_python(
    data: object,
    streams: Streams,
    test_fraction: float = 0.2,
    *,
    task: str = "auto",
    private: bool = False,
    **settings: Any,
) -> Data:
    """Convert any supported Python object to Data.

    Args:
        data: (x, y), a data frame, a torch or Hugging Face data set, a Bunch of scikit-learn, or a list or mapping of
            these with one entry per agent. (training data, test data) adds test data. A `Data` is checked and returned.
        streams: the run's random streams, which decide on held-out records.
        test_fraction: fraction of the records that is held out without test data.
        task: kind of the task, by which targets are converted.
        private: whether labels must not be taken from the records.
        settings: those of `[data]`: target, owner, columns, categories, classes, pixels.
    """
    if isinstance(data, Data):
        return _check_data(data)
    options = DataSettings(**{**settings, "name": "python", "test_fraction": test_fraction})
    train, test, validation = _split(data, options)
    names: tuple[str, ...] = ()
    parts: Source | list[Source]
    if isinstance(train, Mapping) and not _is_records(train):
        names = tuple(str(name) for name in train)
        parts = [_read(part, str(name), options) for name, part in train.items()]
    elif isinstance(train, list) and not _is_numbers(train):
        parts = [_read(part, f"agent {agent}", options) for agent, part in enumerate(train)]
    else:
        parts = _read(train, "data", options)
    if isinstance(parts, list):
        check_parts(parts, "data")
        if options.owner is not None:
            raise PdslError("owner: the data have one entry per agent already; leave owner out")
    elif options.owner is not None and parts.owner is None:
        raise PdslError("owner names a column of a table; give a list or mapping with one entry per agent")
    options = public_options(options, parts[0] if isinstance(parts, list) else parts)
    rest = (
        None if test is None else _read(test, "test data", options),
        None if validation is None else _read(validation, "validation data", options),
    )
    return assemble("python", parts, rest, options, streams, task, private, names)


def public_options(settings: DataSettings, train: Source) -> DataSettings:
    """Settings to read test and validation data: they have the columns of the training table, and no owner."""
    return settings.model_copy(update={"columns": train.columns or settings.columns, "owner": None})


def assemble(
    name: str,
    train: Source | list[Source],
    rest: tuple[Source | None, Source | None],
    settings: DataSettings,
    streams: Streams,
    task: str,
    private: bool,
    names: tuple[str, ...] = (),
) -> Data:
    """Build a Data from converted records: a pooled source, or one per agent, then (test, public validation).

    Without test data, some training records are held out.
    """
    parts, (test, validation) = train if isinstance(train, list) else [train], rest
    public = [part for part in (test, validation) if part is not None]
    sources = [*parts, *public]
    check_shapes(sources)
    for source in sources:
        _check_features(source, parts[0])
    targets = convert_targets(sources, task, settings.classes, private)
    x, owner = join_inputs(parts)
    where = parts[0].where if len(parts) == 1 else "data"
    y = torch.cat(targets.values[: len(parts)])
    agent: Tensor | None = owner if isinstance(train, list) else None
    if agent is None and parts[0].owner is not None:
        agent, names = convert_owner(parts, f"{where}: {settings.owner or 'agent'}")
    records = Records(x, y, where)
    held = iter(targets.values[len(parts) :])
    given = [None if part is None else (fixed_reading(part.x), next(held)) for part in (test, validation)]
    data = Data(
        name,
        x,
        y,
        *(given[0] or (x, y)),
        classes=targets.classes,
        owner=agent,
        validation=given[1],
        note=targets.note,
        agent_names=names,
        class_names=targets.class_names,
        features=parts[0].features,
        scaling=pixel_scaling() if parts[0].pixels else None,
        schema=_schema(parts[0]),
    )
    return data if test is not None else _hold_out(data, records, settings.test_fraction, streams)


def _schema(source: Source) -> Schema:
    """Input columns of a table, a Hugging Face Dataset or several named inputs; empty if they have no names."""
    names = (source.x.names if isinstance(source.x, Fields) else None) or source.columns or source.features
    return source.schema or dict.fromkeys(names, ())


def _hold_out(data: Data, records: Records, fraction: float, streams: Streams) -> Data:
    """Move some records from the training set to the test set."""
    held = _choose_held_out(records, data.owner, fraction, streams)
    note = f"{int(held.sum())} of {len(held)} records were held out of training for testing, as no test data were given"
    if data.validation is None:
        note += (
            "; the public set Q is drawn from them, so these records become public:"
            " if no record may be public, give test data: "
            + ("(data, test data)" if data.name == "python" else "data.test_path, or x_test and y_test in an npz file")
        )
    return replace(
        data,
        x=data.x[~held],
        y=data.y[~held],
        test_x=fixed_reading(data.x)[held],
        test_y=data.y[held],
        owner=None if data.owner is None else data.owner[~held],
        note=note if data.note is None else f"{data.note}; {note}",
    )


def _choose_held_out(train: Records, owner: Tensor | None, fraction: float, streams: Streams) -> Tensor:  # [n] bool
    """Choose the test records by a coin per record that depends only on the seed and on the record itself.

    So adding or removing a record moves no other record between training and test set.
    """
    key = f"held-out/{streams.seed}".encode()
    coins = [hashlib.blake2b(row, key=key, digest_size=8).digest() for row in row_bytes(train.x, train.y)]
    held = torch.tensor([int.from_bytes(coin, "big") < fraction * 2**64 for coin in coins])
    local = torch.zeros(len(train.y), dtype=torch.int64) if owner is None else owner
    emptied = set(local[held].tolist()) - set(local[~held].tolist())
    if not held.any() or emptied:
        raise PdslError(f"{train.where}: too few records to split into training and test records; give test data")
    return held


def _split(data: object, settings: DataSettings) -> tuple[object, object | None, object | None]:
    """Training data, test data and public validation data."""
    if huggingface.is_dataset_dict(data):
        return huggingface.splits(data)
    if isinstance(data, tuple) and len(data) == 2 and not _is_pair(data, settings):
        return data[0], data[1], None
    return data, None, None


def _is_pair(data: tuple[object, ...], settings: DataSettings) -> bool:
    """Whether a tuple of two is (inputs, targets), not (training data, test data)."""
    first, second = data
    if tables.is_frame(first) and tables.is_frame(second):
        return settings.target is None
    if tables.is_frame(second) and isinstance(first, Mapping | list):
        return False
    if isinstance(second, tuple | Mapping | Dataset) or huggingface.is_dataset(second):
        return False
    return not isinstance(first, Dataset | Data) and not huggingface.is_dataset(first)


def _is_records(value: Mapping[Any, object]) -> bool:
    """Whether a mapping is a Bunch of scikit-learn, with data and target."""
    return "data" in value and "target" in value


def _is_numbers(value: list[object]) -> bool:
    """Whether a list is nested numbers, not a list of data sets."""
    while value and isinstance(value[0], list):
        value = value[0]
    return bool(value) and isinstance(value[0], bool | int | float)


def _read(data: object, where: str, settings: DataSettings) -> Source:
    """Convert one data set."""
    if isinstance(data, DataLoader):
        raise PdslError(f"{where}: a DataLoader given; pass its dataset, loader.dataset: pdsl draws the batches")
    if isinstance(data, IterableDataset) or huggingface.is_iterable_dataset(data):
        raise PdslError(
            f"{where}: {type(data).__name__} given, which has no length; give a map-style Dataset, or (x, y)"
        )
    if huggingface.is_dataset(data):
        return huggingface.from_dataset(data, where, settings)
    if tables.is_frame(data):
        frame: Any = data
        return tables.from_frame(frame, where, settings)
    if isinstance(data, Dataset) and hasattr(data, "__len__"):
        items: Items = data
        return from_items(items, where, settings)
    if isinstance(data, Mapping) and _is_records(data):
        return _from_bunch(data, where, settings)
    if isinstance(data, tuple) and len(data) == 2:
        return _from_pair(data[0], data[1], where, settings)
    raise PdslError(f"{where}: {type(data).__name__} given; {_hint(data)}")


def _hint(data: object) -> str:
    if isinstance(data, Tensor | np.ndarray):
        return "give a tuple (x, y), and for one data set per agent a list of such tuples"
    if isinstance(data, tuple):
        return f"{len(data)} items: give (x, y), ((a, b), y) for several inputs, or ((x, y), (test_x, test_y))"
    if hasattr(data, "load_partition"):
        return "give its partitions: [federated.load_partition(i) for i in range(agents)]"
    return HINT


def _from_pair(x: object, y: object, where: str, settings: DataSettings) -> Source:
    classes: tuple[object, ...] = ()
    class_names: tuple[str, ...] = ()
    if tables.is_series(y):
        series: Any = y
        y, classes = tables.series_values(series, where, "y"), tables.series_classes(series)
    elif tables.is_frame(y):
        frame: Any = y
        class_names = tuple(str(column) for column in frame.columns) if len(frame.columns) > 1 else ()
        y = np.stack([tables.series_values(frame[column], where, str(column)) for column in frame.columns], axis=1)
    if tables.is_frame(x):
        table: Any = x
        values, features = tables.encode(table, where, settings)
        table = table.rename(columns=str)
        schema = tables.read_schema(table, settings.columns or tuple(table.columns), settings)
        source = Source(to_floats(values, f"{where}: x"), y, where, features=features, schema=schema)
    else:
        inputs, pixels = convert_inputs(x, f"{where}: x", settings.pixels)
        source = Source(inputs, y, where, pixels=pixels)
    return replace(source, classes=classes, class_names=class_names)


def _from_bunch(bunch: Mapping[Any, Any], where: str, settings: DataSettings) -> Source:
    """A Bunch of scikit-learn: a table, with the names of features and classes."""
    source = _from_pair(bunch["data"], bunch["target"], where, settings)
    y = np.asarray(bunch["target"])
    names = bunch.get("target_names")
    features = source.features or tuple(str(name) for name in bunch.get("feature_names", ()))
    if names is None or y.ndim != 1 or y.dtype.kind not in "iu":
        return replace(source, features=features)
    return replace(source, features=features, class_names=tuple(str(name) for name in names))


def _check_features(source: Source, first: Source) -> None:
    if source.features != first.features:
        other = sorted(set(source.features) ^ set(first.features)) or ["their order"]
        raise PdslError(f"{source.where}: its columns differ from those of {first.where} ({other[0]}); make them equal")


def _check_data(data: Data) -> Data:
    """Apply the checks of custom data to a Data that the user built."""
    train = _check_records(data.x, data.y, "data", ("x", "y"))
    test = _check_records(data.test_x, data.test_y, "data", ("test_x", "test_y"))
    owner = data.owner
    if owner is not None:
        source = Source(train.x, train.y, "data", owner=np.asarray(owner))
        owner, _ = convert_owner([source], "data: owner")
    parts, q = [train, test], None
    if data.validation is not None:
        validation = _check_records(*data.validation, "data.validation", ("x", "y"))
        parts, q = [*parts, validation], (validation.x, validation.y)
    check_shapes(parts)
    if not train.y.is_floating_point():
        check_classes(parts, data.classes if train.y.ndim == 1 else 2)
    return replace(data, x=train.x, y=train.y, test_x=test.x, test_y=test.y, owner=owner, validation=q)


def _check_records(x: Inputs, y: Tensor, where: str, names: tuple[str, str]) -> Records:
    x_name, y_name = (f"{where}: {name}" for name in names)
    inputs: object = x
    if isinstance(x, Fields):
        inputs = x.tensors if x.names is None else dict(zip(x.names, x.tensors, strict=True))
    checked = convert_inputs(inputs, x_name).x
    if len(y) != len(checked):
        raise PdslError(f"{y_name} has {len(y)} records, but {x_name} has {len(checked)}; give one target each")
    array = as_array(y, y_name)
    targets = to_floats(array, y_name) if array.dtype.kind == "f" else to_integers(array, y_name)
    return Records(x if isinstance(x, AugmentedFields) else checked, targets, where)
