"""Attacks over the network, by outsiders and by a lying neighbour; each test is named after what it prevents."""

import asyncio
import datetime
import gc
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event
from typing import Any

import h11
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from pdsl.peer import identity
from pdsl.peer.attendance import QuorumError
from pdsl.peer.connections import MAX_REVERSED, ConnectionPool, NoPinError
from pdsl.peer.http1 import Response, TooLargeError
from pdsl.peer.identity import PINS, RUN, VALIDITY, Identity
from pdsl.peer.membership import join
from pdsl.peer.messages import Answer, Request
from pdsl.peer.server import MAX_CONNECTIONS, REQUEST_BURST, REQUEST_RATE
from pdsl.peer.status import Events
from pdsl.peer.transport import Loop, Transport
from pdsl.peer.trust_store import TrustStore
from tests.helpers.hood import QUICK, ROUNDS, D, Hood, call, exchange, run_hood, run_rounds, until
from tests.helpers.organisations import make_organisations, make_plan

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


LISTEN = """
import resource, sys, time
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256))
from pdsl.peer.identity import Identity
from pdsl.peer.membership import load_plan
from pdsl.peer.status import Events
from pdsl.peer.transport import Loop, Transport
own = Identity.load(Path(sys.argv[1]))
Transport(Loop(), own, load_plan(own), Events(own.folder / "events.jsonl"), 6).start()
print("listening", flush=True)
time.sleep(600)
"""


def test_idle_connections_of_an_outsider_cannot_end_a_peer(tmp_path: Path) -> None:
    """Four times as many connections as the process may have open files."""
    ada, ben, _ = members = make_organisations(tmp_path, 3)
    plan = make_plan(members, timeouts=QUICK)
    for member in members:
        join(member, plan)
    host, _, port = ada.card.address.partition(":")
    command = [sys.executable, "-c", LISTEN, str(ada.folder)]
    hello = Request(plan.hash, 0, 0).encode()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process, ExitStack() as stack:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"listening\n"
            for _ in range(1010):
                stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
            until(lambda: isinstance(asyncio.run(call(ben, ada.card, hello, "/hello")), bytes))
            assert process.poll() is None
            open_files = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
            assert open_files < 128  # idle connections are dropped, the oldest first
        finally:
            process.kill()
    assert "too many connections" in (ada.folder / "events.jsonl").read_text()


def test_an_idle_connection_is_closed_after_the_handshake_timeout(hood: Hood, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdsl.peer.listener.HANDSHAKE_SECONDS", 0.3)
    host, _, port = hood.members[0].card.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as idle:
        start = time.monotonic()
        assert idle.recv(1) == b""
        assert time.monotonic() - start < 5
    until(lambda: hood.refusals(0) == ["TLS: timeout"])


def test_exhausted_file_descriptors_are_not_a_damaged_pin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (ben,) = make_organisations(tmp_path, 1)
    store = TrustStore(tmp_path / PINS)
    store.add(ben.card)
    assert store.accepted("ada") == (ben.card.certificate,)

    def fail(path: Path) -> bytes:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("pdsl.peer.trust_store.read_file", fail)
    assert store.accepted("ada") == (ben.card.certificate,)  # not read again
    with pytest.raises(identity.PdslError, match="ulimit") as caught:
        store.certificates("ada")
    assert "pdsl peer pin" not in str(caught.value)


def test_an_expired_or_future_certificate_is_accepted_if_pinned(
    tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong clock has the same effect as these dates, and must not stop a peer."""
    for years in ((2000, 2001), (2090, 2091)):
        dates = tuple(datetime.datetime(year, 1, 1) for year in years)
        monkeypatch.setattr(identity, "VALIDITY", dates)
        with run_hood(tmp_path / str(years[0]), loop, 3, QUICK) as hood:
            assert isinstance(hood.call(hood.members[1], Request(hood.plan.hash, 0, 0).encode()), bytes)


def issue(issuer: Identity, name: str) -> tuple[str, bytes]:
    """A certificate for a new key, signed with the key of `issuer`; and the key."""
    key = ec.generate_private_key(ec.SECP256R1())
    old = x509.load_pem_x509_certificate(issuer.card.certificate.encode())
    signer = serialization.load_pem_private_key(issuer.key, None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    made = (
        x509.CertificateBuilder(old.subject, old.subject, key.public_key(), 77, *VALIDITY)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(signer, hashes.SHA256())
    )
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return made.public_bytes(serialization.Encoding.PEM).decode(), pem


def test_a_certificate_signed_by_a_pinned_key_is_refused_in_both_directions(hood: Hood, tmp_path: Path) -> None:
    ada, ben, _ = hood.members
    certificate, key = issue(ben, "ben")
    (tmp_path / "other.pem").write_text(certificate)
    (tmp_path / "other.key").write_bytes(key)
    other = Identity(tmp_path, identity.PeerInfo("ben", ben.card.address, certificate), key)
    assert not isinstance(hood.call(other, Request(hood.plan.hash, 0, 0).encode()), bytes)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "other.pem", tmp_path / "other.key")
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:

        def serve() -> bytes:
            connection, _ = listening.accept()
            try:
                with context.wrap_socket(connection, server_side=True) as secure:
                    return secure.recv(1)  # no byte of a request
            except (ssl.SSLError, ConnectionError):
                return b""

        served = pool.submit(serve)
        card = identity.PeerInfo("ben", f"127.0.0.1:{listening.getsockname()[1]}", ben.card.certificate)
        assert isinstance(hood.loop.run(call(ada, card, b"", "/hello")), ssl.SSLError)
        assert served.result(5) == b""


def test_connections_of_a_revoked_certificate_are_closed(hood: Hood) -> None:
    ada, ben, _ = hood.members

    async def hold() -> bytes:
        pool = ConnectionPool(ben, ada.card, TrustStore(ben.folder / PINS))
        await pool.request("/hello", Request(hood.plan.hash, 0, 0).encode(), 10**6)
        (connection,) = pool._idle
        TrustStore(ada.folder / PINS).revoke(ben.card.fingerprint)
        async with asyncio.timeout(5):
            return await connection.reader.read(1)

    assert hood.loop.run(hold()) == b""
    assert "certificate not pinned" in hood.refusals(0)


def test_requests_of_a_flooding_neighbour_are_limited(hood: Hood) -> None:
    ada, ben, _ = hood.members
    seconds, hello = 2.0, Request(hood.plan.hash, 0, 0).encode()

    async def flood() -> int:
        pools = [ConnectionPool(ben, ada.card, TrustStore(ben.folder / PINS)) for _ in range(4)]
        end, answered = time.monotonic() + seconds, 0

        async def send(pool: ConnectionPool) -> None:
            nonlocal answered
            while time.monotonic() < end:
                await pool.request("/hello", hello, 10**6)
                answered += 1

        await asyncio.gather(*map(send, pools))
        for pool in pools:
            pool.close()
        return answered

    rate = hood.peers[0]._server._rates[1]
    rate._tokens = 10.0
    assert hood.loop.run(flood()) <= 10 + MAX_CONNECTIONS + 1.5 * seconds * REQUEST_RATE < REQUEST_BURST + 1000
    assert isinstance(hood.call(hood.members[2], hello), bytes)


@pytest.mark.parametrize("lie", [10**9, ROUNDS + 1, ROUNDS, 4])
@pytest.mark.parametrize("state", ["ahead", "left", "finished"])
def test_one_lie_about_its_round_cannot_end_the_training_of_others(hood: Hood, state: str, lie: int) -> None:
    """A lie of 4 means four rounds ahead of the caller, again and again."""

    async def answer(j: int, t: int) -> Answer:
        at = t + 4 if lie == 4 else lie
        return Answer(hood.plan.hash, state, min(at, 10**9), False, False, False)

    hood.peers[2].state.hello = answer  # type: ignore[method-assign]
    honest = hood.peers[:2]
    with ThreadPoolExecutor(2) as pool:
        lives = [pool.submit(run_rounds, peer, Event()) for peer in honest]
        rounds = [life.result(60) for life in lives]
    for found in rounds:
        assert sum(bool(present) for _, present in found) >= 0.85 * ROUNDS


def test_a_member_that_cannot_be_called_costs_one_silence_and_is_named(tmp_path: Path, loop: Loop) -> None:
    """It listens on another port than its card says, and its own calls work."""
    members = make_organisations(tmp_path, 3)
    plan = make_plan(members, timeouts=QUICK, rounds=ROUNDS)
    for member in members:
        join(member, plan)
    events = [Events(member.folder / "events.jsonl") for member in members]
    peers = [Transport(loop, member, plan, log, D) for member, log in zip(members, events, strict=True)]
    for peer in peers[:2]:
        peer.start()
    peers[2].start("127.0.0.1:0")
    try:
        with ThreadPoolExecutor(3) as pool:
            alone = pool.submit(peers[2].roll_call, 1)
            lives = [pool.submit(run_rounds, peer, Event()) for peer in peers[:2]]
            rounds = [life.result(60) for life in lives]
            with pytest.raises(QuorumError, match=f"cannot reach you at {members[2].card.address}"):
                alone.result(60)
    finally:
        for peer in peers:
            peer.stop()
    for found, log in zip(rounds, events, strict=False):
        assert len(found) == ROUNDS and all(len(present) == 1 for _, present in found)
        assert sum(seconds > 0.8 * QUICK.silence for seconds, _ in found) <= 1
        (lost,) = [event for event in log.read() if event["event"] == "lost"]
        assert lost["why"] == f"unreachable at {members[2].card.address}"


def test_a_killed_neighbour_is_not_said_to_have_a_closed_port(hood: Hood) -> None:
    """Its last call may arrive after its last answer."""
    state = hood.peers[0].state
    now = time.monotonic()
    state.last_contact[1], state.calls[1] = now - QUICK.silence - 0.1, (now - 60, now - QUICK.silence + 0.1)
    assert not state.is_calling(1)
    state.calls[1] = now - 60, now - 0.1
    assert state.is_calling(1)


def test_a_revoked_pin_or_a_large_answer_leaves_no_traceback_on_standard_error(hood: Hood) -> None:
    """The caller of a request is cancelled at the moment at which the request fails, as at the end of a roll call."""
    reported = list[Any]()

    async def cancel_while_failing(error: Exception) -> None:
        async def fail(*_: object) -> Response:
            calling.cancel()
            raise error

        calls = hood.peers[0].calls
        calls.neighbours[1].pool.request = fail  # type: ignore[method-assign]
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context))
        calling = asyncio.create_task(calls.call(1, "/hello", b""))
        await asyncio.wait({calling})
        gc.collect()
        await asyncio.sleep(0)

    for error in (NoPinError(), TooLargeError()):
        hood.loop.run(cancel_while_failing(error))
    assert reported == []


HUGE = {
    "one header": b"X: " + b"a" * 2**20 + b"\r\n",
    "many headers": b"X: a\r\n" * 100_000,
    "no end": b"X" * 2**20,
}


@pytest.mark.parametrize("headers", HUGE.values(), ids=HUGE)
def test_a_request_with_large_headers_is_not_answered(hood: Hood, headers: bytes) -> None:
    ada, ben, _ = hood.members
    hello = Request(hood.plan.hash, 0, 0).encode()

    async def send(extra: bytes) -> bytes:
        connection = await ConnectionPool(ben, ada.card, TrustStore(ben.folder / PINS)).dial()
        connection.writer.write(b"POST /hello HTTP/1.1\r\nHost: ada\r\n" + extra)
        connection.writer.write(b"Content-Length: %d\r\n\r\n" % len(hello) + hello)
        try:
            return await asyncio.wait_for(connection.reader.read(100), 5)
        except ConnectionError:
            return b""
        finally:
            connection.close()

    assert b"200" in hood.loop.run(send(b"X: a\r\n"))
    assert b"200" not in hood.loop.run(send(headers))


def test_a_neighbour_cannot_forge_a_receipt(hood: Hood) -> None:
    hood.together(lambda peer: peer.roll_call(1))
    hood.peers[0].note_release(1)
    hood.together(exchange(1, 0))
    ada, ben = hood.peers[0].receipts, hood.peers[1].receipts
    assert ben.held[0].round == 1 and ada.proven_round == 0
    ada.check(2, ben.held[0])  # of another neighbour
    ada.check(1, ben.held[0]._replace(round=7))
    ben.check(0, ben.held[0])  # of another peer
    assert ada.proven_round == ben.proven_round == 0
    hood.loop.run(hood.peers[1].calls.hello(0, 0))
    assert ada.proven_round == 1


def test_receipts_survive_a_restart_and_damage_to_their_file(hood: Hood) -> None:
    hood.together(lambda peer: peer.roll_call(1))
    hood.peers[0].note_release(1)
    hood.together(exchange(1, 0))
    ben, member = hood.peers[1].receipts, hood.members[1]
    (member.folder / RUN).mkdir(exist_ok=True)
    ben.save()
    again = Transport(hood.loop, member, hood.plan, hood.events[1], D).receipts
    assert again.held == ben.held
    for damage in ("", "[]", '{"plan": 3}', '{"plan": "%s", "receipts": {"0": [1, "x"]}}' % hood.plan.hash):  # noqa: UP031
        (member.folder / RUN / "receipts.json").write_text(damage)
        damaged: Any = Transport(hood.loop, member, hood.plan, hood.events[1], D).receipts.held
        assert {receipt.round for receipt in damaged.values()} == {0}


def answer_once(hood: Hood, content: bytes) -> tuple[Any, float]:
    """Call of ada to a server with ben's certificate that answers with `content`. Returns its outcome and CPU time."""
    ada, ben, _ = hood.members
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ben.folder / "certificate.pem", ben.folder / "key.pem")
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:

        def serve() -> None:
            connection, _ = listening.accept()
            with suppress(OSError), context.wrap_socket(connection, server_side=True) as secure:
                secure.recv(4096)
                secure.sendall(content)
                secure.recv(1)

        served = pool.submit(serve)
        card = identity.PeerInfo("ben", f"127.0.0.1:{listening.getsockname()[1]}", ben.card.certificate)
        began = time.process_time()
        outcome = hood.loop.run(call(ada, card, b"", "/hello"))
        served.result(10)
        return outcome, time.process_time() - began


@pytest.mark.parametrize(
    "flood",
    [
        b"HTTP/1.1 100 Continue\r\n\r\n" * 30_000 + b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 100_000 + b"0\r\n\r\n",
    ],
    ids=["informational responses", "chunks of one byte"],
)
def test_a_neighbour_cannot_occupy_a_peer_with_tiny_parts_of_an_answer(hood: Hood, flood: bytes) -> None:
    outcome, seconds = answer_once(hood, flood)
    assert isinstance(outcome, EOFError | ConnectionError | h11.RemoteProtocolError)
    assert seconds < 5


def test_a_neighbour_cannot_fill_the_memory_with_reversed_connections(hood: Hood) -> None:
    ben, pool = hood.members[1], hood.peers[0]._dialler.pools[1]
    reverse = Request(hood.plan.hash, 0, 0).encode()

    held = []  # the newest ones stay open

    async def open_many() -> None:
        for _ in range(60):
            own = ConnectionPool(ben, hood.members[0].card, TrustStore(ben.folder / PINS))
            held.append(await own.dial())
            await held[-1].request("/reverse", "ada", reverse, 10**6)

    hood.loop.run(open_many())
    assert len(pool._idle) <= MAX_REVERSED + 2 and len(pool._reversed) <= MAX_REVERSED
