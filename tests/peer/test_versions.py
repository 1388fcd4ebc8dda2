"""Peers of different versions: refused by name on both sides, and never misread."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdsl.peer import doctor
from pdsl.peer.about import About
from pdsl.peer.attendance import QuorumError
from pdsl.peer.membership import join
from pdsl.peer.messages import PROTOCOL, RefusedError
from pdsl.peer.status import Events
from pdsl.peer.transport import Loop, Transport
from tests.helpers.hood import QUICK, D, Hood, run_hood, until
from tests.helpers.organisations import make_organisations, make_plan

pytestmark = pytest.mark.peer

OTHER = PROTOCOL + 7

LATER = """
import sys, time
from pathlib import Path
from pdsl.peer import messages
messages.PROTOCOL = int(sys.argv[2])
from pdsl.peer.identity import Identity
from pdsl.peer.membership import load_plan
from pdsl.peer.status import Events
from pdsl.peer.transport import Loop, Transport
own = Identity.load(Path(sys.argv[1]))
Transport(Loop(), own, load_plan(own), Events(own.folder / "events.jsonl"), 6).start()
print("listening", flush=True)
time.sleep(600)
"""


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def test_two_versions_refuse_each_other_by_name_on_both_sides(tmp_path: Path, loop: Loop) -> None:
    ada, ben = members = make_organisations(tmp_path, 2)
    plan = make_plan(members, timeouts=QUICK, graph={"kind": "full"})
    for member in members:
        join(member, plan)
    own = Events(ada.folder / "events.jsonl")
    peer = Transport(loop, ada, plan, own, D)
    command = [sys.executable, "-c", LATER, str(ben.folder), str(OTHER)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"listening\n"
            peer.start()
            with pytest.raises(QuorumError, match=f"ben rejects us: protocol {PROTOCOL} instead of {OTHER}"):
                peer.roll_call(1)
            until(lambda: own.counts["refused"] > 0)
            found = [finding.text for finding in doctor.examine(ada, plan) if finding.text.startswith("ben")]
        finally:
            process.kill()
            peer.stop()
    assert any(f"protocol {OTHER}, but {PROTOCOL} here" in text for text in found)
    (lost,) = [event for event in own.read() if event["event"] == "lost"]
    assert lost["why"] == f"rejects us: protocol {PROTOCOL} instead of {OTHER}"
    here = {(e["event"], e["reason"]) for e in own.read() if e["event"] != "lost"}
    there = {(e["event"], e["reason"]) for e in Events(ben.folder / "events.jsonl").read()}
    assert here == {
        ("rejected", f"protocol {PROTOCOL} instead of {OTHER}"),
        ("refused", f"protocol {OTHER} instead of {PROTOCOL}"),
    }
    assert there == {
        ("rejected", f"protocol {OTHER} instead of {PROTOCOL}"),
        ("refused", f"protocol {PROTOCOL} instead of {OTHER}"),
    }
    assert peer.state.present == frozenset() and peer.receipts.released_round == 0


@pytest.fixture
def hood(tmp_path: Path, loop: Loop) -> Iterator[Hood]:
    with run_hood(tmp_path, loop, 3, QUICK) as made:
        yield made


@pytest.mark.parametrize("path", ["/hello", "/fetch", "/goodbye", "/reverse"])
def test_a_request_of_another_version_changes_nothing(hood: Hood, path: str) -> None:
    before = hood.state(0), dict(hood.peers[0].state.departed)
    request = b'{"protocol": %d, "plan": "%s", "something": "new"}' % (OTHER, hood.plan.hash.encode())
    assert hood.call(hood.members[1], request, path) == (400, f"protocol {OTHER} instead of {PROTOCOL}")
    assert (hood.state(0), dict(hood.peers[0].state.departed)) == before


def test_any_version_is_described_to_neighbours_only(hood: Hood, tmp_path: Path) -> None:
    for request in (b"{}", b"\xff", b'{"protocol": 99}', b""):
        found = About.decode(hood.call(hood.members[1], request, "/about"))
        assert (found.protocol, found.plan) == (PROTOCOL, hood.plan.hash)
    stranger = make_organisations(tmp_path / "stranger", 1)[0]
    assert isinstance(hood.call(stranger, b"{}", "/about"), Exception)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"protocol": "2", "pdsl": "1"}', b'{"protocol": 9, "pdsl": "a b"}', b'{"protocol": 9, "pdsl": 1}',
     b'{"protocol": 2, "pdsl": "1.0", "plan": "x", "round": 1, "time": 0, "reaches_you": true, "served": [0, 0, ""]}',
     b'{"protocol": 2, "pdsl": "1.0", "served": [0, 0]}'],
)  # fmt: skip
def test_an_invalid_description_is_refused(content: bytes) -> None:
    with pytest.raises(RefusedError):
        About.decode(content.replace(b'"protocol": 2', b'"protocol": %d' % PROTOCOL))
