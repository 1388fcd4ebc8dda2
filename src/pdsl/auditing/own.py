"""A user's own algorithm, model, data and graph for the audit of a run, by import path."""

from pathlib import Path
from typing import Any

from torch import nn

from pdsl import graph as graphs
from pdsl.algorithms import Algorithm
from pdsl.data import from_python
from pdsl.errors import PdslError
from pdsl.graph import Graph
from pdsl.imports import import_object
from pdsl.randomness import Streams
from pdsl.runs import RunDirectory


def imported_objects(
    run: Path, *, algorithm: str | None, model: str | None, data: str | None, graph: str | None
) -> dict[str, Any]:
    """The objects behind import paths, as `runner.take_up` takes them; functions without arguments are called."""
    stored = RunDirectory.open(run).config()
    found: dict[str, Any] = {}
    if algorithm is not None:
        kind = import_object(algorithm, "--algorithm")
        if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
            raise PdslError(f"--algorithm {algorithm} is no pdsl.Algorithm; give a class that is one")
        found["algorithm"] = kind
    if model is not None:
        found["model"] = _made(model, "--model", nn.Module)
    if graph is not None:
        given = import_object(graph, "--graph")
        given = given() if callable(given) and not isinstance(given, Graph) else given
        found["graph"] = given if isinstance(given, Graph) else graphs.from_networkx(given)
    if data is not None:
        given = import_object(data, "--data")
        fraction = stored.get("data", {}).get("test_fraction", 0.2)
        found["data"] = from_python(given() if callable(given) else given, Streams(stored.get("seed", 0)), fraction)
    return found


def _made(path: str, option: str, kind: type) -> object:
    given = import_object(path, option)
    made = given if isinstance(given, kind) else given() if callable(given) else given
    if not isinstance(made, kind):
        raise PdslError(f"{option} {path} gave a {type(made).__name__}, not a {kind.__name__}")
    return made
