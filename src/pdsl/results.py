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

from pdsl.errors import PdslError
from pdsl.report import write_report
from pdsl.runs import Checkpoint, RunDirectory
from pdsl.train import Evaluation, Experiment, Row, models_sha256, state_tensors


@dataclass(frozen=True)
class Result:
    """What came out of a run."""

    experiment: Experiment
    rows: list[Row]
    state: Any
    evaluation: Evaluation
    seconds: float

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
    def models(self) -> list[nn.Module]:
        """Each agent's own model."""
        return [self.experiment.network.to_module(x) for x in self.state.x]

    @property
    def model(self) -> nn.Module:
        """The mean of the agents' models."""
        return self.experiment.network.to_module(self.state.x.mean(0))

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
        run = RunDirectory.create(Path(path), self.experiment.config.to_toml(), self.experiment.facts())
        for row in self.rows:
            run.append(row)
        run.save(Checkpoint(len(self.rows), state_tensors(self.state), self.seconds))
        finish(run, self)
        return run.path


def summarise(result: Result) -> dict[str, Any]:
    """The result as plain values."""
    e, c, ev = result.experiment, result.experiment.config, result.evaluation
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
        "graph": e.graph.describe(),
        "data": e.data.name,
        "epsilon": None,
        "sigma": max(e.sigma),
        "privacy": privacy_statement(e),
        "models_sha256": models_sha256(result.state.x),
        "notes": [e.data.note] if e.data.note else [],
    }


def privacy_statement(e: Experiment) -> str:
    """What may be said about privacy. ε is not stated before it is accounted for."""
    if e.config.privacy.mode == "none":
        return "none: messages carry no noise, ε is not stated"
    return f"ε is not stated: noise with σ = {max(e.sigma):.4g} on every message, seeded and not accounted for"


def finish(run: RunDirectory, result: Result) -> dict[str, Any]:
    """Write what a finished run leaves: the mean model, the summary and the page. Returns the summary."""
    named = {name: p.detach().contiguous() for name, p in result.model.named_parameters()}
    run.write("model.safetensors", save(named))
    summary = {**summarise(result), "run": str(run.path)}
    run.write("summary.json", json.dumps(summary, indent=2, ensure_ascii=False).encode())
    write_report(run.path)
    return summary
