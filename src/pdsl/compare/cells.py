"""One cell of a comparison: a run in its directory, started, taken up, or found finished."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from pdsl import runner
from pdsl.compare.plan import Cell, Plan
from pdsl.errors import PdslError
from pdsl.models import accuracy
from pdsl.train import Experiment

SCORE = "score.json"


@dataclass(frozen=True)
class Score:
    """How a cell did. `on_public` is the accuracy on the public set Q, mean over agents, by which steps are chosen."""

    cell: Cell
    failed: str | None = None  # why there is nothing else
    on_public: float = 0.0
    accuracy: float = 0.0
    accuracy_of_mean: float = 0.0
    loss: float | None = None
    epsilon: float | None = None
    bytes: int = 0
    seconds: float = 0.0


def run_cell(plan: Plan, cell: Cell, folder: Path) -> Score:
    """The cell's score; what was computed before is not computed again. A failure is a score too."""
    path = folder / cell.name
    if (found := finished(cell, path)) is not None:
        return found
    try:
        score = _run(plan, cell, path)
    except PdslError as e:
        return Score(cell, failed=str(e))  # not kept: another time it may go well
    aside = path / f"{SCORE}.part"
    aside.write_text(json.dumps(asdict(score)), encoding="utf-8")
    aside.replace(path / SCORE)
    return score


def finished(cell: Cell, path: Path) -> Score | None:
    """The score of a cell that has ended."""
    try:
        stored: dict[str, Any] = json.loads((path / SCORE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return Score(**{**stored, "cell": cell})


def _run(plan: Plan, cell: Cell, path: Path) -> Score:
    if (path / "config.toml").exists():
        experiment, directory = runner.take_up(path, [])
    else:
        experiment, directory = runner.start(plan.config(cell), path)
    summary = runner.execute(experiment, directory, lambda: None, lambda row: None, lambda text: None)
    checkpoint, _ = directory.newest()
    assert checkpoint is not None
    return Score(
        cell,
        on_public=_on_public(experiment, checkpoint.tensors["x"]),
        accuracy=summary["accuracy"],
        accuracy_of_mean=summary["accuracy_of_mean"],
        loss=summary["loss"],
        epsilon=summary["epsilon"],
        bytes=summary["bytes"],
        seconds=summary["seconds"],
    )


def _on_public(e: Experiment, x: Tensor) -> float:
    inputs, labels = e.validation
    return fmean(accuracy(e.network.logits(model, inputs), labels) for model in x)
