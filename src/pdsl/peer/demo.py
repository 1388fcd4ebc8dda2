"""Demonstration of peer mode: four organisations on one machine, from keys to trained models.

Each has its own folder, its own digits and its own process. They communicate over mutual TLS, as remote peers do.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from torch import Tensor

from pdsl.data import load, partition, split_public
from pdsl.peer.experiment import describe_task
from pdsl.peer.identity import DATA, PUBLIC, Identity
from pdsl.peer.membership import join
from pdsl.peer.plan import Timeouts, TrainingPlan, compose, format_hash
from pdsl.peer.status import Status, read_status
from pdsl.settings import DataSettings, PartitionSettings
from pdsl.utils.errors import PdslError
from pdsl.utils.random import Streams
from pdsl.utils.types import JsonDict

NAMES = ("amber", "birch", "cedar", "dune")
COMPLETE = (0, 3)  # exit codes of a peer that wrote its model, with all rounds or fewer
SETTINGS = ("algorithm.name=pdsl", "algorithm.learning_rate=2.0", "model.name=softmax", "privacy.target_epsilon=8")


def run_demo(
    folder: Path, rounds: int, on_step: Callable[[str], None], on_status: Callable[[list[Status]], None]
) -> JsonDict:
    """Run the demonstration in `folder`; `on_step` gets a line per step, `on_status` the status of the peers."""
    start = time.monotonic()
    members, plan = create_organisations(folder, [f"127.0.0.1:{port}" for port in _find_free_ports()], rounds, on_step)
    on_step("training starts")
    summaries = _run_peers([member.folder for member in members], on_status)
    kept = ("name", "accuracy", "epsilon", "delta", "rounds", "rounds_run", "bytes", "privacy", "gain", "run")
    return {
        "peers": [{key: summary[key] for key in kept} for summary in summaries],
        "plan": plan.hash,
        "seconds": round(time.monotonic() - start, 1),
    }


def create_organisations(
    folder: Path, addresses: Sequence[str], rounds: int, on_step: Callable[[str], None]
) -> tuple[list[Identity], TrainingPlan]:
    """Create four folders in `folder`, with digits and a plan that all have joined."""
    if folder.exists() and any(folder.iterdir()):
        raise PdslError(f"{folder} is not empty; choose another folder")
    members = [Identity.create(folder / name, name, at) for name, at in zip(NAMES, addresses, strict=True)]
    on_step(f"init: created key, certificate and card of {', '.join(NAMES)} in {folder}")
    records = _distribute_digits(members)
    timeouts = Timeouts(silence=10, deadline=60, start=120)
    task = describe_task(members[0].folder / PUBLIC, records, None)
    plan = compose([m.card for m in members], None, [*SETTINGS, f"rounds={rounds}"], task, timeouts)
    on_step(f"invite: wrote the plan, hash {format_hash(plan.hash)}")
    for member in members:
        join(member, plan)
    on_step("join: each peer checked the plan and pinned the certificates of its two neighbours")
    return members, plan


def _find_free_ports() -> list[int]:
    """Ports that are free at this moment, one per organisation."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in NAMES]
        return [int(s.getsockname()[1]) for s in sockets]


def _distribute_digits(members: list[Identity]) -> float:
    """Write heterogeneous shares of the digits to the members' folders. Returns the mean number of records."""
    streams = Streams(0)
    digits = load(DataSettings(), streams)
    assert isinstance(digits.x, Tensor)
    parts = partition(digits.y, len(members), PartitionSettings(mu=1.0), streams, None)
    (q_x, q_y), (x, y) = split_public(digits, None, streams)
    public: JsonDict = {"x_validation": q_x, "y_validation": q_y, "x_test": x, "y_test": y}
    for member, part in zip(members, parts, strict=True):
        np.savez(member.folder / DATA, x=digits.x[part].numpy(), y=digits.y[part].numpy())
        np.savez(member.folder / PUBLIC, **public)
    return float(np.mean([len(part) for part in parts]))


def _run_peers(folders: list[Path], on_status: Callable[[list[Status]], None]) -> list[JsonDict]:
    """Run one process per folder. Returns their summaries."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pdsl", "peer", "run", "--json"]
    with ExitStack() as stack:
        logs = [stack.enter_context((folder / "process.log").open("wb")) for folder in folders]
        processes = [
            subprocess.Popen([*command, str(folder)], stdout=subprocess.PIPE, stderr=log, env=environment)
            for folder, log in zip(folders, logs, strict=True)
        ]
        for process in processes:
            stack.callback(process.kill)  # no effect on a process that has ended
        while any(process.poll() is None for process in processes):
            on_status([status for folder in folders if (status := read_status(folder))])
            time.sleep(0.5)
            if any(process.poll() not in (None, *COMPLETE) for process in processes):
                break
        for folder, process in zip(folders, processes, strict=True):
            if process.poll() not in (None, *COMPLETE):
                last = (folder / "process.log").read_text(errors="replace").strip().splitlines()[-1:]
                raise PdslError(
                    f"the process of {folder.name} ended with exit code {process.returncode}: {' '.join(last)};"
                    f" see {folder / 'process.log'}"
                )
        return [json.loads(process.communicate()[0]) for process in processes]
