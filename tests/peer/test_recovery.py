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

from pdsl.peer.identity import Identity
from pdsl.peer.membership import join, load_plan
from pdsl.peer.plan import Timeouts
from pdsl.peer.recovery import Recovery, recover
from pdsl.peer.runner import run
from pdsl.peer.transport import Loop
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
        found = recover(own, load_plan(own), loop)
        again = recover(own, load_plan(own), loop)
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
        return recover(own, load_plan(own), loop)

    found, _ = with_neighbours(three, loop, life)
    assert len(found.after.charges) == 7 and found.before.charges == {}


def test_recovery_needs_the_receipts_of_all_neighbours(three: list[Identity], loop: Loop) -> None:
    with refused("no answer from ada, ben", "pdsl peer doctor"):
        recover(three[-1], load_plan(three[-1]), loop)
    assert not (three[-1].folder / "run" / "ledger.json").exists()
