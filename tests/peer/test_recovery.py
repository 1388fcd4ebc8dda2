"""Backup and restore: an older copy of a folder cannot spend its budget twice, and can be charged for what was sent."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from pdsl.peer.amending import apply, propose
from pdsl.peer.experiment import empty_ledger
from pdsl.peer.identity import Identity
from pdsl.peer.membership import join, load_chain, write_charge_marker
from pdsl.peer.plan import Timeouts
from pdsl.peer.recovery import Recovery, recover
from pdsl.peer.runner import run
from pdsl.peer.status import Events
from pdsl.peer.transport import Loop, Transport
from tests.helpers.organisations import make_organisations, make_plan, write_digits
from tests.helpers.refusals import refused

pytestmark = pytest.mark.peer

ROUNDS, HOLD = 24, 12  # the neighbours wait after round HOLD until the copy is recovered


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def three(tmp_path: Path) -> list[Identity]:
    members = make_organisations(tmp_path, 3)
    _, task = write_digits(members)
    timeouts = Timeouts(silence=2.0, patience=1.0, deadline=20.0, start=20.0)
    plan = make_plan(members, task, timeouts, rounds=ROUNDS, evaluate_every=ROUNDS)
    for member in members:
        join(member, plan)
    return members


class StoppedError(Exception):
    """End of a process, raised by a test."""


def stop_at(t: int, copy: Callable[[], object] = lambda: None, copy_at: int = 0) -> Callable[[Any], None]:
    def on_round(row: Any) -> None:
        if row["round"] == copy_at:
            copy()
        if row["round"] >= t:
            raise StoppedError

    return on_round


def sent(*folders: Path) -> dict[tuple[str, int], dict[tuple[int, ...], str]]:
    """Vectors of several copies of a folder: (key, round) → draw → digest. No draw may have two digests."""
    found: dict[tuple[str, int], dict[tuple[int, ...], str]] = {}
    for folder in folders:
        for log in (folder / "run").glob("sent-*.log"):
            key = hashlib.sha256((folder / "run" / f"secret-{log.stem[5:]}.key").read_bytes()).hexdigest()
            for t, *vector in map(json.loads, log.read_text().splitlines()):
                if vector:
                    *draw, digest = vector
                    assert found.setdefault((key, t), {}).setdefault(tuple(draw), digest) == digest
    return found


def restore(folder: Path, copy: Path, lost: Path) -> None:
    folder.rename(lost)
    shutil.copytree(copy, folder)


def with_neighbours(
    members: list[Identity], loop: Loop, life: Callable[[Identity, Event], Any]
) -> tuple[Any, list[Any]]:
    """Run `life` for the last member, and all others until their last round, with a pause until an event is set."""
    released = Event()

    def on_round(row: Any) -> None:
        time.sleep(0.05)
        if row["round"] == HOLD:
            released.wait(120)

    with ThreadPoolExecutor(len(members)) as pool:
        others = [pool.submit(run, member, loop, None, on_round) for member in members[:-1]]
        try:
            found = life(members[-1], released)
        finally:
            released.set()
        return found, [other.result() for other in others]


def test_a_restored_backup_is_refused_then_recovered_with_all_charges(
    three: list[Identity], loop: Loop, tmp_path: Path
) -> None:
    copy, lost = tmp_path / "copy", tmp_path / "lost"

    def life(own: Identity, released: Event) -> tuple[Recovery, Recovery, Any]:
        with pytest.raises(StoppedError):
            run(own, loop, on_round=stop_at(8, lambda: shutil.copytree(own.folder, copy), copy_at=3))
        restore(own.folder, copy, lost)
        with refused("is an older copy", "round 8", "pdsl peer recover"):
            run(own, loop)
        assert sent(own.folder) == sent(copy)  # nothing was sent from the copy
        found = recover(own, load_chain(own), loop)
        again = recover(own, load_chain(own), loop)
        released.set()
        return found, again, run(own, loop)

    (found, again, summary), others = with_neighbours(three, loop, life)
    before = json.loads((lost / "run" / "ledger.json").read_text())["charges"]
    assert (found.proven_round, len(found.before.charges)) == (8, 3)
    assert len(found.after.charges) == len(before) + 1  # one more than was lost
    assert again.added == 0
    folder = three[-1].folder
    charges = json.loads((folder / "run" / "ledger.json").read_text())["charges"]
    vectors = sent(folder, lost)
    assert len(charges) >= len(vectors)
    charged = sorted((len(peers) for _, _, peers in charges), reverse=True)
    needed = sorted(({len({j for _, _, j in draws} - {2}) for draws in vectors.values()}), reverse=True)
    assert all(a >= b for a, b in zip(charged, needed, strict=False))
    assert summary["rounds_run"] > 8 and summary["epsilon"] <= summary["budget"]
    assert max(t for _, t in sent(folder)) > 8  # it takes part again
    assert all(other["rounds_run"] == ROUNDS for other in others)


def test_a_restored_run_directory_is_recovered_from_the_marker_of_charges(
    three: list[Identity], loop: Loop, tmp_path: Path
) -> None:
    copy, lost = tmp_path / "copy", tmp_path / "lost"

    def life(own: Identity, released: Event) -> Recovery:
        with pytest.raises(StoppedError):
            run(own, loop, on_round=stop_at(6, lambda: shutil.copytree(own.folder / "run", copy), copy_at=2))
        restore(own.folder / "run", copy, lost)
        with refused("ledger.json is outdated", "round 6"):
            run(own, loop)
        shutil.rmtree(own.folder / "run")
        with refused("ledger.json is missing"):
            run(own, loop)
        return recover(own, load_chain(own), loop)

    found, _ = with_neighbours(three, loop, life)
    assert len(found.after.charges) == 7 and found.before.charges == {}


def test_recovery_needs_the_receipts_of_all_neighbours(three: list[Identity], loop: Loop) -> None:
    with refused("no answer from ada, ben", "pdsl peer doctor"):
        recover(three[-1], load_chain(three[-1]), loop)
    assert not (three[-1].folder / "run" / "ledger.json").exists()


def write_ledger(own: Identity, last: int) -> None:
    """Ledger with charges for rounds up to `last`, of the plan without amendments."""
    stage = load_chain(own).at(1)
    ledger = empty_ledger(stage, stage.agent(own.card.name))
    for t in range(1, last + 1):
        ledger = ledger.charge(t, 1, frozenset({1, 2}))
    (own.folder / "run").mkdir(exist_ok=True)
    (own.folder / "run" / "ledger.json").write_text(ledger.to_json([card.name for card in stage.members]))


def test_recovery_charges_the_noise_of_one_stage_and_refuses_an_amendment_between(
    three: list[Identity], loop: Loop
) -> None:
    ada = three[0]
    leaving = propose(three[2], "leave", "cleo", 6)
    for member in three:
        apply(member, leaving)
    plan = load_chain(ada).at(1)
    stages = [load_chain(member).at(1) for member in three[1:]]
    peers = [
        Transport(loop, member, stage, Events(member.folder / "events.jsonl"), 1)
        for member, stage in zip(three[1:], stages, strict=True)
    ]
    for peer in peers:
        peer.start()
    try:
        write_ledger(ada, last=3)
        write_charge_marker(ada, plan, 5)
        found = recover(ada, load_chain(ada), loop)
        added = found.after.charges.keys() - found.before.charges.keys()
        assert sorted(t for t, _ in added) == [3, 4, 5]
        assert {found.after.find_stage(generation).stage for _, generation in added} == {plan.hash}
        assert {found.after.charges[key] for key in added} == {frozenset({1, 2})}
        write_ledger(ada, last=3)
        write_charge_marker(ada, plan, 8)
        with refused("lacks charges between rounds 3 and 8", "an amendment came into force"):
            recover(ada, load_chain(ada), loop)
    finally:
        for peer in peers:
            peer.stop()


def test_recovery_refuses_a_renewed_key_without_the_key_of_receipts(three: list[Identity], loop: Loop) -> None:
    renewed = Identity.renew(three[0].folder, None, None)
    with refused("receipts.key is missing", "restore the file"):
        recover(renewed, load_chain(renewed), loop)
