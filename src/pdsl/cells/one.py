"""One cell: a run in its directory, started, taken up, or found finished; held by one process at a time.

Beside a cell's directory lie `<name>.lock` and, where it went wrong, `<name>.failed` with the reason.
"""

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean

from pydantic import TypeAdapter
from torch import Tensor

from pdsl import runner
from pdsl.config import Config
from pdsl.errors import PdslError
from pdsl.files import write_whole
from pdsl.models import accuracy
from pdsl.runs import RunDirectory
from pdsl.settings import flat
from pdsl.train import Experiment, state_from

SCORE = "score.json"
DIVERGED = 100.0  # a loss above it is that of no model: guessing among ten classes costs 2.3
Measured = list[tuple[int, float | None, float]]  # round, loss and accuracy, mean over agents, on test data


@dataclass(frozen=True)
class Score:
    """How a cell did. `on_public` is the accuracy on the public set Q, mean over agents, by which steps are chosen."""

    name: str
    failed: str | None = None  # why there is nothing else
    on_public: float = 0.0
    accuracy: float = 0.0
    accuracy_of_mean: float = 0.0
    loss: float | None = None
    epsilon: float | None = None
    bytes: int = 0
    seconds: float = 0.0
    note: str = ""  # what was got over

    @property
    def unfit(self) -> str | None:
        """Why the run's learning rate cannot be chosen; None where it can.

        Where no bytes are told, no more than `on_public` was kept, and that is all to go by.
        """
        if self.failed is None and self.bytes and (self.loss is None or self.loss > DIVERGED):
            return f"diverged: its loss is {'not finite' if self.loss is None else f'{self.loss:.3g}'}"
        return self.failed


_SCORE, _MEASURED = TypeAdapter(Score), TypeAdapter(Measured)


def best_rate(trials: Mapping[float, Score]) -> float | None:
    """The learning rate with the best accuracy on the public set, the smallest of equals; None if none is fit."""
    fit = {rate: trials[rate].on_public for rate in sorted(trials) if trials[rate].unfit is None}
    return max(fit, key=lambda rate: fit[rate]) if fit else None


def run_cell(name: str, config: Config, folder: Path) -> Score | None:
    """The cell's score; None while another process has it. What was computed before is not computed again.

    A failure is a score too, whatever went wrong. It does not count as finished: another time it may go well.
    """
    with _held(folder / f"{name}.lock") as ours:
        if not ours:
            return None
        if (found := finished(name, config, folder)) is not None:
            return found
        damaged = (folder / name / SCORE).exists()
        try:
            score = _run(name, config, folder / name)
        except PdslError as e:
            return fail(name, folder, str(e))
        except (Exception, SystemExit) as e:  # a model of the user's own may raise anything
            return fail(name, folder, f"{type(e).__name__}: {e}")
        stored = {key: value for key, value in asdict(score).items() if key != "note"}
        write_whole(folder / name / SCORE, json.dumps(stored).encode())
        (folder / f"{name}.failed").unlink(missing_ok=True)
        return replace(score, note=f"{SCORE} was damaged and is written anew") if damaged else score


def fail(name: str, folder: Path, reason: str) -> Score:
    """Write down why a cell went wrong, in one line."""
    reason = " ".join(reason.split())
    write_whole(folder / f"{name}.failed", reason.encode())
    return Score(name, failed=reason)


def finished(name: str, config: Config, folder: Path) -> Score | None:
    """The score of a cell that has ended well, with the settings that it would have now; None too if it is damaged."""
    score = _stored(folder / name / SCORE)
    if score is None:
        return None
    _check(folder / name, config)
    return replace(score, name=name)


def _stored(file: Path) -> Score | None:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        whole = isinstance(values, dict) and {f.name for f in fields(Score)} - {"note"} <= values.keys()
        return _SCORE.validate_python(values) if whole else None
    except (FileNotFoundError, ValueError):
        return None


def measured(run: Path) -> Measured:
    """Loss and accuracy wherever a finished cell has them; refused where rows are damaged or missing."""
    directory = RunDirectory.open(run)
    rows = directory.rows()
    try:
        rounds = json.loads(directory.read("summary.json") or b"")["rounds"]
        found = [(row["round"], row["loss"], row["accuracy"]) for row in rows if "accuracy" in row or "loss" in row]
        if len(rows) == rounds:
            return _MEASURED.validate_python(found)
    except (ValueError, KeyError, TypeError):
        pass
    raise PdslError(f"{run}/rows.jsonl is damaged; restore it, or move {run} away and give the command again")


def _check(path: Path, config: Config) -> None:
    """Refuse a run that was begun under other settings, or before there was one of them."""
    then, now = (flat(values) for values in (RunDirectory.open(path).config(), config.as_dict()))
    for key in then | now:
        if now.get(key) != then.get(key):
            was, is_now = (values.get(key, "not set") for values in (then, now))
            raise PdslError(
                f"{path} was run with {key}={was}, which is now {is_now}; move it away, or choose another --out"
            )


def failure(name: str, folder: Path) -> Score | None:
    """The score of a cell that went wrong when it was last tried."""
    try:
        return Score(name, failed=(folder / f"{name}.failed").read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return None


@contextmanager
def _held(lock: Path) -> Iterator[bool]:
    """Whether this process holds the lock now.

    flock rather than a file whose existence is the lock: the system lets go of it when its holder dies, by kill -9
    or with its machine, so there is nothing stale to detect. The empty file stays, since removing it would let two
    processes hold two files of one name.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            ours = False
        else:
            ours = True
        yield ours


def _run(name: str, config: Config, path: Path) -> Score:
    if (path / "config.toml").exists():
        _check(path, config)
        experiment, directory = runner.take_up(path, [])
    else:
        experiment, directory = runner.start(config, path)
    summary = runner.execute(experiment, directory, lambda: None, lambda row: None, lambda text: None)
    checkpoint, _ = directory.newest()
    assert checkpoint is not None
    return Score(
        name,
        on_public=_on_public(experiment, state_from(config, checkpoint.tensors).x),
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
