"""`pdsl value`: an account at a total ε, without a model."""

import json
from pathlib import Path
from typing import Any

import pytest

from pdsl.config import load, validate
from pdsl.privacy.recommendation import CONVEX_ROUNDS, DEEP_ROUNDS
from pdsl.runs.valuation import plan_valuation, value_records
from pdsl.shapley.account import Account
from pdsl.training.experiment import prepare
from tests.helpers.commands import pdsl
from tests.helpers.refusals import refused


def test_a_plan_has_all_records_a_full_graph_and_the_recommended_rounds() -> None:
    given = {"graph": {"kind": "ring", "agents": 4}, "algorithm": "d-psgd", "privacy": {"mode": "noise", "sigma": 3.0}}
    planned = plan_valuation(validate(given, "test"), 1.5)
    e = prepare(planned)
    assert (planned.rounds, e.graph.max_members, e.config.algorithm.name) == (CONVEX_ROUNDS, 4, "pdsl")
    assert e.batches.rate == 1.0
    assert all(e.batches.divisor(i) == e.batches.records == 1198 / 4 for i in range(4))
    assert plan_valuation(validate({"model": {"name": "mlp"}}, "test"), 1.0).rounds == DEEP_ROUNDS
    assert plan_valuation(validate({"rounds": 7}, "test"), 1.0).rounds == 7


@pytest.mark.parametrize("batch", [{"records": 250.5}, {"rate": 0.2, "size": 50}])
def test_a_public_number_of_records_is_kept(batch: dict[str, Any]) -> None:
    e = prepare(plan_valuation(validate({"batch": batch}, "test"), 1.0))
    assert e.batches.rate == 1.0
    assert e.batches.divisor(0) == e.batches.records == batch.get("records", 250.0)


def test_a_valuation_ranks_a_free_rider_last_within_its_budget() -> None:
    config = load(None, ["graph.agents=5", "attack.free_rider=1", "seed=3"])
    (rider,) = prepare(config).attackers
    found = value_records(plan_valuation(config, 4.0))
    *_, last = found.account.by_agent()
    assert last == str(rider)
    assert 3.8 < found.epsilon <= 4.0
    assert any("total ε = 4 at δ" in note for note in found.account.notes)


@pytest.mark.parametrize(
    ("settings", "epsilon", "reason"),
    [({}, 0.0, "--epsilon 0"), ({}, float("inf"), "--epsilon inf"), ({"clipping": "batch"}, 1.0, "hides numbers")],
)
def test_a_plan_without_budget_or_numbers_of_records_is_refused(
    settings: dict[str, Any], epsilon: float, reason: str
) -> None:
    with refused(reason):
        plan_valuation(validate({"privacy": settings}, "test"), epsilon)


def test_the_command_writes_the_account_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["value", "--epsilon", 2, "--set", "graph.agents=3", "--set", "rounds=8"]
    outcome = pdsl(*words, "--json")
    assert outcome.code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["contributions.json"]
    written = (tmp_path / "contributions.json").read_text()
    assert json.loads(written) == json.loads(outcome.out)
    assert len(Account.from_json(written).names) == 3
    pdsl(*words).refused("contributions.json exists", "choose another --out")
    printed = pdsl(*words, "--out", "again.json")
    assert "Total ε = 2 spent" in printed.out and "part of the gain" in printed.out
    pdsl("value", "--set", "privacy.mode=noise", "--set", "privacy.sigma=1", "--out", "x").refused("give --epsilon")
