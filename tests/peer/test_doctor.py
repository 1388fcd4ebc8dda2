"""`pdsl peer doctor`: every fault of folder, machine and network is named with what to do, and nothing is disturbed."""

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from pdsl.peer import about, doctor, probe, status
from pdsl.peer.amending import apply, propose
from pdsl.peer.identity import PINS, RUN, Identity
from pdsl.peer.membership import join, load_current_stage, write_charge_marker
from pdsl.peer.messages import PROTOCOL, Receipt, split_proof
from pdsl.peer.plan import TrainingPlan
from pdsl.peer.receipts import Receipts
from pdsl.peer.status import Events, NeighbourStatus, Status
from pdsl.peer.transport import Loop, Transport
from pdsl.peer.trust_store import TrustStore
from tests.helpers.commands import pdsl
from tests.helpers.hood import QUICK, D
from tests.helpers.organisations import make_organisations, make_plan, write_digits

pytestmark = pytest.mark.peer


class Site(NamedTuple):
    """Ada with data, and two running neighbours."""

    loop: Loop
    members: list[Identity]
    plan: TrainingPlan
    peers: list[Transport]

    @property
    def problems(self) -> list[str]:
        return [finding.text for finding in doctor.examine(self.members[0], self.plan) if not finding.ok]


def start(loop: Loop, members: list[Identity], plan: TrainingPlan) -> list[Transport]:
    peers = [Transport(loop, member, plan, Events(member.folder / "events.jsonl"), D) for member in members]
    for peer in peers:
        peer.start()
    return peers


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    loop = Loop()
    members = make_organisations(tmp_path, 3)
    _, task = write_digits(members)
    plan = make_plan(members, task, QUICK)
    for member in members:
        join(member, plan)
    peers = start(loop, members[1:], plan)
    yield Site(loop, members, plan, peers)
    for peer in peers:
        peer.stop()
    loop.close()


def write_status(folder: Path, plan: TrainingPlan, **changes: object) -> None:
    """Status file as of a running peer."""
    names = [card.name for card in plan.members[1:]]
    seen = [NeighbourStatus(name=name, state="here", in_round=True, round=2, heard_seconds_ago=0.1) for name in names]
    made = Status(
        time=time.time(),
        pid=os.getpid(),
        running=True,
        name="ada",
        plan=plan.hash,
        round=2,
        rounds=3,
        doing="computing",
        accuracy=None,
        epsilon=None,
        budget=8.0,
        refused=0,
        neighbours=seen,
    ).model_copy(update=changes)
    (folder / RUN).mkdir(exist_ok=True)
    (folder / RUN / status.STATUS).write_text(json.dumps(made.model_dump()))


def test_doctor_finds_nothing_in_a_sound_site_and_changes_nothing(site: Site) -> None:
    def seen() -> object:
        states = [(peer.state.round, peer.state.calls, peer.state.last_request, peer.state.away) for peer in site.peers]
        return json.dumps(str(states)), sorted(file.name for file in site.members[0].folder.iterdir())

    before = seen()
    found = pdsl("peer", "doctor", site.members[0].folder, "--json")
    texts = [finding["text"] for finding in json.loads(found.out)]
    assert found.code == 0 and all(finding["ok"] for finding in json.loads(found.out))
    for name in ("ben", "cleo"):
        address = next(member.card.address for member in site.members if member.card.name == name)
        assert any(text.startswith(f"{name}: answers directly at {address}") for text in texts)
        assert any(
            text.startswith(f"{name}: pdsl ") and f"protocol {PROTOCOL}, the same plan" in text for text in texts
        )
    assert seen() == before
    assert all("ATTENTION" not in line for line in pdsl("peer", "doctor", site.members[0].folder).out.splitlines())


def test_doctor_names_a_neighbour_that_does_not_run(site: Site) -> None:
    site.peers[0].stop()
    (problem,) = site.problems
    assert problem.startswith(f"ben: nothing listens at {site.members[1].card.address}; start it there")
    outcome = pdsl("peer", "doctor", site.members[0].folder)
    assert outcome.code == 1 and f"ATTENTION {problem}" in outcome.out.splitlines()


def test_doctor_names_certificates_that_are_not_pinned_on_either_side(site: Site) -> None:
    ada, ben, cleo = site.members
    TrustStore(ben.folder / PINS).revoke(ada.card.fingerprint)
    TrustStore(ada.folder / PINS).revoke(cleo.card.fingerprint)
    first, second = site.problems
    assert first.startswith("ben: closes the connection: it has not pinned your certificate; send it")
    assert second.startswith("cleo: no certificate of it is pinned; get its card")
    other = Identity.create(ada.folder.parent / "other", "cleo", cleo.card.address)
    TrustStore(ada.folder / PINS).add(other.card)
    assert site.problems[1].startswith(
        "cleo: its certificate is not the pinned one; ask cleo whether it renewed its key"
    )


def test_doctor_names_another_plan_version_and_clock(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    made = about.describe("f" * 64, 1, True, about.NO_RECEIPT)
    monkeypatch.setattr(about, "describe", lambda *_: replace(made, time=time.time() - 60))
    problems = site.problems
    assert [p.partition(",")[0] for p in problems if "plan" in p] == ["ben: has another plan", "cleo: has another plan"]
    assert sum("its clock is 60 s behind yours" in problem for problem in problems) == 2
    monkeypatch.setattr(about, "describe", lambda *_: about.About(PROTOCOL + 1, "9.9"))
    assert all(f": pdsl 9.9, protocol {PROTOCOL + 1}, but {PROTOCOL} here" in problem for problem in site.problems)


def test_doctor_knows_amendments_and_names_a_neighbour_without_one_in_force(site: Site) -> None:
    ada, _, cleo = site.members
    apply(ada, propose(cleo, "leave", "cleo", 2))
    assert [found.text for found in doctor.examine(ada, load_current_stage(ada)) if not found.ok] == []
    write_charge_marker(ada, site.plan, 1)
    site.peers[0].state.round = 2  # of the plan without the amendment
    found = [finding.text for finding in doctor.examine(ada, load_current_stage(ada)) if not finding.ok]
    assert found[0].startswith("ben: has another plan") and "pdsl peer amend" in found[0]
    assert not any(text.startswith("cleo") for text in found)


def test_doctor_names_faults_of_the_machine(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    own = site.members[0]
    (own.folder / "data.npz").unlink()
    host, _, port = own.card.address.partition(":")

    def fail(descriptor: int) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 10**7, 10**7))
    with socket.create_server((host, int(port))):
        data, disk, sync, used = site.problems
    assert data.startswith("data: ") and "data.npz" in data
    assert disk == "disk: 10 MB free; a run needs 200 MB: free some space"
    assert sync.startswith("disk: cannot write and sync") and "Read-only file system" in sync
    assert used.startswith(f"port: cannot listen on {own.card.address}") and "end the program that uses it" in used
    assert doctor._check_port("192.0.2.1:7443").text.endswith("give an address of this machine with --listen")
    assert doctor._check_port("none").ok


def test_doctor_names_neighbours_that_cannot_reach_a_running_peer(site: Site) -> None:
    write_status(site.members[0].folder, site.plan)
    assert site.problems == [
        f"{name}: cannot reach you at {site.members[0].card.address}; open that port to it" for name in ("ben", "cleo")
    ]


def test_doctor_recognises_an_older_copy(site: Site) -> None:
    ada, ben = site.members[0], site.peers[0]
    ben.state.receipts.held[0] = make_receipt(site, charges=5)
    (problem,) = site.problems
    assert problem.startswith("ledger: older copy: neighbours have proof of messages of round 4, and it ends at 0")
    (ada.folder / RUN).mkdir()
    charges = [[t, 1, [1, 2]] for t in (1, 2, 3, 4)]
    (ada.folder / RUN / "ledger.json").write_text(json.dumps({"charges": charges}))
    assert [problem.partition(":")[0] for problem in site.problems] == ["ledger"]  # one charge is missing
    (ada.folder / RUN / "ledger.json").write_text(json.dumps({"charges": [*charges, [4, 2, [1, 2]]]}))
    assert site.problems == []
    (ada.folder / "charged").write_text(f"{site.plan.hash}\n9\n")
    assert site.problems[0].startswith("ledger: missing or outdated")


def make_receipt(site: Site, charges: int) -> Receipt:
    """Receipt of ada for round 4, as it gives it to ben."""
    own = Receipts(site.members[0].key, site.plan.hash, [1, 2], Path("nowhere"))
    own.charges = charges
    own.note_release(4)
    return split_proof(own.attach(1))[0]


def test_doctor_goes_through_relays_and_knows_callers_from_the_running_peer(tmp_path: Path) -> None:
    loop = Loop()
    members = make_organisations(tmp_path, 3, without_address={0, 2})
    _, task = write_digits(members)
    plan = make_plan(members, task, QUICK, graph={"kind": "full"})
    for member in members:
        join(member, plan)
    peers = start(loop, members, plan)
    try:
        time.sleep(1.0)  # cleo waits at ben
        texts = {finding.text: finding.ok for finding in doctor.examine(members[0], plan)}
        assert all(texts.values()), texts
        assert any(text.startswith("cleo: answers through a relay (ben)") for text in texts)
        before = [finding.text for finding in doctor.examine(members[2], plan) if finding.text.startswith("ada")]
        assert before == ["ada: has no address and calls you; check again while pdsl peer run is active"]
        write_status(members[0].folder, plan)
        seen = doctor._check_caller("cleo", status.read_status(members[0].folder), silence=2.0)
        assert seen == (True, "cleo: has no address and calls you, last 0.1 s ago")
        assert not doctor._check_caller("cleo", status.read_status(members[0].folder), silence=0.05).ok
    finally:
        for peer in peers:
            peer.stop()
        loop.close()


def test_the_route_through_a_proxy_is_shown_without_its_credentials(
    monkeypatch: pytest.MonkeyPatch, site: Site
) -> None:
    monkeypatch.setenv("https_proxy", "http://user:secret@proxy.example:3128")
    monkeypatch.setenv("no_proxy", "")
    route = probe._describe_route(site.plan, "peer.example:7443", [])
    assert route == "at peer.example:7443 through the proxy proxy.example:3128"


def test_mistakes_of_the_user_have_exit_code_2(tmp_path: Path) -> None:
    pdsl("peer", "doctor", tmp_path / "nowhere").refused("pdsl peer init")
    own = Identity.create(tmp_path / "ada", "ada", "127.0.0.1:9")
    pdsl("peer", "doctor", own.folder).refused("has not joined a plan")
    pdsl("peer", "doctor", own.folder, "--listen", "here").refused("--listen", "host:port")
    pdsl("peer", "health", tmp_path / "nowhere").refused("no folder")


def test_health_follows_the_status_file(site: Site) -> None:
    folder = site.members[0].folder
    assert pdsl("peer", "health", folder).code == 1
    write_status(folder, site.plan)
    assert pdsl("peer", "health", folder) == (0, "ada: round 2 of 3, computing, 2 of 2 neighbours in the round\n", "")
    write_status(folder, site.plan, time=time.time() - 60)
    assert pdsl("peer", "health", folder) == (1, "ada: round 2 of 3, not running\n", "")
    write_status(folder, site.plan, network_pause=31.0)
    assert "network thread has hung for 31 s" in pdsl("peer", "health", folder).out
    write_status(folder, site.plan, running=False, completed=True)
    assert json.loads(pdsl("peer", "health", folder, "--json").out)["healthy"]
    (folder / RUN / status.STATUS).write_text("{")
    assert pdsl("peer", "health", folder).code == 1
