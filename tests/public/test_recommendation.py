"""Recommended batches and rounds: the budget of gradients and of privacy, and the law of the noise."""

import json
import math
import time
from typing import Any

import pytest

from pdsl.privacy import Mechanism, epsilon
from pdsl.privacy.recommendation import CONVEX_ROUNDS, DEEP_ROUNDS, MIN_BATCH, recommend
from tests.helpers.commands import pdsl, settings
from tests.helpers.refusals import refused


@pytest.mark.parametrize("deep", [False, True])
def test_without_a_budget_of_gradients_batches_are_full(deep: bool) -> None:
    advice = recommend(records=6000, target_epsilon=4.0, deep=deep, members=3)
    rounds = DEEP_ROUNDS if deep else CONVEX_ROUNDS
    assert (advice.chosen.batch, advice.chosen.rate, advice.chosen.rounds) == (6000, 1.0, rounds)
    assert advice.gradients == 6000 * 3 * rounds


def test_noise_falls_with_the_sampling_rate() -> None:
    advice = recommend(records=6000, target_epsilon=2.0)
    choices = sorted((advice.chosen, *advice.others), key=lambda choice: choice.rate)
    assert len(choices) == 4 and len({choice.rate for choice in choices}) == 4
    noises = [choice.noise for choice in choices]
    assert noises == sorted(noises, reverse=True) and noises[0] > 1.2 * noises[-1]
    for choice in choices:
        assert choice.noise == pytest.approx(choice.noise_multiplier / (choice.rate * math.sqrt(choice.rounds)))


@pytest.mark.parametrize("gradients", [None, 50_000, 3_000])
def test_the_noise_multiplier_keeps_the_target(gradients: float | None) -> None:
    """The ε of the chosen rounds with this noise is the target, for one message of sensitivity 1."""
    advice = recommend(records=1000, target_epsilon=3.0, gradients=gradients)
    c = advice.chosen
    mechanism = Mechanism(sigma=c.noise_multiplier, sensitivity=1.0, messages=1, steps=1, rate=c.rate)
    spent = epsilon(((mechanism, c.rounds),), advice.delta)
    assert 0.97 * 3.0 <= spent <= 3.0 * (1 + 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("members", [1, 3, 7])
@pytest.mark.parametrize("records", [100, 390, 1000, 6001])
def test_the_budget_of_gradients_is_kept_and_used(records: int, members: int) -> None:
    for passes in (0.5, 1.0, 3.7, 10.6, 10.7, 25.0, 39.99, 100.0):
        given = passes * records * members
        advice = recommend(records=records, target_epsilon=4.0, members=members, gradients=given)
        c = advice.chosen
        assert advice.gradients == pytest.approx(c.batch * members * c.rounds)
        assert advice.gradients <= given * (1 + 1e-9)
        assert 1 <= c.rounds <= CONVEX_ROUNDS and MIN_BATCH <= c.batch <= records
        if passes < CONVEX_ROUNDS:  # another record per batch, or another round, does not fit
            assert (c.batch + 1) * members * c.rounds > given * (1 - 1e-9)


def test_a_budget_for_less_than_a_batch_gives_the_smallest_batch_once() -> None:
    advice = recommend(records=1000, target_epsilon=4.0, gradients=1)
    assert (advice.chosen.batch, advice.chosen.rounds) == (MIN_BATCH, 1)


def test_more_gradients_leave_less_noise() -> None:
    noises = [recommend(records=6000, target_epsilon=4.0, gradients=g).chosen.noise for g in (2e4, 6e4, 2e5)]
    assert noises == sorted(noises, reverse=True)


@pytest.mark.slow
def test_a_recommendation_takes_less_than_five_seconds() -> None:
    began = time.process_time()
    recommend(records=54_321, target_epsilon=1.7, deep=True, gradients=3e6, delta=1e-6)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"records": 0}, "records=0"),
        ({"records": -5}, "records=-5"),
        ({"target_epsilon": 0.0}, "target_epsilon=0.0"),
        ({"target_epsilon": -1.0}, "target_epsilon=-1.0"),
        ({"target_epsilon": math.nan}, "target_epsilon=nan"),
        ({"target_epsilon": math.inf}, "target_epsilon=inf"),
        ({"members": 0}, "members=0"),
        ({"delta": 0.0}, "delta=0.0"),
        ({"delta": 1.0}, "delta=1.0"),
        ({"delta": math.nan}, "delta=nan"),
        ({"gradients": 0}, "gradients=0"),
        ({"gradients": -3.0}, "gradients=-3"),
        ({"gradients": math.nan}, "gradients=nan"),
    ],
    ids=str,
)
def test_wrong_values_are_refused_in_one_line(changes: dict[str, Any], words: str) -> None:
    with refused("privacy", words):
        recommend(**{"records": 100, "target_epsilon": 4.0, **changes})


@pytest.mark.slow
def test_assignments_of_the_command_are_accepted_by_a_run(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = pdsl("privacy", "--recommend", "--samples", 6000, "--target-epsilon", 4, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    advice = json.loads(outcome.out)
    assert advice["chosen"]["batch"] == 6000 and advice["target_epsilon"] == 4
    assert "privacy.target_epsilon=4" in advice["assignments"]
    some = [a for a in advice["assignments"] if not a.startswith("rounds")]  # two rounds are enough here
    extra = ["rounds=2", "graph.agents=3", "model.name=softmax", "data.validation=40", "baselines=none"]
    monkeypatch.chdir(tmp_path)
    done = pdsl("run", *settings(*some, *extra), "--out", tmp_path / "run", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["epsilon"] <= 4


def test_the_command_prints_a_table_and_the_command_to_run() -> None:
    outcome = pdsl("privacy", "--recommend", "--samples", 600, "--target-epsilon", 4)
    assert outcome.code == 0
    assert "recommended" in outcome.out
    assert outcome.out.splitlines()[-1].startswith("pdsl run --set rounds=40 --set batch.size=600 ")


def test_the_graph_of_the_command_counts_the_gradients() -> None:
    arguments = ["privacy", "--recommend", "--samples", 600, "--target-epsilon", 4, "--json"]
    alone, ring = pdsl(*arguments), pdsl(*arguments, "--graph", "ring", "--agents", 5)
    assert json.loads(ring.out)["gradients"] == 3 * json.loads(alone.out)["gradients"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--samples", 100],
        ["--target-epsilon", 4],
        ["--samples", 100, "--target-epsilon", -1],
        ["--samples", 100, "--target-epsilon", 4, "--k", 0],
        ["--samples", 100, "--target-epsilon", 4, "--graph", "ring"],
        ["--samples", 100, "--target-epsilon", 4, "--graph", "pentagram", "--agents", 5],
    ],
    ids=str,
)
def test_wrong_arguments_of_the_command_are_one_line(arguments: list[object]) -> None:
    pdsl("privacy", "--recommend", *arguments).refused()
