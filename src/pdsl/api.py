"""The Python API: train a model on data over a graph, in one call or round by round."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from pdsl import topology
from pdsl.algorithms import Algorithm
from pdsl.config import validate
from pdsl.data import from_python
from pdsl.runs.listeners import RunListener
from pdsl.runs.result import Result
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


def experiment(
    model: nn.Module | str = "auto",
    data: object = "digits",
    *,
    graph: "Graph | networkx.Graph[Any] | None" = None,
    algorithm: Algorithm | None = None,
    **settings: Any,
) -> Experiment:
    """Check and prepare a run. `settings` are those of a config: rounds=100, seed=1, batch={"size": 64}, …"""
    values: JsonDict = dict(settings)
    if not isinstance(model, str | nn.Module):
        raise PdslError(f"model: {model!r:.60} given; give a torch.nn.Module, not its class, or the name of a model")
    given_graph = _graph(graph)
    if given_graph is not None:
        values["graph"] = {"kind": "python", "agents": given_graph.agents}
    if algorithm is not None:
        values["algorithm"] = algorithm
    values["model"] = {"name": model if isinstance(model, str) else "python"}
    values["data"] = {"name": data if isinstance(data, str) else "python"}
    config = validate(values, "settings")
    module = None if isinstance(model, str) else model
    given_data = None if isinstance(data, str) else from_python(data, Streams(config.seed), config.data.test_fraction)
    return prepare(config, model=module, data=given_data, graph=given_graph)


def _graph(graph: object) -> Graph | None:
    if graph is None or isinstance(graph, Graph):
        return graph
    if not hasattr(graph, "is_directed"):
        raise PdslError(f"graph: {graph!r:.60} given; give pdsl.ring(10) or the like, or a networkx graph")
    return topology.from_networkx(graph)


def rounds(
    model: nn.Module | str = "auto",
    data: object = "digits",
    *,
    graph: "Graph | networkx.Graph[Any] | None" = None,
    algorithm: Algorithm | None = None,
    **settings: Any,
) -> Iterator[RoundResult]:
    """`train` as an iterator that yields after every round, for a loop of your own."""
    return _rounds(experiment(model, data, graph=graph, algorithm=algorithm, **settings))


def train(
    model: nn.Module | str = "auto",
    data: object = "digits",
    *,
    graph: "Graph | networkx.Graph[Any] | None" = None,
    algorithm: Algorithm | None = None,
    listener: RunListener | None = None,
    **settings: Any,
) -> Result:
    """Train one model over a graph of agents.

    Args:
        model: a torch.nn.Module, or the name of a built-in model.
        data: the name of a dataset, (x, y), ((x, y), (test_x, test_y)), a torch Dataset, or a list of these with one
            entry per agent.
        graph: pdsl.ring(10) or another topology, or a networkx graph.
        algorithm: for example pdsl.PDSL(learning_rate=2.0); default PDSL.
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
