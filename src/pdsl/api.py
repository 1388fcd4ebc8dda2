"""The Python API: train a model on data over a graph, in one call or round by round."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from pdsl import topology
from pdsl.algorithms import Algorithm
from pdsl.config import Config, take_agents, validate
from pdsl.data import data_path, from_python
from pdsl.runs.listeners import RunListener
from pdsl.runs.result import Result
from pdsl.settings import DataSettings
from pdsl.topology import Graph
from pdsl.training.evaluation import final_evaluation
from pdsl.training.experiment import Experiment, prepare
from pdsl.training.trainer import RoundResult
from pdsl.training.trainer import rounds as _rounds
from pdsl.utils.errors import PdslError
from pdsl.utils.random import Streams
from pdsl.utils.types import JsonDict

if TYPE_CHECKING:
    import networkx

    from pdsl.auditing import AuditReport

    AnyGraph: TypeAlias = Graph | networkx.Graph[Any]
    GraphLike: TypeAlias = str | Mapping[str, Any] | AnyGraph | Sequence[AnyGraph] | Callable[[int], AnyGraph]


def experiment(
    model: nn.Module | str = "auto",
    data: object = "digits",
    *,
    graph: "GraphLike | None" = None,
    algorithm: Algorithm | str | Mapping[str, Any] | None = None,
    **settings: Any,
) -> Experiment:
    """Check and prepare a run. `settings` are those of a config: rounds=100, seed=1, batch={"size": 64}, …"""
    values: JsonDict = dict(settings)
    if not isinstance(model, str | nn.Module):
        raise PdslError(f"model: {model!r:.60} given; give a torch.nn.Module, not its class, or the name of a model")
    given_graph = _graph(graph, values)
    if algorithm is not None:
        values["algorithm"] = algorithm
    values["model"] = {"name": model if isinstance(model, str) else "python"}
    of_data = {name: values.pop(name) for name in DataSettings.model_fields if name in values}
    values["data"] = {**(data_path(data) if isinstance(data, str) else {"name": "python"}), **of_data}
    config = validate(values, "settings")
    module = None if isinstance(model, str) else model
    private = config.privacy.randomness == "system" and config.privacy.mode != "none"
    options = config.data.model_dump(exclude={"name"})
    streams, kind = Streams(config.seed), config.task.kind
    given_data = None if isinstance(data, str) else from_python(data, streams, task=kind, private=private, **options)
    if given_data is not None:
        config = take_agents(config, given_data.agents)
    return prepare(config, model=module, data=given_data, graph=given_graph)


def _graph(graph: "GraphLike | None", values: JsonDict) -> Graph | None:
    """Put the settings of a graph into `values`; return the graph if it is an object."""
    if graph is None:
        return None
    if isinstance(graph, str | Mapping):
        values["graph"] = graph
        return None
    rounds = values.get("rounds", Config.model_fields["rounds"].default)
    given = topology.as_graph(graph, rounds if isinstance(rounds, int) else 1)
    named = given.settings
    values["graph"] = {"kind": "python", "agents": given.agents} if named is None else named
    return given


def rounds(
    model: nn.Module | str = "auto",
    data: object = "digits",
    *,
    graph: "GraphLike | None" = None,
    algorithm: Algorithm | str | Mapping[str, Any] | None = None,
    **settings: Any,
) -> Iterator[RoundResult]:
    """`train` as an iterator that yields after every round, for a loop of your own."""
    return _rounds(experiment(model, data, graph=graph, algorithm=algorithm, **settings))


def train(
    model: nn.Module | str = "auto",
    data: object = "digits",
    *,
    graph: "GraphLike | None" = None,
    algorithm: Algorithm | str | Mapping[str, Any] | None = None,
    listener: RunListener | None = None,
    **settings: Any,
) -> Result:
    """Train one model over a graph of agents.

    Args:
        model: a torch.nn.Module, or the name of a built-in model.
        data: the name of a dataset, (x, y), ((x, y), (test_x, test_y)), a torch Dataset, or a list of these with one
            entry per agent.
        graph: "ring", {"kind": "torus", "agents": 12}, pdsl.ring(10) or another topology, a networkx graph; for a graph
            that changes, a list of graphs, one per round and repeated, or a function of the round (from 1).
        algorithm: for example pdsl.PDSL(learning_rate=2.0), "muffliato" or {"name": "muffliato", "learning_rate": 2.0};
            default PDSL.
        listener: callbacks for the start, every round and the end.
        settings: as in a config file; `pdsl config` lists them.
    """
    e = experiment(model, data, graph=graph, algorithm=algorithm, **settings)
    listener = listener or RunListener()
    listener.on_start(e, None, [])
    start = time.monotonic()
    rows, result = [], None
    for result in _rounds(e):
        rows.append(result.row)
        listener.on_round(result.row)
    seconds = time.monotonic() - start
    if result is None:
        raise PdslError("privacy: not even one round fits the budget; raise target_epsilon or the noise")
    finished = Result(e, rows, result.state, final_evaluation(e, result.state.x), seconds, result.ledger)
    listener.on_end(finished.summary)
    return finished


def audit(result: Result, canaries: int | None = None, rounds: int | None = None) -> "AuditReport":
    """Try to refute a result's privacy statement: repeat its rounds, measure them, and attack it with canaries.

    Args:
        result: what `train` returned.
        canaries: number of canaries; 0 skips that part; default: as many as fit.
        rounds: rounds to train with canaries; default: all.
    """
    from pdsl.auditing import audit as run_audit

    return run_audit(result, canaries, rounds)
