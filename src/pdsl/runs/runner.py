"""A run with a directory: open or resume it, prepare, loop (charge, round, record, checkpoint), finish.

The same folder with the same settings resumes; with other settings it is refused.
"""

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TypedDict, Unpack

from torch import nn

from pdsl import config as configs
from pdsl.algorithms import Algorithm
from pdsl.algorithms.schedule import PYTHON
from pdsl.config import MAY_CHANGE, Config
from pdsl.data import Data
from pdsl.engine.launch import Processes, SingleProcess
from pdsl.privacy import Ledger, Mechanism
from pdsl.privacy.seal import graph_digest, model_digest
from pdsl.runs.changes import differing_setting
from pdsl.runs.checkpoints import Checkpoint
from pdsl.runs.directory import INITIAL, OWNER, RunDirectory, unused
from pdsl.runs.listeners import RunListener, StopTraining
from pdsl.runs.model_file import pack_initial_weights, restore_initial_weights
from pdsl.runs.result import Result, Stop, Summary, finish, gather_sums
from pdsl.tasks import Loss, Metric
from pdsl.topology import Graph
from pdsl.training.evaluation import final_evaluation
from pdsl.training.experiment import Experiment, prepare
from pdsl.training.records import RoundRecord
from pdsl.training.trainer import State, restore_state, rounds, state_tensors
from pdsl.utils.errors import PdslError
from pdsl.utils.inputs import tensors_digest
from pdsl.utils.random import KEY_BYTES
from pdsl.utils.types import JsonDict

SINGLE_PROCESS = SingleProcess()
NO_LISTENER = RunListener()
NOT_ONE_ROUND = "privacy: not even one round fits the budget; raise target_epsilon or the noise"


class Objects(TypedDict, total=False):
    """Objects given in Python, which a config cannot name."""

    model: nn.Module | None
    data: Data | None
    graph: Graph | None
    loss: Loss | None
    metric: Metric | None


def run(
    config: Config, out: Path | None = None, listener: RunListener = NO_LISTENER, ranks: Processes = SINGLE_PROCESS
) -> Summary | None:
    """Train in a run directory, new or continued. Returns the summary; None on ranks other than the main one."""
    experiment, directory = open_run(config, out, ranks)
    return execute(experiment, directory, listener)


def open_run(
    config: Config, out: Path | None = None, ranks: Processes = SINGLE_PROCESS, **objects: Unpack[Objects]
) -> tuple[Experiment, RunDirectory]:
    """Resume the run in `out` if it has these settings, else start it there.

    Without `out`: resume the unfinished run in runs/ that has these settings, else start in an unused folder.
    """
    data = objects.get("data")
    config = config.resolve(None if data is None else data.name)
    folder, resumes = ranks.all_or_raise(lambda: _find(config, out))
    ((chosen, resumes), *_) = ranks.gather([(str(folder), resumes)])  # rank 0 decides
    if not resumes:
        return start(config, Path(chosen), ranks, **objects)
    return resume(Path(chosen), [], ranks, algorithm=config.algorithm, **objects)


def _find(config: Config, out: Path | None) -> tuple[Path, bool]:
    """The folder of a run, and whether the run is there already."""
    if out is not None:
        there = RunDirectory(out)
        if there.exists() and (other := differing_setting(config, there)) is not None:
            raise PdslError(
                f"{out} already holds a run with another {other}; choose another folder, or the run's own settings"
                f" (pdsl run --resume {out})"
            )
        return out, there.exists()
    folder, name = Path("runs"), f"{config.data.name}-{config.graph.kind}-{config.algorithm.name}"
    for path in sorted(folder.glob(f"{name}*"), reverse=True):
        run = RunDirectory(path)
        if run.exists() and not run.is_finished() and not run.is_locked() and differing_setting(config, run) is None:
            return path, True
    return unused(folder, name), False


def start(
    config: Config, out: Path, ranks: Processes = SINGLE_PROCESS, **objects: Unpack[Objects]
) -> tuple[Experiment, RunDirectory]:
    """Prepare a new run and create its directory. Everything is checked first: a mistake leaves nothing behind."""
    ranks.configure(config.engine)
    key = _new_key(ranks)
    experiment = ranks.all_or_raise(lambda: prepare(config, key=key, engine=ranks.engine, **objects))

    def create() -> RunDirectory:
        if ranks.rank > 0:
            return RunDirectory(out)
        e = experiment
        directory = RunDirectory.create(out, e.config.to_toml(), e.metadata(), _owner_metadata(e))
        if (model := objects.get("model")) is not None:  # before any start from the public set
            directory.write(INITIAL, pack_initial_weights(model))
        return directory

    return experiment, ranks.all_or_raise(create)


def resume(
    path: Path,
    assignments: Sequence[str] = (),
    ranks: Processes = SINGLE_PROCESS,
    *,
    algorithm: Algorithm | type[Algorithm] | None = None,
    **objects: Unpack[Objects],
) -> tuple[Experiment, RunDirectory]:
    """Prepare the run in a directory again. The assignments may change only settings that change no record.

    algorithm and `objects` were given in Python, where a config cannot name them. A graph that is left out is read from
    the directory.
    """
    run, config, key, agreed = ranks.all_or_raise(lambda: _load(path, assignments, algorithm))
    ranks.configure(config.engine)
    new = _new_key(ranks)  # for a run that was interrupted before its first round
    key = new if key is None else key

    def prepare_again() -> Experiment:
        passed: Objects = {**objects}
        if passed.get("graph") is None and config.graph.kind == "python":
            passed["graph"] = run.graph()
        if (model := passed.get("model")) is not None:  # a call without a seed builds other initial weights
            passed["model"] = restore_initial_weights(model, run.read(INITIAL))
        experiment = prepare(config, key=key, agreed=agreed, given=run.given(), engine=ranks.engine, **passed)
        _check_objects(experiment, run)
        return experiment

    return ranks.all_or_raise(prepare_again), run


def _owner_metadata(e: Experiment) -> JsonDict:
    """Content of owner.json: exact counts, and in a run without noise digests of the objects given in Python.

    With noise the ledger has keyed digests of everything (`privacy.seal`).
    """
    given = {"data": e.config.data.name, "model": e.config.model.name, "graph": e.config.graph.kind}
    if e.mechanisms is not None or "python" not in given.values():
        return e.owner_metadata()
    digests = {
        "data": lambda: tensors_digest((e.data.x, e.data.y, *e.validation)),
        "model": lambda: model_digest(e.network.module),
        "graph": lambda: graph_digest(e.graph),
    }
    return e.owner_metadata() | {"objects": {name: digests[name]() for name, kind in given.items() if kind == "python"}}


def _check_objects(e: Experiment, run: RunDirectory) -> None:
    """Refuse objects other than those that a run without noise started with."""
    stored = json.loads(run.read(OWNER) or b"{}").get("objects")
    if stored is None:
        return
    for name, digest in _owner_metadata(e)["objects"].items():
        if stored.get(name) != digest:
            raise PdslError(f"{run.path}: the run was started with another {name}; pass the same, or another folder")


def _new_key(ranks: Processes) -> bytes:
    """One secret for all processes, because any of them may own any agent after a restart."""
    first, *_ = ranks.gather([secrets.token_hex(KEY_BYTES)])
    return bytes.fromhex(first)


def _load(
    path: Path, assignments: Sequence[str], algorithm: Algorithm | type[Algorithm] | None
) -> tuple[RunDirectory, Config, bytes | None, list[Mechanism] | None]:
    """A run's directory, settings, secret key and calibrated noise."""
    for assignment in assignments:
        key = assignment.partition("=")[0].strip()
        if key not in MAY_CHANGE:
            raise PdslError(
                f"--set {key} would change a run that has started; with --resume only: {', '.join(MAY_CHANGE)}"
            )
    run = RunDirectory.open(path)
    ledger = run.ledger()
    stored = run.config()
    if algorithm is not None:
        fields = {name: value for name, value in stored.get("algorithm", {}).items() if name != "name"}
        if isinstance(algorithm, Algorithm):
            if fields.get("learning_rate") == PYTHON:  # a function, which only the object has
                fields["learning_rate"] = algorithm.learning_rate
            algorithm = type(algorithm)
        stored["algorithm"] = algorithm.model_validate(fields)
    rounds = stored.get("rounds")
    config = configs.load(None, assignments, base=stored)
    if config.algorithm.rates_need_rounds and config.rounds != rounds:
        raise PdslError(
            f"--set rounds={config.rounds}: the learning rate of this run depends on its number of rounds, {rounds};"
            " leave it, or start a new run"
        )
    return run, config, run.secret_key(), None if ledger is None else ledger.mechanisms


def execute(experiment: Experiment, run: RunDirectory, listener: RunListener = NO_LISTENER) -> Summary | None:
    """Run the rounds that are left, from the newest valid checkpoint. Returns the summary; None on other ranks."""
    result = complete(experiment, run, listener)
    return None if result is None else result.summary


def complete(experiment: Experiment, run: RunDirectory, listener: RunListener = NO_LISTENER) -> Result | None:
    """`execute` that returns the whole result."""
    e, engine = experiment, experiment.engine
    with _locked(run, engine.is_main_process):
        checkpoint, warnings = run.newest(engine.agents, engine.gather, e.seal.checkpoint_key)
        done, seconds, state = (0, 0.0, None) if checkpoint is None else _restore(e, run, checkpoint)
        ledger = _open_ledger(e, run, done)
        records: list[RoundRecord] = []
        if engine.is_main_process:
            for warning in warnings:
                listener.on_warning(warning)
            records = run.back_to(done)
            run.describe(e.config.to_toml(), e.metadata(), _owner_metadata(e))
            if done < e.config.rounds:
                run.reopen()
        engine.gather([])  # later rows and checkpoints are removed before any process goes on

        began = time.monotonic() - seconds
        with _listening(listener):
            stop = _ask_to_stop(e, lambda: listener.on_start(e, run.path, records))
            left = rounds(e, state, ledger, done, lambda charged: _publish(e, run, charged))
            for completed in [] if stop else left:
                state, ledger, done = completed.state, completed.ledger, completed.t
                seconds = time.monotonic() - began
                if engine.is_main_process:
                    records.append(completed.row)
                    run.append(completed.row)
                    listener.on_models(completed)
                if done % e.config.checkpoint_every == 0:
                    _save(e, run, done, state, seconds)
                if (stop := _ask_to_stop(e, partial(listener.on_round, completed.row))) is not None:
                    break
            left.close()
            if state is None:
                raise PdslError(NOT_ONE_ROUND)
            if done % e.config.checkpoint_every:
                _save(e, run, done, state, seconds)
            evaluation, sums = final_evaluation(e, state.x), gather_sums(e, state)
            if not engine.is_main_process:
                return None
            result = Result(e, records, state, evaluation, seconds, ledger, _early(e, done, stop), run.path, sums)
            finish(run, result)
            listener.on_end(result.summary)
        return result


def train_in_memory(e: Experiment, listener: RunListener = NO_LISTENER) -> Result:
    """Run all rounds in one process, without files."""
    began, records, completed = time.monotonic(), [], None
    with _listening(listener):
        stop = _ask_to_stop(e, lambda: listener.on_start(e, None, []))
        left = rounds(e)
        for completed in [] if stop else left:
            records.append(completed.row)
            listener.on_models(completed)
            if (stop := _ask_to_stop(e, partial(listener.on_round, completed.row))) is not None:
                break
        left.close()
        if completed is None:
            raise PdslError(NOT_ONE_ROUND)
        state, ledger, seconds = completed.state, completed.ledger, time.monotonic() - began
        evaluation = final_evaluation(e, state.x)
        result = Result(e, records, state, evaluation, seconds, ledger, _early(e, len(records), stop))
        listener.on_end(result.brief_summary)
    return result


@contextmanager
def _listening(listener: RunListener) -> Iterator[None]:
    try:
        yield
    finally:
        listener.close()


def _ask_to_stop(e: Experiment, call: Callable[[], None]) -> Stop | None:
    """Call a listener on the main process. All processes get its wish to stop, if it has one."""
    stop = None
    if e.engine.is_main_process:
        try:
            call()
        except StopTraining as raised:
            stop = Stop(str(raised), raised.rule)
    return next((found for found in e.engine.gather([stop]) if found is not None), None)


def _early(e: Experiment, done: int, stop: Stop | None) -> Stop | None:
    """The stop, if it was before the last round."""
    return stop if done < e.config.rounds else None


@contextmanager
def _locked(run: RunDirectory, is_main: bool) -> Iterator[None]:
    """Hold the directory's lock. A full disk or the like becomes an error that says how to continue."""
    try:
        with run.lock() if is_main else nullcontext():
            yield
    except OSError as e:
        raise PdslError(
            f"cannot write to {run.path}: {e.strerror}; free some space or repair it, then start the same run again"
            f" (pdsl run --resume {run.path})"
        ) from e


def _restore(e: Experiment, run: RunDirectory, checkpoint: Checkpoint) -> tuple[int, float, State]:
    """Rounds done, seconds spent and the state, from a checkpoint."""
    if checkpoint.round > e.config.rounds:
        raise PdslError(
            f"{run.path} has {checkpoint.round} rounds already; rounds={e.config.rounds} cannot remove any of them"
        )
    return checkpoint.round, checkpoint.seconds, restore_state(e.config, checkpoint.tensors)


def _publish(e: Experiment, run: RunDirectory, ledger: Ledger) -> None:
    """Write the charged ledger before any process sends a message of the round."""
    if e.engine.is_main_process:
        run.write_ledger(e.seal.sign(ledger))
    e.engine.gather([])


def _save(e: Experiment, run: RunDirectory, t: int, state: State, seconds: float) -> None:
    """Write this process's part of a checkpoint. All parts are written, or no process goes on."""
    problem = None
    try:
        run.save(Checkpoint(t, state_tensors(state), seconds), e.engine.agents, e.graph.agents, e.seal.checkpoint_key)
    except OSError as error:
        problem = error.strerror
    for reported in e.engine.gather([problem]):
        if reported is not None:
            raise OSError(None, reported)
    if e.engine.is_main_process:
        run.prune()


def _open_ledger(e: Experiment, run: RunDirectory, done: int) -> Ledger | None:
    """The verified ledger of this run, or a new one, which is written at once; None without noise."""
    if e.mechanisms is None:
        return None
    ledger, problem = None, None
    try:
        ledger = load_ledger(e, run, done)
    except PdslError as error:
        problem = str(error)
    records = e.seal.digests["records"]
    for reported, others in e.engine.gather([(problem, records)]):  # all processes continue, or none
        if reported is not None:
            raise PdslError(reported)
        if others != records:
            raise PdslError("the processes of the run have different records; give all of them the same data")
    if ledger is not None and ledger.rounds:
        return ledger
    ledger = e.open_ledger()
    if e.engine.is_main_process and ledger is not None:
        run.write_ledger(e.seal.sign(ledger))  # before the key: where there is a key, there is a ledger
        if e.streams.secret and run.secret_key() is None:
            run.write_secret_key(e.seal.secret)
    return ledger


def load_ledger(e: Experiment, run: RunDirectory, done: int) -> Ledger | None:
    """The ledger in the directory, checked against rows, key and seal; None if no round was charged yet."""
    where, text, ledger, key = run.ledger_path, run.ledger_text(), run.ledger(), run.secret_key()
    ran, charged = max(done, len(run.rows())), 0 if ledger is None else ledger.rounds
    if charged < ran or (ledger is None and key is not None):
        raise PdslError(
            f"{where} does not account for the {ran} rounds that were run, so the spent budget is unknown;"
            " restore it, or start the run anew"
        )
    if ledger is None or (not charged and key is None):
        return None
    if key not in (None, e.seal.secret) or (charged and ledger.mechanisms != e.mechanisms):
        raise PdslError(f"another process has continued {run.path} in the meantime; start this one again")
    if e.streams.secret and key is None:
        raise PdslError(f"{run.key_path} is missing: a repeated round would draw new noise; restore it, or start anew")
    e.seal.verify(ledger, text, str(where))
    return ledger
