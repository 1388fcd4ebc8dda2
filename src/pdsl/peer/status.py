"""Event log and status file of a running peer, and their readers. Neither contains secrets or messages."""

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError
from rich.table import Table

from pdsl.peer.identity import RUN
from pdsl.peer.limits import TokenBucket
from pdsl.section import Section
from pdsl.utils.errors import PdslError
from pdsl.utils.format import format_epsilon, printable
from pdsl.utils.types import JsonDict

STATUS = "status.json"
WRITE_INTERVAL = 1.0  # seconds
STALE_AFTER = 5.0  # seconds without a write after which the process is considered dead
MAX_LOG_BYTES = 5_000_000  # of the event log, and as many of the one before it
EVENT_RATE, EVENT_BURST = 0.1, 100.0  # lines per second and at once, for each kind of event and each neighbour

OnLine = Callable[[JsonDict], None]


class Events:
    """Event log in JSON lines, with a count per kind of event.

    Each neighbour, and all outsiders together, have their own quota of lines per kind of event. No caller can thus fill
    the disk or hide the events of others. A line after omitted ones has their number as `more`. A full file is renamed
    and replaces the one before it.
    """

    def __init__(self, path: Path, on_line: OnLine = lambda line: None):
        self.path, self._on_line = path, on_line
        self.counts: Counter[str] = Counter()
        self._quotas: dict[tuple[str, object], TokenBucket] = {}
        self._omitted: Counter[tuple[str, object]] = Counter()
        self._lock = threading.Lock()

    def log(self, kind: str, **facts: str | int | float | None) -> None:
        """Log an event. `of` or `who` is the name of the neighbour that it is about; an outsider has an `address`."""
        source = kind, facts.get("of") or facts.get("who")
        with self._lock:
            self.counts[kind] += 1
            if not self._quotas.setdefault(source, TokenBucket(EVENT_RATE, EVENT_BURST)).take():
                self._omitted[source] += 1
                return
            if more := self._omitted.pop(source, 0):
                facts["more"] = more
            clean = {name: printable(fact) if isinstance(fact, str) else fact for name, fact in facts.items()}
            line: JsonDict = {"time": round(time.time(), 3), "event": kind, **clean}
            self._on_line(line)
            try:
                with self.path.open("ab+") as file:
                    if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                        file.write(b"\n")  # after a line that a power failure has cut
                    file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
                    full = file.tell() >= MAX_LOG_BYTES
                if full:
                    self.path.replace(self._older)
            except OSError:
                self.counts["event not written"] += 1  # a full disk is reported by the writes of the round

    @property
    def _older(self) -> Path:
        return self.path.with_name(self.path.name + ".1")

    def read(self) -> list[JsonDict]:
        """All events that are kept, oldest first, without lines that a power failure has cut."""
        found = []
        for path in (self._older, self.path):
            for line in path.read_bytes().splitlines() if path.exists() else ():
                with suppress(ValueError):
                    found.append(json.loads(line))
        return found


class NeighbourStatus(Section):
    """State of a neighbour as seen by a peer."""

    name: str
    state: str
    in_round: bool
    round: int
    heard_seconds_ago: float


class Status(Section):
    """Content of the status file."""

    time: float
    pid: int
    running: bool
    name: str
    plan: str  # hash
    round: int
    rounds: int
    doing: str
    accuracy: float | None
    epsilon: float | None
    budget: float
    refused: int
    neighbours: list[NeighbourStatus]
    completed: bool = False  # the last round is over
    network_pause: float = 0.0  # seconds since the network thread's last sign of life


class StatusWriter:
    """Thread that writes the status of a running peer until it is stopped."""

    def __init__(self, folder: Path, events: Events, current: Callable[[], Status]):
        self._path, self._events, self._current = folder / STATUS, events, current
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pdsl status", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._write(running=False)

    def _run(self) -> None:
        while not self._stopped.wait(WRITE_INTERVAL):
            self._write(running=True)

    def _write(self, running: bool) -> None:
        status = self._current().model_copy(update={"running": running})
        aside = self._path.with_suffix(".part")
        try:
            aside.write_text(json.dumps(status.model_dump(), ensure_ascii=False), encoding="utf-8")
            aside.replace(self._path)
        except OSError:
            self._events.counts["status not written"] += 1  # a full disk is reported by the writes of the round


def read_status(folder: Path) -> Status | None:
    """Read the status in an organisation's folder; None if it never ran. A stale status is not `running`."""
    path = folder / RUN / STATUS
    try:
        status = Status.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as e:
        raise PdslError(
            f"{path} is damaged; a running peer rewrites it every second, and for a finished one read"
            f" {path.with_name('summary.json')}"
        ) from e
    return status.model_copy(update={"running": status.running and abs(time.time() - status.time) < STALE_AFTER})


def status_table(statuses: list[Status]) -> Table:
    """Table with a row per peer; for a single peer also a row per neighbour."""
    table = Table("peer", "round", "state", "accuracy", "ε", "refused", header_style="bold")
    for s in statuses:
        doing = s.doing if s.running else "not running"
        accuracy = "" if s.accuracy is None else f"{s.accuracy:.4f}"
        spent = "" if s.epsilon is None else f"{format_epsilon(s.epsilon)} of {s.budget:g}"
        table.add_row(s.name, f"{s.round} of {s.rounds}", doing, accuracy, spent, str(s.refused))
        if len(statuses) == 1:
            for n in s.neighbours:
                contact = f"last contact {n.heard_seconds_ago:g} s ago"
                present = "in the round" if n.in_round else "not in the round"
                table.add_row(f"  ↔ {n.name}", str(n.round), f"{printable(n.state)}, {present}, {contact}")
    return table
