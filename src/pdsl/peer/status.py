"""How a peer is doing: the running process writes it down every second, anybody in the folder may read it."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.table import Table

from pdsl.errors import PdslError
from pdsl.peer.events import Events
from pdsl.peer.join import RUN
from pdsl.peer.plan import Plan
from pdsl.peer.transport import Transport
from pdsl.rounded import rounded_up
from pdsl.runs import Row, RunDirectory
from pdsl.settings import Section

STATUS = "status.json"
EVERY = 1.0  # seconds
STALE = 5.0  # seconds after which nobody is writing any more


class Neighbour(Section):
    """How one is doing, as its neighbour has heard it."""

    name: str
    state: str
    in_round: bool
    round: int
    heard_seconds_ago: float


class Status(Section):
    """What the file says, to check one that is read."""

    time: float
    pid: int
    running: bool
    name: str
    plan: str
    round: int
    rounds: int
    doing: str
    accuracy: float | None
    epsilon: float | None
    budget: float
    refused: int
    neighbours: list[Neighbour]


class Reporter:
    """Writes the status of a running peer until it is stopped."""

    def __init__(self, directory: RunDirectory, plan: Plan, me: int, transport: Transport, events: Events):
        self._path = directory.path / STATUS
        self._plan, self._me, self._transport, self._events = plan, me, transport, events
        self.row: Row = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pdsl status", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._write(running=False)

    def _run(self) -> None:
        while not self._stopped.wait(EVERY):
            self._write(running=True)

    def _write(self, running: bool) -> None:
        aside = self._path.with_suffix(".part")
        try:
            aside.write_text(json.dumps(self._status(running), ensure_ascii=False), encoding="utf-8")
            aside.replace(self._path)
        except OSError:
            self._events.counts["status not written"] += 1  # a full disk is found out where it matters

    def _status(self, running: bool) -> dict[str, Any]:
        node, now = self._transport.node, time.monotonic()
        return {
            "time": time.time(),
            "pid": os.getpid(),
            "running": running,
            "name": self._plan.members[self._me].name,
            "plan": self._plan.hash,
            "round": node.round,
            "rounds": self._plan.config.rounds,
            "doing": "looking who is there" if node.gathering else "waiting" if node.waiting else "computing",
            "accuracy": self.row.get("accuracy"),
            "epsilon": self.row.get("epsilon"),
            "budget": self._plan.config.privacy.budget,
            "refused": self._events.counts["refused"],
            "neighbours": [
                {
                    "name": neighbour.name,
                    "state": neighbour.state,
                    "in_round": j in node.present,
                    "round": max(neighbour.at[0], node.asked[j]),  # by its own words or questions
                    "heard_seconds_ago": round(now - node.heard[j], 1),
                }
                for j, neighbour in self._transport.calls.neighbours.items()
            ],
        }


def read_status(folder: Path) -> dict[str, Any] | None:
    """What the peer of this folder wrote last; None if it never ran. `running` is false if it writes no more."""
    path = folder / RUN / STATUS
    try:
        status = Status.model_validate_json(path.read_bytes()).model_dump()
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as e:
        raise PdslError(
            f"{path} is damaged; a peer that runs writes it again in a second, of one that has ended"
            f" {path.with_name('summary.json')} has more"
        ) from e
    status["running"] = status["running"] and time.time() - status["time"] < STALE
    return status


def status_table(statuses: list[dict[str, Any]]) -> Table:
    """A row for each peer, and one for each neighbour where there is but one peer."""
    table = Table("peer", "round", "what it does", "accuracy", "ε", "refused", header_style="bold")
    for s in statuses:
        doing = s["doing"] if s["running"] else "not running"
        accuracy = "" if s["accuracy"] is None else f"{s['accuracy']:.4f}"
        spent = "" if s["epsilon"] is None else f"{rounded_up(s['epsilon'])} of {s['budget']:g}"
        table.add_row(s["name"], f"{s['round']} of {s['rounds']}", doing, accuracy, spent, str(s["refused"]))
        if len(statuses) == 1:
            for n in s["neighbours"]:
                heard = f"heard {n['heard_seconds_ago']:g} s ago"
                there = "in the round" if n["in_round"] else "not in the round"
                table.add_row(f"  ↔ {n['name']}", str(n["round"]), f"{n['state']}, {there}, {heard}")
    return table
