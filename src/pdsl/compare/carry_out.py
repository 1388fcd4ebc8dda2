"""Run what a plan asks for: every algorithm's trials, then its finals at the learning rate that did best in them."""

import json
from pathlib import Path

from pdsl import cells
from pdsl.cells import Score
from pdsl.cells.many import Scores, Told
from pdsl.compare.plan import Cell, Plan
from pdsl.config import Config
from pdsl.errors import PdslError
from pdsl.files import write_whole

PLAN = "plan.json"


def carry_out(plan: Plan, folder: Path, told: Told, processes: int | None = None) -> dict[str, Score]:
    """All scores by name; what was done before is not done again."""
    _claim(plan, folder)

    def wanted(scores: Scores) -> dict[str, Config]:
        needed: list[Cell] = []
        for name in plan.algorithms:
            trials = plan.trials(name)
            needed += trials
            if all(cell.name in scores for cell in trials) and (rate := best_rate(plan, name, scores)) is not None:
                needed += plan.finals(name, rate)
        return {cell.name: plan.config(cell) for cell in needed}

    return cells.carry_out(wanted, folder, told, processes)


def best_rate(plan: Plan, algorithm: str, scores: Scores) -> float | None:
    """The learning rate that the algorithm's trials chose; None if none of them is fit."""
    return cells.best_rate({cell.learning_rate: scores[cell.name] for cell in plan.trials(algorithm)})


def _claim(plan: Plan, folder: Path) -> None:
    """The folder is this plan's, or new."""
    file = folder / PLAN
    if file.exists():
        try:
            stored = Plan.from_dict(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError) as e:
            raise PdslError(f"{file}: damaged: {e}; remove the folder, or choose another --out") from e
        if stored.key != plan.key:
            raise PdslError(f"{folder} holds another comparison; choose another --out")
        return
    if folder.exists() and any(folder.iterdir()):
        raise PdslError(f"{folder} is not empty; choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(plan.as_dict(), indent=1).encode())
    except OSError as e:
        raise PdslError(f"cannot write to {folder}: {e.strerror}; choose another --out") from e
