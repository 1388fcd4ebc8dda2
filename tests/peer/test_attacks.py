"""Attacks by outsiders and by a lying neighbour; each test is named after the damage that it prevents."""

import io
import json
import os
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from pdsl.data.files import load_public, load_records
from pdsl.models.weights import load_weights
from pdsl.peer.experiment import public_sha256
from pdsl.peer.identity import PeerInfo, read_toml
from pdsl.peer.membership import join
from pdsl.peer.plan import TrainingPlan
from pdsl.peer.status import EVENT_BURST, Events, NeighbourStatus, Status, status_table
from pdsl.peer.trust_store import TrustStore
from pdsl.utils.errors import PdslError
from pdsl.utils.files import read_private
from tests.helpers.organisations import make_organisations, make_plan, write_digits
from tests.helpers.refusals import refused

MEMORY = 400 * 2**20  # bytes in addition to the start of the process


def test_a_noisy_neighbour_cannot_hide_the_events_of_others(tmp_path: Path) -> None:
    events = Events(tmp_path / "events.jsonl")
    for _ in range(20_000):
        events.log("refused", what="request", of="bonn", reason="plan")
        events.log("refused", what="handshake", address="192.0.2.1", reason="TLS: timeout")
    events.log("refused", what="request", of="cologne", reason="round")
    events.log("lost", who="bonn", round=3, why="silent")
    read = events.read()
    assert [event["of"] for event in read if event.get("of") == "cologne"] == ["cologne"]
    assert [event["round"] for event in read if event["event"] == "lost"] == [3]
    assert len(read) <= 2 * EVENT_BURST + 20
    assert events.counts["refused"] == 40_001


def test_a_line_cut_by_a_power_failure_costs_no_other_event(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    Events(path).log("lost", who="bonn", round=3, why="silent")
    path.write_bytes(path.read_bytes() + b'{"time": 1, "ev')
    Events(path).log("lost", who="bonn", round=4, why="silent")
    assert [event["round"] for event in Events(path).read()] == [3, 4]


def test_omitted_events_are_counted(tmp_path: Path) -> None:
    events = Events(tmp_path / "events.jsonl")
    for _ in range(int(EVENT_BURST) + 7):
        events.log("refused", of="bonn", reason="plan")
    events._quotas["refused", "bonn"]._tokens = 1.0  # as after a while
    events.log("refused", of="bonn", reason="plan")
    assert events.read()[-1]["more"] == 7


def test_a_neighbour_cannot_forge_lines_or_move_the_cursor(tmp_path: Path) -> None:
    words = '\x1b[2J\x1b]0;owned\x07\n{"event": "lost"}\x9b31m'
    events = Events(tmp_path / "events.jsonl")
    events.log("refused", of="bonn", reason=words)
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    assert json.loads(line)["reason"].isprintable()
    neighbour = NeighbourStatus(name="bonn", state=words, in_round=True, round=1, heard_seconds_ago=0.0)
    status = Status(
        time=0.0, pid=1, running=True, name="ada", plan="", round=1, rounds=2, doing="", accuracy=None, epsilon=None,
        budget=1.0, refused=0, neighbours=[neighbour],
    )  # fmt: skip
    for column in status_table([status]).columns:
        assert all(str(cell).isprintable() for cell in column.cells)


HOSTILE = {
    "dotted key": b"a." * 45_000 + b"a = 1",
    "inline table": b"x = {" + b"a." * 45_000 + b"a = 1}",
    "many tables": b"\n".join(b"[k%d" % i + b".a" * 9 + b"]" for i in range(25_000))[:990_000],
    "lines": b"\n" * 900_000,
}
PARSE = """
import resource, sys
from pdsl.peer.identity import parse_toml
from pdsl.utils.errors import PdslError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    parse_toml(open(sys.argv[1], "rb").read(), "mail", sys.argv[2])
except PdslError:
    pass
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.parametrize("kind", ["card", "plan"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_card_or_plan_cannot_exhaust_memory(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / "mail").write_bytes(HOSTILE[name])
    command = [sys.executable, "-c", PARSE, str(tmp_path / "mail"), kind]
    grown = subprocess.run(command, capture_output=True, check=True, timeout=30).stdout
    assert int(grown) < MEMORY


def write_bomb(path: Path, name: str, unpacked: int) -> None:
    """An .npz file with one array of zeros that unpacks to this many bytes."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (unpacked,)})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file, file.open(f"{name}.npy", "w", force_zip64=True) as f:
        f.write(header.getvalue())
        for _ in range(unpacked >> 24):
            f.write(bytes(1 << 24))


@pytest.mark.parametrize("name", ["x_test", "unwanted"])
def test_a_public_file_cannot_exhaust_memory(tmp_path: Path, name: str) -> None:
    write_bomb(tmp_path / "public.npz", name, 3 << 30)
    assert (tmp_path / "public.npz").stat().st_size < 10**7
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with refused("fewer public records" if name == "x_test" else "unknown array unwanted"):
        load_public(tmp_path / "public.npz")
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MEMORY


def test_an_array_larger_than_memory_is_a_one_line_error(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (1 << 50,)})
    with zipfile.ZipFile(tmp_path / "data.npz", "w") as file:
        file.writestr("x.npy", header.getvalue())
    with refused("do not fit into memory"):
        load_records(tmp_path / "data.npz")


def test_a_named_pipe_among_the_files_does_not_hang(tmp_path: Path) -> None:
    pipe = tmp_path / "ben.pem"
    os.mkfifo(pipe, 0o600)
    readers: list[Callable[[Path], object]] = [
        load_records,
        load_public,
        public_sha256,
        read_private,
        PeerInfo.read,
        TrainingPlan.read,
        lambda path: read_toml(path, "plan"),
        lambda path: TrustStore(tmp_path).certificates("ben"),
        lambda path: load_weights(nn.Linear(1, 1), path),
    ]
    for read in readers:
        with pytest.raises(PdslError):
            read(pipe)


LIMIT_THREADS = """
import sys, threading
real, left = threading._start_new_thread, int(sys.argv.pop(1))
def start(*arguments):
    global left
    left -= 1
    if left < 0:
        raise RuntimeError("can't start new thread")
    return real(*arguments)
threading._start_new_thread = start
from pdsl.cli.main import main
main()
"""


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_a_limit_on_threads_is_a_one_line_error(tmp_path: Path, threads: int) -> None:
    members = make_organisations(tmp_path, 3)
    _, task = write_digits(members)
    for member in members:
        join(member, make_plan(members, task))
    command = [sys.executable, "-c", LIMIT_THREADS, str(threads), "peer", "run", str(members[0].folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 1 and line.startswith("pdsl: out of memory or threads (can't start new thread)")
