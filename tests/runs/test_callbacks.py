"""Callbacks: early stopping, the best model, loggers, and exceptions in callbacks."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import pdsl
from pdsl.callbacks import BestModel, EarlyStopping, MLflow, StopTraining, TensorBoard, WandB
from pdsl.runs.callbacks import stopping_round
from tests.helpers.commands import pdsl as command
from tests.helpers.commands import rows_on_disk, wait_for
from tests.helpers.refusals import refused

QUICK: dict[str, Any] = {
    "model": "softmax",
    "data": "digits",
    "graph": {"kind": "ring", "agents": 4},
    "engine": {"workers": 2},
    "batch": {"size": 16},
}
NOISE: dict[str, Any] = {"mode": "noise", "sigma": 0.3}


def rule(**values: Any) -> dict[str, Any]:
    return {"monitor": "loss", "patience": 2, "min_delta": 0.0, "higher_is_better": False, **values}


@pytest.mark.parametrize(
    ("values", "settings", "stops"),
    [
        ([3, 2, 1], {}, None),
        ([3, 2, 2, 2, 1], {}, 4),  # an equal loss is no improvement
        ([3, 2.6, 2.5, 1], {"min_delta": 0.5}, 3),  # neither 2.6 nor 2.5 is better than 3 by more than 0.5
        ([3, None, None, 1], {}, 3),  # a loss that is not finite is no improvement
        ([None, 3, 2, 1], {}, None),
        ([0.1, 0.2, 0.2, 0.1], {"higher_is_better": True}, 4),
        ([3, 3], {"patience": 1}, 2),
        ([3, 3, 3], {"patience": 3}, None),
    ],
)
def test_the_rule(values: list[float | None], settings: dict[str, Any], stops: int | None) -> None:
    rows = [{"round": t, "loss": value} for t, value in enumerate(values, 1)]
    assert stopping_round(rows, rule(**settings)) == stops
    sparse = [row for t, row in enumerate(rows, 1) for row in ({"round": 2 * t - 1}, {**row, "round": 2 * t})]
    assert stopping_round(sparse, rule(**settings)) == (stops and 2 * stops)


def stopped_run(out: Path | None, **settings: Any) -> pdsl.Result:
    stopping = EarlyStopping("accuracy", patience=3, min_delta=0.5)
    return pdsl.train(**{**QUICK, "privacy": NOISE, **settings}, rounds=30, out=out, callbacks=[stopping])


def test_early_stopping_ends_a_run_and_the_audit_accepts_it(tmp_path: Path) -> None:
    found = stopped_run(tmp_path / "run")
    done = len(found.rows)
    assert 3 < done < 30
    assert found.summary["stopped"] == f"after round {done} of 30: accuracy has not improved in 3 evaluations"
    ledger = json.loads((tmp_path / "run/ledger.json").read_text())
    assert ledger["stopped"] == found.summary["stopped"]
    assert {entry["last"] for agent in ledger["agents"] for entry in agent["entries"]} == {done}
    outcome = command("audit", tmp_path / "run", "--canaries", "0", "--json")
    assert outcome.code == 0, outcome.out
    assert pdsl.audit(found, canaries=0).verdict.name == "PASS"
    again = stopped_run(tmp_path / "run")  # a finished run is not continued
    assert again.rows == found.rows
    assert again.summary["models_sha256"] == found.summary["models_sha256"]
    in_memory = stopped_run(None)
    assert in_memory.rows == found.rows


def test_the_audit_does_not_accept_a_stop_that_no_public_rule_explains(tmp_path: Path) -> None:
    class Whim(pdsl.RunListener):
        def on_round(self, record: Any) -> None:
            if record["round"] == 3:
                raise StopTraining("it was enough")

    found = pdsl.train(**QUICK, privacy=NOISE, rounds=9, out=tmp_path / "run", callbacks=[Whim()])
    assert found.summary["stopped"] == "after round 3 of 9: it was enough"
    (finding,) = (f for f in pdsl.audit(found, canaries=0).findings if f.check == "end of the run")
    assert finding.verdict.name == "INCONCLUSIVE"
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    summary["stop_rule"] = rule(monitor="accuracy", higher_is_better=True, patience=5)  # a false explanation
    (tmp_path / "run/summary.json").write_text(json.dumps(summary))
    outcome = json.loads(command("audit", tmp_path / "run", "--canaries", "0", "--json").out)
    verdicts = {finding["check"]: finding["verdict"] for finding in outcome["findings"]}
    assert verdicts["end of the run"] != "pass"


def test_early_stopping_needs_a_metric_that_exists() -> None:
    with refused("no metric 'rmse'", "accuracy"):
        pdsl.train(**QUICK, rounds=2, callbacks=[EarlyStopping("rmse")])
    with refused("patience=0"):
        EarlyStopping(patience=0)


def test_the_best_model_is_that_of_the_lowest_loss_on_the_public_set(tmp_path: Path) -> None:
    best, models = BestModel(), []

    class Keep(pdsl.RunListener):
        def on_models(self, completed: Any) -> None:
            models.append(completed.state.x.clone())

    settings: dict[str, Any] = {**QUICK, "privacy": {"mode": "noise", "sigma": 1.0}, "rounds": 8}
    found = pdsl.train(**settings, callbacks=[best, Keep()], out=tmp_path / "run")
    e = found.experiment
    inputs, labels = e.validation
    losses = []
    for x in models:
        outputs = e.network.to_module(x.double().mean(0))(inputs)
        losses.append(float(torch.nn.functional.cross_entropy(outputs.double(), labels)))
    assert best.round == 1 + losses.index(min(losses)) < 8
    assert best.score == pytest.approx(min(losses))
    weights = best.model.state_dict()["1.weight"]
    assert torch.allclose(weights.flatten(), models[best.round - 1].mean(0)[: weights.numel()], atol=1e-6)
    assert len(best.models) == 4
    kept = BestModel()
    pdsl.train(**{**settings, "rounds": 8}, callbacks=[kept], out=tmp_path / "run")  # all rounds are done already
    assert (kept.round, kept.score) == (best.round, best.score)
    assert torch.equal(kept.model.state_dict()["1.weight"], weights)
    with refused("no metric 'rmse'"):
        pdsl.train(**settings, callbacks=[BestModel("rmse")])
    with refused("no round has been run"):
        _ = BestModel().model


class Clumsy(pdsl.RunListener):
    def __init__(self) -> None:
        self.closed = 0

    def on_round(self, record: Any) -> None:
        if record["round"] == 3:
            raise ZeroDivisionError

    def close(self) -> None:
        self.closed += 1


def test_an_exception_in_a_callback_leaves_a_run_that_can_be_resumed(tmp_path: Path) -> None:
    clumsy = Clumsy()
    settings: dict[str, Any] = {**QUICK, "privacy": NOISE, "rounds": 6}
    with pytest.raises(ZeroDivisionError):
        pdsl.train(**settings, out=tmp_path / "run", callbacks=[clumsy])
    assert clumsy.closed == 1
    assert rows_on_disk(tmp_path / "run") == 3
    assert pdsl.train(**settings, out=tmp_path / "run").rows == pdsl.train(**settings).rows


def test_tensorboard(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = pdsl.train(**QUICK, rounds=3, callbacks=[TensorBoard(tmp_path / "board")])
    events = event_accumulator.EventAccumulator(str(tmp_path / "board")).Reload()
    values = [event.value for event in events.Scalars("accuracy")]
    assert values == pytest.approx([row["accuracy"] for row in found.rows])


@pytest.mark.slow
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    found = pdsl.train(**QUICK, rounds=3, callbacks=[WandB("test", mode="offline", folder=tmp_path)])
    (file,) = tmp_path.rglob("*.wandb")

    def logged() -> list[float]:  # of each round, in the history and in the summary
        numbers = re.findall(rb"(?s)\x08accuracy\x82\x01.([\d.]+)", file.read_bytes())
        return list(dict.fromkeys(map(float, numbers)))

    accuracies = pytest.approx([row["accuracy"] for row in found.rows])
    wait_for(lambda: logged() == accuracies)  # wandb's own process may write after `finish` has returned
    assert b"algorithm.learning_rate" in file.read_bytes()
    assert wandb.run is None


@pytest.mark.slow
def test_mlflow_with_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    found = pdsl.train(**QUICK, rounds=3, callbacks=[MLflow("test", uri=tmp_path / "store")])
    client = mlflow.MlflowClient((tmp_path / "store").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("test").experiment_id])
    values = [metric.value for metric in client.get_metric_history(run.info.run_id, "accuracy")]
    assert values == [row["accuracy"] for row in found.rows]
    assert run.data.params["graph.agents"] == "4"
    assert run.info.status == "FINISHED"
    assert run.data.metrics["final.accuracy"] == found.accuracy


@pytest.mark.parametrize(
    ("module", "make", "extra"),
    [
        ("wandb", WandB, "pip install wandb"),
        ("mlflow", MLflow, "pip install mlflow-skinny"),
        ("torch.utils.tensorboard", lambda: TensorBoard("x"), "pip install tensorboard"),
    ],
)
def test_a_missing_package_is_named(module: str, make: Any, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with refused("pip install", extra):
        make()
