"""`ema_decay`: agents hand out the running mean of their models, and training does not know of it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pdsl.auditing import Verdict
from pdsl.auditing import audit_experiment as audit
from pdsl.config import Config, validate
from pdsl.runs import runner
from pdsl.runs.directory import RunDirectory
from pdsl.training.experiment import prepare
from pdsl.training.trainer import restore_state, rounds, state_tensors

BETA = 0.6


def config(**changes: Any) -> Config:
    values = {
        "rounds": 8,
        "graph": {"kind": "ring", "agents": 4},
        "batch": {"size": 30},
        "privacy": {"target_epsilon": 4.0},
        "ema_decay": BETA,
    }
    return validate(values | changes, "test")


def run(path: Path, config: Config) -> dict[str, Any]:
    experiment, directory = runner.start(config, path)
    return runner.execute(experiment, directory)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["pdsl", "d-psgd", "gradient-tracking"])
def test_what_is_handed_out_is_the_running_mean_of_the_models(algorithm: str) -> None:
    changes = {"algorithm": {"name": algorithm}}
    last = list(rounds(prepare(config(ema_decay=0.0, **changes))))
    mean = prepare(config()).network.initial_parameters().repeat(4, 1)
    for plain, averaged in zip(last, rounds(prepare(config(**changes))), strict=True):
        t = plain.t
        old = min(BETA, (1 + t) / (10 + t))
        mean = old * mean + (1 - old) * plain.state.x
        assert torch.equal(averaged.state.state.x, plain.state.x)
        torch.testing.assert_close(averaged.state.x, mean)
        assert averaged.row["epsilon"] == plain.row["epsilon"]


def test_a_state_comes_back_from_its_tensors() -> None:
    *_, step = rounds(prepare(config(rounds=2)))
    again = restore_state(config(), state_tensors(step.state))
    assert torch.equal(again.x, step.state.x)
    assert torch.equal(again.state.x, step.state.state.x)
    assert torch.equal(again.state.u, step.state.state.u)


@pytest.mark.slow
def test_cut_and_taken_up_it_ends_the_same(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", config())
    fixed = {"privacy": {"mode": "noise", "sigma": 0.05}, "algorithm": {"learning_rate": 1.0}}  # auto depends on rounds
    run(tmp_path / "cut", config(rounds=5, **fixed))
    experiment, directory = runner.resume(tmp_path / "cut", ["rounds=8"])
    taken_up = runner.execute(experiment, directory)
    straight = run(tmp_path / "straight", config(**fixed))
    assert taken_up["models_sha256"] == straight["models_sha256"] != whole["models_sha256"]
    newest, _ = RunDirectory.open(tmp_path / "straight").newest()
    assert newest is not None
    assert set(newest.tensors) == {"x", "u", "evidence", "anchor", "sums", "x.mean"}


@pytest.mark.slow
def test_the_audit_finds_nothing_against_it() -> None:
    e = prepare(config())
    steps = list(rounds(e))
    ledger = steps[-1].ledger
    assert ledger is not None
    findings = audit(e, ledger, [step.row for step in steps], ledger.epsilon_per_agent)
    assert all(finding.verdict == Verdict.PASS for finding in findings)


def test_without_it_states_are_the_algorithm_s_own() -> None:
    *_, step = rounds(prepare(config(ema_decay=0.0)))
    assert set(state_tensors(step.state)) == {"x", "u", "evidence", "anchor", "sums"}
