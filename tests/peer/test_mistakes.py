"""User mistakes in peer mode: each gives a one-line error whose advice works."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from pdsl.peer.identity import Identity, PeerInfo
from pdsl.peer.membership import join, load_plan
from pdsl.peer.plan import TrainingPlan
from pdsl.peer.trust_store import TrustStore
from pdsl.utils.files import write_whole
from tests.helpers.commands import pdsl, settings
from tests.helpers.organisations import make_organisations, make_plan, with_hash
from tests.helpers.refusals import refused


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Identity]:
    """Organisations that have joined a plan, with a public file."""
    monkeypatch.chdir(tmp_path)
    members = make_organisations(Path(), 3)
    x, y = np.zeros((6, 4), np.float32), np.arange(6) % 3
    np.savez("public.npz", x_test=x, y_test=y, x_validation=x, y_validation=y)
    for member in members:
        join(member, make_plan(members))
    return members


WITHOUT_NOISE_OR_BUDGET: list[tuple[dict[str, Any], str]] = [
    ({"sigma": 0.0, "target_epsilon": None}, "no noise"),
    ({"sigma": 0.0}, "no noise"),
    ({"noise_multiplier": 0.0}, "no noise"),
    ({"sigma": 1.0, "target_epsilon": None}, "target_epsilon"),
    ({"mode": "noise", "noise_multiplier": 1.0, "target_epsilon": None}, "target_epsilon"),
    ({"mode": "per-round", "epsilon_per_round": 0.1, "target_epsilon": None}, "target_epsilon"),
]


@pytest.mark.parametrize(("privacy", "reason"), WITHOUT_NOISE_OR_BUDGET)
def test_a_plan_has_noise_and_a_budget(tmp_path: Path, privacy: dict[str, Any], reason: str) -> None:
    members = make_organisations(tmp_path, 3)
    with refused("plan: ", reason):
        make_plan(members, privacy=privacy)
    by_hand = make_plan(members).as_dict()
    by_hand["config"]["privacy"] |= privacy
    by_hand["config"]["privacy"] = {k: v for k, v in by_hand["config"]["privacy"].items() if v is not None}
    with refused("plan: ", reason):
        TrainingPlan.parse(tomli_w.dumps(with_hash(by_hand)).encode(), "mail")


INFEASIBLE: list[tuple[list[str], float, list[str]]] = [
    (["privacy.sigma=0"], 20, ["no noise"]),
    (["privacy.target_epsilon=1e-5"], 20, ["target_epsilon=1e-05", "0.001 to 1000"]),
    (["privacy.sigma=1e-9", "privacy.target_epsilon=3"], 20, ["one round spends ε = inf", "target_epsilon=3"]),
    ([], 0.5, ["task.records", "1"]),
    ([], 1e-300, ["task.records", "1"]),
]


@pytest.mark.parametrize(("assignments", "records", "parts"), INFEASIBLE)
def test_invite_refuses_an_infeasible_plan(
    three: list[Identity], assignments: list[str], records: float, parts: list[str]
) -> None:
    cards = [member.folder / "card.toml" for member in three]
    words = ["--public", "public.npz", "--records", records, *settings("model.name=softmax", *assignments)]
    pdsl("peer", "invite", *cards, *words).refused(*parts)
    assert not Path("plan.toml").exists()


def test_join_refuses_an_infeasible_plan(tmp_path: Path) -> None:
    members = make_organisations(tmp_path, 3)
    (tmp_path / "plan.toml").write_text(make_plan(members, privacy={"target_epsilon": 1e-5}).to_toml())
    pdsl("peer", "join", members[0].folder, tmp_path / "plan.toml").refused("target_epsilon=1e-05", "0.001 to 1000")
    assert not (members[0].folder / "plan.toml").exists() and not (members[0].folder / "pins").exists()


STATUS = {
    "time": 0.0,
    "pid": 1,
    "running": True,
    "name": "ada",
    "plan": "0" * 64,
    "round": 2,
    "rounds": 3,
    "doing": "computing",
    "accuracy": None,
    "epsilon": None,
    "budget": 8.0,
    "refused": 0,
    "neighbours": [{"name": "ben", "state": "here", "in_round": True, "round": 2, "heard_seconds_ago": 0.1}],
    "completed": False,
    "network_pause": 0.0,
}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"running": 1}',
        "[" * 100_000,
        json.dumps({**STATUS, "time": "noon"}),
        json.dumps({**STATUS, "accuracy": "good"}),
        json.dumps({**STATUS, "neighbours": [{}]}),
    ],
)
def test_a_damaged_status(three: list[Identity], content: str) -> None:
    run = three[0].folder / "run"
    run.mkdir()
    (run / "status.json").write_text(content)
    for more in ([], ["--json"], ["--watch"]):
        pdsl("peer", "status", "ada", *more).refused("ada/run/status.json is damaged", "ada/run/summary.json")
    (run / "status.json").write_text(json.dumps(STATUS))
    assert json.loads(pdsl("peer", "status", "ada", "--json").out) == {**STATUS, "running": False}


def test_a_lost_or_damaged_key_is_renewed(three: list[Identity]) -> None:
    ada, ben, _ = three
    key = ada.folder / "key.pem"
    for damage, reason in (
        (key.unlink, "No such file"),
        (lambda: key.write_bytes(b"garbage"), "damaged"),
        (lambda: key.write_bytes(ben.key), "does not match"),
        (lambda: key.chmod(0o640), "open to other"),  # other users may have read it
    ):
        before = PeerInfo.read(ada.folder / "card.toml")
        damage()
        outcome = pdsl("peer", "status", "ada")
        outcome.refused(reason)
        assert "open to other" in reason or "pdsl peer init ada --renew" in outcome.err
        assert pdsl("peer", "init", "ada", "--renew").code == 0
        after = Identity.load(ada.folder).card
        assert (after.name, after.address) == (before.name, before.address) and after.certificate != before.certificate


@pytest.mark.parametrize("damage", ["lost", "garbage"])
@pytest.mark.parametrize("key", ["there", "lost"])
def test_a_lost_card_is_renewed_with_name_and_address(three: list[Identity], damage: str, key: str) -> None:
    folder = three[0].folder
    (folder / "card.toml").write_text("garbage") if damage == "garbage" else (folder / "card.toml").unlink()
    if key == "lost":
        (folder / "key.pem").unlink()
    command = "pdsl peer init ada --renew --name NAME --address HOST:PORT"
    pdsl("peer", "status", "ada").refused("ada/card.toml is missing or damaged", command)
    pdsl("peer", "init", "ada", "--renew").refused("ada/card.toml is missing or damaged", command)
    pdsl("peer", "init", "ada", "--renew", "--name", "Ada", "--address", "h:1").refused("--name")
    assert pdsl("peer", "init", "ada", "--renew", "--name", "ada", "--address", "h:1").code == 0
    assert Identity.load(folder).card.address == "h:1"
    pdsl("peer", "init", "ada", "--renew", "--name", "eve", "--address", "h:1").refused("keeps name and address")
    pdsl("peer", "init", "nowhere", "--renew", "--name", "eve", "--address", "h:1").refused("no folder nowhere")
    assert not Path("nowhere").exists()


@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_kill_during_init(three: list[Identity], monkeypatch: pytest.MonkeyPatch, written: int) -> None:
    """After a kill between any two files, the same command completes the folder."""
    for command in (["ada", "--renew"], ["dora", "--name", "dora", "--address", "h:1"]):
        left = iter([write_whole] * written)
        with monkeypatch.context() as patch:
            patch.setattr("pdsl.peer.identity.write_whole", lambda *args, left=left: next(left)(*args))
            with pytest.raises(StopIteration):
                pdsl("peer", "init", *command)
        assert pdsl("peer", "init", *command).code == 0
        assert Identity.load(Path(command[0])).card.name == command[0]


def test_a_damaged_pin_file_is_replaced_by_a_card(three: list[Identity]) -> None:
    ada, ben, cleo = three
    file = ada.folder / "pins" / "ben.pem"
    for content in (
        "garbage",
        ben.card.certificate[:100],
        ben.card.certificate + cleo.card.certificate,
        "".join(Identity.create(Path(name), "ben", "h:1").card.certificate for name in "xyz"),
    ):
        file.write_text(content)
        pdsl("peer", "pin", "ada").refused("ada/pins/ben.pem", "pdsl peer pin ada CARD")
        pinned = pdsl("peer", "pin", "ada", "ben/card.toml")
        assert pinned.code == 0 and "was damaged" in pinned.out and "only this certificate" in pinned.out
        assert TrustStore(ada.folder / "pins").certificates("ben") == [ben.card.certificate]
    again = pdsl("peer", "pin", "ada", "ben/card.toml")
    assert again.code == 0 and "was damaged" not in again.out


def test_repairing_a_pin_file_restores_no_revoked_certificate(three: list[Identity]) -> None:
    """The old certificate, which is still in the plan, is not pinned again with the new one."""
    ada, ben, _ = three
    new = Identity.renew(ben.folder)
    (ada.folder / "pins" / "ben.pem").write_text("garbage")
    with refused("ada/pins/ben.pem", "pdsl peer pin ada CARD"):
        join(ada, load_plan(ada))
    pdsl("peer", "pin", "ada").refused("ada/pins/ben.pem")
    assert pdsl("peer", "pin", "ada", "ben/card.toml").code == 0
    assert TrustStore(ada.folder / "pins").certificates("ben") == [new.card.certificate]


def test_revocation_works_beside_a_damaged_pin_file(three: list[Identity]) -> None:
    ada, _, cleo = three
    (ada.folder / "pins" / "ben.pem").write_text("garbage")
    assert pdsl("peer", "pin", "ada", "--revoke", cleo.card.fingerprint[:12]).code == 0
    assert TrustStore(ada.folder / "pins").certificates("cleo") == []


def test_the_advice_to_list_pins_works(three: list[Identity]) -> None:
    pdsl("peer", "pin", "ada", "--revoke", "0123456789").refused("'pdsl peer pin ada' lists them")
    assert three[1].card.fingerprint in pdsl("peer", "pin", "ada").out
