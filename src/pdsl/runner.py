"""A run with a directory: started, watched, interrupted at any moment, taken up again, finished."""

import secrets
import time
import tomllib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from pdsl import config as configs
from pdsl.algorithms import Algorithm
from pdsl.checkpoints import Checkpoint
from pdsl.config import MAY_CHANGE, Config
from pdsl.data import Data
from pdsl.engine.ranks import Alone, Processes
from pdsl.errors import PdslError
from pdsl.files import PRIVATE, read_private
from pdsl.graph import Graph
from pdsl.privacy import Ledger, Mechanism
from pdsl.randomness import KEY_BYTES
from pdsl.results import Result, finish
from pdsl.runs import RunDirectory, unused
from pdsl.train import Experiment, Row, final_evaluation, prepare, rounds, state_from, state_tensors

Begin = Callable[[], None]  # called when nothing can be the user's mistake any more
Watch = Callable[[Row], None]  # told about every new row, and the last of the old ones
Complain = Callable[[str], None]  # told about damage that was got over
LEDGER, KEY, JOB = "ledger.json", "secret.key", "job"
ALONE = Alone()


def start(config: Config, out: Path, ranks: Processes = ALONE) -> tuple[Experiment, RunDirectory]:
    """Everything is checked before the directory is made: a mistake leaves nothing behind."""
    ranks.settle(config.engine)
    key = _new_key(ranks)
    experiment = ranks.together(lambda: prepare(config, key=key, engine=ranks.engine))
    if ranks.rank > 0:
        ranks.together(lambda: None)
        return experiment, RunDirectory(out)
    run = ranks.together(
        lambda: RunDirectory.create(out, config.to_toml(), experiment.facts(), experiment.owner_facts())
    )
    if ranks.job:
        run.write(JOB, ranks.job.encode())
    return experiment, run


def _new_key(ranks: Processes) -> bytes:
    """One secret for all processes, since any of them may own an agent later on."""
    first, *_ = ranks.gather([secrets.token_hex(KEY_BYTES)])
    return bytes.fromhex(first)


def begun(config: Config, out: Path | None, ranks: Processes) -> tuple[Path, bool]:
    """The directory of a run, and whether it is there already: begun by this very job, before it was restarted."""
    folder, name = Path("runs"), f"{config.data.name}-{config.graph.kind}-{config.algorithm.name}"
    places = [out] if out else sorted(folder.glob(f"{name}*"))
    ours = ranks.together(lambda: [path for path in places if ranks.restarts and _begun_by(ranks.job, path, config)])
    path = ours[-1] if ours else out or unused(folder, name)
    ((chosen, there), *_) = ranks.gather([(str(path), bool(ours))])  # rank 0's word
    return Path(chosen), there


def _begun_by(job: str, path: Path, config: Config) -> bool:
    run = RunDirectory(path)
    return run.read(JOB) == job.encode() and run.config() == tomllib.loads(config.to_toml())


def take_up(
    path: Path,
    assignments: Sequence[str],
    ranks: Processes = ALONE,
    *,
    model: nn.Module | None = None,
    data: Data | None = None,
    graph: Graph | None = None,
    algorithm: type[Algorithm] | None = None,
) -> tuple[Experiment, RunDirectory]:
    """An old run, with those settings changed that change none of its rows.

    model, data, graph and algorithm stand for objects that were given in Python, and that no config can name.
    """
    run, config, key, agreed = ranks.together(lambda: _found(path, assignments, algorithm))
    ranks.settle(config.engine)
    new = _new_key(ranks)  # for a run that was cut before its first round, and has none yet
    key = new if key is None else key

    def made() -> Experiment:
        return prepare(config, model=model, data=data, graph=graph, key=key, agreed=agreed, engine=ranks.engine)

    return ranks.together(made), run


def _found(
    path: Path, assignments: Sequence[str], algorithm: type[Algorithm] | None
) -> tuple[RunDirectory, Config, bytes | None, list[Mechanism] | None]:
    """A run's directory, its settings, its secret and the noise agreed on when it started."""
    for assignment in assignments:
        key = assignment.partition("=")[0].strip()
        if key not in MAY_CHANGE:
            raise PdslError(
                f"--set {key} would change a run that has begun; with --resume only: {', '.join(MAY_CHANGE)}"
            )
    run = RunDirectory.open(path)
    ledger = read_ledger(run)
    stored = run.config()
    if algorithm is not None:
        fields = {name: value for name, value in stored.get("algorithm", {}).items() if name != "name"}
        stored["algorithm"] = algorithm.model_validate(fields)
    config = configs.load(None, assignments, base=stored)
    return run, config, _read_key(run), None if ledger is None else ledger.mechanisms


def _read_key(run: RunDirectory) -> bytes | None:
    """The run's secret; None where it has none yet."""
    key = read_private(run.path / KEY) if (run.path / KEY).exists() else None
    if key is not None and len(key) != KEY_BYTES:
        raise PdslError(
            f"{run.path / KEY} is damaged: a round run again would draw new noise; restore it, or start anew"
        )
    return key


def read_ledger(run: RunDirectory) -> Ledger | None:
    """The ledger in a run directory; None where there is none."""
    stored = run.read(LEDGER)
    return None if stored is None else Ledger.from_json(stored.decode(errors="replace"), str(run.path / LEDGER))


def execute(
    experiment: Experiment, run: RunDirectory, begin: Begin, watch: Watch, complain: Complain
) -> dict[str, Any]:
    """Run what is left to run, from the newest whole checkpoint on. Returns the summary, to the process that writes.

    The other processes of the run, if there are any, get an empty one.
    """
    try:
        with run.lock() if experiment.engine.writes else nullcontext():
            return _execute(experiment, run, begin, watch, complain)
    except OSError as e:
        raise PdslError(
            f"cannot write to {run.path}: {e.strerror}; make room or mend it, then pdsl run --resume {run.path}"
        ) from e


def _execute(e: Experiment, run: RunDirectory, begin: Begin, watch: Watch, complain: Complain) -> dict[str, Any]:
    engine = e.engine
    checkpoint, complaints = run.newest(engine.agents, engine.gather, e.bond.checkpoint_key)
    done, seconds = 0, 0.0
    state: Any = None
    if checkpoint is not None:
        done, seconds = checkpoint.round, checkpoint.seconds
        state = state_from(e.config, checkpoint.tensors)
        if done > e.config.rounds:
            raise PdslError(f"{run.path} has {done} rounds already; rounds={e.config.rounds} cannot take any back")
    ledger = _agreed_ledger(e, run, done)
    rows: list[Row] = []
    if engine.writes:
        for complaint in complaints:
            complain(complaint)
        rows = run.back_to(done)
        run.describe(e.config.to_toml(), e.facts(), e.owner_facts())
        if done < e.config.rounds:
            (run.path / "summary.json").unlink(missing_ok=True)  # of a run that is being extended
        begin()
        for row in rows[-1:]:
            watch(row)
    engine.gather([])  # what is old is out of the way

    start = time.monotonic() - seconds

    def announce(ledger: Ledger) -> None:
        if engine.writes:
            run.write(LEDGER, e.bond.sealed(ledger).encode())
        engine.gather([])  # nobody sends before it is written

    def save(t: int) -> None:
        problem = None
        try:
            run.save(Checkpoint(t, state_tensors(state), seconds), engine.agents, e.graph.agents, e.bond.checkpoint_key)
        except OSError as error:
            problem = error.strerror
        for told in engine.gather([problem]):  # everybody's part is there, or nobody goes on
            if told is not None:
                raise OSError(None, told)
        if engine.writes:
            run.prune()

    for step in rounds(e, state, ledger, done, announce):
        state, ledger, seconds, done = step.state, step.ledger, time.monotonic() - start, step.t
        if engine.writes:
            rows.append(step.row)
            run.append(step.row)
        if step.t % e.config.checkpoint_every == 0:
            save(step.t)
        if engine.writes:
            watch(step.row)
    if state is None:
        raise PdslError("privacy: not even one round fits the budget; raise target_epsilon or the noise")
    if done % e.config.checkpoint_every:
        save(done)
    evaluation = final_evaluation(e, state.x)
    return finish(run, Result(e, rows, state, evaluation, seconds, ledger)) if engine.writes else {}


def _agreed_ledger(e: Experiment, run: RunDirectory, done: int) -> Ledger | None:
    """The run's ledger: of this very run, and with every round in it that was run. A new run's is written first."""
    if e.mechanisms is None:
        return None
    ledger, problem = None, None
    try:
        ledger = _looked_up(e, run, done)
    except PdslError as error:
        problem = str(error)
    records = e.bond.digests["records"]
    found = e.engine.gather([(problem, records)])  # all processes continue, or none
    for problem, others in found:
        if problem is not None:
            raise PdslError(problem)
        if others != records:
            raise PdslError("the processes of the run do not have the same records; give all of them the same data")
    if ledger is not None and ledger.rounds:
        return ledger
    ledger = e.open_ledger()
    if e.engine.writes and ledger is not None:
        run.write(LEDGER, e.bond.sealed(ledger).encode())  # before the key: where there is a key, there is a ledger
        if e.streams.secret and _read_key(run) is None:
            run.write(KEY, e.bond.secret, PRIVATE)
    return ledger


def _looked_up(e: Experiment, run: RunDirectory, done: int) -> Ledger | None:
    """The ledger in the directory, which is compared with all that is there; None where no round was charged yet."""
    where = str(run.path / LEDGER)
    stored, key, ran = run.read(LEDGER), _read_key(run), max(done, len(run.rows()))
    text = (stored or b"").decode(errors="replace")
    ledger = None if stored is None else Ledger.from_json(text, where)
    charged = 0 if ledger is None else ledger.rounds
    if charged < ran or (ledger is None and key is not None):
        raise PdslError(
            f"{where} does not account for the {ran} rounds that were run, so what was spent is not known;"
            " restore it, or start the run anew"
        )
    if ledger is None or (not charged and key is None):
        return None
    if key not in (None, e.bond.secret) or (charged and ledger.mechanisms != e.mechanisms):
        raise PdslError(f"another process has gone on with {run.path} in the meantime; start this one again")
    if e.streams.secret and key is None:
        raise PdslError(
            f"{run.path / KEY} is missing: a round run again would draw new noise; restore it, or start anew"
        )
    e.bond.check(ledger, text, where)
    return ledger
