"""What a run comes to: models, values and a summary, in memory and on disk."""

import json
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import save
from torch import nn

from pdsl.checkpoints import Checkpoint
from pdsl.errors import PdslError
from pdsl.privacy import Ledger
from pdsl.privacy.statement import adversaries, statement
from pdsl.report import write_report
from pdsl.runs import RunDirectory
from pdsl.train import Evaluation, Experiment, Row, finite, state_tensors


@dataclass(frozen=True)
class Result:
    """What came out of a run."""

    experiment: Experiment
    rows: list[Row]
    state: Any
    evaluation: Evaluation
    seconds: float
    ledger: Ledger | None = None

    @property
    def accuracy(self) -> float:
        """Mean over the agents of the test accuracy of their own models."""
        return self.evaluation.accuracy

    @property
    def accuracy_of_mean(self) -> float:
        """Test accuracy of the mean of the agents' models."""
        return self.evaluation.accuracy_of_mean

    @property
    def loss(self) -> float | None:
        """Mean test loss of the agents' own models; None where it is not finite."""
        return self.evaluation.loss

    @property
    def epsilon(self) -> float | None:
        """Total ε of the worst agent; None where no finite ε holds."""
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
        """(receiver, sender) of each column of `contributions`."""
        g = self.experiment.graph
        return list(zip(g.receiver.tolist(), g.sender.tolist(), strict=True))

    @property
    def contributions(self) -> NDArray[np.float64]:
        """Shapley values [rounds, edges]: what the sender's message was worth to the receiver."""
        if not all("shapley" in row for row in self.rows):
            raise PdslError(f"{self.experiment.config.algorithm.name} computes no Shapley values")
        return np.array([row["shapley"]["phi"] for row in self.rows])

    @property
    def summary(self) -> dict[str, Any]:
        """The result as plain values: summary.json, and what `pdsl run --json` prints."""
        return summarise(self)

    def save(self, path: str | PathLike[str]) -> Path:
        """Write a run directory, as `pdsl run` does."""
        e = self.experiment
        run = RunDirectory.create(Path(path), e.config.to_toml(), e.facts(), e.owner_facts())
        for row in self.rows:
            run.append(row)
        run.save(Checkpoint(len(self.rows), state_tensors(self.state), self.seconds), key=e.bond.checkpoint_key)
        finish(run, self)
        return run.path


def summarise(result: Result) -> dict[str, Any]:
    """The result as plain values."""
    e, c, ev, ledger = result.experiment, result.experiment.config, result.evaluation, result.ledger
    return {
        "accuracy": ev.accuracy,
        "accuracy_of_mean": ev.accuracy_of_mean,
        "loss": ev.loss,
        "rounds": len(result.rows),
        "agents": e.graph.agents,
        "algorithm": c.algorithm.name,
        "seconds": round(result.seconds, 3),
        "run": None,
        "accuracy_per_agent": ev.accuracies,
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
        "stopped": stopped(result),
        "models_sha256": ev.models_sha256,
        "notes": [e.data.note] if e.data.note else [],
    }


def stopped(result: Result) -> str | None:
    """Why a run has fewer rounds than were asked for."""
    done, asked = len(result.rows), result.experiment.config.rounds
    if done == asked or result.ledger is None:
        return None
    return f"after round {done} of {asked}: another would pass the budget of ε = {result.ledger.budget:g}"


def finish(run: RunDirectory, result: Result) -> dict[str, Any]:
    """Write what a finished run leaves: the mean model, the summary and the page. Returns the summary."""
    # cloned, since a file does not hold one tensor under two names, as tied layers do
    named = {name: tensor.clone().contiguous() for name, tensor in result.model.state_dict().items()}
    run.write("model.safetensors", save(named))
    if result.ledger is not None:
        run.write("ledger.json", result.experiment.bond.sealed(result.ledger, costs=True).encode())
    summary = {**summarise(result), "run": str(run.path)}
    run.write("summary.json", json.dumps(summary, indent=2, ensure_ascii=False).encode())
    write_report(run.path)
    return summary
