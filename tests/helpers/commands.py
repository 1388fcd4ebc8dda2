"""The command `pdsl` inside this process (fast), and in a process of its own that can be killed."""

import io
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from safetensors.torch import load_file

from pdsl.cli.main import main
from pdsl.runs.listeners import RunListener

SMALL = [
    "privacy.mode=none",
    "graph.agents=4",
    "model.name=softmax",
    "data.validation=40",
    "batch.size=16",
    "engine.workers=2",
]
PATIENCE = 60.0  # seconds, for what should take less than one

# Forked from a server that has imported torch already, a process is there in milliseconds instead of seconds.
forking = get_context("forkserver")
forking.set_forkserver_preload(["pdsl.runs.runner", "pdsl.cli.main", "pdsl.runs.listeners", "dp_accounting.pld"])


class Warnings(RunListener):
    """Keep the warnings of a run."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_warning(self, text: str) -> None:
        self.texts.append(text)


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    def refused(self, *parts: str) -> None:
        """One line on stderr that has all of the parts, nothing on stdout."""
        assert (self.code, self.out) == (2, "")
        assert self.err.startswith("pdsl: ")
        assert self.err.endswith("\n")
        assert len(self.err.splitlines()) == 1
        for part in parts:
            assert part in self.err


def settings(*assignments: str) -> list[str]:
    return [word for assignment in assignments for word in ("--set", assignment)]


def pdsl(*args: object) -> Outcome:
    """`pdsl args…`."""
    out, err = io.StringIO(), io.StringIO()
    argv = ["pdsl", *map(str, args)]
    with patch.object(sys, "argv", argv), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as e:
            code = e.code
    assert isinstance(code, int)
    return Outcome(code, out.getvalue(), err.getvalue())


def started(*args: object, out: str | Path = os.devnull, err: str | Path = os.devnull) -> ForkServerProcess:
    """`pdsl args… >out 2>err &`."""
    process = forking.Process(target=_command, args=(Path.cwd(), ["pdsl", *map(str, args)], out, err))
    process.start()
    return process


def _command(cwd: Path, argv: list[str], out: str | Path, err: str | Path) -> None:
    os.chdir(cwd)
    for stream, target in ((1, out), (2, err)):
        os.dup2(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_NOCTTY), stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w") for stream in (1, 2))
    sys.argv = argv
    main()


def wait_for(condition: Callable[[], bool], patience: float = PATIENCE) -> None:
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def rows_on_disk(run: Path) -> int:
    file = run / "rows.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def files_of(path: Path) -> dict[str, bytes]:
    """Every file but the lock."""
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file() and f.name != ".lock"}


def result_of(run: Path) -> dict[str, Any]:
    """Everything a run came to but the time it took, the place it is in, and settings as they were given."""
    result: dict[str, Any] = {
        name: (run / name).read_bytes() for name in ("config.toml", "rows.jsonl", "model.safetensors")
    }
    result["setup"] = {**json.loads((run / "setup.json").read_text()), "date": None, "given": None}
    summary = json.loads((run / "summary.json").read_text())
    result["summary"] = {name: value for name, value in summary.items() if name not in ("seconds", "run")}
    for file in (run / "checkpoint").iterdir():
        for name, tensor in load_file(file).items():
            result[f"{file.name} {name}"] = tensor.numpy().tobytes()
    return result
