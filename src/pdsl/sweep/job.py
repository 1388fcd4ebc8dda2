"""One run of a sweep: started, resumed or found finished, by one process at a time.

Beside the run directory of a job are `<name>.lock` and, if the job failed, `<name>.failed` with the reason.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from filelock import FileLock, Timeout
from pydantic import TypeAdapter
from torch import Tensor

from pdsl.config import Config
from pdsl.data import data_root, status
from pdsl.report.metric import Metric
from pdsl.report.run_schema import parse_setup
from pdsl.runs import runner
from pdsl.runs.changes import changed_settings
from pdsl.runs.directory import SETUP, RunDirectory
from pdsl.runs.result import headline
from pdsl.training.experiment import Experiment, prepare
from pdsl.training.trainer import restore_state
from pdsl.utils.errors import PdslError
from pdsl.utils.files import write_whole

SCORE = "score.json"
MAX_LOSS = 100.0  # of a classifier; a larger test loss has diverged: guessing among ten classes has 2.3
OPTIONAL = {"note", "max_loss"}  # fields that a file may lack
Curve = list[tuple[int, float | None, float]]  # round, loss and headline metric: mean over agents, on test data


class Job(NamedTuple):
    """One run of a sweep: the name of its directory, and its settings."""

    name: str
    config: Config


@dataclass(frozen=True)
class Score:
    """Result of a job. `accuracy` is the headline metric of the task, mean over agents, on the test set.

    `on_public` is the same on the public set Q, or minus it if smaller is better. It chooses learning rates.
    """

    name: str
    failed: str | None = None  # reason of a failure; all other fields are then empty
    on_public: float = 0.0
    accuracy: float = 0.0
    accuracy_of_mean: float = 0.0
    loss: float | None = None
    epsilon: float | None = None
    bytes: int = 0
    seconds: float = 0.0
    note: str = ""  # a problem that was repaired
    max_loss: float = MAX_LOSS  # a larger loss has diverged

    @property
    def unfit(self) -> str | None:
        """Reason why this learning rate must not be chosen; None if it may.

        Without `bytes`, only `on_public` was kept, and the loss is unknown.
        """
        if self.failed is None and self.bytes and (self.loss is None or self.loss > self.max_loss):
            return f"diverged: its loss is {'not finite' if self.loss is None else f'{self.loss:.3g}'}"
        return self.failed


_SCORE, _CURVE = TypeAdapter(Score), TypeAdapter(Curve)


def run_job(job: Job, folder: Path) -> Score | None:
    """Run a job, or resume it, or load its score; None while another process runs it.

    Any error is a score too, with the reason. A failed job is not finished: the next call tries it again.

    The lock is released by the operating system when its holder dies, so a stale one cannot exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / f"{job.name}.lock", timeout=0):
            return load_score(job, folder) or _run_and_score(job, folder)
    except Timeout:
        return None


def _run_and_score(job: Job, folder: Path) -> Score:
    path = folder / job.name
    damaged = (path / SCORE).exists()
    try:
        score = _run(job, path)
    except PdslError as e:
        return record_failure(job.name, folder, str(e))
    except (Exception, SystemExit) as e:  # a user's model may raise anything
        return record_failure(job.name, folder, f"{type(e).__name__}: {e}")
    stored = {key: value for key, value in asdict(score).items() if key != "note"}
    write_whole(path / SCORE, json.dumps(stored).encode())
    (folder / f"{job.name}.failed").unlink(missing_ok=True)
    return replace(score, note=f"{SCORE} was damaged and is written anew") if damaged else score


def _run(job: Job, path: Path) -> Score:
    if RunDirectory(path).exists():
        _check_settings(path, job.config)
    config = job.config.model_copy(update={"baselines": "none"})  # a sweep computes them once for all its runs
    experiment, directory = runner.open_run(config, path)
    summary = runner.execute(experiment, directory)
    assert summary is not None  # one process
    checkpoint, _ = directory.newest()
    assert checkpoint is not None
    return Score(
        job.name,
        on_public=_score_on_public(experiment, restore_state(job.config, checkpoint.tensors).x),
        accuracy=headline(summary),
        accuracy_of_mean=headline(summary, "_of_mean"),
        loss=summary["loss"],
        epsilon=summary["epsilon"],
        bytes=summary["bytes"],
        seconds=summary["seconds"],
        max_loss=MAX_LOSS if experiment.task.metric == "accuracy" else math.inf,  # other losses have other units
    )


def _score_on_public(e: Experiment, x: Tensor) -> float:
    """Headline metric on the public set, mean over agents; its negative if less is better."""
    inputs, targets = e.validation
    score = fmean(e.task.score(e.network.outputs(model, inputs), targets) for model in x)
    return score if e.task.higher_is_better else -score


def record_failure(name: str, folder: Path, reason: str) -> Score:
    """Write the reason of a failure, in one line, and return it as a score."""
    reason = " ".join(reason.split())
    write_whole(folder / f"{name}.failed", reason.encode())
    return Score(name, failed=reason)


def load_failure(name: str, folder: Path) -> Score | None:
    """Score of a job that failed when it was last tried."""
    try:
        return Score(name, failed=(folder / f"{name}.failed").read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return None


def load_score(job: Job, folder: Path) -> Score | None:
    """Score of a finished job; None if it is not finished or its file is damaged. Other settings are refused."""
    score = _read_score(folder / job.name / SCORE)
    if score is None:
        return None
    _check_settings(folder / job.name, job.config)
    return replace(score, name=job.name)


def _read_score(file: Path) -> Score | None:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        whole = isinstance(values, dict) and {f.name for f in fields(Score)} - OPTIONAL <= values.keys()
        return _SCORE.validate_python(values) if whole else None
    except (FileNotFoundError, ValueError):
        return None


def _check_settings(path: Path, config: Config) -> None:
    """Refuse a run that was started with other settings, or before one of the settings existed."""
    for key, *values in changed_settings(config, RunDirectory.open(path)):
        was, is_now = ("not set" if value is None else value for value in values)
        raise PdslError(
            f"{path} was run with {key}={was}, which is now {is_now}; move it away, or choose another --out"
        )


def read_curve(run: Path) -> Curve:
    """Loss and headline metric of a finished run in all evaluated rounds; damaged or missing rows are refused."""
    directory = RunDirectory.open(run)
    rows = directory.rows()
    try:
        summary = json.loads(directory.read("summary.json") or b"")
        m = summary.get("metric", "accuracy")
        found = [(row["round"], row["loss"], row[m]) for row in map(dict, rows) if m in row or "loss" in row]
        if len(rows) == summary["rounds"]:
            return _CURVE.validate_python(found)
    except (ValueError, KeyError, TypeError):
        pass
    raise PdslError(f"{run}/rows.jsonl is damaged; restore it, or move {run} away and run the command again")


def read_metric(run: Path) -> Metric:
    """The headline metric of a run."""
    try:
        return parse_setup((run / SETUP).read_text(encoding="utf-8")).task.metric
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise PdslError(f"{run / SETUP} is damaged; restore it, or move {run} away and run the command again") from e


def compute_features(jobs: Iterable[Job], folder: Path) -> None:
    """Compute the public features of unfinished jobs on all cores. Each job uses one core, and finds them in the cache.

    Jobs whose public set depends on their seed compute their own.
    """
    wanted: dict[str, Config] = {}
    for job in jobs:
        config = job.config
        if config.public.has_features and config.data.public_seed is not None and load_score(job, folder) is None:
            wanted.setdefault(f"{config.data.model_dump_json()} {config.public.model_dump_json()}", config)
    for config in wanted.values():
        prepare(config.model_copy(update={"engine": config.engine.model_copy(update={"workers": None})}))


def check_data(names: Iterable[str]) -> None:
    """Refuse data sets whose files are missing."""
    wanted = set(names)
    for name, present, where in status(data_root()):
        if name in wanted and not present:
            raise PdslError(f"{name} is not in {where}; run 'pdsl data fetch {name}', or set PDSL_DATA")
