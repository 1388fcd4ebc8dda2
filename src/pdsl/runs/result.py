"""The result of a run: models, Shapley values and a summary, in memory and on disk."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TypedDict, cast

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import save
from torch import nn

from pdsl.privacy import Ledger
from pdsl.privacy.statement import adversaries, statement
from pdsl.report import write_report
from pdsl.runs.checkpoints import Checkpoint
from pdsl.runs.directory import MODEL, SUMMARY, RunDirectory
from pdsl.training.evaluation import Evaluation, finite, measure_model
from pdsl.training.experiment import Experiment
from pdsl.training.records import RoundRecord
from pdsl.training.trainer import State, state_tensors
from pdsl.utils.errors import PdslError
from pdsl.utils.types import JsonDict


class Summary(TypedDict, total=False):
    """The result as plain values: summary.json, and the output of `pdsl run --json`.

    With the headline metric m (accuracy, rmse, loss) there are also m, its mean over the agents' own models on the test
    set; m_of_mean, that of the mean model; and m_per_agent. `headline` reads them.
    """

    metric: str  # name of the headline metric
    metrics: JsonDict  # all metrics of the mean model on the test set
    loss: float | None
    rounds: int
    agents: int
    algorithm: str
    learning_rate: float  # the largest of all rounds
    seconds: float
    run: str | None  # the run directory
    names: list[str]  # of the agents
    bytes: int
    bytes_between_processes: int
    graph: str
    data: str
    epsilon: float | None  # total of the worst agent
    delta: float | None
    epsilon_per_agent: list[float | None] | None
    adversaries: dict[str, float | None] | None
    sigma: float
    privacy: str  # the privacy statement
    stopped: str | None  # reason, if there are fewer rounds than configured
    models_sha256: str
    notes: list[str]


@dataclass(frozen=True)
class Result:
    """A finished run: models, records, ledger."""

    experiment: Experiment
    rows: list[RoundRecord]
    state: State
    evaluation: Evaluation
    seconds: float
    ledger: Ledger | None = None

    @property
    def score(self) -> float:
        """Headline metric of the task on the test set: mean over the agents' own models."""
        return self.evaluation.score

    @property
    def score_of_mean(self) -> float:
        """Headline metric of the task on the test set, for the mean of the agents' models."""
        return self.evaluation.score_of_mean

    @property
    def accuracy(self) -> float:
        """Mean over the agents of the test accuracy of their own models."""
        return self._accuracy(self.evaluation.score)

    @property
    def accuracy_of_mean(self) -> float:
        """Test accuracy of the mean of the agents' models."""
        return self._accuracy(self.evaluation.score_of_mean)

    def _accuracy(self, score: float) -> float:
        if self.evaluation.metric != "accuracy":
            raise PdslError(f"this task has no accuracy; its headline is {self.evaluation.metric}: use result.score")
        return score

    @cached_property
    def metrics(self) -> JsonDict:
        """All metrics of the mean model on the test set."""
        return measure_model(self.experiment, self.evaluation.mean)

    @property
    def loss(self) -> float | None:
        """Mean test loss of the agents' own models; None if it is not finite."""
        return self.evaluation.loss

    @property
    def epsilon(self) -> float | None:
        """Total ε of the worst agent; None if no finite ε holds."""
        return None if self.ledger is None else finite(self.ledger.epsilon)

    @property
    def models(self) -> list[nn.Module]:
        """Each agent's own model."""
        return [self.experiment.network.to_module(x) for x in self.state.x]

    @property
    def model(self) -> nn.Module:
        """The mean of the agents' models."""
        return self.experiment.network.to_module(self.evaluation.mean)

    @property
    def edges(self) -> list[tuple[int, int]]:
        """(receiver, sender) of each column of `contributions`: the edges of all rounds."""
        g = self.experiment.graph
        return list(zip(g.receiver.tolist(), g.sender.tolist(), strict=True))

    @property
    def contributions(self) -> NDArray[np.float64]:
        """Shapley values [rounds, edges]: value of the sender's message to the receiver; NaN if there was none."""
        if not all("shapley" in row for row in self.rows):
            raise PdslError(f"{self.experiment.config.algorithm.name} computes no Shapley values")
        return np.array([row["shapley"]["phi"] for row in self.rows], dtype=np.float64)

    @property
    def summary(self) -> Summary:
        """The result as plain values."""
        return summarise(self)

    def save(self, path: str | PathLike[str]) -> Path:
        """Write a run directory, as `pdsl run` does."""
        e = self.experiment
        run = RunDirectory.create(Path(path), e.config.to_toml(), e.metadata(), e.owner_metadata())
        for row in self.rows:
            run.append(row)
        run.save(Checkpoint(len(self.rows), state_tensors(self.state), self.seconds), key=e.seal.checkpoint_key)
        finish(run, self)
        return run.path


def summarise(result: Result) -> Summary:
    """The result as plain values."""
    e, c, ev, ledger = result.experiment, result.experiment.config, result.evaluation, result.ledger
    scores = {
        ev.metric: finite(ev.score),
        f"{ev.metric}_of_mean": finite(ev.score_of_mean),
        f"{ev.metric}_per_agent": [finite(score) for score in ev.scores],
    }
    rest: Summary = {
        "metric": ev.metric,
        "metrics": result.metrics,
        "loss": ev.loss,
        "rounds": len(result.rows),
        "agents": e.graph.agents,
        "algorithm": c.algorithm.name,
        "learning_rate": max(e.learning_rates),
        "seconds": round(result.seconds, 3),
        "run": None,
        "names": list(e.agent_names),
        "bytes": sum(row["bytes"] for row in result.rows),
        "bytes_between_processes": sum(row.get("bytes_between_processes", 0) for row in result.rows),
        "graph": e.graph.describe(),
        "data": e.data.name,
        "epsilon": result.epsilon,
        "delta": None if ledger is None else ledger.delta,
        "epsilon_per_agent": None if ledger is None else [finite(eps) for eps in ledger.epsilon_per_agent],
        "adversaries": None if ledger is None else {who: finite(eps) for who, eps in adversaries(ledger).items()},
        "sigma": e.largest_sigma,
        "privacy": statement(c.privacy, ledger, e.mechanisms),
        "stopped": stop_reason(result),
        "models_sha256": ev.models_sha256,
        "notes": [e.data.note] if e.data.note else [],
    }
    return cast(Summary, {**scores, **rest})


def headline(summary: Mapping[str, object], suffix: str = "") -> float:
    """Headline metric of a summary; `suffix` _of_mean: that of the mean model. NaN if it is not finite."""
    value = summary[f"{summary['metric']}{suffix}"]
    return float(value) if isinstance(value, int | float) else math.nan


def stop_reason(result: Result) -> str | None:
    """Reason for fewer rounds than configured; None if all were run."""
    done, asked = len(result.rows), result.experiment.config.rounds
    if done == asked or result.ledger is None:
        return None
    return f"after round {done} of {asked}: another one would exceed the budget of ε = {result.ledger.budget:g}"


def finish(run: RunDirectory, result: Result) -> Summary:
    """Write the mean model, the ledger, the summary and the report. Returns the summary."""
    # cloned, because a safetensors file cannot hold one tensor under two names, as tied layers have
    named = {name: tensor.clone().contiguous() for name, tensor in result.model.state_dict().items()}
    run.write(MODEL, save(named))
    if result.ledger is not None:
        run.write_ledger(result.experiment.seal.sign(result.ledger, costs=True))
    summary: Summary = {**summarise(result), "run": str(run.path)}
    run.write(SUMMARY, json.dumps(summary, indent=2, ensure_ascii=False).encode())
    write_report(run.path)
    return summary
