"""Members that come and go: complete runs of peers in one process."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from pdsl.peer.amending import apply, propose, sign
from pdsl.peer.amendment import Amendment
from pdsl.peer.engine import PeerEngine
from pdsl.peer.health import check_health
from pdsl.peer.identity import Identity
from pdsl.peer.membership import join
from pdsl.peer.plan import Timeouts
from pdsl.peer.runner import run
from pdsl.peer.settlement import settle
from pdsl.peer.transport import Loop
from tests.helpers.organisations import make_organisations, make_plan, write_digits
from tests.helpers.refusals import refused
from tests.peer.test_runner import CrashError, simulate, use_test_key
from tests.stress.history import check, load
from tests.stress.soak import Site, ledger_matches_log

pytestmark = pytest.mark.peer

QUICK = Timeouts(silence=5.0, patience=5.0, deadline=30.0, start=60.0)
CALM = Timeouts(silence=30.0, patience=30.0, deadline=60.0, start=60.0)  # no neighbour is excluded on a busy machine
OnRound = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def site(member: Identity) -> Site:
    return Site(member.folder, None, None)


def ledger(member: Identity) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads((member.folder / "run" / "ledger.json").read_text())
    return stored


def present(member: Identity, t: int) -> list[str]:
    names: list[str] = site(member).rows[t - 1].get("present", [])
    return names


def admit(signers: list[Identity], new: Identity, first_round: int) -> Amendment:
    names = [signer.card.name for signer in signers]
    made = propose(signers[0], "join", new.card.name, first_round, new.card, names)
    for signer in signers[1:]:
        made = sign(signer, made)
    return made


def at_round(t: int, action: Callable[[], object]) -> OnRound:
    def on_round(row: dict[str, Any]) -> None:
        if row["round"] == t:
            action()

    return on_round


def test_one_of_eight_leaves_and_a_ninth_joins(tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The accuracy is that of the eight without a change; dora leaves before the start, and ida is admitted later."""
    use_test_key(monkeypatch)
    everyone = make_organisations(tmp_path, 9)
    data, task = write_digits(everyone, first=130)
    members, leaver, new = everyone[:8], everyone[3], everyone[8]
    stay = [member for member in members if member is not leaver]
    settings = {
        "algorithm": {"learning_rate": 4.0},
        "batch": {"rate": 1.0, "size": 130},
        "privacy": {"target_epsilon": 50.0},  # little noise: it changes the accuracy of a run by less than half a point
    }
    plan = make_plan(members, task, CALM, rounds=20, evaluate_every=20, **settings)
    for member in members:
        join(member, plan)
    leaving = propose(leaver, "leave", "dora", 8)
    for member in members:
        apply(member, leaving)
    admitted = threading.Event()

    def admit_new() -> None:
        joining = admit([members[2], members[4]], new, 13)
        for member in members:
            apply(member, joining)
        join(new, plan, [leaving, joining])
        admitted.set()

    def one(member: Identity) -> dict[str, Any]:
        if member is new:
            assert admitted.wait(60)
        return run(member, loop, on_round=at_round(3, admit_new) if member is members[0] else lambda row: None)

    with ThreadPoolExecutor(9) as pool:
        summaries = dict(zip([member.card.name for member in everyone], pool.map(one, everyone), strict=True))

    assert data.owner is not None and not isinstance(data.x, dict | tuple)
    first = data.owner < 8
    eight = replace(data, x=data.x[first], y=data.y[first], owner=data.owner[first])
    undisturbed = simulate(plan, eight)
    accuracy = np.mean([summaries[member.card.name]["accuracy"] for member in [*stay, new]])
    assert accuracy == pytest.approx(np.mean(undisturbed.evaluation.scores), abs=0.01)
    assert undisturbed.last.ledger is not None
    planned = undisturbed.last.ledger.epsilon_per_agent[0]
    for member in stay:  # as much is spent as without a change
        assert summaries[member.card.name]["epsilon"] == pytest.approx(planned, rel=1e-3)
        assert summaries[member.card.name]["epsilon"] <= 50.0
        assert summaries[member.card.name]["rounds_run"] == 20
    assert summaries["dora"]["rounds_run"] == 7 and "after round 7" in summaries["dora"]["stopped"]
    assert summaries["ida"]["rounds_run"] == 8 and min(t for t, _, _ in ledger(new)["charges"]) == 13
    assert summaries["dora"]["epsilon"] < planned and summaries["ida"]["epsilon"] < planned
    assert all(ledger_matches_log(site(member)) for member in everyone)
    cleo = members[2]
    assert [present(cleo, t) for t in (7, 8, 12, 13, 20)] == [
        ["ben", "dora"],
        ["ben", "eli"],
        ["ben", "eli"],
        ["ben", "eli", "ida"],
        ["ben", "eli", "ida"],
    ]
    assert not any("lost" in row for member in everyone for row in site(member).rows)
    generations = {t: n for t, n, _ in ledger(cleo)["charges"]}
    assert generations[7] < generations[8] < generations[13]  # no noise of one graph is used in another
    assert check([load(member.folder) for member in everyone]) == []
    assert all(check_health(member.folder).healthy for member in everyone)  # also after a departure
    assert all(summary["statement"] is None for summary in summaries.values())
    with refused("the plan has amendments", "the same members in all rounds"):
        settle(cleo.folder, [cleo.folder / "run" / "statement.json"])


def test_a_silent_member_is_removed_and_rounds_continue(tmp_path: Path, loop: Loop) -> None:
    members = make_organisations(tmp_path, 4)
    _, task = write_digits(members)
    quick = Timeouts(silence=1.5, patience=1.5, deadline=30.0, start=60.0)
    plan = make_plan(members, task, quick, rounds=6, graph={"kind": "line"})
    for member in members:
        join(member, plan)
    ada, ben, cleo, dora = members  # ada has no other neighbour than ben
    removal = sign(cleo, propose(ada, "leave", "ben", 5))

    def crash() -> None:
        raise CrashError

    def remove() -> None:
        for member in (ada, cleo, dora):
            apply(member, removal)

    actions = {"ben": at_round(2, crash), "dora": at_round(3, remove)}

    def one(member: Identity) -> dict[str, Any]:
        return run(member, loop, on_round=actions.get(member.card.name, lambda row: None))

    with ThreadPoolExecutor(4) as pool:
        crashed, *others = [pool.submit(one, member) for member in (ben, ada, cleo, dora)]
        with pytest.raises(CrashError):
            crashed.result()
        summaries = [other.result() for other in others]
    assert [summary["rounds"] for summary in summaries] == [6, 6, 6]
    assert present(cleo, 6) == ["ada", "dora"] and present(ada, 6) == ["cleo"]
    assert present(cleo, 4) == ["dora"] and all(ledger_matches_log(site(member)) for member in (ada, cleo, dora))
    assert check([load(member.folder) for member in (ada, cleo, dora)]) == []


def test_a_crash_in_the_first_round_after_an_amendment_changes_nothing(
    tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ada's checkpoint is of the stage before, with another neighbourhood, when it starts again."""
    members = make_organisations(tmp_path, 4)
    _, task = write_digits(members)
    plan = make_plan(members, task, CALM, rounds=5)
    for member in members:
        join(member, plan)
    leaving = propose(members[3], "leave", "dora", 3)
    for member in members:
        apply(member, leaving)
    mix, crashes = PeerEngine.mix, iter([True])

    def mix_or_crash(engine: PeerEngine, x: Tensor) -> Tensor:
        if (engine.agents.start, engine._t) == (0, 3) and next(crashes, False):
            raise CrashError
        return mix(engine, x)

    monkeypatch.setattr(PeerEngine, "mix", mix_or_crash)

    def one(member: Identity) -> dict[str, Any]:
        if member is members[0]:
            with pytest.raises(CrashError):
                run(member, loop)
        return run(member, loop)

    with ThreadPoolExecutor(4) as pool:
        summaries = list(pool.map(one, members))
    assert [summary["rounds_run"] for summary in summaries] == [5, 5, 5, 2]
    assert [present(members[0], t) for t in (2, 3)] == [["ben", "dora"], ["ben", "cleo"]]
    assert all(ledger_matches_log(site(member)) for member in members)
    assert [charge[0] for charge in ledger(members[0])["charges"]] == [1, 2, 3, 4, 5]  # repeated with the same bytes
    assert check([load(member.folder) for member in members]) == []
    assert run(members[3], loop)["rounds_run"] == 2  # a member that left does not train again


def test_a_new_machine_continues_with_the_ledger_of_the_old_one(tmp_path: Path, loop: Loop) -> None:
    members = make_organisations(tmp_path, 3)
    (fresh,) = make_organisations(tmp_path / "new", 1)
    _, task = write_digits(members)
    plan = make_plan(members, task, QUICK, rounds=8)
    for member in members:
        join(member, plan)
    ada = members[0]
    replacing = propose(ada, "replace", "ada", 4, fresh.card)
    for member in members:
        apply(member, replacing)

    moved_in = threading.Event()

    def wait_for_ada(row: dict[str, Any]) -> None:
        if row["round"] == 5:  # the others have lost the older copy in round 4
            moved_in.wait(20)

    def move() -> dict[str, Any]:
        early = tmp_path / "early"
        old = run(ada, loop, on_round=at_round(2, lambda: shutil.copytree(ada.folder / "run", early)))
        assert old["rounds_run"] == 3 and "after round 3" in old["stopped"]
        for name in ("data.npz", "public.npz", "plan.toml"):
            shutil.copy(ada.folder / name, fresh.folder)
        for name in ("pins", "amendments"):
            shutil.copytree(ada.folder / name, fresh.folder / name)
        with refused("ledger.json is missing, but ada was a member with another machine before"):
            run(fresh, loop)
        shutil.copytree(early, fresh.folder / "run")
        with refused("is an older copy: neighbours have proof that messages of round 3 were sent"):
            run(fresh, loop)
        shutil.rmtree(fresh.folder / "run")
        shutil.copytree(ada.folder / "run", fresh.folder / "run")
        shutil.copy(ada.folder / "charged", fresh.folder)
        return run(fresh, loop, on_round=lambda row: moved_in.set())

    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(run, member, loop, on_round=wait_for_ada) for member in members[1:]]
        moved = pool.submit(move).result()
        for other in others:
            other.result()
    charges = ledger(fresh)["charges"]
    assert [charge for charge in charges if charge[0] < 4] == ledger(ada)["charges"]
    assert max(t for t, _, _ in charges) == 8
    assert moved["epsilon"] <= 8.0 and ledger_matches_log(site(fresh))
    assert check([load(member.folder) for member in (fresh, *members[1:])]) == []
    assert {n for t, n, _ in charges if t < 4}.isdisjoint({n for t, n, _ in charges if t >= 4})
    for member in members[1:]:
        pinned = (member.folder / "pins" / "ada.pem").read_text()
        assert pinned == fresh.card.certificate  # the old machine is refused from round 4 on


def test_records_that_changed_between_two_starts_are_refused(tmp_path: Path, loop: Loop) -> None:
    members = make_organisations(tmp_path, 2)
    _, task = write_digits(members)
    plan = make_plan(members, task, QUICK, graph={"kind": "full"})
    for member in members:
        join(member, plan)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda member: run(member, loop), members))
    file = members[0].folder / "data.npz"
    stored = dict(np.load(file))
    np.savez(file, **stored)  # the same records in another file
    run(members[0], loop)
    np.savez(file, x=stored["x"][:-1], y=stored["y"][:-1])
    with refused("has other records than in the rounds charged so far"):
        run(members[0], loop)
