"""The audit passes correct runs of any algorithm, including a user's, and refutes an edited ledger."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pdsl
from pdsl.auditing import Finding, Verdict, audit_experiment, audit_run
from pdsl.auditing.leaks import check_public
from pdsl.auditing.replay import Start
from pdsl.config import validate
from pdsl.runs.runner import execute, start
from pdsl.training.experiment import prepare
from pdsl.training.trainer import rounds
from tests.helpers.commands import pdsl as command
from tests.helpers.experiments import experiment
from tests.privacy.test_metering import Own

pytestmark = pytest.mark.slow

Values = dict[str, Any]


def settings(**changes: Any) -> Values:
    values: Values = {
        "rounds": 5,
        "graph": {"kind": "ring", "agents": 4},
        "model": {"name": "mlp", "hidden": 12},
        "partition": {"kind": "iid"},
        "data": {"validation": 40},
        "shapley": {"weighting": "uniform"},  # [algorithm.shapley] of PDSL
        "privacy": {"target_epsilon": 2.0},
    }
    for name, change in changes.items():
        values[name] = {**values[name], **change} if isinstance(values.get(name), dict) else change
    shapley, algorithm = values.pop("shapley"), values.get("algorithm", {})
    if algorithm.get("name", "pdsl") == "pdsl":
        values["algorithm"] = {**algorithm, "shapley": shapley}
    return values


def findings(**changes: Any) -> list[Finding]:
    """Run and audit with the same code."""
    e = prepare(validate(settings(**changes), "test"))
    steps = list(rounds(e))
    ledger = steps[-1].ledger
    assert ledger is not None
    return audit_experiment(e, ledger, [s.row for s in steps], starts=[Start(len(steps), steps[-1].state)])


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 7},
        {"batch": {"sampler": "fixed"}},
        {"privacy": {"clipping": "batch", "noise_multiplier": 3.0}},
        {"graph": {"kind": "star"}},
        {"privacy": {"sigma": 0.3}, "graph": {"kind": "star"}},
        {"batch": {"size": 10_000}},
        {"ema_decay": 0.5, "privacy": {"randomness": "system"}},
        {"attack": {"label_flip": 1, "gaussian": 1}},
        {"shapley": {"weighting": "evidence"}},
    ],
    ids=str,
)
def test_an_honest_run_passes(changes: Values) -> None:
    assert [f for f in findings(**changes) if f.verdict is not Verdict.PASS] == []


def edit(path: Path, change: Callable[[Values], None]) -> None:
    stored = json.loads(path.read_text())
    change(stored)
    path.write_text(json.dumps(stored))


def set_sigma(stored: Values) -> None:
    for agent in stored["agents"]:
        agent["entries"][0]["sigma"] *= 2


EDITS: dict[str, Callable[[Values], None]] = {
    "less spent": lambda s: s["agents"][1].update(epsilon=0.1),
    "more noise": set_sigma,
    "fewer rounds": lambda s: s["agents"][0]["entries"][0].update(last=3),
    "fewer messages": lambda s: s["agents"][0]["entries"][0].update(messages=1),
    "smaller sensitivity": lambda s: s["agents"][0]["entries"][0].update(sensitivity=1e-3),
    "smaller rate": lambda s: s["agents"][0]["entries"][0].update(rate=0.01),
    "other peers": lambda s: s["agents"][2]["edges"].pop(),
    "larger budget spent": lambda s: s.update(budget=0.5),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audit") / "run"
    values = settings(privacy={"randomness": "system"}, checkpoint_every=1)
    execute(*start(validate(values, "test"), path))
    return path


def test_a_run_directory_passes_with_canaries(run: Path) -> None:
    report = audit_run(run)
    assert report.verdict is Verdict.PASS, report.findings
    assert {"canaries", "files readable by others"} <= {finding.check for finding in report.findings}
    assert "total ε" in report.claim
    assert str(report).splitlines()[-1].startswith("pass: total ε")


@pytest.mark.parametrize("change", EDITS.values(), ids=EDITS.keys())
def test_a_ledger_edited_by_hand_fails(run: Path, change: Callable[[Values], None]) -> None:
    ledger = run / "ledger.json"
    original = ledger.read_bytes()
    try:
        edit(ledger, change)
        assert audit_run(run, canaries=0).verdict is Verdict.FAIL
    finally:
        ledger.write_bytes(original)


def test_without_noise_nothing_can_be_said() -> None:
    e = prepare(validate(settings(privacy={"mode": "none", "target_epsilon": None}), "test"))
    assert audit_experiment(e, None, [])[0].verdict is Verdict.INCONCLUSIVE


def test_a_run_that_ended_early_for_no_known_reason_is_inconclusive() -> None:
    e = prepare(validate(settings(), "test"))
    steps = list(rounds(e))[:3]
    found = audit_experiment(e, steps[-1].ledger, [step.row for step in steps])
    (end,) = (finding for finding in found if finding.check == "end of the run")
    assert end.verdict is Verdict.INCONCLUSIVE


def own_model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))


def own_graph() -> pdsl.Graph:
    return pdsl.star(5)


def own_result() -> pdsl.Result:
    return pdsl.train(
        own_model(), "digits", graph=own_graph(), algorithm=Own(), rounds=4, privacy={"target_epsilon": 4.0}
    )


def test_a_result_with_own_algorithm_model_and_graph_is_audited_in_python() -> None:
    report = pdsl.audit(own_result(), canaries=0)
    assert report.verdict is Verdict.PASS, report.findings


def test_a_directory_with_own_algorithm_model_and_graph_is_audited_by_import_paths(tmp_path: Path) -> None:
    folder = own_result().save(tmp_path / "own")
    command("audit", folder, "--canaries", "0").refused("model was an object given in Python", "a config cannot name")
    own = ("--model", "tests.auditing.test_audit:own_model", "--graph", "tests.auditing.test_audit:own_graph")
    outcome = command(
        "audit", folder, "--canaries", "0", "--algorithm", "tests.privacy.test_metering:Own", *own, "--json"
    )
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["verdict"] == "pass"
    command("audit", folder, "--algorithm", "tests.privacy.test_metering:State", *own).refused("not a subclass of pdsl")
    command("audit", folder, "--model", "tests.auditing.test_audit:Values", *own[2:]).refused("give a torch.nn.Module")


def test_records_of_a_table_with_few_columns_may_be_close_by_chance() -> None:
    x = torch.randn(3000, 5, generator=torch.Generator().manual_seed(0))
    e = experiment("softmax", (x, (x[:, 0] > 0).long()), graph="full", rounds=2)
    assert check_public(e).verdict is Verdict.PASS
    near = replace(e, public=replace(e.public, public=(e.data.x[:300] * 1.001, e.data.y[:300])))
    assert check_public(near).verdict is Verdict.FAIL
