"""Every algorithm, as a user meets it: it trains, it is private within its budget, it is audited, cut and taken up."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import ClassVar

import pytest
from torch import Tensor

import pdsl as package
from pdsl.algorithms import ALGORITHMS
from pdsl.config import validate
from pdsl.training.experiment import prepare
from pdsl.training.trainer import rounds
from tests.helpers.commands import pdsl, result_of, settings

SAME_WITHOUT_NOISE = {"dp-cga": "cga", "dp-net-fleet": "net-fleet", "dp-dpsgd": "d-psgd"}
ROUNDS = 60
every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)


@cache
def accuracy(name: str, times: float) -> float:
    """Mean over agents on digits, ring of 10, μ = 0.25, noise off, with so many times the default step."""
    values = {
        "rounds": ROUNDS,
        "evaluate_every": ROUNDS,
        "graph": {"kind": "ring", "agents": 10},
        "partition": {"kind": "dirichlet", "mu": 0.25},
        "algorithm": {"name": name},
        "privacy": {"mode": "none"},
    }
    try:
        e = prepare(validate(values, "test"))
        *_, last = rounds(replace(e, learning_rates=tuple(times * rate for rate in e.learning_rates)))
    except package.PdslError as e:
        assert "diverged" in str(e)
        return 0.0
    return float(last.row["accuracy"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in SAME_WITHOUT_NOISE])
def test_the_default_step_is_near_the_best(name: str) -> None:
    best = max(accuracy(name, times) for times in (0.5, 1.0, 2.0, 4.0))
    assert best > 0.85
    assert accuracy(name, 1.0) >= best - 0.03


@pytest.mark.slow
@every_algorithm
def test_private_within_the_budget_and_audited(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    asked = settings(
        f"algorithm.name={name}", "privacy.target_epsilon=2", "rounds=12", "graph.agents=5", "partition.mu=0.25",
        "model.name=softmax", "data.validation=100", "evaluate_every=12",
    )  # fmt: skip
    outcome = pdsl("run", "--json", "--out", run, *asked)
    assert outcome.code == 0, outcome.err
    summary = json.loads(outcome.out)
    assert 0.97 * 2 <= summary["epsilon"] <= 2
    assert len(summary["epsilon_per_agent"]) == 5
    audited = pdsl("audit", run, "--canaries", 0, "--json")
    assert audited.code == 0, audited.out
    assert json.loads(audited.out)["verdict"] == "pass"


@pytest.mark.slow
@every_algorithm
def test_cut_and_taken_up_it_ends_as_if_never_cut(name: str, tmp_path: Path) -> None:
    changed = ["algorithm.staleness=2"] if name == "dp-dpsgd" else []
    asked = [
        f"algorithm.name={name}", "privacy.noise_multiplier=1", "graph.agents=5", "model.name=softmax",
        "data.validation=40", "batch.size=16", "algorithm.learning_rate=0.5", *changed,
    ]  # fmt: skip
    assert pdsl("run", "--json", "--out", tmp_path / "whole", *settings("rounds=5", *asked)).code == 0
    assert pdsl("run", "--json", "--out", tmp_path / "cut", *settings("rounds=2", *asked)).code == 0
    assert pdsl("run", "--json", "--resume", tmp_path / "cut", *settings("rounds=5")).code == 0
    whole, cut = result_of(tmp_path / "whole"), result_of(tmp_path / "cut")
    assert whole["rows.jsonl"] == cut["rows.jsonl"]
    assert whole["summary"]["models_sha256"] == cut["summary"]["models_sha256"]


def test_the_list_of_algorithms() -> None:
    entries = json.loads(pdsl("algorithms", "--json").out)
    assert [entry["name"] for entry in entries] == list(ALGORITHMS)
    for entry in entries:
        assert all(entry[key] for key in ("what", "paper", "rule", "messages_per_round", "k", "settings"))
    shown = pdsl("algorithms").out
    assert all(name in shown for name in ALGORITHMS)


@pytest.mark.slow
def test_every_setting_of_every_algorithm_can_be_set() -> None:
    for entry in json.loads(pdsl("algorithms", "--json").out):
        for setting in entry["settings"]:
            outcome = pdsl("config", *settings(f"algorithm.name={entry['name']}"))
            section, _, name = setting["name"].rpartition(".")
            assert f"[{section}]" in outcome.out
            assert f"{name} =" in outcome.out


def test_an_unknown_algorithm_is_refused() -> None:
    pdsl("run", *settings("algorithm.name=fedavg")).refused("no algorithm 'fedavg'", "d-psgd")


def test_a_setting_of_another_algorithm_is_refused() -> None:
    pdsl("run", *settings("algorithm.name=d-psgd", "algorithm.momentum=0.5")).refused(
        "this algorithm has no setting algorithm.momentum", "these have: pdsl"
    )


class Undeclared(package.Algorithm):
    """Says nothing about what it releases."""

    name: ClassVar[str] = "undeclared"

    def init(self, x0: Tensor) -> object:
        from pdsl.algorithms.base import Models as State

        return State(x0)

    def step(self, state: object, r: package.Round) -> tuple[object, package.Metrics]:
        return state, {}


def test_an_algorithm_that_declares_no_release_has_no_private_form() -> None:
    with pytest.raises(package.PdslError, match="does not declare its messages, so no ε can be computed"):
        package.train(data="digits", graph=package.ring(3), algorithm=Undeclared(), rounds=1)
    package.train(data="digits", graph=package.ring(3), algorithm=Undeclared(), rounds=1, privacy={"mode": "none"})
