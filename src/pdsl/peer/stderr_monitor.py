"""Monitor of standard error that logs failed TLS handshakes as events.

gRPC's core reports a failed handshake on standard error and nowhere else. While a peer runs, standard error therefore
goes through a pipe: all output is forwarded unchanged, and reports of failed handshakes become events. Output in the
last moment before a process is aborted may be lost.
"""

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pdsl.peer.status import Events

# …Handshake failed with error SSL_ERROR_SSL: error:100000c0:SSL routines:OPENSSL_internal:PEER_DID_NOT_RETURN_A_…
FAILED = re.compile(rb"Handshake failed with error ([A-Z0-9_]+)(?:.*OPENSSL_internal:([A-Z0-9_]+))?")
STANDARD_ERROR = 2
PIPE_BYTES = 1 << 20  # large, because a writer that holds Python's lock must not wait for the forwarding thread
MAX_LINE = 4096  # bytes
MAX_HANDSHAKES = 1_000  # events per process, so that strangers leave room for other events


class HandshakeLog:
    """Event log of failed handshakes; lines are ignored until `events` is set."""

    events: Events | None = None
    count = 0

    def add_line(self, line: bytes) -> None:
        failed = FAILED.search(line)
        if failed and self.events and self.count < MAX_HANDSHAKES:
            self.count += 1
            self.events.log("refused", what="handshake", of=None, reason=f"TLS: {(failed[2] or failed[1]).decode()}")


@contextmanager
def monitor_stderr() -> Iterator[HandshakeLog]:
    """Monitor standard error of a process with a single peer, because a line does not name the peer it is about."""
    log = HandshakeLog()
    if not _is_open():
        yield log
        return
    python_stderr, original = sys.stderr, os.dup(STANDARD_ERROR)
    reading, writing = os.pipe()
    _enlarge(writing)
    forwarder = threading.Thread(target=_forward, args=(reading, original, log), name="pdsl stderr", daemon=True)
    try:
        os.dup2(writing, STANDARD_ERROR)
        os.close(writing)
        forwarder.start()
        if _is_python_stderr():  # Python's own output bypasses the pipe, so that a terminal stays a terminal
            sys.stderr = open(  # noqa: SIM115
                original, "w", buffering=1, closefd=False, encoding=python_stderr.encoding, errors=python_stderr.errors
            )
        yield log
    finally:
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        sys.stderr = python_stderr
        os.dup2(original, STANDARD_ERROR)  # the pipe has no writer left, so the forwarder ends
        forwarder.join(timeout=5)
        if not forwarder.is_alive():
            os.close(original)


def _enlarge(pipe: int) -> None:
    try:
        from fcntl import F_SETPIPE_SZ, fcntl  # Linux only
    except ImportError:
        return
    with suppress(OSError):
        fcntl(pipe, F_SETPIPE_SZ, PIPE_BYTES)


def _forward(reading: int, original: int, log: HandshakeLog) -> None:
    rest = b""
    with open(reading, "rb", buffering=0) as pipe:
        while some := pipe.read(65536):
            *lines, rest = (rest + some).split(b"\n")
            for line in lines:
                log.add_line(line[:MAX_LINE])
            rest = rest[-MAX_LINE:]
            with suppress(OSError):  # closed or full: monitoring continues
                while some:
                    some = some[os.write(original, some) :]


def _is_open() -> bool:
    """Whether standard error is open. If it was closed at the start, its descriptor may belong to another file."""
    try:
        os.fstat(STANDARD_ERROR)
    except OSError:
        return False
    return sys.stderr is not None


def _is_python_stderr() -> bool:
    """Whether `sys.stderr` writes to the standard error descriptor."""
    try:
        return sys.stderr.fileno() == STANDARD_ERROR
    except (OSError, ValueError):  # not a file
        return False
