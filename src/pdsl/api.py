"""The Python API: train a model on data over a graph, in one call or round by round."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from pdsl import graph as graphs
from pdsl.algorithms import Algorithm
from pdsl.config import validated
from pdsl.data import Data, from_python
from pdsl.graph import Graph
from pdsl.randomness import Streams
from pdsl.results import Result
from pdsl.train import Experiment, Step, final_evaluation, prepare
from pdsl.train import rounds as _rounds

if TYPE_CHECKING:
    import networkx


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
    given_graph = None if graph is None else graph if isinstance(graph, Graph) else graphs.from_networkx(graph)
    if given_graph is not None:
        values["graph"] = {"kind": "python", "agents": given_graph.agents}
    if algorithm is not None:
        values["algorithm"] = algorithm
    if isinstance(model, str):
        values["model"] = {**values.get("model", {}), "name": model}
    else:
        values["model"] = {"name": "python"}
    given_data: Data | None = None
    if isinstance(data, str):
        values["data"] = {**values.get("data", {}), "name": data}
    else:
        section = values.get("data", {})
        given_data = from_python(data, Streams(values.get("seed", 0)), section.get("test_fraction", 0.2))
        values["data"] = {**section, "name": "python"}
    config = validated(values, "settings")
    module = None if isinstance(model, str) else model
    return prepare(config, model=module, data=given_data, graph=given_graph)


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
    steps = list(_last_state_only(_rounds(e)))
    seconds = time.monotonic() - start
    state = steps[-1].state
    return Result(e, [step.row for step in steps], state, final_evaluation(e, state.x), seconds)


def _last_state_only(steps: Iterator[Step]) -> Iterator[Step]:
    """The same steps, but only the last one holds on to its state."""
    before: Step | None = None
    for step in steps:
        if before is not None:
            yield Step(before.row, None)
        before = step
    if before is not None:
        yield before
