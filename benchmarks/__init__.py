"""Scripts that each answer one question, and the files that keep their results line by line."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def read_rows(file: Path) -> list[dict[str, str]]:
    """Lines of a CSV file; none if it does not exist."""
    if not file.exists():
        return []
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def append_rows(file: Path, fields: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Add lines to a CSV file, and its header if it is new. Numbers have four digits; None is empty."""
    new = not file.exists()
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        if new:
            writer.writerow(fields)
        for row in rows:
            writer.writerow([_format(value) for value in row])


def _format(value: Any) -> Any:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else value
