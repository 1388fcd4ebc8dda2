"""Who is turned away by TLS, before a request can be made, stands in the events of a peer all the same."""

import os
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from pdsl.peer.events import Events
from pdsl.peer.identity import Identity
from pdsl.peer.join import join
from pdsl.peer.overheard import MOST, Overheard, overhearing
from pdsl.peer.plan import Conduct
from tests.commands import started, wait_for
from tests.neighbourhood import agreed, organisations, with_data

LINE = (
    b"E0000 00:00:1.0 12 ssl_transport_security.cc:1884] Handshake failed with error SSL_ERROR_SSL: error:100000c0:SSL"
    b" routines:OPENSSL_internal:PEER_DID_NOT_RETURN_A_CERTIFICATE: Invalid certificate verification context\n"
)


def test_all_goes_on_and_what_is_about_handshakes_is_written_down(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    events = Events(tmp_path / "events.jsonl")
    with overhearing() as heard:
        heard.events = events
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
    heard, events = Overheard(), Events(tmp_path / "events.jsonl")
    heard.events = events
    for _ in range(2 * MOST):
        heard.line(LINE)
    assert len(events.read()) == MOST


CODE = """
import os, sys
from pathlib import Path
from pdsl.peer.events import Events
from pdsl.peer.overheard import overhearing
from pdsl.peer.transport import Loop

async def answer():
    return 42

loop = Loop()
with overhearing() as heard:
    heard.events = Events(Path(sys.argv[1]))
    if sys.stderr is not None:
        os.write(2, %r)
print(loop.run(answer()))
"""


@pytest.mark.parametrize("error", ["2>&-", "2>/dev/full"])
def test_where_standard_error_cannot_be_written_to_a_peer_runs_all_the_same(error: str, tmp_path: Path) -> None:
    program, events = tmp_path / "program.py", tmp_path / "events.jsonl"
    program.write_text(CODE % LINE)
    command = f"exec '{sys.executable}' '{program}' '{events}' {error}"
    done = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (0, b"42\n")
    assert len(Events(events).read()) == (error != "2>&-")


def test_pythons_standard_error_is_still_a_terminal() -> None:
    parent, child = os.openpty()
    code = "import sys; from pdsl.peer.overheard import overhearing\nwith overhearing(): print(sys.stderr.isatty())"
    done = subprocess.run([sys.executable, "-c", code], stderr=child, stdout=subprocess.PIPE, check=True)
    os.close(child)
    os.close(parent)
    assert done.stdout == b"True\n"


def test_a_running_peer_writes_down_whom_tls_turned_away(tmp_path: Path) -> None:
    members = organisations(tmp_path, 3)
    _, task = with_data(members)
    plan = agreed(members, task, Conduct(silence=1.5, deadline=3.0, start=60.0))
    for member in members:
        join(member, plan)
    own = members[0]
    stranger = Identity.create(tmp_path / "stranger", "ben", "127.0.0.1:9")  # another's name, another key
    host, _, port = own.card.address.partition(":")
    log = Events(own.folder / "run" / "events.jsonl")
    process = started("peer", "run", own.folder, err=tmp_path / "err")

    def reasons() -> list[str]:
        return [str(e["reason"]) for e in log.read() if e["event"] == "refused"]

    def listening() -> bool:
        with socket.socket() as s:
            return s.connect_ex((host, int(port))) == 0

    def knock(version: ssl.TLSVersion, shown: Identity | None) -> None:
        context = ssl.create_default_context(cadata=own.card.certificate)
        context.minimum_version = context.maximum_version = version
        context.set_alpn_protocols(["h2"])
        if shown:
            context.load_cert_chain(shown.folder / "certificate.pem", shown.folder / "key.pem")
        with socket.create_connection((host, int(port))) as plain:
            try:
                with context.wrap_socket(plain, server_hostname=own.card.name) as secure:
                    secure.recv(1)
            except (ssl.SSLError, ConnectionError):
                pass

    try:
        wait_for(listening)
        newest, older = ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2
        for version, shown, reason in [
            (newest, None, "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
            (newest, stranger, "CERTIFICATE_VERIFY_FAILED"),
            (older, members[1], "NO_SHARED_CIPHER"),
        ]:
            knock(version, shown)
            wait_for(lambda reason=reason: f"TLS: {reason}" in reasons())  # type: ignore[misc]
        with socket.create_connection((host, int(port))) as plain:
            plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(50))
            wait_for(lambda: len(set(reasons())) == 4)
    finally:
        process.kill()
        process.join()
    assert "Handshake failed" in (tmp_path / "err").read_text()
