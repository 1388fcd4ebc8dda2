"""Peers that cannot be called: reversed connections, relays that cannot read, and HTTP proxies."""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from pdsl.peer import relay, streams
from pdsl.peer.http1 import Stream
from pdsl.peer.identity import PINS, Identity
from pdsl.peer.membership import join
from pdsl.peer.messages import RelayRequest, Request
from pdsl.peer.plan import Timeouts, TrainingPlan
from pdsl.peer.routes import find_contacts, find_relays
from pdsl.peer.runner import run
from pdsl.peer.transport import Loop
from pdsl.peer.trust_store import TrustStore
from tests.helpers.hood import D, call, exchange, run_hood, until
from tests.helpers.organisations import make_organisations, make_plan, write_digits
from tests.helpers.proxy import Proxy
from tests.helpers.refusals import refused
from tests.peer.test_runner import combined_sha256, simulate, use_test_key

pytestmark = pytest.mark.peer

TIMEOUTS = Timeouts(silence=8.0, patience=4.0, deadline=30.0, start=30.0)


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("count", "without", "kind"),
    [(3, {1}, "full"), (4, {1, 3}, "full"), (4, {2, 3}, "ring"), (4, {1, 2, 3}, "full"), (2, {0}, "full")],
)
def test_peers_without_an_address_exchange_messages(
    tmp_path: Path, loop: Loop, count: int, without: set[int], kind: str
) -> None:
    with run_hood(tmp_path, loop, count, TIMEOUTS, without, graph={"kind": kind, "agents": count}) as hood:
        for t in (1, 2):
            everyone = [set(hood.plan.neighbours(i)) for i in range(count)]
            assert hood.together(lambda peer, t=t: peer.roll_call(t).present) == everyone
            for phase in range(3):
                for i, got in enumerate(hood.together(exchange(t, phase))):
                    assert {j: v.tolist() for j, v in got.items()} == {j: [j + 1.0] * D for j in everyone[i]}
        assert all(hood.refusals(i) == [] for i in range(count))


def test_two_of_four_organisations_behind_firewalls_have_the_same_models_as_in_the_open(
    tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_test_key(monkeypatch)
    members = make_organisations(tmp_path, 4, without_address={1, 2})
    data, task = write_digits(members)
    plan = make_plan(members, task, TIMEOUTS, graph={"kind": "full"})
    for member in members:
        join(member, plan)
    with ThreadPoolExecutor(4) as pool:
        summaries = list(pool.map(lambda member: run(member, loop), members))
    assert combined_sha256(summaries) == simulate(plan, data).models_sha256
    assert all(summary["rounds_run"] == 3 and not summary["neighbour_rounds_lost"] for summary in summaries)


def test_listen_none_works_with_an_address_in_the_card(tmp_path: Path, loop: Loop) -> None:
    with run_hood(tmp_path, loop, 3, TIMEOUTS) as hood:
        hood.peers[2].stop()
        again = type(hood.peers[2])(loop, hood.members[2], hood.plan, hood.events[2], D)
        assert again.start("none") == 0
        hood.peers[2] = again
        assert hood.together(lambda peer: peer.roll_call(1).present) == [{1, 2}, {0, 2}, {0, 1}]
        assert set(hood.together(exchange(1, 0))[0]) == {1, 2}


async def tap(see: Callable[[bytes], bytes], a: Stream, b: Stream, idle: float) -> None:
    """A relay that sees all bytes and passes what `see` returns."""

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            target.write(see(data))

    tasks = [asyncio.create_task(copy(a[0], b[1])), asyncio.create_task(copy(b[0], a[1]))]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def test_a_relay_passes_no_byte_that_it_could_read(tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[bytes] = []
    monkeypatch.setattr(relay, "pass_bytes", partial(tap, lambda data: passed.append(data) or data))
    with run_hood(tmp_path, loop, 3, TIMEOUTS, {1, 2}) as hood:
        hood.together(lambda peer: peer.roll_call(1))
        assert set(hood.together(exchange(1, 0))[1]) == {0, 2}
    content = b"".join(passed)
    assert content[:2] == b"\x16\x03"  # a TLS handshake
    for secret in (hood.plan.hash.encode(), b"HTTP/1.1", b"hello", torch.full((D,), 3.0).numpy().tobytes()):
        assert secret not in content


def test_a_relay_that_changes_a_byte_breaks_the_connection_and_nothing_else(
    tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "pass_bytes", partial(tap, lambda data: data[:-1] + bytes([data[-1] ^ 1])))
    quick = Timeouts(silence=1.5, deadline=3.0, start=3.0)
    with run_hood(tmp_path, loop, 3, quick, {1, 2}) as hood:
        assert hood.together(lambda peer: peer.roll_call(1).present) == [{1, 2}, {0}, {0}]
        assert [set(got) for got in hood.together(exchange(1, 0))] == [{1, 2}, {0}, {0}]


def test_a_relay_serves_only_pairs_of_the_plan(tmp_path: Path, loop: Loop) -> None:
    with run_hood(tmp_path, loop, 4, TIMEOUTS, {1, 2}, graph={"kind": "full", "agents": 4}) as hood:
        ada, ben, _, dora = hood.members
        for by, peer in ((dora, 1), (ben, 3), (ben, 0), (ben, 99)):
            body = RelayRequest(hood.plan.hash, peer).encode()
            for path in ("/connect", "/listen"):
                assert loop.run(call(by, ada.card, body, path)) == (400, "relay")


def test_a_relay_that_is_no_neighbour_gets_no_messages(tmp_path: Path, loop: Loop) -> None:
    """On a ring of five, the relays of two members include one that is not their neighbour."""
    with run_hood(tmp_path, loop, 5, TIMEOUTS, {0, 1}) as hood:
        assert find_relays(hood.plan, 0, 1) == [2, 4, 3]
        assert 3 in find_contacts(hood.plan, 0) and 0 in find_contacts(hood.plan, 3)
        stranger = hood.members[1]
        hello = Request(hood.plan.hash, 1, 0).encode()
        assert loop.run(call(stranger, hood.members[3].card, hello, "/hello")) == (404, "path")
        assert loop.run(call(stranger, hood.members[3].card, hello, "/reverse")) == (400, "not a neighbour")
        hood.peers[2].stop()
        hood.peers[4].stop()  # the relays that are neighbours
        first, second = hood.peers[:2]
        for peer, other in ((first, 1), (second, 0)):
            peer.calls.neighbours[other].pool.close()  # the tunnels through them are gone
            before = time.monotonic()
            until(lambda peer=peer, other=other, before=before: peer.state.last_contact[other] > before)


def test_relays_prefer_common_neighbours(tmp_path: Path) -> None:
    plan: TrainingPlan = make_plan(make_organisations(tmp_path, 6, {2, 3}))
    assert find_relays(plan, 2, 3)[:2] == [1, 4] and find_relays(plan, 1, 2) == []
    assert set(find_contacts(plan, 1)) == {0, 2, 3} and find_contacts(plan, 5) == [0, 4]
    with refused("no member has an address"):
        make_plan(make_organisations(tmp_path / "all", 3, {0, 1, 2}))


def test_a_proxy_of_the_environment_is_used(tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = Proxy(password="user:p@ss")
    proxy.start()
    monkeypatch.setattr(streams.ipaddress, "ip_address", lambda host: streams.ipaddress.IPv4Address("192.0.2.1"))
    for name in ("no_proxy", "NO_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with run_hood(tmp_path, loop, 3, TIMEOUTS) as hood:
        hello = Request(hood.plan.hash, 0, 0).encode()
        ada, ben, _ = hood.members
        monkeypatch.setenv("https_proxy", f"http://user:p%40ss@127.0.0.1:{proxy.port}")
        assert isinstance(hood.call(ben, hello), bytes)
        assert ada.card.address in proxy.targets
        monkeypatch.setenv("https_proxy", f"http://user:wrong@127.0.0.1:{proxy.port}")
        assert isinstance(hood.call(ben, hello), ConnectionError)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert isinstance(hood.call(ben, hello), bytes)
    proxy.server.close()


def test_a_local_neighbour_needs_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    assert streams.find_proxy("127.0.0.1") is streams.find_proxy("::1") is streams.find_proxy("localhost") is None
    assert streams.find_proxy("peer.example") == "http://proxy.example:3128"


def test_reversed_connections_of_a_revoked_neighbour_are_closed(tmp_path: Path, loop: Loop) -> None:
    with run_hood(tmp_path, loop, 2, TIMEOUTS, {1}, graph={"kind": "full", "agents": 2}) as hood:
        ada, _ = hood.peers
        until(lambda: ada.state.reaches(1))
        TrustStore(hood.members[0].folder / PINS).revoke(hood.members[1].card.fingerprint)
        assert loop.run(ada.calls.hello(1, 0)) is None
        assert ada.calls.neighbours[1].state == "no pin" and not ada.calls.neighbours[1].pool.is_open


def test_an_identity_without_an_address(tmp_path: Path) -> None:
    made = Identity.create(tmp_path / "a", "a", "none")
    assert Identity.load(tmp_path / "a").card.address == made.card.address == "none"
    with refused("host:port"):
        Identity.create(tmp_path / "b", "b", "nowhere")


def test_a_relay_closes_connections_of_a_revoked_member(tmp_path: Path, loop: Loop) -> None:
    with run_hood(tmp_path, loop, 3, TIMEOUTS, {1, 2}) as hood:
        until(lambda: hood.peers[1].state.reaches(2) and hood.peers[2].state.reaches(1))
        TrustStore(hood.members[0].folder / PINS).revoke(hood.members[1].card.fingerprint)
        ends = hood.peers[0]._server._relay._ends
        until(lambda: all(j != 1 or end.writer.is_closing() for end, j in list(ends.items())))
        until(lambda: not hood.peers[1].calls.neighbours[2].pool.is_open)


def test_connections_that_were_dropped_silently_are_renewed(tmp_path: Path, loop: Loop) -> None:
    """The neighbour has lost its ends of all connections, and no end of them is closed."""
    quick = Timeouts(silence=3.0, patience=2.0, deadline=20.0, start=20.0)
    with run_hood(tmp_path, loop, 2, quick, {1}, graph={"kind": "full", "agents": 2}) as hood:
        ada = hood.peers[0]
        until(lambda: ada.state.reaches(1))
        pool = ada.calls.neighbours[1].pool
        kept = pool._idle
        pool._idle, pool._reversed = [], []
        until(lambda: bool(pool._reversed))
        assert all(connection not in kept for connection in pool._reversed)
