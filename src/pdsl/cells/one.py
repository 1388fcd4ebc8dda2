"""One cell: a run in its directory, started, taken up, or found finished; held by one process at a time.

Beside a cell's directory lie `<name>.lock` and, where it went wrong, `<name>.failed` with the reason.
"""

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from pdsl import runner
from pdsl.config import Config
from pdsl.errors import PdslError
from pdsl.files import write_whole
from pdsl.models import accuracy
from pdsl.runs import RunDirectory
from pdsl.train import Experiment, state_from

SCORE = "score.json"


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


def run_cell(name: str, config: Config, folder: Path) -> Score | None:
    """The cell's score; None while another process has it. What was computed before is not computed again.

    A failure is a score too. It does not count as finished: another time it may go well.
    """
    with _held(folder / f"{name}.lock") as ours:
        if not ours:
            return None
        if (found := finished(name, config, folder)) is not None:
            return found
        try:
            score = _run(name, config, folder / name)
        except PdslError as e:
            write_whole(folder / f"{name}.failed", str(e).encode())
            return Score(name, failed=str(e))
        write_whole(folder / name / SCORE, json.dumps(asdict(score)).encode())
        (folder / f"{name}.failed").unlink(missing_ok=True)
        return score


def finished(name: str, config: Config, folder: Path) -> Score | None:
    """The score of a cell that has ended well, with the settings that it would have now."""
    try:
        stored: dict[str, Any] = json.loads((folder / name / SCORE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    _check(folder / name, config)
    return Score(**{**stored, "name": name})


def _check(path: Path, config: Config) -> None:
    """Refuse a run that was begun under other settings, or before there was one of them."""
    then, now = (_flat(values) for values in (RunDirectory.open(path).config(), config.as_dict()))
    for key in then | now:
        if now.get(key) != then.get(key):
            was, is_now = (values.get(key, "not set") for values in (then, now))
            raise PdslError(
                f"{path} was run with {key}={was}, which is now {is_now}; move it away, or choose another --out"
            )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their names, like graph.agents."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def failure(name: str, folder: Path) -> Score | None:
    """The score of a cell that went wrong when it was last tried."""
    try:
        return Score(name, failed=(folder / f"{name}.failed").read_text(encoding="utf-8"))
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
