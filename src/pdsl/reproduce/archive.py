"""Kept cells: one line per run in `cells.jsonl`, so that a table can combine runs of many days and machines.

A kept cell is used in a table if its own run is not in the folder and if it was run with its present settings. It does
not replace a run that the command asks for, unless with --missing.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from pdsl.config import validate
from pdsl.sweep.job import Curve, Job, Score
from pdsl.utils.errors import PdslError
from pdsl.utils.files import write_whole
from pdsl.utils.types import JsonDict

FILE = "cells.jsonl"
# Settings and sections that are younger than the first kept cells. At their defaults, which change no result, they are
# left out of a digest, so that older cells are still found. List every new setting here.
ADDED = (
    "baselines",
    "algorithm.schedule",
    "attack.duplicate",
    "attack.echo",
    "data.public_seed",
    "graph.k",
    "public",
    "task",
    "mixing",
    "attack.reversed_model",
    "attack.constant_model",
    "attack.copied_model",
    "attack.drifting_model",
    "attack.drift",
)


@dataclass(frozen=True)
class KeptCell:
    score: Score
    settings: str  # digest of all settings
    curve: Curve


def digest(job: Job) -> str:
    """Digest of all settings, without those that were `ADDED` and are at their defaults."""
    settings = job.config.as_dict()
    defaults = validate({"algorithm": {"name": settings["algorithm"]["name"]}}, "defaults").as_dict()
    for path in ADDED:
        *sections, name = path.split(".")
        inner, default = settings, defaults
        for section in sections:
            inner, default = inner[section], default[section]
        if inner.get(name) == default.get(name):
            inner.pop(name, None)
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def read(folder: Path) -> dict[str, KeptCell]:
    """All kept cells of a folder, by name."""
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


def matching_scores(kept: Mapping[str, KeptCell], jobs: Iterable[Job]) -> dict[str, Score]:
    """Scores of the jobs that are kept with their present settings."""
    by_name = {job.name: job for job in jobs if job.name in kept}
    return {name: kept[name].score for name, job in by_name.items() if kept[name].settings == digest(job)}


def kept_score(kept: Mapping[str, KeptCell], job: Job) -> Score | None:
    """Score of a job that is kept with its present settings; None if there is none, or if it failed."""
    score = matching_scores(kept, [job]).get(job.name)
    return score if score is not None and score.failed is None else None


def add(folder: Path, cells: Mapping[str, KeptCell]) -> Path:
    """Add or replace kept cells; the lines of the file are in the order of names."""
    lines = [
        json.dumps({"settings": cell.settings, "score": _as_dict(cell.score), "curve": cell.curve}, ensure_ascii=False)
        for _, cell in sorted((read(folder) | dict(cells)).items())
    ]
    write_whole(folder / FILE, "".join(f"{line}\n" for line in lines).encode())
    return folder / FILE


def _as_dict(score: Score) -> JsonDict:
    """Fields that differ from their defaults."""
    return {field.name: value for field in fields(score) if (value := getattr(score, field.name)) != field.default}
