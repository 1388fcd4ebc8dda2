"""A run with a directory: started, watched, interrupted at any moment, taken up again, finished."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pdsl import config as configs
from pdsl.config import Config
from pdsl.errors import PdslError
from pdsl.results import Result, finish
from pdsl.runs import Checkpoint, RunDirectory
from pdsl.train import Experiment, Row, final_evaluation, prepare, rounds, state_from, state_tensors

Watch = Callable[[Row], None]  # told about every new row
MAY_CHANGE = ("rounds", "checkpoint_every", "engine.workers", "engine.device")  # on resuming: what changes no row


def start(config: Config, out: Path) -> tuple[Experiment, RunDirectory]:
    """Everything is checked before the directory is made: a mistake leaves nothing behind."""
    experiment = prepare(config)
    return experiment, RunDirectory.create(out, config.to_toml(), experiment.facts())


def take_up(path: Path, assignments: Sequence[str]) -> tuple[Experiment, RunDirectory]:
    """An old run, with those settings changed that change none of its rows."""
    for assignment in assignments:
        key = assignment.partition("=")[0].strip()
        if key not in MAY_CHANGE:
            raise PdslError(
                f"--set {key} would change a run that has begun; with --resume only: {', '.join(MAY_CHANGE)}"
            )
    run = RunDirectory.open(path)
    return prepare(configs.load(None, assignments, base=run.config())), run


def execute(experiment: Experiment, run: RunDirectory, watch: Watch, complain: Callable[[str], None]) -> dict[str, Any]:
    """Run what is left to run, from the newest whole checkpoint on. Returns the summary."""
    try:
        with run.lock():
            return _execute(experiment, run, watch, complain)
    except OSError as e:
        raise PdslError(
            f"cannot write to {run.path}: {e.strerror}; make room or mend it, then pdsl run --resume {run.path}"
        ) from e


def _execute(e: Experiment, run: RunDirectory, watch: Watch, complain: Callable[[str], None]) -> dict[str, Any]:
    checkpoint, complaints = run.newest()
    for complaint in complaints:
        complain(complaint)
    done, seconds = 0, 0.0
    state: Any = None
    if checkpoint is not None:
        done, seconds = checkpoint.round, checkpoint.seconds
        state = state_from(e.config, checkpoint.tensors)
        if done > e.config.rounds:
            raise PdslError(f"{run.path} has {done} rounds already; rounds={e.config.rounds} cannot take any back")
    rows = run.keep_rows(done)
    run.write("config.toml", e.config.to_toml().encode())
    for row in rows:
        watch(row)

    start = time.monotonic()
    for step in rounds(e, state, after=done):
        rows.append(step.row)
        run.append(step.row)
        state = step.state
        if step.t % e.config.checkpoint_every == 0 or step.t == e.config.rounds:
            run.save(Checkpoint(step.t, state_tensors(state), seconds + time.monotonic() - start))
        watch(step.row)
    seconds += time.monotonic() - start
    return finish(run, Result(e, rows, state, final_evaluation(e, state.x), seconds))
