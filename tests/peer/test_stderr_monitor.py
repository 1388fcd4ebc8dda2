"""Failed TLS handshakes, which happen before any request, are logged as events of a peer."""

import os
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from pdsl.peer.identity import Identity
from pdsl.peer.membership import join
from pdsl.peer.plan import Timeouts
from pdsl.peer.status import Events
from pdsl.peer.stderr_monitor import MAX_HANDSHAKES, HandshakeLog, monitor_stderr
from tests.helpers.commands import started, wait_for
from tests.helpers.organisations import make_organisations, make_plan, write_digits

pytestmark = pytest.mark.peer

LINE = (
    b"E0000 00:00:1.0 12 ssl_transport_security.cc:1884] Handshake failed with error SSL_ERROR_SSL: error:100000c0:SSL"
    b" routines:OPENSSL_internal:PEER_DID_NOT_RETURN_A_CERTIFICATE: Invalid certificate verification context\n"
)


def test_output_is_forwarded_and_failed_handshakes_are_logged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    events = Events(tmp_path / "events.jsonl")
    with monitor_stderr() as log:
        log.events = events
        for some in (b"something else\nand E00", LINE[3:20], LINE[20:], b"no end"):
            os.write(2, some)
        print("from Python", file=sys.stderr)
    err = capfd.readouterr().err
    assert err.count("PEER_DID_NOT_RETURN") == 1
    assert "something else\n" in err and err.count("no end") == 1 and "from Python\n" in err
    (event,) = events.read()
    assert (event["event"], event["reason"]) == ("refused", "TLS: PEER_DID_NOT_RETURN_A_CERTIFICATE")
    os.write(2, b"as before\n")
    assert capfd.readouterr().err == "as before\n"


def test_strangers_cannot_fill_the_log(tmp_path: Path) -> None:
    log, events = HandshakeLog(), Events(tmp_path / "events.jsonl")
    log.events = events
    for _ in range(2 * MAX_HANDSHAKES):
        log.add_line(LINE)
    assert len(events.read()) == MAX_HANDSHAKES


CODE = """
import os, sys
from pathlib import Path
from pdsl.peer.status import Events
from pdsl.peer.stderr_monitor import monitor_stderr
from pdsl.peer.transport import Loop

async def answer():
    return 42

loop = Loop()
with monitor_stderr() as log:
    log.events = Events(Path(sys.argv[1]))
    if sys.stderr is not None:
        os.write(2, %r)
print(loop.run(answer()))
"""


@pytest.mark.parametrize("error", ["2>&-", "2>/dev/full"])
def test_a_peer_runs_without_a_writable_standard_error(error: str, tmp_path: Path) -> None:
    program, events = tmp_path / "program.py", tmp_path / "events.jsonl"
    program.write_text(CODE % LINE)
    command = f"exec '{sys.executable}' '{program}' '{events}' {error}"
    done = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (0, b"42\n")
    assert len(Events(events).read()) == (error != "2>&-")


def test_standard_error_of_python_stays_a_terminal() -> None:
    parent, child = os.openpty()
    importing = "import sys; from pdsl.peer.stderr_monitor import monitor_stderr"
    code = f"{importing}\nwith monitor_stderr(): print(sys.stderr.isatty())"
    done = subprocess.run([sys.executable, "-c", code], stderr=child, stdout=subprocess.PIPE, check=True)
    os.close(child)
    os.close(parent)
    assert done.stdout == b"True\n"


def test_a_running_peer_logs_failed_handshakes(tmp_path: Path) -> None:
    members = make_organisations(tmp_path, 3)
    _, task = write_digits(members)
    plan = make_plan(members, task, Timeouts(silence=1.5, deadline=3.0, start=60.0))
    for member in members:
        join(member, plan)
    own = members[0]
    stranger = Identity.create(tmp_path / "stranger", "ben", "127.0.0.1:9")  # a neighbour's name, another key
    host, _, port = own.card.address.partition(":")
    log = Events(own.folder / "run" / "events.jsonl")
    process = started("peer", "run", own.folder, err=tmp_path / "err")

    def reasons() -> list[str]:
        return [str(e["reason"]) for e in log.read() if e["event"] == "refused"]

    def listening() -> bool:
        with socket.socket() as s:
            return s.connect_ex((host, int(port))) == 0

    def knock(version: ssl.TLSVersion, client: Identity | None) -> None:
        context = ssl.create_default_context(cadata=own.card.certificate)
        context.minimum_version = context.maximum_version = version
        context.set_alpn_protocols(["h2"])
        if client:
            context.load_cert_chain(client.folder / "certificate.pem", client.folder / "key.pem")
        with socket.create_connection((host, int(port))) as plain:
            try:
                with context.wrap_socket(plain, server_hostname=own.card.name) as secure:
                    secure.recv(1)
            except (ssl.SSLError, ConnectionError):
                pass

    try:
        wait_for(listening)
        newest, older = ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2
        for version, client, reason in [
            (newest, None, "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
            (newest, stranger, "CERTIFICATE_VERIFY_FAILED"),
            (older, members[1], "NO_SHARED_CIPHER"),
        ]:
            knock(version, client)
            wait_for(lambda reason=reason: f"TLS: {reason}" in reasons())  # type: ignore[misc]
        with socket.create_connection((host, int(port))) as plain:
            plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(50))
            wait_for(lambda: len(set(reasons())) == 4)
    finally:
        process.kill()
        process.join()
    assert "Handshake failed" in (tmp_path / "err").read_text()
