"""The account of a run, against the values of the parties' true data."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import pdsl
from pdsl.shapley.account import Account
from pdsl.shapley.masses import estimate_masses
from pdsl.training.contributions import account_from_sums, add_receivers, build_game, significant, sums_by_sender


@pytest.fixture(scope="module")
def result() -> pdsl.Result:
    return pdsl.train(
        data="digits", graph={"kind": "full", "agents": 5}, rounds=20, batch={"size": 240}, baselines="none",
        privacy={"mode": "none", "clipping": "per-sample"}, attack={"free_rider": 1}, seed=3,
    )  # fmt: skip


def test_values_add_up_to_the_gain_on_the_public_set(result: pdsl.Result) -> None:
    account = result.contributions
    assert account.gain == pytest.approx(account.end - account.start)
    assert account.end > account.start + 0.5
    assert account.names == ("0", "1", "2", "3", "4")


def test_masses_are_the_agents_true_numbers_of_records(result: pdsl.Result) -> None:
    e = result.experiment
    (rider,) = e.attackers
    true = e.labels.numpy() / e.batches.records
    true[rider] = 0
    found = estimate_masses(sums_by_sender(e, result.state)).masses
    assert np.corrcoef(found.ravel(), true.ravel())[0, 1] > 0.97
    assert np.abs(found - true).mean() < 0.2 * true.mean()


def test_a_free_rider_has_the_lowest_value(result: pdsl.Result) -> None:
    (rider,) = result.experiment.attackers
    *_, last = result.contributions.by_agent()
    assert last == str(rider)


def test_parties_with_the_same_sums_have_the_same_value(result: pdsl.Result) -> None:
    e = result.experiment
    sums = sums_by_sender(e, result.state)
    sums[:, 1] = sums[:, 0]
    game = build_game(e, result.evaluation.mean, 20)
    values = account_from_sums(sums, game, e.agent_names, 0.1, 0.9, np.random.default_rng(0)).values
    assert values[0] == pytest.approx(values[1])


def test_a_party_that_splits_changes_the_others_by_less_than_the_interval(result: pdsl.Result) -> None:
    e = result.experiment
    sums = sums_by_sender(e, result.state)
    game = build_game(e, result.evaluation.mean, 20)
    whole = account_from_sums(sums, game, e.agent_names, 0.1, 0.9, np.random.default_rng(0))
    sums[:, 0, -1] /= 2  # half of the records
    halves = np.concatenate([sums, sums[:, :1]], axis=1)
    split = account_from_sums(halves, game, (*e.agent_names, "twin"), 0.1, 0.9, np.random.default_rng(0))
    assert (np.abs(split.values[1:5] - whole.values[1:]) < whole.margins[1:]).all()
    assert split.values[0] == pytest.approx(split.values[5])


def test_a_value_of_the_game_depends_on_the_members_only(result: pdsl.Result) -> None:
    e = result.experiment
    game = build_game(e, result.evaluation.mean, 20)
    masses = significant(estimate_masses(sums_by_sender(e, result.state)))
    changed = masses.copy()
    changed[4] = 0
    without = [0b0011, 0b0101, 0b1111]
    assert (game.values(masses, without) == game.values(changed, without)).all()


def test_receivers_are_added_by_sender() -> None:
    rows = np.arange(2 * 1 * 2 * 3 * 2, dtype=float).reshape(2, 1, 2, 3, 2)
    total = add_receivers(rows, [[0, 2], [1, 2]], 3)
    assert (total[:, 0] == rows[0][:, 0]).all()
    assert (total[:, 2] == rows[0][:, 1] + rows[1][:, 1]).all()


def test_a_saved_run_has_the_same_account(result: pdsl.Result, tmp_path: Path) -> None:
    saved: Account = pdsl.load(result.save(tmp_path / "run")).contributions
    assert saved.by_agent().keys() == result.contributions.by_agent().keys()
    assert saved.values == pytest.approx([result.contributions.by_agent()[name].value for name in saved.names])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": "d-psgd"}, "use algorithm pdsl"),
        ({"privacy": {"mode": "none", "clipping": "batch"}}, "clipping=batch hides numbers of records"),
    ],
)
def test_a_run_without_an_account_says_why(settings: dict[str, Any], message: str) -> None:
    found = pdsl.train(data="digits", rounds=1, baselines="none", **{"privacy": {"mode": "none"}, **settings})
    with pytest.raises(pdsl.PdslError, match=message):
        _ = found.contributions


def test_a_regression_has_an_account_in_units_of_its_error() -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(600, 3)).astype(np.float32)
    y = (x @ np.array([1.0, -2.0, 0.5], dtype=np.float32)).astype(np.float32)
    found = pdsl.train(
        data=(x, y), graph={"kind": "ring", "agents": 3}, rounds=15, model=nn.Linear(3, 1), baselines="none",
        privacy={"mode": "none", "clipping": "per-sample"},
    )  # fmt: skip
    account = found.contributions
    assert account.metric == "rmse"
    assert account.end < account.start
    assert account.gain == pytest.approx(account.start - account.end)
