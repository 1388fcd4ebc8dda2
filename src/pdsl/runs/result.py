"""The result of a run: models, Shapley values and a summary, in memory and on disk."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import NoReturn, TypedDict, cast

import numpy as np
from numpy.typing import NDArray
from torch import nn

from pdsl.privacy import Ledger
from pdsl.privacy.statement import adversaries, statement
from pdsl.report import write_report
from pdsl.runs.cards import describe_result, html_card, model_card
from pdsl.runs.checkpoints import Checkpoint
from pdsl.runs.directory import CARD, CONTRIBUTIONS, FEATURES, LEDGER, MODEL, SUMMARY, RunDirectory
from pdsl.runs.model_file import pack_model
from pdsl.runs.prediction import Predictions, Predictor, predictor_of
from pdsl.shapley.account import Account
from pdsl.shapley.coalitions import Values
from pdsl.training.baselines import Baselines, compute_baselines, describe_gain
from pdsl.training.contributions import account_of_model, make_run_account, sums_by_sender
from pdsl.training.evaluation import Evaluation, final_evaluation, finite, measure_model
from pdsl.training.experiment import Experiment
from pdsl.training.records import RoundRecord
from pdsl.training.trainer import CompletedRound, State, state_tensors
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
    parameters: int  # number of trained parameters
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
    stop_rule: JsonDict | None  # rule over public records that stopped the run
    models_sha256: str
    notes: list[str]
    baselines: dict[str, float | None]  # headline metric of each baseline, see `training.baselines`
    gain: str  # what collaboration was worth, in one sentence; empty without baselines


@dataclass(frozen=True)
class Stop:
    """End of a run before its last round, by a callback. `rule`: see `StopTraining`."""

    reason: str
    rule: JsonDict | None = None


@dataclass(frozen=True)
class Result:
    """A finished run: models, records, ledger."""

    experiment: Experiment
    rows: list[RoundRecord]
    state: State
    evaluation: Evaluation
    seconds: float
    ledger: Ledger | None = None
    stop: Stop | None = None
    path: Path | None = None  # the run directory
    sums: Values | None = None  # for the account, gathered from all ranks; None: those of the state

    def __repr__(self) -> str:
        return describe_result(self)

    def _repr_html_(self) -> str:
        return html_card(self)

    def __getstate__(self) -> NoReturn:
        raise PdslError(
            "a result holds the agents' private records and is not pickled; use result.save(folder) and pdsl.load"
        )

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
        e = self.experiment
        return [e.to_module(x) for x in self.state.x]

    @property
    def model(self) -> nn.Module:
        """The mean of the agents' models. Running statistics, for example of BatchNorm, are those of the public set."""
        e = self.experiment
        return e.to_module(self.evaluation.mean)

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
        return self.experiment.class_names

    @cached_property
    def _predictor(self) -> Predictor:
        e = self.experiment
        return predictor_of(e, e.network.to_module(self.evaluation.mean, e.validation[0]))

    @cached_property
    def baselines(self) -> Baselines:
        """Headline metric of the public set alone, each agent alone, pooled data and a trusted server."""
        return compute_baselines(self.experiment, len(self.rows))

    @property
    def edges(self) -> list[tuple[int, int]]:
        """(receiver, sender) of each column of `message_values`: the edges of all rounds."""
        g = self.experiment.graph
        return list(zip(g.receiver.tolist(), g.sender.tolist(), strict=True))

    @cached_property
    def contributions(self) -> Account:
        """Contribution of each agent to the gain over the start, with intervals."""
        e, mean, rounds = self.experiment, self.evaluation.mean, len(self.rows)
        if self.sums is not None:
            return account_of_model(e, self.sums, mean, rounds)
        return make_run_account(e, self.state, mean, rounds)

    @property
    def message_values(self) -> NDArray[np.float64]:
        """Shapley values [rounds, edges]: value of the sender's message to the receiver; NaN if there was none."""
        if not all("shapley" in row for row in self.rows):
            raise PdslError(f"{self.experiment.config.algorithm.name} computes no Shapley values")
        return np.array([row["shapley"]["phi"] for row in self.rows], dtype=np.float64)

    @cached_property
    def summary(self) -> Summary:
        """The result as plain values."""
        return summarise(self)

    @cached_property
    def brief_summary(self) -> Summary:
        """The summary without baselines, which take time."""
        return summarise(self, with_baselines=False)

    def save(self, path: str | PathLike[str]) -> Path:
        """Write a run directory, as `pdsl run` does; with system randomness also its secret key."""
        e = self.experiment
        run = RunDirectory.create(Path(path), e.config.to_toml(), e.metadata(), e.owner_metadata())
        for row in self.rows:
            run.append(row)
        run.save(Checkpoint(len(self.rows), state_tensors(self.state), self.seconds), key=e.seal.checkpoint_key)
        finish(run, self)
        if self.ledger is not None and e.streams.secret:
            run.write_secret_key(e.seal.secret)
        return run.path


@dataclass(frozen=True, repr=False)
class RoundResult(CompletedRound):
    """Result of a round of `pdsl.rounds`: its record, the models after it, and the result if the run ended here."""

    experiment: Experiment
    rows: list[RoundRecord]  # of all rounds so far
    seconds: float

    @property
    def model(self) -> nn.Module:
        """The mean of the agents' models."""
        e = self.experiment
        return e.to_module(e.engine.mean(self.state.x))

    @property
    def models(self) -> list[nn.Module]:
        """Each agent's own model."""
        e = self.experiment
        return [e.to_module(x) for x in self.state.x]

    def result(self, reason: str = "the loop was left") -> Result:
        """The result if the run ends with this round. `reason`: why it ends, for the summary."""
        e = self.experiment
        stop = None if self.t == e.config.rounds else Stop(reason)
        ledger = None if self.ledger is None else self.ledger.up_to(self.t)
        evaluation = final_evaluation(e, self.state.x)
        return Result(e, self.rows, self.state, evaluation, self.seconds, ledger, stop)

    def __repr__(self) -> str:
        shown = [f"{name}={self.row[name]:.4g}" for name in ("loss", "accuracy", "epsilon") if self.row.get(name)]
        return f"RoundResult(t={self.t}{''.join(f', {text}' for text in shown)})"


def summarise(result: Result, with_baselines: bool = True) -> Summary:
    """The result as plain values; baselines take time, and may be left out."""
    e, c, ev, ledger = result.experiment, result.experiment.config, result.evaluation, result.ledger
    scores = {
        ev.metric: finite(ev.score),
        f"{ev.metric}_of_mean": finite(ev.score_of_mean),
        f"{ev.metric}_per_agent": [finite(score) for score in ev.scores],
    }
    baselines = result.baselines if with_baselines else {}
    rest: Summary = {
        "metric": ev.metric,
        "metrics": result.metrics,
        "loss": ev.loss,
        "rounds": len(result.rows),
        "agents": e.graph.agents,
        "parameters": e.network.num_parameters,
        "algorithm": c.algorithm.name,
        "learning_rate": max(e.learning_rates),
        "seconds": round(result.seconds, 3),
        "run": None if result.path is None else str(result.path),
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
        "privacy": statement(c.privacy, ledger, e.mechanisms, e.public.uses),
        "stopped": stop_reason(result),
        "stop_rule": None if result.stop is None else result.stop.rule,
        "models_sha256": ev.models_sha256,
        "notes": [e.data.note] if e.data.note else [],
        "baselines": baselines,
        "gain": describe_gain(ev.score_of_mean, baselines, ev.metric, e.task.higher_is_better),
    }
    return cast(Summary, {**scores, **rest})


def headline(summary: Mapping[str, object], suffix: str = "") -> float:
    """Headline metric of a summary; `suffix` _of_mean: that of the mean model. NaN if it is not finite."""
    value = summary[f"{summary['metric']}{suffix}"]
    return float(value) if isinstance(value, int | float) else math.nan


def stop_reason(result: Result) -> str | None:
    """Reason for fewer rounds than configured; None if all were run."""
    done, asked = len(result.rows), result.experiment.config.rounds
    if result.stop is not None:
        return f"after round {done} of {asked}: {result.stop.reason}"
    if done == asked or result.ledger is None:
        return None
    return f"after round {done} of {asked}: another one would exceed the budget of ε = {result.ledger.budget:g}"


def gather_sums(e: Experiment, state: State) -> Values | None:
    """Sums for the account from all ranks; None if the run has no account, or if the state has all of them."""
    if len(e.engine.agents) == e.graph.agents:
        return None
    try:
        return sums_by_sender(e, state)
    except PdslError:  # `result.contributions` says why
        return None


def write_contributions(run: RunDirectory, result: Result) -> None:
    """Write the account of contributions, if the run has one."""
    try:
        account = result.contributions
    except PdslError:  # `result.contributions` says why
        run.remove(CONTRIBUTIONS)
    else:
        run.write(CONTRIBUTIONS, account.to_json().encode())


def finish(run: RunDirectory, result: Result) -> Summary:
    """Write the mean model, the ledger, the summary, the model card and the report. Returns the summary."""
    e = result.experiment
    summary: Summary = {**result.summary, "run": str(run.path)}
    run.write(MODEL, pack_model(e, e.network.to_module(result.evaluation.mean, e.validation[0])))
    if e.public.features is not None and e.public.features.path is not None:
        run.link(FEATURES, e.public.features.path)
    if result.ledger is not None:
        run.write_ledger(e.seal.sign(result.ledger, costs=True, stopped=summary["stopped"]))
    write_contributions(run, result)
    run.write(SUMMARY, json.dumps(summary, indent=2, ensure_ascii=False).encode())
    run.write(CARD, model_card(e, summary, run.read(LEDGER)).encode())
    write_report(run.path)
    return summary
