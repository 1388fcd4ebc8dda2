"""A run directory, loaded for inference, reading and audit."""

import json
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import nn

from pdsl import config as configs
from pdsl import topology
from pdsl.algorithms import Algorithm
from pdsl.config import Config
from pdsl.data import Data, from_python
from pdsl.models.network import load_vector
from pdsl.public.features import join
from pdsl.report.reading import read_account
from pdsl.runs.directory import CONTRIBUTIONS, MODEL, SUMMARY, RunDirectory
from pdsl.runs.model_file import build_module, read_class_names, read_features, read_metadata, read_predictor
from pdsl.runs.prediction import Predictions, Predictor
from pdsl.runs.result import Summary
from pdsl.shapley.account import Account
from pdsl.tasks import Loss, Metric
from pdsl.topology import Graph
from pdsl.training.records import RoundRecord
from pdsl.training.trainer import restore_state
from pdsl.utils.errors import PdslError
from pdsl.utils.random import Streams
from pdsl.utils.types import JsonDict

if TYPE_CHECKING:
    import networkx

    from pdsl.auditing import AuditReport


def load(
    path: str | PathLike[str],
    *,
    model: nn.Module | None = None,
    data: object = None,
    graph: "Graph | networkx.Graph[Any] | None" = None,
    algorithm: type[Algorithm] | Algorithm | None = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
) -> "SavedRun":
    """Load a run directory. Nothing is read before it is needed.

    Args:
        path: the run directory.
        model: the model, if it was an object given in Python; its weights are replaced by the trained ones. For an
            audit it must have the initial weights, so a copy is used.
        data, graph, algorithm, loss, metric: objects given in Python, which only an audit needs.
    """
    kind = type(algorithm) if isinstance(algorithm, Algorithm) else algorithm
    given = {"model": model, "data": data, "graph": graph, "algorithm": kind, "loss": loss, "metric": metric}
    return SavedRun(RunDirectory.open(Path(path)), {name: value for name, value in given.items() if value is not None})


class SavedRun:
    """A run directory. `pdsl.load` makes one."""

    def __init__(self, directory: RunDirectory, objects: JsonDict):
        self.path = directory.path
        self._directory = directory
        self._objects = objects

    def __repr__(self) -> str:
        state = "" if self._directory.is_finished() else ", not finished"
        return f"SavedRun({str(self.path)!r}{state})"

    @cached_property
    def config(self) -> Config:
        """All settings."""
        stored, algorithm = self._directory.config(), self._objects.get("algorithm")
        if algorithm is not None:
            fields = {name: value for name, value in stored.get("algorithm", {}).items() if name != "name"}
            stored["algorithm"] = algorithm.model_validate(fields)
        return configs.load(None, base=stored)

    @cached_property
    def summary(self) -> Summary:
        """The result as plain values."""
        text = self._directory.read(SUMMARY)
        if text is None:
            raise PdslError(f"{self.path} has no {SUMMARY}: the run is not finished; continue it first")
        return cast(Summary, json.loads(text))

    @property
    def metrics(self) -> JsonDict:
        """All metrics of the mean model on the test set."""
        return self.summary["metrics"]

    @property
    def rows(self) -> list[RoundRecord]:
        """The record of each round."""
        return self._directory.rows()

    @cached_property
    def contributions(self) -> Account:
        """The contribution of each party, with intervals."""
        account = read_account(self.path)
        if account is None:
            raise PdslError(
                f"{self.path} has no {CONTRIBUTIONS}: the run is not finished, or its algorithm does not measure"
                " contributions; finish it, or train with PDSL"
            )
        return account

    @cached_property
    def model(self) -> nn.Module:
        """The mean of the agents' models, in evaluation mode."""
        return self._join(self._build_head())

    @cached_property
    def models(self) -> list[nn.Module]:
        """Each agent's own model, from the newest checkpoint."""
        checkpoint, _ = self._directory.newest()
        if checkpoint is None:
            raise PdslError(f"{self.path} has no intact checkpoint; use .model")
        built = []
        for x in restore_state(self.config, checkpoint.tensors).x:
            head = self._build_head()
            load_vector(head, x)
            built.append(self._join(head))
        return built

    def predict(self, x: object) -> Predictions:
        """Predictions of the mean model for raw inputs.

        x: records as the data had them before `pdsl` scaled them: a tensor, an array, a data frame or a row of one, the
        path of a file, a data set, or a tuple or mapping for several inputs. Columns are chosen by name, and others are
        ignored. Returns class names or numbers, 0 or 1 for each of several labels, or numbers in the units of the
        targets.
        """
        return self._predictor(x)

    def predict_proba(self, x: object) -> NDArray[np.float64]:
        """Probability of each class or label [n, classes] by the mean model, in the order of `class_names`."""
        return self._predictor.probabilities(x)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes or labels; their numbers if they have none, and () for regression."""
        return read_class_names(read_metadata(self.path / MODEL))

    def audit(self, canaries: int | None = None, rounds: int | None = None) -> "AuditReport":
        """Try to refute the run's privacy statement; see `pdsl.audit`.

        If the run was started with objects, pass them to `pdsl.load`.
        """
        from pdsl.auditing import audit_run

        objects = dict(self._objects)
        if (graph := objects.get("graph")) is not None and not isinstance(graph, Graph):
            objects["graph"] = topology.from_networkx(graph)
        if "data" in objects:
            objects["data"] = read_data(objects["data"], self.config)
        return audit_run(self.path, canaries, rounds, **objects)

    def _build_head(self) -> nn.Module:
        file, given = self.path / MODEL, self._objects.get("model")
        return build_module(file, read_metadata(file), given)

    @cached_property
    def _features(self) -> nn.Module | None:
        file, given = self.path / MODEL, self._objects.get("model")
        return read_features(file, read_metadata(file), given)

    def _join(self, head: nn.Module) -> nn.Module:
        return head if self._features is None else join(self._features, head)

    @cached_property
    def _predictor(self) -> Predictor:
        return read_predictor(read_metadata(self.path / MODEL), self._build_head(), self._features)


def read_data(data: object, config: Config) -> Data:
    """Convert data given in Python, by the settings of a config."""
    private = config.privacy.randomness == "system" and config.privacy.mode != "none"
    options = config.data.model_dump(exclude={"name"})
    return from_python(data, Streams(config.seed), task=config.task.kind, private=private, **options)
