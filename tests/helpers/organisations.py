"""Organisations for tests: folders with keys and data, a plan, and a malicious pickle."""

import hashlib
import json
import pickle
import socket
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pdsl.config import validate
from pdsl.data import Data, load, split_public
from pdsl.peer.experiment import describe_task
from pdsl.peer.identity import Identity
from pdsl.peer.plan import TaskDescription, Timeouts, TrainingPlan
from pdsl.settings import DataSettings
from pdsl.utils.random import Streams

NAMES = ("ada", "ben", "cleo", "dora", "eli", "fay", "gus", "hal", "ida")


def make_organisations(folder: Path, count: int = 4, without_address: Collection[int] = ()) -> list[Identity]:
    """Create folders with keys and local addresses whose ports are free at this moment."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        ports = [s.getsockname()[1] for s in sockets]
    return [
        Identity.create(folder / name, name, "none" if i in without_address else f"127.0.0.1:{port}")
        for i, (name, port) in enumerate(zip(NAMES[:count], ports, strict=True))
    ]


def make_plan(
    members: list[Identity], task: TaskDescription | None = None, timeouts: Timeouts | None = None, **settings: Any
) -> TrainingPlan:
    values: dict[str, Any] = {
        "rounds": 3,
        "graph": {"kind": "ring", "agents": len(members)},
        "model": {"name": "softmax"},
        "privacy": {"randomness": "system", "target_epsilon": 8.0},
    }
    for name, value in settings.items():
        values[name] = {**values.get(name, {}), **value} if isinstance(value, dict) else value
    return TrainingPlan(
        validate(values, "test"),
        task or TaskDescription(records=100, shape=(1, 8, 8), classes=10, public_records=40, public="0" * 64),
        timeouts or Timeouts(),
        tuple(member.card for member in members),
    )


def with_hash(values: dict[str, Any]) -> dict[str, Any]:
    """Values of a plan with their hash."""
    rest = {name: value for name, value in values.items() if name != "hash"}
    canonical = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return {"hash": hashlib.sha256(canonical.encode()).hexdigest(), **rest}


class Payload:
    """Object whose pickle creates a file when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def pickled(path: Path) -> bytes:
    return pickle.dumps(Payload(path))


def write_digits(members: list[Identity], seed: int = 0, first: int = 150) -> tuple[Data, TaskDescription]:
    """Write digits to the members' folders. Returns all data as one dataset, and the task of a plan.

    The first member has `first` records, and each of the next ones 20 more, as long as there are enough.
    """
    digits = load(DataSettings(name="digits"), Streams(seed))
    (q_x, q_y), (test_x, test_y) = split_public(digits, 200, Streams(seed))
    step = 20 if len(members) < 6 else 0
    sizes = [first + step * i for i in range(len(members))]
    owner = torch.repeat_interleave(torch.arange(len(members)), torch.tensor(sizes))
    x, y = digits.x[: len(owner)], digits.y[: len(owner)]
    for i, member in enumerate(members):
        np.savez(member.folder / "data.npz", x=x[owner == i].numpy(), y=y[owner == i].numpy())
        np.savez(
            member.folder / "public.npz",
            x_test=test_x.numpy(),
            y_test=test_y.numpy(),
            x_validation=q_x.numpy(),
            y_validation=q_y.numpy(),
        )
    everything = Data("npz", x, y, test_x, test_y, 10, owner, (q_x, q_y))
    return everything, describe_task(members[0].folder / "public.npz", records=sum(sizes) / len(sizes), classes=None)
