"""Mutual TLS between pinned peers: admission of callers, refusal of invalid messages, and silent neighbours."""

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import save

from pdsl.peer import tls
from pdsl.peer.identity import PINS, Identity
from pdsl.peer.membership import join
from pdsl.peer.messages import Header, Request, encode
from pdsl.peer.plan import Timeouts, TrainingPlan
from pdsl.peer.status import Events
from pdsl.peer.transport import Loop, Transport
from pdsl.peer.trust_store import TrustStore
from tests.helpers.organisations import make_organisations, make_plan, pickled

pytestmark = pytest.mark.peer

D, ROUNDS = 6, 40
QUICK = Timeouts(silence=1.5, deadline=3.0, start=2.0)
grpc = tls.load_grpc()


@dataclass
class Hood:
    """Running peers in one process."""

    loop: Loop
    members: list[Identity]
    plan: TrainingPlan
    peers: list[Transport]
    events: list[Events]

    def together(self, function: Any) -> list[Any]:
        """Call function(peer) for all peers at once."""
        with ThreadPoolExecutor(len(self.peers)) as pool:
            return list(pool.map(function, self.peers))

    def refusals(self, i: int) -> list[str]:
        return [str(event["reason"]) for event in self.events[i].read() if event["event"] == "refused"]

    def state(self, i: int) -> Any:
        state = self.peers[i].state
        return state.round, state.gathering, state.present, dict(state._messages), set(state.arrived), set(state.away)

    def call(self, by: Identity, content: bytes, method: str = "Hello", at: int = 0) -> Any:
        """Call peer `at` with the certificate of `by`. Returns the response or the status."""
        card = self.members[at].card
        channel = partial(tls.open_channel, grpc, by, card.name, card.address, [card.certificate], 10**6)
        return self.loop.run(_call(channel, content, method))


async def _call(make: Any, content: bytes, method: str) -> Any:
    channel = make()
    try:
        return await channel.unary_unary(f"/pdsl.Peer/{method}")(content, timeout=3)
    except grpc.aio.AioRpcError as e:
        return e.code().name, e.details()
    finally:
        await channel.close()


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@contextmanager
def run_hood(folder: Path, loop: Loop, count: int, timeouts: Timeouts) -> Iterator[Hood]:
    members = make_organisations(folder, count)
    plan = make_plan(members, timeouts=timeouts, rounds=ROUNDS)
    events = [Events(member.folder / "events.jsonl") for member in members]
    for member in members:
        join(member, plan)
    peers = [Transport(loop, member, plan, log, D) for member, log in zip(members, events, strict=True)]
    for peer in peers:
        peer.start()
    try:
        yield Hood(loop, members, plan, peers, events)
    finally:
        for peer in peers:
            peer.stop()


@pytest.fixture
def hood(tmp_path: Path, loop: Loop) -> Iterator[Hood]:
    with run_hood(tmp_path, loop, 3, QUICK) as made:
        yield made


def row(peer: Transport) -> torch.Tensor:
    return torch.full((D,), float(peer.me + 1))


def exchange(t: int, phase: int) -> Any:
    return lambda peer: peer.exchange(t, phase, dict.fromkeys(peer.state.present, row(peer)))


def test_exchange_between_all_peers(hood: Hood) -> None:
    assert hood.together(lambda peer: peer.roll_call(1).present) == [{1, 2}, {0, 2}, {0, 1}]
    for phase in range(2):
        for i, got in enumerate(hood.together(exchange(1, phase))):
            assert {j: v.tolist() for j, v in got.items()} == {j: [j + 1.0] * D for j in range(3) if j != i}
    again = hood.call(hood.members[1], Request(hood.plan.hash, 1, 0).encode(), "Fetch")
    assert again == hood.call(hood.members[1], Request(hood.plan.hash, 1, 0).encode(), "Fetch")  # the same bytes
    assert hood.refusals(0) == hood.refusals(1) == []


def test_unpinned_callers_are_rejected(hood: Hood, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = hood.state(0)
    hello = Request(hood.plan.hash, 1, 0).encode()
    stranger = Identity.create(tmp_path / "stranger", "stranger", "127.0.0.1:9")
    namesake = Identity.create(tmp_path / "namesake", "ben", "127.0.0.1:9")  # a neighbour's name, another key
    for who in (stranger, namesake):
        assert hood.call(who, hello)[0] == "UNAVAILABLE"
        assert "CERTIFICATE_VERIFY_FAILED" in capfd.readouterr().err  # from gRPC
    host, _, port = hood.members[0].card.address.partition(":")
    card = hood.members[0].card
    bare = grpc.ssl_channel_credentials(card.certificate.encode())
    for channel in (
        partial(grpc.aio.secure_channel, card.address, bare, options=[("grpc.ssl_target_name_override", card.name)]),
        partial(grpc.aio.insecure_channel, card.address),
    ):
        assert hood.loop.run(_call(channel, hello, "Hello"))[0] == "UNAVAILABLE"
    assert "PEER_DID_NOT_RETURN_A_CERTIFICATE" in capfd.readouterr().err
    with socket.create_connection((host, int(port))) as plain:
        plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        plain.settimeout(5)
        assert b"HTTP" not in plain.recv(100)
    assert hood.state(0) == before


@pytest.mark.parametrize(("version", "served"), [(ssl.TLSVersion.TLSv1_2, False), (ssl.TLSVersion.TLSv1_3, True)])
def test_only_tls_1_3(hood: Hood, version: ssl.TLSVersion, served: bool) -> None:
    """A client with a pinned certificate and another TLS library."""
    own, card = hood.members[1], hood.members[0].card
    context = ssl.create_default_context(cadata=card.certificate)
    context.minimum_version = context.maximum_version = version
    context.load_cert_chain(own.folder / "certificate.pem", own.folder / "key.pem")
    context.set_alpn_protocols(["h2"])
    host, _, port = card.address.partition(":")

    def connect() -> str | None:
        with socket.create_connection((host, int(port))) as plain:
            try:
                with context.wrap_socket(plain, server_hostname=card.name) as secure:
                    return secure.version()
            except (ssl.SSLError, ConnectionError):
                return None

    assert connect() == ("TLSv1.3" if served else None)


def test_a_client_refuses_tls_1_2(hood: Hood) -> None:
    own, other = hood.members[0], hood.members[1]
    seen: list[str] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(other.folder / "certificate.pem", other.folder / "key.pem")
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def serve() -> None:
            connection, _ = listener.accept()
            try:
                context.wrap_socket(connection, server_side=True)
                seen.append("connected")
            except ssl.SSLError as e:
                seen.append(str(e.reason))

        served = pool.submit(serve)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        channel = partial(tls.open_channel, grpc, own, other.card.name, address, [other.card.certificate], 1000)
        assert hood.loop.run(_call(channel, b"", "Hello"))[0] == "UNAVAILABLE"
        served.result(5)
    assert seen == ["NO_SHARED_CIPHER"]


def test_a_client_accepts_only_the_pin_of_its_callee(hood: Hood) -> None:
    own, ben, cleo = hood.members
    for name, pin in (("ben", ben), ("cleo", cleo)):  # cleo listens: ben's pin fails
        channel = partial(tls.open_channel, grpc, own, name, cleo.card.address, [pin.card.certificate], 1000)
        answer = hood.loop.run(_call(channel, Request(hood.plan.hash, 0, 0).encode(), "Hello"))
        assert (answer[0] == "UNAVAILABLE") == (name == "ben")
    channel = partial(tls.open_channel, grpc, own, "ben", cleo.card.address, [cleo.card.certificate], 1000)
    assert hood.loop.run(_call(channel, b"", "Hello"))[0] == "UNAVAILABLE"


def test_invalid_requests_are_refused_with_a_reason_and_change_nothing(hood: Hood, tmp_path: Path) -> None:
    hood.together(lambda peer: peer.roll_call(1))
    before = hood.state(0)
    good = Request(hood.plan.hash, 1, 0)
    other_plan = make_plan(hood.members, timeouts=QUICK, rounds=ROUNDS + 1)
    witness = tmp_path / "ran"
    cases = [
        (pickled(witness), "header"),
        (b"", "header"),
        (b"[" * 900, "header"),
        (replace(good, plan=other_plan.hash).encode(), "plan"),
        (replace(good, round=-1).encode(), "round"),
        (replace(good, round=2**70).encode(), "round"),
        (replace(good, phase=-2).encode(), "phase"),
    ]
    for content, reason in cases:
        for method in ("Hello", "Fetch"):
            assert hood.call(hood.members[1], content, method) == ("INVALID_ARGUMENT", reason)
    assert hood.call(hood.members[1], bytes(2000))[0] == "RESOURCE_EXHAUSTED"  # by gRPC itself
    assert hood.call(hood.members[1], good.encode(), "Else")[0] == "UNIMPLEMENTED"
    assert hood.refusals(0) == [reason for _, reason in cases for _ in range(2)]
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
    assert hood.call(ben, hello) == ("PERMISSION_DENIED", "certificate not pinned")
    assert hood.refusals(0) == ["certificate not pinned"]
    client = hood.peers[0].client
    assert hood.loop.run(client.hello(1, 0)) is None  # and ada does not call ben either
    assert client.neighbours[1].state == "no pin" and client.neighbours[1].channel is None
    old, new = ben.card, Identity.renew(ben.folder)
    for card in (old, new.card):
        pins.add(card)
    hood.peers[0].stop()  # a new process accepts both
    again = Transport(hood.loop, ada, hood.plan, hood.events[0], D)
    again.start()
    hood.peers[0] = again
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


def run_rounds(peer: Transport, end: Event) -> list[tuple[float, frozenset[int]]]:
    """Run rounds of two phases until `end` or the last round. Returns the duration and the neighbours of each."""
    found, t = [], 1
    while t <= ROUNDS and not end.is_set():
        began = time.monotonic()
        present, jump = peer.roll_call(t)
        for phase in range(0 if jump else 2):
            peer.exchange(t, phase, dict.fromkeys(peer.state.present, row(peer)))
        found.append((time.monotonic() - began, present))
        t = jump or t + 1
        time.sleep(0.1)
    peer.finish()
    return found


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


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_quorum_is_required(hood: Hood) -> None:
    hood.together(lambda peer: peer.roll_call(1))
    for peer in hood.peers[1:]:
        peer.stop()
    with pytest.raises(Exception, match="the plan requires 1"):
        hood.peers[0].roll_call(2)


def test_open_requests_per_neighbour_are_limited(hood: Hood) -> None:
    async def many() -> list[Any]:
        card = hood.members[0].card
        channel = tls.open_channel(grpc, hood.members[1], card.name, card.address, [card.certificate], 10**6)
        call = channel.unary_unary("/pdsl.Peer/Hello")
        content = Request(hood.plan.hash, 99, 0).encode()  # the answer is delayed
        answers = await asyncio.gather(*(call(content, timeout=4) for _ in range(60)), return_exceptions=True)
        await channel.close()
        return answers

    answers = hood.loop.run(many())
    refused = [answer.code().name for answer in answers if not isinstance(answer, bytes)]
    assert refused and set(refused) <= {"UNAVAILABLE", "INVALID_ARGUMENT"}  # gRPC's limit or ours
    assert isinstance(hood.call(hood.members[1], Request(hood.plan.hash, 0, 0).encode()), bytes)
    assert hood.peers[0]._server._open[1] == 0
