"""The Python API: train a model on data over a graph, in one call or round by round, and load a run again."""

import atexit
import sys
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, TypeAlias
from weakref import WeakSet

from rich.console import Console
from torch import nn

from pdsl import topology
from pdsl.algorithms import Algorithm
from pdsl.config import Config, validate
from pdsl.data import data_path
from pdsl.options import (
    AttackOptions,
    BatchOptions,
    EngineOptions,
    GraphOptions,
    MixingOptions,
    ModelOptions,
    PartitionOptions,
    PrivacyOptions,
    PublicOptions,
    TaskOptions,
)
from pdsl.privacy.statement import SEEDED
from pdsl.runs import runner
from pdsl.runs.listeners import Listeners, Progress, RunListener
from pdsl.runs.result import Result, RoundResult
from pdsl.runs.runner import Objects
from pdsl.saved import read_data
from pdsl.settings import (
    AttackSettings,
    BatchSettings,
    DataSettings,
    EngineSettings,
    GraphSettings,
    MixingSettings,
    ModelSettings,
    PartitionSettings,
    PrivacySettings,
    PublicSettings,
    TaskSettings,
)
from pdsl.tasks import Loss, Metric
from pdsl.topology import Graph
from pdsl.training.experiment import Experiment, prepare
from pdsl.training.records import RoundRecord
from pdsl.training.trainer import rounds as run_rounds
from pdsl.utils.errors import PdslError, PrivacyWarning
from pdsl.utils.imports import import_path
from pdsl.utils.types import JsonDict

if TYPE_CHECKING:
    import networkx

    from pdsl.auditing import AuditReport

GivenModel: TypeAlias = nn.Module | str | ModelSettings | ModelOptions
AnyGraph: TypeAlias = "Graph | networkx.Graph[Any]"
GivenGraph: TypeAlias = (
    "AnyGraph | Sequence[AnyGraph] | Callable[[int], AnyGraph] | str | GraphSettings | GraphOptions | None"
)
GivenAlgorithm: TypeAlias = Algorithm | str | Mapping[str, object] | None
GivenTask: TypeAlias = TaskSettings | TaskOptions | str | None


def train(
    model: GivenModel = "auto",
    data: object = "digits",
    *,
    graph: GivenGraph = None,
    algorithm: GivenAlgorithm = None,
    task: GivenTask = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    out: str | PathLike[str] | None = None,
    callbacks: Sequence[RunListener] = (),
    progress: bool | None = None,
    rounds: int = 100,
    seed: int = 0,
    privacy: PrivacySettings | PrivacyOptions | None = None,
    public: PublicSettings | PublicOptions | None = None,
    batch: BatchSettings | BatchOptions | None = None,
    partition: PartitionSettings | PartitionOptions | str | None = None,
    mixing: MixingSettings | MixingOptions | None = None,
    attack: AttackSettings | AttackOptions | None = None,
    engine: EngineSettings | EngineOptions | None = None,
    evaluate_every: int = 1,
    checkpoint_every: int = 1,
    ema_decay: float = 0.0,
    baselines: Literal["all", "public", "none"] = "all",
    test_path: str | None = None,
    target: str | Sequence[str] | None = None,
    owner: str | None = None,
    columns: Sequence[str] | None = None,
    categories: Mapping[str, Sequence[str | int]] | None = None,
    classes: int | Sequence[str | int] | None = None,
    pixels: bool | None = None,
    scale: Literal["none", "public"] | None = None,
    validation: int | None = None,
    public_seed: int | None = None,
    test_fraction: float = 0.2,
    **unknown: Never,
) -> Result:
    """Train one model over a graph of agents.

    Args:
        model: a torch.nn.Module, or the name of a built-in model, also as a mapping with its settings.
        data: the name of a dataset, a file ("patients.csv", .parquet, .npz), (x, y) tensors or arrays, a data frame, a
            torch or Hugging Face Dataset, a Bunch of scikit-learn, or a list or mapping of these with one entry per
            agent. (data, test data) adds test data.
        graph: "ring", {"kind": "torus", "agents": 12}, pdsl.ring(10) or another topology, a networkx graph; for a graph
            that changes, a list of graphs, one per round and repeated, or a function of the round (from 1).
        algorithm: "muffliato", {"name": "muffliato", "learning_rate": 1.0}, or pdsl.PDSL(learning_rate=2.0).
        task: "regression", {"kind": "regression", "huber": 1.0}, or pdsl.regression(huber=1.0); default: by the
            targets.
        loss: your own loss, a function of (outputs, targets) with one number per record.
        metric: one more metric, a function of (outputs, targets) with one number.
        out: the run directory. The same call with the same directory resumes the run. Default: no files.
        callbacks: see `pdsl.callbacks`.
        progress: show the progress on stderr; default: in a terminal or a notebook.
        rounds: rounds T.
        seed: seed of partition, graph, initial model, batches, seeded noise and permutations.
        privacy: budget, clipping and noise, for example {"target_epsilon": 4.0}.
        public: features and start from the public set, for example {"features": "patches", "start": "labels"}.
        batch: size and sampling of batches, for example {"size": 64}.
        partition: how records without an owner are split across agents: "iid", or {"kind": "shards", "classes": 3}.
        mixing: {"robust": True} limits neighbours' models to what honest ones can differ by.
        attack: simulated attackers.
        engine: device and number of workers.
        evaluate_every: rounds between evaluations on the test set.
        checkpoint_every: rounds between checkpoints.
        ema_decay: EMA decay of the released models.
        baselines: baselines that are computed after the last round.
        test_path: CSV and Parquet files: a file with test records.
        target: tables: column of the target.
        owner: tables: column with the agent that owns a record.
        columns: tables: columns that are inputs.
        categories: tables: possible values of columns of text.
        classes: number of classes, or all labels in order.
        pixels: whether bytes are pixels, to be divided by 255.
        scale: "public": standardise inputs by mean and deviation of the public set.
        validation: size of the public set Q.
        public_seed: seed of the draw of Q from the test set; default: `seed`.
        test_fraction: fraction held out for testing if there are no test data.
    """
    config, objects = configure(
        model,
        data,
        graph=graph,
        algorithm=algorithm,
        task=task,
        loss=loss,
        metric=metric,
        rounds=rounds,
        seed=seed,
        privacy=privacy,
        public=public,
        batch=batch,
        partition=partition,
        mixing=mixing,
        attack=attack,
        engine=engine,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        ema_decay=ema_decay,
        baselines=baselines,
        test_path=test_path,
        target=target,
        owner=owner,
        columns=columns,
        categories=categories,
        classes=classes,
        pixels=pixels,
        scale=scale,
        validation=validation,
        public_seed=public_seed,
        test_fraction=test_fraction,
        **unknown,
    )
    if out is None:
        experiment, directory = prepare(config, **objects), None
    else:
        experiment, directory = runner.open_run(config, Path(out), **objects)
    warn(experiment)
    with ExitStack() as stack:
        listeners = list(callbacks)
        if progress if progress is not None else _is_watched():
            console = Console(stderr=True, markup=False, emoji=False, highlight=False, force_jupyter=False)
            listeners.append(stack.enter_context(Progress(console, config.rounds)))
        if directory is None:
            return runner.train_in_memory(experiment, Listeners(*listeners))
        result = runner.complete(experiment, directory, Listeners(*listeners))
        assert result is not None  # one process
        return result


def rounds(
    model: GivenModel = "auto",
    data: object = "digits",
    *,
    graph: GivenGraph = None,
    algorithm: GivenAlgorithm = None,
    task: GivenTask = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    rounds: int = 100,
    seed: int = 0,
    privacy: PrivacySettings | PrivacyOptions | None = None,
    public: PublicSettings | PublicOptions | None = None,
    batch: BatchSettings | BatchOptions | None = None,
    partition: PartitionSettings | PartitionOptions | str | None = None,
    mixing: MixingSettings | MixingOptions | None = None,
    attack: AttackSettings | AttackOptions | None = None,
    engine: EngineSettings | EngineOptions | None = None,
    evaluate_every: int = 1,
    checkpoint_every: int = 1,
    ema_decay: float = 0.0,
    baselines: Literal["all", "public", "none"] = "all",
    test_path: str | None = None,
    target: str | Sequence[str] | None = None,
    owner: str | None = None,
    columns: Sequence[str] | None = None,
    categories: Mapping[str, Sequence[str | int]] | None = None,
    classes: int | Sequence[str | int] | None = None,
    pixels: bool | None = None,
    scale: Literal["none", "public"] | None = None,
    validation: int | None = None,
    public_seed: int | None = None,
    test_fraction: float = 0.2,
    **unknown: Never,
) -> Generator[RoundResult]:
    """`train` as an iterator that yields after every round, for a loop of your own. The arguments are those of `train`.

    Leave the loop at any round: `RoundResult.result()` is the result so far.
    """
    config, objects = configure(
        model,
        data,
        graph=graph,
        algorithm=algorithm,
        task=task,
        loss=loss,
        metric=metric,
        rounds=rounds,
        seed=seed,
        privacy=privacy,
        public=public,
        batch=batch,
        partition=partition,
        mixing=mixing,
        attack=attack,
        engine=engine,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        ema_decay=ema_decay,
        baselines=baselines,
        test_path=test_path,
        target=target,
        owner=owner,
        columns=columns,
        categories=categories,
        classes=classes,
        pixels=pixels,
        scale=scale,
        validation=validation,
        public_seed=public_seed,
        test_fraction=test_fraction,
        **unknown,
    )
    experiment = prepare(config, **objects)
    warn(experiment)
    iterator = _iterate(experiment)
    _unfinished.add(iterator)
    return iterator


def _iterate(e: Experiment) -> Generator[RoundResult]:
    began = time.monotonic()
    rows: list[RoundRecord] = []
    for done in run_rounds(e):
        rows = [*rows, done.row]
        yield RoundResult(done.row, done.state, done.ledger, e, rows, time.monotonic() - began)


_unfinished: WeakSet[Generator[RoundResult]] = WeakSet()


@atexit.register
def _close_unfinished() -> None:
    """Close loops that were left, while threads and modules still exist."""
    for iterator in list(_unfinished):
        iterator.close()


def configure(
    model: GivenModel,
    data: object,
    *,
    graph: GivenGraph = None,
    algorithm: GivenAlgorithm = None,
    task: GivenTask = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    **settings: Any,
) -> tuple[Config, Objects]:
    """Settings as a checked config, and the objects that it cannot name."""
    values: JsonDict = {name: value for name, value in settings.items() if value is not None}
    of_data = {name: values.pop(name) for name in DataSettings.model_fields if name in values}
    values["data"] = {**(data_path(data) if isinstance(data, str) else {"name": "python"}), **of_data}
    values["model"] = _model_settings(model)
    given_graph, values["graph"] = _graph(graph, settings["rounds"])
    values["task"] = _task_settings(task, loss, metric)
    if algorithm is not None:
        values["algorithm"] = algorithm
    config = validate(values, "settings")
    objects: Objects = {"model": model if isinstance(model, nn.Module) else None, "graph": given_graph}
    objects |= {"loss": loss, "metric": metric, "data": None}
    if not isinstance(data, str):
        objects["data"] = read_data(data, config)
    return config, objects


def _model_settings(model: object) -> ModelSettings | JsonDict:
    if isinstance(model, ModelSettings):
        return model
    if isinstance(model, Mapping):
        return dict(model)
    if not isinstance(model, str | nn.Module):
        raise PdslError(f"model: {model!r:.60} given; give a torch.nn.Module, not its class, or the name of a model")
    return {"name": model if isinstance(model, str) else "python"}


def _graph(graph: GivenGraph, rounds: int) -> tuple[Graph | None, object]:
    """The graph, if it is an object, and its settings."""
    if graph is None or isinstance(graph, str | Mapping | GraphSettings):
        return None, {} if graph is None else graph
    given = topology.as_graph(graph, rounds if isinstance(rounds, int) else 1)
    return given, given.settings or {"kind": "python", "agents": given.agents}


def _task_settings(task: object, loss: Loss | None, metric: Metric | None) -> TaskSettings | JsonDict:
    """Settings of the task. Functions are named by their import path, if they have one."""
    if isinstance(task, TaskSettings):
        values = task.model_dump(exclude_unset=True)
    elif isinstance(task, Mapping):
        values = dict(task)
    elif task is None or isinstance(task, str):
        values = {} if task is None else {"kind": task}
    else:
        raise PdslError(f'task: {task!r:.60} given; give "regression" or the like, or pdsl.regression()')
    if loss is not None:
        values["loss"] = _function_name("loss", loss)
    if metric is not None:
        values["metric"] = _function_name("metric", metric)
    return values


def _function_name(argument: str, function: object) -> str:
    if not callable(function):
        raise PdslError(f"{argument}: {function!r:.60} given; give a function of (outputs, targets)")
    return import_path(function) or "python"


def warn(e: Experiment) -> None:
    """Warn once about each caveat of a run that the command line prints."""
    if e.mechanisms is not None and not e.streams.secret:
        text = f"{SEEDED}; a private run needs privacy={{'randomness': 'system'}}"
        warnings.warn(text, PrivacyWarning, stacklevel=3)
    if e.data.note:
        warnings.warn(e.data.note, PrivacyWarning, stacklevel=3)


def _is_watched() -> bool:
    """Whether stderr is a terminal or belongs to a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def audit(result: Result, canaries: int | None = None, rounds: int | None = None) -> "AuditReport":
    """Try to refute a result's privacy statement: repeat its rounds, measure them, and attack it with canaries.

    Args:
        result: what `train` returned.
        canaries: number of canaries; 0 skips that part; default: as many as fit.
        rounds: rounds to train with canaries; default: all.
    """
    from pdsl.auditing import audit as run_audit

    return run_audit(result, canaries, rounds)
