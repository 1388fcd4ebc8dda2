"""Cells that were kept: a line each in `cells.jsonl`, so that a table can be put together from the runs of many days
and machines without their directories.

A kept cell stands in a table where its own run is not there, if it was run with the settings that it would have now. It
does not stand for a run that is asked for: that is done.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pdsl.cells import Measured, Score
from pdsl.errors import PdslError
from pdsl.files import write_whole
from pdsl.reproduce.plan import Cell

FILE = "cells.jsonl"


@dataclass(frozen=True)
class KeptCell:
    score: Score
    settings: str  # a digest of all of them
    curve: Measured


def digest(cell: Cell) -> str:
    content = json.dumps(cell.config.as_dict(), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def read(folder: Path) -> dict[str, KeptCell]:
    """All cells that are kept there, by name."""
    file = folder / FILE
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except OSError as e:
        raise PdslError(f"cannot read {file}: {e.strerror}; choose another --keep") from e
    try:
        cells = [
            KeptCell(
                Score(**line["score"]), line["settings"], [(t, loss, accuracy) for t, loss, accuracy in line["curve"]]
            )
            for line in map(json.loads, lines)
        ]
    except (ValueError, KeyError, TypeError) as e:
        raise PdslError(f"{file} is damaged ({e}); restore it, or choose another --keep") from e
    return {cell.score.name: cell for cell in cells}


def with_settings_of_now(kept: Mapping[str, KeptCell], cells: Iterable[Cell]) -> dict[str, Score]:
    """Scores of those of the cells that are kept."""
    by_name = {cell.name: cell for cell in cells if cell.name in kept}
    return {name: kept[name].score for name, cell in by_name.items() if kept[name].settings == digest(cell)}


def add(folder: Path, cells: Mapping[str, KeptCell]) -> Path:
    """Keep these too, or anew; the file has its lines in the order of names."""
    lines = [
        json.dumps({"settings": cell.settings, "score": _told(cell.score), "curve": cell.curve}, ensure_ascii=False)
        for _, cell in sorted((read(folder) | dict(cells)).items())
    ]
    write_whole(folder / FILE, "".join(f"{line}\n" for line in lines).encode())
    return folder / FILE


def _told(score: Score) -> dict[str, Any]:
    """What there is to say: of a cell that failed, that and nothing else."""
    return {field.name: value for field in fields(score) if (value := getattr(score, field.name)) != field.default}
