"""Tables: pandas data frames, CSV and Parquet files.

Numeric columns become float32. Booleans become 0 or 1. A column with categories becomes one 0/1 column per declared
category. Text without declared categories is refused, because categories found in private records would reveal them.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pdsl.data.validation import Array, Schema, Source, to_floats
from pdsl.settings import DataSettings
from pdsl.utils.errors import PdslError

if TYPE_CHECKING:
    import pandas

MAX_NAMES = 8  # columns in a message


def import_pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise PdslError("tables need pandas; install it with: pip install pandas pyarrow") from error
    return pandas


def is_frame(value: object) -> bool:
    """Whether a value is a pandas DataFrame; pandas is not imported for it."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, pandas.DataFrame)


def is_series(value: object) -> bool:
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, pandas.Series)


def read_table(path: Path) -> "pandas.DataFrame":
    """Read a CSV or Parquet file."""
    pandas = import_pandas()
    if not path.is_file():
        raise PdslError(f"there is no {path}; give a .csv or .parquet file")
    try:
        frame = pandas.read_parquet(path) if path.suffix.lower() == ".parquet" else pandas.read_csv(path)
    except ImportError as error:
        raise PdslError("Parquet files need pyarrow; install it with: pip install pyarrow") from error
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise PdslError(f"{path}: cannot be read ({reason[:120]}); save it with pandas to_csv or to_parquet") from error
    for column in frame.columns:
        if str(column).startswith("Unnamed: "):
            raise PdslError(
                f"{path}: column {str(column)[9:]} has no name, as a saved index has none; write the file with"
                " index=False, or name the column"
            )
    return frame


def from_frame(frame: "pandas.DataFrame", where: str, settings: DataSettings) -> Source:
    """Records of a data frame: target and owner columns by the settings, inputs from the other columns."""
    if settings.target is None:
        raise PdslError(f"{where}: name the column of the target, target='...'; columns: {join_names(frame.columns)}")
    frame = frame.rename(columns=str)
    targets = [settings.target] if isinstance(settings.target, str) else list(settings.target)
    taken = [*targets, *([settings.owner] if settings.owner is not None else [])]
    columns = settings.columns or tuple(column for column in frame.columns if column not in taken)
    if overlap := [column for column in columns if column in taken]:
        raise PdslError(f"{where}: column {overlap[0]} is an input and a target or owner; leave it out of columns")
    _require(frame, taken, where)
    x, features = encode(frame[[column for column in frame.columns if column not in taken]], where, settings)
    y, classes = _targets(frame, targets, where)
    return Source(
        to_floats(x, where),
        y,
        where,
        join_names(targets),
        classes,
        class_names=tuple(targets) if len(targets) > 1 else (),
        owner=None if settings.owner is None else series_values(frame[settings.owner], where, settings.owner),
        features=features,
        columns=columns,
        schema=read_schema(frame, columns, settings),
    )


def encode(frame: "pandas.DataFrame", where: str, settings: DataSettings) -> tuple[Array, tuple[str, ...]]:
    """Input columns as numbers [n, features] float32, and the names of the features."""
    frame = frame.rename(columns=str)
    columns = settings.columns or tuple(frame.columns)
    if not columns or not len(frame):
        raise PdslError(f"{where}: the table has no {'input columns' if len(frame) else 'rows'}; give at least one")
    _require(frame, columns, where)
    encoded, names = [], []
    for column in columns:
        for name, values in _encode(frame[column], column, where, (settings.categories or {}).get(column)):
            names.append(name)
            encoded.append(values)
    return np.stack(encoded, axis=1), tuple(names)


def read_schema(frame: "pandas.DataFrame", columns: Sequence[str], settings: DataSettings) -> Schema:
    """Input columns with their declared categories, by which `encode` reads another frame in the same way."""
    declared = settings.categories or {}
    return {
        column: tuple(str(value) for value in declared.get(column) or series_classes(frame[column]))
        for column in columns
    }


def series_classes(series: "pandas.Series[Any]") -> tuple[object, ...]:
    """Declared categories of a column; () if it has none."""
    dtype = series.dtype
    return tuple(dtype.categories) if isinstance(dtype, import_pandas().CategoricalDtype) else ()


def series_values(series: "pandas.Series[Any]", where: str, name: str) -> Array:
    """Values of a column without missing ones: numbers, or strings."""
    types = import_pandas().api.types
    if missing := int(series.isna().sum()):
        raise PdslError(f"{where}: column {name} has {missing} missing values; fill them in, or drop these rows")
    if types.is_bool_dtype(series.dtype):
        return np.asarray(series, dtype=bool)
    if types.is_integer_dtype(series.dtype):
        return np.asarray(series, dtype=np.int64)
    if types.is_float_dtype(series.dtype):
        return np.asarray(series, dtype=np.float64)
    return np.asarray(series.astype(object))


def _encode(
    series: "pandas.Series[Any]", name: str, where: str, declared: tuple[str | int, ...] | None
) -> list[tuple[str, Array]]:
    types = import_pandas().api.types
    values = series_values(series, where, name)
    categories = declared if declared is not None else series_classes(series)
    if categories:
        known = {str(category) for category in categories}
        texts = values.astype(str)
        if len(other := [text for text in np.unique(texts) if text not in known]):
            raise PdslError(f"{where}: column {name} has the value {other[0]}, which is not one of its categories")
        return [(f"{name}={c}", (texts == str(c)).astype(np.float32)) for c in categories]
    if not types.is_numeric_dtype(series.dtype):
        raise PdslError(
            f"{where}: column {name} is {series.dtype}; declare its values with .astype('category') (in a config"
            f" data.categories.{name}=['...']), convert it to numbers, or leave it out of columns"
        )
    with np.errstate(over="ignore"):
        numbers = values.astype(np.float32)
    if not (finite := np.isfinite(numbers)).all():
        raise PdslError(f"{where}: column {name} has {int((~finite).sum())} infinite values; replace them")
    return [(name, numbers)]


def _targets(frame: "pandas.DataFrame", targets: list[str], where: str) -> tuple[Array, tuple[object, ...]]:
    columns = [series_values(frame[target], where, target) for target in targets]
    if len(columns) == 1:
        return columns[0], series_classes(frame[targets[0]])
    return np.stack(columns, axis=1), ()


def _require(frame: "pandas.DataFrame", columns: Sequence[str], where: str) -> None:
    if missing := [column for column in columns if column not in frame.columns]:
        raise PdslError(f"{where}: there is no column {missing[0]}; columns: {join_names(frame.columns)}")
    if repeated := [column for column in columns if list(frame.columns).count(column) > 1]:
        raise PdslError(f"{where}: there are several columns {repeated[0]}; rename them")


def join_names(columns: Any) -> str:
    names = [str(column) for column in columns]
    return ", ".join(names[:MAX_NAMES]) + (", …" if len(names) > MAX_NAMES else "")
