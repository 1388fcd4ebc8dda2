"""End of a peer by SIGTERM, as service managers and containers send it.

All files of a run are complete at any moment, so there is nothing to save. The handler makes the run end in the same
way as by Ctrl-C, which says goodbye to the neighbours. A process that takes longer is ended at once. As process 1 of a
container, a program without a handler would not end at all.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

MAX_SECONDS = 4.0  # from the signal to the end
EXIT_CODE = 128 + signal.SIGTERM


class TerminatedError(KeyboardInterrupt):
    """The process received SIGTERM."""


@contextmanager
def handle_sigterm() -> Iterator[None]:
    """Raise TerminatedError in the main thread on SIGTERM."""

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        watchdog = threading.Timer(MAX_SECONDS, os._exit, (EXIT_CODE,))
        watchdog.daemon = True
        watchdog.start()
        raise TerminatedError

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
