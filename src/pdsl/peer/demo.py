"""Four organisations on one machine: keys, cards, a plan, four processes that train, four models.

Each has its own folder, its own digits and its own process; they talk over mutual TLS as they would from far apart.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from pdsl.data import load, partition, split_public
from pdsl.errors import PdslError
from pdsl.peer.identity import Identity
from pdsl.peer.join import join
from pdsl.peer.plan import Conduct, compose, spoken
from pdsl.peer.status import read_status
from pdsl.peer.task import OWN, PUBLIC, public_task
from pdsl.randomness import Streams
from pdsl.settings import DataSettings, PartitionSettings

NAMES = ("amber", "birch", "cedar", "dune")
SETTINGS = ("algorithm.name=pdsl", "algorithm.learning_rate=2.0", "model.name=softmax", "privacy.target_epsilon=8")


def demonstrate(
    folder: Path, rounds: int, say: Callable[[str], None], show: Callable[[list[dict[str, Any]]], None]
) -> dict[str, Any]:
    """The whole way, in `folder`; tells each step, and shows the peers' own status while they train."""
    start = time.monotonic()
    if folder.exists() and any(folder.iterdir()):
        raise PdslError(f"{folder} is not empty; choose another --out")
    members = [
        Identity.create(folder / name, name, f"127.0.0.1:{port}") for name, port in zip(NAMES, _ports(), strict=True)
    ]
    say(f"init: {', '.join(NAMES)} have a key, a certificate and a card each, in {folder}")
    records = _deal(members)
    conduct = Conduct(silence=10, deadline=60, start=120)
    task = public_task(members[0].folder / PUBLIC, records, None)
    plan = compose([m.card for m in members], None, [*SETTINGS, f"rounds={rounds}"], task, conduct)
    say(f"invite: the plan's hash is {spoken(plan.hash)}")
    for member in members:
        join(member, plan)
    say("join: each has checked the plan and pinned its two neighbours' certificates; run:")
    summaries = _run([member.folder for member in members], show)
    kept = ("name", "accuracy", "epsilon", "delta", "rounds", "rounds_run", "bytes", "privacy", "run")
    return {
        "peers": [{key: summary[key] for key in kept} for summary in summaries],
        "plan": plan.hash,
        "seconds": round(time.monotonic() - start, 1),
    }


def _ports() -> list[int]:
    """Ports that are free at this moment."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in NAMES]
        return [int(s.getsockname()[1]) for s in sockets]


def _deal(members: list[Identity]) -> float:
    """Digits to the members' folders, not the same kinds to each; returns the mean number."""
    streams = Streams(0)
    digits = load(DataSettings(), streams)
    parts = partition(digits.y, len(members), PartitionSettings(mu=1.0), streams, None)
    (q_x, q_y), (x, y) = split_public(digits, None, streams)
    public: dict[str, Any] = {"x_validation": q_x, "y_validation": q_y, "x_test": x, "y_test": y}
    for member, part in zip(members, parts, strict=True):
        np.savez(member.folder / OWN, x=digits.x[part].numpy(), y=digits.y[part].numpy())
        np.savez(member.folder / PUBLIC, **public)
    return float(np.mean([len(part) for part in parts]))


def _run(folders: list[Path], show: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """A process for each; their summaries."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pdsl", "peer", "run", "--json"]
    with ExitStack() as stack:
        logs = [stack.enter_context((folder / "process.log").open("wb")) for folder in folders]
        processes = [
            subprocess.Popen([*command, str(folder)], stdout=subprocess.PIPE, stderr=log, env=environment)
            for folder, log in zip(folders, logs, strict=True)
        ]
        for process in processes:
            stack.callback(process.kill)  # does nothing to one that has ended
        while any(process.poll() is None for process in processes):
            show([status for folder in folders if (status := read_status(folder))])
            time.sleep(0.5)
            if any(process.poll() not in (None, 0) for process in processes):
                break
        for folder, process in zip(folders, processes, strict=True):
            if process.poll() not in (None, 0):
                last = (folder / "process.log").read_text(errors="replace").strip().splitlines()[-1:]
                raise PdslError(f"the process of {folder.name} ended with {process.returncode}: {' '.join(last)}")
        return [json.loads(process.communicate()[0]) for process in processes]
