"""Organisations for tests: folders with keys, a plan that they agree on, and bytes that nobody should send."""

import pickle
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pdsl.config import validated
from pdsl.peer.identity import Identity
from pdsl.peer.plan import Conduct, Plan, Task

NAMES = ("ada", "ben", "cleo", "dora", "eli", "fay", "gus", "hal")


def organisations(folder: Path, count: int = 4) -> list[Identity]:
    """Folders with keys, and addresses on this machine that were free a moment ago."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        ports = [s.getsockname()[1] for s in sockets]
    return [
        Identity.create(folder / name, name, f"127.0.0.1:{port}")
        for name, port in zip(NAMES[:count], ports, strict=True)
    ]


def agreed(members: list[Identity], task: Task | None = None, conduct: Conduct | None = None, **settings: Any) -> Plan:
    values: dict[str, Any] = {
        "rounds": 3,
        "graph": {"kind": "ring", "agents": len(members)},
        "model": {"name": "softmax"},
        "privacy": {"randomness": "system", "target_epsilon": 8.0},
    }
    for name, value in settings.items():
        values[name] = {**values.get(name, {}), **value} if isinstance(value, dict) else value
    return Plan(
        validated(values, "test"),
        task or Task(records=100, shape=(1, 8, 8), classes=10, public="0" * 64),
        conduct or Conduct(),
        tuple(member.card for member in members),
    )


class Payload:
    """Pickled, it writes a file when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def pickled(path: Path) -> bytes:
    return pickle.dumps(Payload(path))
