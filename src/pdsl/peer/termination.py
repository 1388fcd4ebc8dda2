"""End of a peer by SIGTERM, as service managers and containers send it, or by Ctrl-C.

All files of a run are complete at any moment, so there is nothing to save. The handler interrupts the run, which then
says goodbye to the neighbours. A process that takes longer is ended at once. As process 1 of a container, a program
without a handler would not end at all.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

MAX_SECONDS = 3.0  # from the signal to the end; docs promise 4, and a busy machine needs some of them
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class InterruptedRunError(KeyboardInterrupt):
    """The process received SIGTERM or SIGINT."""

    def __init__(self, number: int):
        super().__init__()
        self.exit_code = 128 + number


@contextmanager
def handle_signals() -> Iterator[None]:
    """Raise InterruptedRunError in the main thread on SIGTERM and SIGINT."""

    def end(number: int, frame: FrameType | None) -> None:
        for other in SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        error = InterruptedRunError(number)
        watchdog = threading.Timer(MAX_SECONDS, os._exit, (error.exit_code,))
        watchdog.daemon = True
        watchdog.start()
        raise error

    before = {number: signal.signal(number, end) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_at_once(code: int) -> NoReturn:
    """End the process without unloading its modules, which takes seconds on a busy machine."""
    sys.stdout.flush()
    sys.stderr.flush()  # if the reader has stopped, the watchdog ends the process
    os._exit(code)
