"""Targets of custom data: labels of any kind to class numbers, label matrices or numbers.

| task       | targets as given                                                        | converted to            |
|------------|-------------------------------------------------------------------------|-------------------------|
| classes    | integers from 0, other integers, strings, categories, booleans          | [n] int64, 0 to C - 1   |
| labels     | 0 or 1 [n, labels], or a list of label names per record                 | [n, labels] int64       |
| regression | floats [n] or [n, targets]; integers if the task says so                | float32                 |
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdsl.data.validation import Array, Source, as_array, check_length, to_floats, to_integers
from pdsl.utils.errors import PdslError

MAX_CLASSES = 1_000_000  # a larger label is an identifier or a regression target
SHOWN = 8  # labels in a message

Classes = int | tuple[str | int, ...] | None


@dataclass(frozen=True)
class Targets:
    """Converted targets of several data sets, with one set of classes for all."""

    values: list[Tensor]
    classes: int = 0  # 0: numbers
    class_names: tuple[str, ...] = ()
    note: str | None = None


def convert_targets(sources: Sequence[Source], task: str, classes: Classes, private: bool) -> Targets:
    """Convert the targets of all sources for a kind of task; `auto` follows their type and shape.

    `classes`: the number of classes, or their labels in order. In a `private` run the labels must be public: those of
    `classes`, or declared by the data set. Labels found in private records would reveal which ones occur.
    """
    arrays = [_as_targets(source) for source in sources]
    task = _infer(arrays[0]) if task == "auto" else task
    names = [f"{source.where}: {source.y_name}" for source in sources]
    if task == "regression":
        return Targets([_numbers(array, name) for array, name in zip(arrays, names, strict=True)])
    if task == "custom" and all(_plain(array) for array in arrays):
        given = [_as_given(array, name) for array, name in zip(arrays, names, strict=True)]
        counted = all(y.ndim == 1 and not y.is_floating_point() for y in given)
        return Targets(given, 1 + max(int(y.max()) for y in given) if counted else 0)
    if task == "multilabel":
        return _labels(sources, arrays, names, classes, private)
    return _classes(sources, arrays, names, task, classes, private)


def _as_targets(source: Source) -> Array:
    """Numbers [n, ...], strings [n], or objects [n] that are lists of label names."""
    name = f"{source.where}: {source.y_name}"
    y = source.y
    if isinstance(y, list | tuple) and any(isinstance(item, list | tuple | set | frozenset) for item in y):
        array = _label_lists(list(y))
    else:
        array = as_array(y, name)
    if array.dtype.kind == "O":
        array = _from_objects(array, name)
    if array.ndim == 0 or array.size == 0:
        raise PdslError(f"{name} is empty; give one target per record")
    check_length(source, len(array))
    if array.dtype.kind not in "biufUSO":
        raise PdslError(f"{name} has dtype {array.dtype}; give numbers or strings")
    return array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array


def _label_lists(rows: list[object]) -> Array:
    """A matrix if all rows are numbers of one length, otherwise an array of lists."""
    if all(isinstance(row, list | tuple) for row in rows) and len({len(row) for row in rows}) == 1:  # type: ignore[arg-type]
        matrix = np.asarray(rows)
        if matrix.dtype.kind in "biuf":
            return matrix
    return _objects(rows)


def _objects(rows: Sequence[object]) -> Array:
    array = np.empty(len(rows), dtype=object)
    array[:] = list(rows)
    return array


def _from_objects(array: Array, name: str) -> Array:
    """An array of objects as strings, as numbers, or as lists of label names."""
    if array.ndim == 1:
        if all(isinstance(item, list | tuple | set | frozenset | np.ndarray) for item in array):
            return _objects([list(item) for item in array])
        if all(isinstance(item, str) for item in array):
            return array.astype(str)
    for i, item in enumerate(array.reshape(len(array), -1)):
        if any(value is None or value != value for value in item):
            raise PdslError(f"{name}[{i}] is missing; remove or fill in such records")
    kinds = {type(item).__name__ for item in array.reshape(-1)}
    try:
        numbers = np.asarray(array.tolist())
    except ValueError:
        numbers = array
    if numbers.dtype.kind not in "biuf":
        raise PdslError(f"{name} has {' and '.join(sorted(kinds))}; give one type: numbers, or strings")
    return numbers


def _infer(array: Array) -> str:
    if array.dtype.kind == "f":
        return "regression"
    return "multilabel" if array.ndim > 1 or array.dtype.kind == "O" else "multiclass"


def _plain(array: Array) -> bool:
    return array.dtype.kind in "biuf"


def _numbers(array: Array, name: str) -> Tensor:
    if not _plain(array):
        raise PdslError(f"{name} has text or lists, but regression needs numbers; set task=multiclass for classes")
    return to_floats(array, name)


def _as_given(array: Array, name: str) -> Tensor:
    """Targets of a loss from the user: floats, and integers unless some are negative."""
    if array.dtype.kind == "f" or (array.dtype.kind == "i" and array.min() < 0):
        return to_floats(array, name)
    return to_integers(array, name)


def _labels(
    sources: Sequence[Source], arrays: list[Array], names: list[str], classes: Classes, private: bool
) -> Targets:
    """0/1 matrices [n, labels]."""
    declared = _declared(sources, classes)
    if all(array.dtype.kind == "O" for array in arrays):
        found = {str(label) for array in arrays for row in array for label in row}
        if not declared and private:
            raise _undeclared(names[0], "label names")
        values = declared or tuple(sorted(found))
        number = {value: k for k, value in enumerate(values)}
        matrices = []
        for array, name in zip(arrays, names, strict=True):
            matrix = torch.zeros(len(array), len(values), dtype=torch.int64)
            for i, row in enumerate(array):
                for label in row:
                    if str(label) not in number:
                        raise _not_declared(name, i, label, values)
                    matrix[i, number[str(label)]] = 1
            matrices.append(matrix)
        return Targets(matrices, len(values), values)
    matrices = []
    for array, name in zip(arrays, names, strict=True):
        if array.ndim != 2 or not _plain(array) or array.shape[1] != arrays[0].shape[1]:
            raise PdslError(
                f"{name} has shape {list(array.shape)}; for several labels give 0 or 1 [records, labels], or a list of"
                " label names per record; for classes set task=multiclass"
            )
        wrong = ((array != 0) & (array != 1)).any(axis=1)
        if wrong.any():
            raise PdslError(
                f"{name}[{int(np.argmax(wrong))}] has numbers other than 0 and 1; for several numbers per record set"
                " task=regression"
            )
        matrices.append(to_integers(array.astype(np.int64), name))
    count = arrays[0].shape[1]
    known = declared or sources[0].class_names
    if known and len(known) != count:
        raise PdslError(f"data.classes: {len(known)} names, but {names[0]} has {count} labels; give one name each")
    return Targets(matrices, count, known if known != _numerals(count) else ())


def _classes(
    sources: Sequence[Source], arrays: list[Array], names: list[str], task: str, classes: Classes, private: bool
) -> Targets:
    for array, name in zip(arrays, names, strict=True):
        if array.ndim != 1 or array.dtype.kind == "O":
            shape = "lists" if array.dtype.kind == "O" else f"shape {list(array.shape)}"
            raise PdslError(
                f"{name} has {shape}; give one label per record, or set task=multilabel for a 0/1 matrix,"
                " task=regression for several numbers"
            )
    arrays = [_whole(array, name) for array, name in zip(arrays, names, strict=True)]
    declared = _declared(sources, classes)
    boolean = all(array.dtype.kind == "b" for array in arrays)
    if not declared and boolean:
        declared = ("False", "True")
    if declared != ("False", "True"):
        arrays = [array.astype(np.int64) if array.dtype.kind == "b" else array for array in arrays]
    note = None
    if not declared:
        if all(array.dtype.kind in "biu" for array in arrays):
            declared, note = _classes_of_integers(arrays, names, private)
        elif private:
            raise _undeclared(names[0], "labels")
        else:
            declared = tuple(sorted({str(value) for array in arrays for value in np.unique(array)}))
    values = [_to_numbers(array, name, declared) for array, name in zip(arrays, names, strict=True)]
    class_names = declared if declared != _numerals(len(declared)) else ()
    given = next((source.class_names for source in sources if source.class_names), ())
    if not class_names and given:
        if len(given) < len(declared):
            raise PdslError(f"{names[0]}: label {len(given)}, but there are {len(given)} classes: {_list(given)}")
        declared, class_names = given, given if given != _numerals(len(given)) else ()
    return Targets(values, len(declared), class_names, note)


def _whole(array: Array, name: str) -> Array:
    """Whole floats as integers."""
    if array.dtype.kind != "f":
        return array
    with np.errstate(invalid="ignore"):
        bad = (array != np.floor(array)) | ~np.isfinite(array) | (np.abs(array) >= MAX_CLASSES)
    if bad.any():
        i = int(np.argmax(bad))
        raise PdslError(f"{name}[{i}] is {array[i]}; classes are whole numbers; for other numbers set task=regression")
    return array.astype(np.int64)


def _classes_of_integers(arrays: list[Array], names: list[str], private: bool) -> tuple[tuple[str, ...], str | None]:
    """Classes 0 to the largest label; labels -1 and 1, or 1 to C, in this order, with a note."""
    for array, name in zip(arrays, names, strict=True):
        if (large := array >= MAX_CLASSES).any():
            i = int(np.argmax(large))
            raise PdslError(
                f"{name}[{i}] is {array[i]}; number the classes 0, 1, 2, ... (below {MAX_CLASSES}), or set"
                " task=regression"
            )
    found = np.unique(np.concatenate([array.astype(np.int64) for array in arrays]))
    if found[0] == 0:
        return _numerals(int(found[-1]) + 1), None
    from_one = np.array_equal(found, np.arange(1, len(found) + 1)) and len(found) > 1
    if not from_one and not np.array_equal(found, [-1, 1]):
        for array, name in zip(arrays, names, strict=True):
            if (array < 0).any():
                i = int(np.argmax(array < 0))
                raise PdslError(
                    f"{name}[{i}] is {array[i]}; number the classes 0, 1, 2, ..., or list all labels: classes=[...]"
                )
        raise PdslError(
            f"{names[0]}: no record has class 0 (labels: {_list(found)}); number the classes 0, 1, 2, ..., or list all"
            " labels: classes=[...]"
        )
    if private:
        raise _undeclared(names[0], f"labels {_list(found)}")
    return tuple(str(value) for value in found), (
        f"no record has label 0: the labels {_list(found)} became classes 0 to {len(found) - 1}; if there are others,"
        " list all labels: classes=[...]"
    )


def _to_numbers(array: Array, name: str, declared: tuple[str, ...]) -> Tensor:
    number = {value: k for k, value in enumerate(declared)}
    if array.dtype.kind in "iu" and not any(value.lstrip("-").isdigit() for value in declared):
        number = {str(k): k for k in range(len(declared))}  # the labels are names of the classes 0, 1, 2, …
    values, places = np.unique(array, return_inverse=True)
    known = np.array([number.get(str(value), -1) for value in values])
    if (known < 0).any():
        i = int(np.argmax(np.isin(places.reshape(-1), np.flatnonzero(known < 0))))
        raise _not_declared(name, i, array[i], declared)
    return torch.from_numpy(known[places.reshape(-1)].astype(np.int64))


def _declared(sources: Sequence[Source], classes: Classes) -> tuple[str, ...]:
    """Labels of all classes in order, from the settings or declared by the data set; () if neither does."""
    if isinstance(classes, int):
        if classes < 2:
            raise PdslError(f"data.classes: {classes}; give the number of classes, 2 or more, or a list of labels")
        return _numerals(classes)
    if classes is not None:
        values = tuple(str(value) for value in classes)
        if len(set(values)) < len(values) or len(values) < 2:
            raise PdslError(f"data.classes: {_list(values)}; give two or more different labels")
        return values
    return next((tuple(str(v) for v in source.classes) for source in sources if source.classes), ())


def _numerals(count: int) -> tuple[str, ...]:
    return tuple(str(k) for k in range(count))


def _undeclared(name: str, found: str) -> PdslError:
    return PdslError(
        f"{name} has {found}, which a private run must not take from private records; list all of them publicly:"
        " classes=[...] (data.classes in a config)"
    )


def _not_declared(name: str, i: int, label: object, declared: Sequence[str]) -> PdslError:
    return PdslError(f"{name}[{i}] is {label}, which is not one of the classes: {_list(declared)}")


def _list(values: Sequence[object] | Array) -> str:
    shown = ", ".join(str(value) for value in list(values)[:SHOWN])
    return f"{shown}, …" if len(values) > SHOWN else shown
