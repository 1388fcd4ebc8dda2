"""The Python API: train a model on data over a graph, in one call or round by round."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from pdsl import graph as graphs
from pdsl.algorithms import Algorithm
from pdsl.config import validated
from pdsl.data import from_python
from pdsl.errors import PdslError
from pdsl.graph import Graph
from pdsl.randomness import Streams
from pdsl.results import Result
from pdsl.train import Experiment, Step, final_evaluation, prepare
from pdsl.train import rounds as _rounds

if TYPE_CHECKING:
    import networkx

    from pdsl.auditing import Report


def experiment(
    model: nn.Module | str = "auto",
    data: object = "digits",
    *,
    graph: "Graph | networkx.Graph[Any] | None" = None,
    algorithm: Algorithm | None = None,
    **settings: Any,
) -> Experiment:
    """Check and prepare a run. `settings` are those of a config: rounds=100, seed=1, batch={"size": 64}, …"""
    values: dict[str, Any] = dict(settings)
    if not isinstance(model, str | nn.Module):
        raise PdslError(f"model: {model!r:.60} given; give a torch.nn.Module, not its class, or the name of a model")
    given_graph = _graph(graph)
    if given_graph is not None:
        values["graph"] = {"kind": "python", "agents": given_graph.agents}
    if algorithm is not None:
        values["algorithm"] = algorithm
    values["model"] = {"name": model if isinstance(model, str) else "python"}
    values["data"] = {"name": data if isinstance(data, str) else "python"}
    config = validated(values, "settings")
    module = None if isinstance(model, str) else model
    given_data = None if isinstance(data, str) else from_python(data, Streams(config.seed), config.data.test_fraction)
    return prepare(config, model=module, data=given_data, graph=given_graph)


def _graph(graph: object) -> Graph | None:
    if graph is None or isinstance(graph, Graph):
        return graph
    if not hasattr(graph, "is_directed"):
        raise PdslError(f"graph: {graph!r:.60} given; give pdsl.ring(10) or the like, or a networkx graph")
    return graphs.from_networkx(graph)


def rounds(
    model: nn.Module | str = "auto",
    data: object = "digits",
    *,
    graph: "Graph | networkx.Graph[Any] | None" = None,
    algorithm: Algorithm | None = None,
    **settings: Any,
) -> Iterator[Step]:
    """The same as `train`, for those who write their own loop: yields after every round."""
    return _rounds(experiment(model, data, graph=graph, algorithm=algorithm, **settings))


def train(
    model: nn.Module | str = "auto",
    data: object = "digits",
    *,
    graph: "Graph | networkx.Graph[Any] | None" = None,
    algorithm: Algorithm | None = None,
    **settings: Any,
) -> Result:
    """Train one model over a graph of agents.

    model: a torch.nn.Module, or the name of one. data: the name of a data set, (x, y), ((x, y), (test_x, test_y)), a
    torch Dataset, or a list of these with one entry per agent. graph: pdsl.ring(10) and the like, or a networkx graph.
    settings: as in a config file, `pdsl config` lists them.
    """
    e = experiment(model, data, graph=graph, algorithm=algorithm, **settings)
    start = time.monotonic()
    rows, step = [], None
    for step in _rounds(e):
        rows.append(step.row)
    seconds = time.monotonic() - start
    if step is None:
        raise PdslError("privacy: not even one round fits the budget; raise target_epsilon or the noise")
    return Result(e, rows, step.state, final_evaluation(e, step.state.x), seconds, step.ledger)


def audit(result: Result, canaries: int | None = None, rounds: int | None = None) -> "Report":
    """Try to refute a result's privacy statement: measure its rounds again, and attack it with canaries.

    canaries: how many to train with; 0 leaves that part out. rounds: how many to train with them; default all.
    """
    from pdsl.auditing import audit as run_audit

    return run_audit(result, canaries, rounds)
