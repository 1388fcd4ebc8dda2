"""Commands of peer mode."""

import importlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdsl.peer import demo
from pdsl.peer.identity import Identity
from pdsl.peer.plan import TrainingPlan
from pdsl.peer.runner import run
from pdsl.peer.transport import Loop
from tests.helpers.commands import Outcome, pdsl
from tests.helpers.refusals import refused


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three organisations that have joined a plan."""
    monkeypatch.chdir(tmp_path)
    for i, name in enumerate(("ada", "ben", "cleo")):
        made = pdsl("peer", "init", name, "--name", name, "--address", f"127.0.0.1:{7001 + i}")
        assert made.code == 0 and f"{name}/card.toml" in made.out
    x, y = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32), np.arange(30) % 3
    np.savez("public.npz", x_test=x, y_test=y, x_validation=x, y_validation=y)
    cards = [f"{name}/card.toml" for name in ("ada", "ben", "cleo")]
    settings = ["--set", "rounds=5", "--set", "model.name=softmax", "--set", "privacy.target_epsilon=3"]
    made = pdsl("peer", "invite", *cards, "--public", "public.npz", "--records", 20, *settings)
    assert made.code == 0
    joined = [pdsl("peer", "join", name, "plan.toml") for name in ("ada", "ben", "cleo")]
    spoken = {line for outcome in [made, *joined] for line in outcome.out.splitlines() if line.startswith("hash ")}
    assert len(spoken) == 1  # all members see the same hash
    return tmp_path


def test_invite_and_join(three: Path) -> None:
    plan = TrainingPlan.read(three / "ada" / "plan.toml")
    assert [card.name for card in plan.members] == ["ada", "ben", "cleo"]
    assert (plan.task.shape, plan.task.classes, plan.config.rounds) == ((4,), 3, 5)
    assert plan.config.privacy.randomness == "system" and plan.config.privacy.budget == 3
    assert sorted(file.name for file in (three / "ada" / "pins").iterdir()) == ["ben.pem", "cleo.pem"]
    assert plan.members[1].fingerprint in pdsl("peer", "pin", "ada").out


def test_renew_pin_and_revoke(three: Path) -> None:
    old = Identity.load(three / "ben").card
    assert pdsl("peer", "init", "ben", "--renew").code == 0
    new = Identity.load(three / "ben").card
    assert "accepted" in pdsl("peer", "pin", "ada", "ben/card.toml").out
    assert "refused from now on" in pdsl("peer", "pin", "ada", "--revoke", old.fingerprint[:12]).out
    listed = pdsl("peer", "pin", "ada").out
    assert new.fingerprint in listed and old.fingerprint not in listed
    pdsl("peer", "join", "ada", "plan.toml")  # joining again restores no revoked pin
    assert old.fingerprint not in pdsl("peer", "pin", "ada").out
    pdsl("peer", "pin", "ada", "ada/card.toml").refused("not a neighbour of ada")
    pdsl("peer", "join", "ben", "plan.toml").refused("another card for ben")


def test_mistakes(three: Path) -> None:
    pdsl("peer", "run", "nowhere").refused("pdsl peer init")
    pdsl("peer", "run", "ada").refused("ada/data.npz")
    pdsl("peer", "status", "ada").refused("has not run yet")
    pdsl("peer", "init", "ada", "--name", "ada", "--address", "h:1").refused("--renew")
    pdsl("peer", "init", "x", "--name", "Ada Lovelace", "--address", "h:1").refused("--name", "choose another")
    pdsl("peer", "init", "x", "--name", "x", "--address", "nowhere").refused("host:port")
    text = (three / "plan.toml").read_text()
    (three / "changed.toml").write_text(text.replace("rounds = 5", "rounds = 6"))
    pdsl("peer", "join", "ada", "changed.toml").refused("changed or damaged")
    (three / "ada" / "key.pem").chmod(0o640)
    pdsl("peer", "run", "ada").refused("chmod 600")
    cards = ["ada/card.toml", "ben/card.toml"]
    pdsl("peer", "invite", *cards, "--public", "public.npz", "--records", 20, "--out", "p", "--quorum", 2).refused(
        "quorum"
    )
    pdsl("peer", "invite", *cards, "--public", "public.npz", "--records", 20, "--out", "p", "--quorum", 0).refused(
        "quorum"
    )


def test_missing_h11_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h11", None)
    monkeypatch.delitem(sys.modules, "pdsl.peer.http1")
    with refused("pip install h11"):
        importlib.import_module("pdsl.peer.http1")


@pytest.mark.peer
def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The four peers run in this process; test_peer_faults.py covers separate processes."""
    loop = Loop()

    def run_in_threads(folders: list[Path], show: Any) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(len(folders)) as pool:
            return list(pool.map(lambda folder: run(Identity.load(folder), loop), folders))

    monkeypatch.setattr(demo, "_run_peers", run_in_threads)
    outcome = pdsl("peer", "demo", "--out", tmp_path / "demo", "--rounds", 3, "--json")
    loop.close()
    result = json.loads(outcome.out)
    assert [peer["name"] for peer in result["peers"]] == list(demo.NAMES)
    assert all(peer["rounds"] == 3 and 0 < peer["epsilon"] <= 8 and peer["accuracy"] > 0.3 for peer in result["peers"])
    status = json.loads(pdsl("peer", "status", tmp_path / "demo" / "amber", "--json").out)
    assert (status["round"], status["running"], len(status["neighbours"])) == (3, False, 2)
    assert "amber" in pdsl("peer", "status", tmp_path / "demo" / "amber").out
    pdsl("peer", "demo", "--out", tmp_path / "demo").refused("not empty")


def test_members_leave_join_and_are_replaced_by_amendments(three: Path) -> None:
    def spoken(*outcomes: Outcome) -> set[str]:
        assert [outcome.code for outcome in outcomes] == [0] * len(outcomes)
        return {line for outcome in outcomes for line in outcome.out.splitlines() if line.startswith("hash ")}

    left = pdsl("peer", "leave", "ada", "--from-round", 2, "--out", "leave.toml")
    applied = [pdsl("peer", "amend", name, "leave.toml") for name in ("ada", "ben", "cleo")]
    assert len(spoken(left, *applied)) == 1  # all members read the same hash aloud
    assert "your neighbours from then on: cleo" in applied[1].out
    pdsl("peer", "amend", "ben", "leave.toml").refused("has amendment 1 already")

    pdsl("peer", "init", "dora", "--name", "dora", "--address", "127.0.0.1:7009")
    neighbours = ("--neighbour", "ben", "--neighbour", "cleo")
    proposed = pdsl("peer", "admit", "ben", "dora/card.toml", *neighbours, "--from-round", 3, "--out", "join.toml")
    assert "Still to sign: cleo." in proposed.out
    pdsl("peer", "amend", "ben", "join.toml").refused("lacks signatures: cleo")
    signed = pdsl("peer", "sign", "cleo", "join.toml")
    applied = [pdsl("peer", "amend", name, "join.toml") for name in ("ben", "cleo")]
    joined = pdsl("peer", "join", "dora", "plan.toml", "--amendment", "leave.toml", "--amendment", "join.toml")
    assert len(spoken(proposed, signed, *applied, joined)) == 1
    assert "dora is agent 3 of 4" in joined.out and "neighbour cleo" in joined.out

    pdsl("peer", "init", "new", "--name", "cleo", "--address", "127.0.0.1:7010")
    pdsl("peer", "replace", "cleo", "new/card.toml", "--from-round", 4)
    pdsl("peer", "amend", "ben", "replace.toml")
    assert len((three / "ben" / "pins" / "cleo.pem").read_text().split("BEGIN CERTIFICATE")) == 3  # both machines
    pdsl("peer", "leave", "ada", "--from-round", 4).refused("ada is not a member at that time")
