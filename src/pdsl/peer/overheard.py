"""Refusals before a request can be made. gRPC's core writes them to standard error, and tells nobody else.

So standard error is listened to while a peer runs: everything goes on to where it went before, and what says that a
handshake failed becomes an event.
"""

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pdsl.peer.events import Events

# …Handshake failed with error SSL_ERROR_SSL: error:100000c0:SSL routines:OPENSSL_internal:PEER_DID_NOT_RETURN_A_…
FAILED = re.compile(rb"Handshake failed with error ([A-Z0-9_]+)(?:.*OPENSSL_internal:([A-Z0-9_]+))?")
STANDARD_ERROR = 2
MOST_OF_A_LINE = 4096


class Overheard:
    """Where what is overheard goes; nowhere until there are events."""

    events: Events | None = None

    def line(self, line: bytes) -> None:
        failed = FAILED.search(line)
        if failed and self.events:
            self.events.log("refused", what="handshake", of=None, reason=f"TLS: {(failed[2] or failed[1]).decode()}")


@contextmanager
def overhearing() -> Iterator[Overheard]:
    """For a process with one peer in it, since standard error does not say whom a line is about."""
    heard = Overheard()
    true_error = os.dup(STANDARD_ERROR)
    reading, writing = os.pipe()
    os.dup2(writing, STANDARD_ERROR)
    os.close(writing)
    listener = threading.Thread(target=_pass_on, args=(reading, true_error, heard), name="pdsl overheard", daemon=True)
    listener.start()
    ours = sys.stderr
    if _writes_to_standard_error():  # Python's own goes straight on: a terminal stays one
        sys.stderr = open(true_error, "w", buffering=1, closefd=False, encoding=ours.encoding, errors=ours.errors)  # noqa: SIM115
    try:
        yield heard
    finally:
        sys.stderr.flush()
        sys.stderr = ours
        os.dup2(true_error, STANDARD_ERROR)  # the pipe has no writer left, and the listener comes to its end
        listener.join(timeout=5)
        os.close(true_error)


def _pass_on(reading: int, true_error: int, heard: Overheard) -> None:
    rest = b""
    with open(reading, "rb", buffering=0) as pipe:
        while some := pipe.read(65536):
            os.write(true_error, some)
            *lines, rest = (rest + some).split(b"\n")
            for line in lines:
                heard.line(line[:MOST_OF_A_LINE])
            rest = rest[-MOST_OF_A_LINE:]


def _writes_to_standard_error() -> bool:
    try:
        return sys.stderr.fileno() == STANDARD_ERROR
    except (OSError, ValueError):  # it is no file at all
        return False
