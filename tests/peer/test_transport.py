"""Mutual TLS between pinned peers: admission of callers, refusal of invalid messages, and silent neighbours."""

import asyncio
import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import save

from pdsl.peer.http1 import FAILED
from pdsl.peer.identity import PINS, Identity, PeerInfo
from pdsl.peer.messages import Header, Request, encode
from pdsl.peer.plan import Timeouts
from pdsl.peer.server import MAX_CONNECTIONS
from pdsl.peer.transport import Loop, Transport
from pdsl.peer.trust_store import TrustStore
from tests.helpers.hood import QUICK, ROUNDS, D, Hood, call, exchange, row, run_hood, run_rounds, until
from tests.helpers.organisations import make_plan, pickled

pytestmark = pytest.mark.peer


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def hood(tmp_path: Path, loop: Loop) -> Iterator[Hood]:
    with run_hood(tmp_path, loop, 3, QUICK) as made:
        yield made


def test_exchange_between_all_peers(hood: Hood) -> None:
    assert hood.together(lambda peer: peer.roll_call(1).present) == [{1, 2}, {0, 2}, {0, 1}]
    for phase in range(2):
        for i, got in enumerate(hood.together(exchange(1, phase))):
            assert {j: v.tolist() for j, v in got.items()} == {j: [j + 1.0] * D for j in range(3) if j != i}
    again = hood.call(hood.members[1], Request(hood.plan.hash, 1, 0).encode(), "/fetch")
    assert again == hood.call(hood.members[1], Request(hood.plan.hash, 1, 0).encode(), "/fetch")  # the same bytes
    assert hood.refusals(0) == hood.refusals(1) == []


def connect(context: ssl.SSLContext, card: PeerInfo) -> str | None:
    """TLS version of a connection after one request, which TLS 1.3 needs to report a refusal; None if refused."""
    host, _, port = card.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=5) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=card.name) as secure:
                secure.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                return secure.version() if secure.recv(100) else None
        except (ssl.SSLError, ConnectionError):
            return None


def test_unpinned_callers_are_rejected(hood: Hood, tmp_path: Path) -> None:
    before = hood.state(0)
    hello = Request(hood.plan.hash, 1, 0).encode()
    stranger = Identity.create(tmp_path / "stranger", "stranger", "127.0.0.1:9")
    namesake = Identity.create(tmp_path / "namesake", "ben", "127.0.0.1:9")  # a neighbour's name, another key
    for who in (stranger, namesake):
        assert isinstance(hood.call(who, hello), FAILED)
    card = hood.members[0].card
    assert connect(ssl.create_default_context(cadata=card.certificate), card) is None  # no certificate
    host, _, port = card.address.partition(":")
    with socket.create_connection((host, int(port))) as plain:
        plain.sendall(b"POST /hello HTTP/1.1\r\nHost: ada\r\n\r\n")
        plain.settimeout(5)
        assert b"HTTP" not in plain.recv(100)
    until(lambda: len(hood.refusals(0)) == 4)
    assert hood.refusals(0) == [
        "TLS: self-signed certificate",
        "TLS: self-signed certificate",
        "TLS: PEER_DID_NOT_RETURN_A_CERTIFICATE",
        "TLS: HTTP_REQUEST",
    ]
    assert hood.state(0) == before


@pytest.mark.parametrize(("version", "served"), [(ssl.TLSVersion.TLSv1_2, False), (ssl.TLSVersion.TLSv1_3, True)])
def test_only_tls_1_3(hood: Hood, version: ssl.TLSVersion, served: bool) -> None:
    """A client with a pinned certificate."""
    own, card = hood.members[1], hood.members[0].card
    context = ssl.create_default_context(cadata=card.certificate)
    context.minimum_version = context.maximum_version = version
    context.load_cert_chain(own.folder / "certificate.pem", own.folder / "key.pem")
    assert connect(context, card) == ("TLSv1.3" if served else None)


def serve_once(context: ssl.SSLContext, own: Identity, callee: PeerInfo, loop: Loop) -> tuple[Any, str]:
    """Call a server with this TLS context, pinning the callee's certificate. Returns both ends' outcomes."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def serve() -> str:
            connection, _ = listener.accept()
            try:
                with context.wrap_socket(connection, server_side=True) as secure:
                    return "connected" if secure.recv(1) else "closed"
            except (ssl.SSLError, ConnectionError) as e:
                return str(getattr(e, "reason", None))

        served = pool.submit(serve)
        card = replace(callee, address=f"127.0.0.1:{listener.getsockname()[1]}")
        return loop.run(call(own, card, b"", "/hello")), served.result(5)


def test_a_client_refuses_tls_1_2(hood: Hood) -> None:
    own, other = hood.members[0], hood.members[1]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(other.folder / "certificate.pem", other.folder / "key.pem")
    outcome, seen = serve_once(context, own, other.card, hood.loop)
    assert isinstance(outcome, ssl.SSLError) and seen == "UNSUPPORTED_PROTOCOL"


def test_a_client_accepts_only_the_pin_of_its_callee(hood: Hood) -> None:
    own, ben, cleo = hood.members
    content = Request(hood.plan.hash, 0, 0).encode()
    assert isinstance(hood.loop.run(call(own, cleo.card, content, "/hello")), bytes)
    for card in (replace(ben.card, address=cleo.card.address), replace(cleo.card, name="ben")):  # cleo listens
        assert isinstance(hood.loop.run(call(own, card, content, "/hello")), ssl.SSLError)


def test_invalid_requests_are_refused_with_a_reason_and_change_nothing(hood: Hood, tmp_path: Path) -> None:
    hood.together(lambda peer: peer.roll_call(1))
    before = hood.state(0)
    good = Request(hood.plan.hash, 1, 0)
    other_plan = make_plan(hood.members, timeouts=QUICK, rounds=ROUNDS + 1)
    witness = tmp_path / "ran"
    cases = [
        (pickled(witness), "header"),
        (b"{}", "protocol"),
        (b"", "header"),
        (b"[" * 900, "header"),
        (replace(good, plan=other_plan.hash).encode(), "plan"),
        (replace(good, round=-1).encode(), "round"),
        (replace(good, round=2**70).encode(), "round"),
        (replace(good, round=ROUNDS + 2).encode(), "round"),
        (replace(good, phase=-2).encode(), "phase"),
    ]
    for content, reason in cases:
        for path in ("/hello", "/fetch"):
            assert hood.call(hood.members[1], content, path) == (400, reason)
    assert hood.call(hood.members[1], bytes(2000)) == (413, "size")
    assert hood.call(hood.members[1], good.encode(), "/else") == (404, "path")
    assert hood.refusals(0) == [*(reason for _, reason in cases for _ in range(2)), "size"]
    assert not witness.exists() and hood.state(0) == before


def bad_messages(plan: str, witness: Path) -> list[tuple[bytes, str]]:
    """Invalid messages from ben to ada in phase 1 of round 2, with the reason for each refusal."""
    header = Header(plan, 2, 1, sender=1, receiver=0)
    v = torch.ones(D)
    named = header.as_metadata()
    return [
        (encode(replace(header, round=1), v), "round"),  # replayed from an earlier round
        (encode(replace(header, phase=0), v), "phase"),  # or from an earlier phase
        (encode(replace(header, sender=2), v), "sender"),  # of another sender
        (encode(replace(header, plan="0" * 64), v), "plan"),
        (save({"v": v.double()}, named), "dtype"),
        (save({"v": v[None]}, named), "shape"),
        (encode(header, v.clone().fill_(float("nan"))), "not finite"),
        (encode(header, torch.ones(D + 1)), "shape"),
        (encode(header, v) + b"\0", "size"),
        (encode(header, torch.ones(100_000)), "size"),
        (pickled(witness), "header"),
    ]


def test_invalid_messages_exclude_their_sender_from_the_round(hood: Hood, tmp_path: Path) -> None:
    ada, ben, cleo = hood.peers
    expected = []
    for content, reason in bad_messages(hood.plan.hash, tmp_path / "ran"):
        hood.together(lambda peer: peer.roll_call(2))
        hood.loop.run(_publish(ben, 1, {0: content, 2: encode(Header(hood.plan.hash, 2, 1, 1, 2), row(ben))}))
        with ThreadPoolExecutor(2) as pool:
            ada_got, cleo_got = pool.map(exchange(2, 1), (ada, cleo))
        assert set(ada_got) == {2} and set(cleo_got) == {0, 1}
        assert ada.state.present == {2}
        expected.append(reason)
    assert hood.refusals(0) == expected
    assert not (tmp_path / "ran").exists()
    assert hood.refusals(2) == []


async def _publish(peer: Transport, phase: int, messages: dict[int, bytes]) -> None:
    peer.state.publish(phase, messages)


def test_a_dropped_neighbour_drops_this_peer_too(hood: Hood) -> None:
    ada, ben, _ = hood.peers
    hood.together(lambda peer: peer.roll_call(1))
    hood.loop.run(_drop(ada, 1))
    with ThreadPoolExecutor(3) as pool:
        got = list(pool.map(exchange(1, 0), hood.peers))
    assert [set(g) for g in got] == [{2}, {2}, {0, 1}]
    assert ben.state.present == {2}
    (lost,) = [event for event in hood.events[1].read() if event["event"] == "lost"]
    assert (lost["who"], lost["why"], lost["round"]) == ("ada", "out", 1)


async def _drop(peer: Transport, j: int) -> None:
    peer.state.drop(j)


def test_revocation_is_immediate_and_rotation_needs_no_pause(hood: Hood) -> None:
    ada, ben = hood.members[:2]
    hello = Request(hood.plan.hash, 0, 0).encode()
    assert isinstance(hood.call(ben, hello), bytes)
    pins = TrustStore(ada.folder / PINS)
    pins.revoke(ben.card.fingerprint)
    assert isinstance(hood.call(ben, hello), FAILED)
    assert "TLS: self-signed certificate" in hood.refusals(0)
    client = hood.peers[0].calls
    assert hood.loop.run(client.hello(1, 0)) is None  # and ada does not call ben either
    assert client.neighbours[1].state == "no pin" and not client.neighbours[1].pool.is_open
    old, new = ben.card, Identity.renew(ben.folder)
    for card in (old, new.card):
        pins.add(card)
    assert isinstance(hood.call(ben, hello), bytes) and isinstance(hood.call(new, hello), bytes)


def test_a_silent_neighbour_is_skipped_and_rejoins(hood: Hood) -> None:
    assert len(hood.together(lambda peer: peer.roll_call(1))) == 3
    hood.peers[2].stop()
    two = hood.peers[:2]
    with ThreadPoolExecutor(2) as pool:
        assert [set(g) for g in pool.map(exchange(1, 0), two)] == [{1}, {0}]
        for t in (2, 3):
            assert list(pool.map(lambda peer, t=t: peer.roll_call(t).present, two)) == [{1}, {0}]
    again = Transport(hood.loop, hood.members[2], hood.plan, hood.events[2], D)
    again.start()
    hood.peers[2] = again
    assert again.roll_call(2).jump == 4  # they run round 3
    with ThreadPoolExecutor(3) as pool:
        back = pool.submit(again.roll_call, 4)
        until(lambda: not any(peer.state.away for peer in two))  # they wait for it again
        assert [o.present for o in pool.map(lambda peer: peer.roll_call(4), two)] == [{1, 2}, {0, 2}]
        assert back.result().present == {0, 1}


def test_a_silent_peer_delays_only_its_neighbours(tmp_path: Path, loop: Loop) -> None:
    """Ring of six: when the first peer falls silent, only the second and the sixth wait for `silence` seconds."""
    silence = 2.5
    with run_hood(tmp_path, loop, 6, Timeouts(silence=silence, patience=0.4, deadline=20.0, start=20.0)) as hood:
        over = [Event() for _ in hood.peers]
        with ThreadPoolExecutor(6) as pool:
            lives = [pool.submit(run_rounds, peer, end) for peer, end in zip(hood.peers, over, strict=True)]
            until(lambda: hood.peers[0].state.round >= 8)
            over[0].set()  # no more rounds
            hood.peers[0].stop()  # no more responses
            second, *others, sixth = (life.result(60) for life in lives[1:])
    for delayed in (second, sixth):
        assert max(seconds for seconds, _ in delayed) > 0.8 * silence
        assert 0 not in delayed[-1][1] and len(delayed[-1][1]) == 1  # it has rejoined its other neighbour
        assert len(delayed) < ROUNDS
    for free in others:
        assert max(seconds for seconds, _ in free[1:]) < 0.8 * silence and len(free) == ROUNDS
        assert len(free[-1][1]) == 2
    assert {(e["who"], e["why"]) for e in hood.events[2].read() if e["event"] == "lost"} == {("ben", "blocked")}


def test_the_quorum_is_required(hood: Hood) -> None:
    hood.together(lambda peer: peer.roll_call(1))
    for peer in hood.peers[1:]:
        peer.stop()
    with pytest.raises(Exception, match="the plan requires 1"):
        hood.peers[0].roll_call(2)


def test_connections_per_neighbour_are_limited(hood: Hood) -> None:
    """A neighbour that opens more connections closes its own oldest ones."""

    async def many() -> list[Any]:
        card = hood.members[0].card
        content = Request(hood.plan.hash, 99, 0).encode()  # the answer is delayed
        return await asyncio.gather(*(call(hood.members[1], card, content, "/hello") for _ in range(60)))

    hood.peers[0].state.poll = 2.5
    answers = hood.loop.run(many())
    assert sum(isinstance(answer, bytes) for answer in answers) <= MAX_CONNECTIONS
    assert isinstance(hood.call(hood.members[1], Request(hood.plan.hash, 0, 0).encode()), bytes)
    assert len(hood.peers[0]._server._connections[1]) <= MAX_CONNECTIONS


def test_a_goodbye_ends_a_roll_call_and_an_exchange_that_wait_for_the_peer(tmp_path: Path, loop: Loop) -> None:
    slow = Timeouts(silence=60.0, patience=30.0, deadline=100.0, start=100.0)
    with run_hood(tmp_path, loop, 3, slow) as hood, ThreadPoolExecutor(2) as pool:
        hood.together(lambda peer: peer.roll_call(1))
        start = time.monotonic()
        waiting = [pool.submit(exchange(1, 0), peer) for peer in hood.peers[:2]]
        time.sleep(1.0)
        hood.peers[2].say_goodbye()
        assert [set(life.result(30)) for life in waiting] == [{1}, {0}]
        assert [life.result(30).present for life in [pool.submit(p.roll_call, 2) for p in hood.peers[:2]]] == [{1}, {0}]
        assert time.monotonic() - start < 20


def test_a_goodbye_during_a_roll_call_ends_the_wait(tmp_path: Path, loop: Loop) -> None:
    slow = Timeouts(silence=60.0, patience=30.0, deadline=100.0, start=100.0)
    with run_hood(tmp_path, loop, 3, slow) as hood, ThreadPoolExecutor(2) as pool:
        hood.together(lambda peer: peer.roll_call(1))
        hood.together(exchange(1, 0))
        start = time.monotonic()
        waiting = [pool.submit(peer.roll_call, 2) for peer in hood.peers[:2]]
        time.sleep(1.0)
        hood.peers[2].say_goodbye()
        assert [life.result(30).present for life in waiting] == [{1}, {0}]
        assert time.monotonic() - start < 20
