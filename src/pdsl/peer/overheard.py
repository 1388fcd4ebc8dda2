"""Handshakes that failed. gRPC's core writes about them to standard error, and tells nobody else.

So standard error is listened to while a peer runs: everything goes on to where it went before, and what says that a
handshake failed becomes an event. What is written in the last moment before a process is aborted may be lost.
"""

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pdsl.peer.events import Events

# …Handshake failed with error SSL_ERROR_SSL: error:100000c0:SSL routines:OPENSSL_internal:PEER_DID_NOT_RETURN_A_…
FAILED = re.compile(rb"Handshake failed with error ([A-Z0-9_]+)(?:.*OPENSSL_internal:([A-Z0-9_]+))?")
STANDARD_ERROR = 2
LARGE = 1 << 20  # of the pipe: whoever writes with Python's lock in his hands must not wait for us
MOST_OF_A_LINE = 4096
MOST = 1_000  # events of one process: strangers can knock without end, and must leave room for the others' events


class Overheard:
    """Where what is overheard goes; nowhere until there are events."""

    events: Events | None = None
    count = 0

    def line(self, line: bytes) -> None:
        failed = FAILED.search(line)
        if failed and self.events and self.count < MOST:
            self.count += 1
            self.events.log("refused", what="handshake", of=None, reason=f"TLS: {(failed[2] or failed[1]).decode()}")


@contextmanager
def overhearing() -> Iterator[Overheard]:
    """For a process with one peer in it, since standard error does not say whom a line is about."""
    heard = Overheard()
    if not _is_there():
        yield heard
        return
    ours, true_error = sys.stderr, os.dup(STANDARD_ERROR)
    reading, writing = os.pipe()
    _widen(writing)
    listener = threading.Thread(target=_pass_on, args=(reading, true_error, heard), name="pdsl overheard", daemon=True)
    try:
        os.dup2(writing, STANDARD_ERROR)
        os.close(writing)
        listener.start()
        if _writes_there():  # Python's own goes straight on: a terminal stays one
            sys.stderr = open(true_error, "w", buffering=1, closefd=False, encoding=ours.encoding, errors=ours.errors)  # noqa: SIM115
        yield heard
    finally:
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        sys.stderr = ours
        os.dup2(true_error, STANDARD_ERROR)  # the pipe has no writer left, and the listener comes to its end
        listener.join(timeout=5)
        if not listener.is_alive():
            os.close(true_error)


def _widen(pipe: int) -> None:
    try:
        from fcntl import F_SETPIPE_SZ, fcntl  # Linux has it
    except ImportError:
        return
    with suppress(OSError):
        fcntl(pipe, F_SETPIPE_SZ, LARGE)


def _pass_on(reading: int, true_error: int, heard: Overheard) -> None:
    rest = b""
    with open(reading, "rb", buffering=0) as pipe:
        while some := pipe.read(65536):
            *lines, rest = (rest + some).split(b"\n")
            for line in lines:
                heard.line(line[:MOST_OF_A_LINE])
            rest = rest[-MOST_OF_A_LINE:]
            with suppress(OSError):  # nobody reads it, or there is no room: that is no reason to stop listening
                while some:
                    some = some[os.write(true_error, some) :]


def _is_there() -> bool:
    """Where standard error was closed from the start, its number may be something else's by now."""
    try:
        os.fstat(STANDARD_ERROR)
    except OSError:
        return False
    return sys.stderr is not None


def _writes_there() -> bool:
    try:
        return sys.stderr.fileno() == STANDARD_ERROR
    except (OSError, ValueError):  # it is no file
        return False
