"""Scripts that each answer one question, and the files that keep their results line by line."""

import csv
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
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


def run_jobs(
    measure: Callable[[Any], tuple[Any, list[list[Any]]]],
    jobs: Iterable[Any],
    file: Path,
    fields: Sequence[str],
    processes: int,
) -> None:
    """Measure jobs in parallel, and add their lines to a CSV file as soon as they are known."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for job, lines in pool.imap_unordered(measure, jobs):
            append_rows(file, fields, [[*job, *line] for line in lines])


def _format(value: Any) -> Any:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else value
