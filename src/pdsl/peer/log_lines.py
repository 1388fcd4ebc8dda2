"""JSON lines on standard error, for the log of a service or a container: start, rounds, events and end.

A thread of its own writes them, because a reader that has stopped must not stop the network: lines beyond a bounded
queue are dropped and counted. The lines contain no messages, no keys and nothing that depends on private records
without noise.
"""

import json
import queue
import threading
import time
from io import BytesIO, RawIOBase

from pdsl.training.records import RoundRecord
from pdsl.utils.format import printable
from pdsl.utils.types import JsonDict

MAX_WAITING = 1000  # lines
STOP_SECONDS = 1.0  # to write the lines that wait
ROUND_FACTS = (
    "round",
    "present",
    "lost",
    "absent",
    "epsilon",
    "accuracy",
    "loss",
    "messages",
    "bytes",
    "seconds",
    "waited",
)


class LogLines:
    """Writer of log lines that never blocks its callers.

    `out` has no buffer: a thread that waits in a buffer's lock would prevent the end of the process.
    """

    def __init__(self, out: RawIOBase | BytesIO):
        self._out = out
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_WAITING)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="pdsl log", daemon=True)
        self._thread.start()

    def log(self, event: str, **facts: object) -> None:
        clean = {name: printable(fact, 1000) if isinstance(fact, str) else fact for name, fact in facts.items()}
        self.write({"time": round(time.time(), 3), "event": event, **clean})

    def write(self, line: JsonDict) -> None:
        """Write a line soon, or drop it if too many wait."""
        if self._dropped:
            line = {**line, "dropped": self._dropped}
        try:
            self._lines.put_nowait(json.dumps(line, ensure_ascii=False))
            self._dropped = 0
        except queue.Full:
            self._dropped += 1

    def on_round(self, row: RoundRecord) -> None:
        facts: JsonDict = dict(row)
        self.log("round", **{name: facts[name] for name in ROUND_FACTS if name in facts})

    def stop(self) -> None:
        """Write the lines that wait, for a second at most."""
        try:
            self._lines.put(None, timeout=STOP_SECONDS)
        except queue.Full:
            return
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._out.write(line.encode() + b"\n")
            except (OSError, ValueError):  # the reader has gone
                return
