"""The budget covers the whole run, is enforced, and cannot be reset."""

import json
import shutil
import stat
from pathlib import Path

import pytest

import pdsl
from pdsl.privacy import Ledger, Mechanism, epsilon
from tests.helpers.commands import SMALL, result_of, settings, started, wait_for
from tests.helpers.commands import pdsl as command
from tests.helpers.refusals import refused

T = 6
PRIVATE = [*SMALL, "privacy.mode=total", "privacy.target_epsilon=1", f"rounds={T}"]
M = Mechanism(sigma=0.5, sensitivity=0.1, messages=3, rate=0.2)


def empty(budget: float | None = None) -> Ledger:
    return Ledger.empty(1e-5, budget, [[0, 1], [0, 1]])


def run(out: Path, *assignments: str) -> dict[str, object]:
    outcome = command("run", "--json", "--out", out, *settings(*PRIVATE, *assignments))
    assert outcome.code == 0, outcome.err
    summary: dict[str, object] = json.loads(outcome.out)
    return summary


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("private") / "run"
    run(path)
    return path


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def test_a_round_is_charged_once() -> None:
    ledger = empty()
    for t in (1, 2, 3, 2, 3):
        ledger = ledger.charge(t, [M, M])
    assert ledger.rounds == 3
    assert ledger.epsilon == epsilon(((M, 3),), 1e-5)
    assert ledger.up_to(2).epsilon == epsilon(((M, 2),), 1e-5)
    assert Ledger.from_json(ledger.to_json(costs=True), "here") == ledger


def test_a_round_that_was_charged_cannot_be_sent_with_other_noise() -> None:
    ledger = empty().charge(1, [M, M])
    with refused("round 1"):
        ledger.charge(1, [M, Mechanism(0.1, 0.1, 3, rate=0.2)])


def test_other_noise_later_is_composed() -> None:
    other = Mechanism(2.0, 0.1, 3, rate=0.2)
    ledger = empty().charge(1, [M, M]).charge(2, [other, M])
    assert ledger.epsilon_per_agent == [epsilon(((M, 1), (other, 1)), 1e-5), epsilon(((M, 2),), 1e-5)]
    assert ledger.epsilon == max(ledger.epsilon_per_agent)


def test_the_target_is_met_and_written_everywhere(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    ledger = json.loads((finished / "ledger.json").read_text())
    rows = [json.loads(line) for line in (finished / "rows.jsonl").read_text().splitlines()]
    assert 0.97 <= summary["epsilon"] <= 1.0
    assert summary["delta"] == 1e-5
    assert summary["epsilon_per_agent"] == [agent["epsilon"] for agent in ledger["agents"]]
    assert summary["sigma"] == max(entry["sigma"] for agent in ledger["agents"] for entry in agent["entries"])
    assert [row["epsilon"] for row in rows] == sorted(row["epsilon"] for row in rows)
    assert rows[-1]["epsilon"] == summary["epsilon"]
    assert "not private: seeded noise" in summary["privacy"]
    for agent in ledger["agents"]:
        assert [edge["messages"] for edge in agent["edges"]] == [T] * 3
        assert not any("epsilon" in edge for edge in agent["edges"])


def test_no_adversary_is_certified_less_than_the_total(finished: Path) -> None:
    """Finding D3: a single message can be a model, which depends on all earlier rounds."""
    summary = json.loads((finished / "summary.json").read_text())
    assert set(summary["adversaries"].values()) == {summary["epsilon"]}
    assert "one intercepted message" in summary["adversaries"]


def test_going_on_beyond_the_budget_stops_and_says_so(copy: Path) -> None:
    before = json.loads((copy / "summary.json").read_text())
    outcome = command("run", "--json", "--resume", copy, *settings(f"rounds={T + 50}"))
    assert outcome.code == 0, outcome.err
    summary = json.loads(outcome.out)
    assert summary["epsilon"] <= 1.0
    assert summary["rounds"] < T + 50
    assert f"of {T + 50}" in summary["stopped"]
    assert "budget" in summary["stopped"]
    assert before["stopped"] is None
    assert "budget" in command("run", "--resume", copy).out


@pytest.mark.slow
def test_a_given_amount_of_noise_stops_at_the_target_too(tmp_path: Path) -> None:
    summary = run(tmp_path / "a", "privacy.noise_multiplier=5", "privacy.target_epsilon=0.2", "rounds=30")
    assert 0 < summary["rounds"] < 30  # type: ignore[operator]
    assert summary["epsilon"] <= 0.2  # type: ignore[operator]


@pytest.mark.slow
def test_cut_and_resumed_it_spends_the_same(finished: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    process = started("run", "--out", cut, *settings(*PRIVATE))
    wait_for(lambda: (cut / "rows.jsonl").exists() and len((cut / "rows.jsonl").read_text().splitlines()) >= 2)
    process.kill()
    process.join()
    assert command("run", "--json", "--resume", cut).code == 0
    assert result_of(cut) == result_of(finished)
    assert (cut / "ledger.json").read_bytes() == (finished / "ledger.json").read_bytes()


@pytest.mark.parametrize("damage", ["gone", "cut", "forgetful", "nonsense"])
def test_a_ledger_cannot_be_reset(copy: Path, damage: str) -> None:
    ledger = copy / "ledger.json"
    text = ledger.read_text()
    (copy / "summary.json").unlink()
    if damage == "gone":
        ledger.unlink()
    elif damage == "cut":
        ledger.write_text(text[: len(text) // 2])
    elif damage == "forgetful":
        ledger.write_text(text.replace(f'"last": {T}', '"last": 1'))
    else:
        ledger.write_text('{"agents": 3}')
    command("run", "--resume", copy).refused("ledger.json", "spent")


def test_noise_from_the_system_is_secret_and_the_same_again(tmp_path: Path) -> None:
    a = tmp_path / "a"
    summary = run(a, "privacy.randomness=system")
    assert "not private" not in str(summary["privacy"])
    assert stat.S_IMODE((a / "secret.key").stat().st_mode) == 0o600
    again = Path(shutil.copytree(a, tmp_path / "again"))
    for checkpoint in (again / "checkpoint").glob(f"*{T:06d}*"):
        checkpoint.unlink()
    assert command("run", "--json", "--resume", again).code == 0
    assert result_of(again) == result_of(a)
    assert run(tmp_path / "b", "privacy.randomness=system")["models_sha256"] != summary["models_sha256"]
    (again / "secret.key").unlink()
    command("run", "--resume", again).refused("secret.key", "new noise")


def test_the_api_keeps_the_budget() -> None:
    result = pdsl.train("softmax", "digits", graph=pdsl.ring(4), rounds=3, privacy={"target_epsilon": 2.0})
    assert result.epsilon is not None
    assert 1.94 <= result.epsilon <= 2.0
    assert result.ledger is not None
    assert result.ledger.rounds == 3


def test_without_noise_no_epsilon_is_stated() -> None:
    result = pdsl.train("softmax", "digits", graph=pdsl.ring(4), rounds=1, privacy={"mode": "none"})
    assert result.epsilon is None
    assert "no ε holds" in result.summary["privacy"]


def test_an_epsilon_per_round_is_what_one_round_spends_and_the_total_stands_beside_it() -> None:
    privacy = {"mode": "per-round", "epsilon_per_round": 0.3}
    one, three = (
        pdsl.train("softmax", "digits", graph=pdsl.ring(4), rounds=rounds, privacy=privacy) for rounds in (1, 3)
    )
    assert one.epsilon is not None
    assert three.epsilon is not None
    assert 0.985 * 0.3 <= one.epsilon <= 0.3 < three.epsilon
    assert one.summary["sigma"] == three.summary["sigma"]
    assert "each round alone spends at most ε = 0.3" in three.summary["privacy"]


def test_the_papers_mode_prints_the_sound_total_beside_it() -> None:
    paper = {"mode": "paper", "epsilon_per_round": 0.08, "clipping": "batch"}
    floored = pdsl.PDSL(shapley=pdsl.Shapley(floor=0.1))
    result = pdsl.train("softmax", "digits", graph=pdsl.ring(4), rounds=2, privacy=paper, algorithm=floored)
    assert result.epsilon is not None
    assert "Theorem 1" in result.summary["privacy"]
    assert "total ε" in result.summary["privacy"]
    with refused("Theorem 1", "algorithm.shapley.floor"):
        pdsl.train("softmax", "digits", graph=pdsl.ring(4), rounds=2, privacy=paper)
