"""The run directory: everything a run leaves behind, written so that a crash at any moment loses at most one round.

    config.toml          every setting, resolved
    setup.json           graph, sizes and noise, which stay the same in all rounds
    owner.json           exact counts of the agents' records, which no ε covers: readable by its owner alone
    rows.jsonl           a row per round
    ledger.json          what every agent has sent and spent, written before a round's first message could leave
    secret.key           the run's own random key, where noise is not seeded; keep it to yourself
    job                  what torchrun or Slurm calls the job that began the run, where one of them did
    checkpoint/          the two newest states, in safetensors files that are written aside and renamed
    summary.json         the result
    model.safetensors    the mean model's state_dict
    report.html          the page

A row is on disk before the checkpoint of its round, so that the newest checkpoint always finds its rows.
"""

import fcntl
import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pdsl import checkpoints
from pdsl.checkpoints import Checkpoint, Gather
from pdsl.errors import PdslError
from pdsl.files import PART, PRIVATE, PUBLIC, write_whole

Row = dict[str, Any]
CHECKPOINTS = "checkpoint"
OWNER = "owner.json"
FOR_OWNER = "the data owner only: exact counts of private records, which no epsilon covers; do not pass this file on"
KEPT = 2  # checkpoints: the newest, and the one before it in case the newest is damaged


class RunDirectory:
    """One run's files. `create` makes a new one, `open` takes up an old one."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def create(
        cls, path: Path, config_toml: str, setup: Mapping[str, Any], owner: Mapping[str, Any] = MappingProxyType({})
    ) -> "RunDirectory":
        """A new directory with the run's settings in it. Refuses one that holds anything already.

        It is a run as soon as config.toml is in place; what a kill before that leaves behind is in nobody's way.
        """
        try:
            if path.is_dir() and any(file.suffix != PART for file in path.iterdir()):
                if (path / "config.toml").exists():
                    raise PdslError(
                        f"{path} already holds a run; continue it with --resume {path}, or choose another --out"
                    )
                raise PdslError(f"{path} is not empty; choose another --out")
            path.mkdir(parents=True, exist_ok=True)
            run = cls(path)
            run.describe(config_toml, setup, owner)
        except OSError as e:
            raise PdslError(f"cannot write to {path}: {e.strerror}; choose another place with --out") from e
        return run

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        if not (path / "config.toml").is_file():
            raise PdslError(f"{path} is not a run directory: it has no config.toml; see the folders in runs/")
        return cls(path)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Held by the process that writes here; a second one is refused. The system lets go of it when we die."""
        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                raise PdslError(f"{self.path} is in use by another process; wait until it has ended") from e
            yield

    def config(self) -> dict[str, Any]:
        try:
            return tomllib.loads((self.path / "config.toml").read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
            raise PdslError(f"{self.path / 'config.toml'}: damaged: {e}; restore it, or start the run anew") from e

    def describe(
        self, config_toml: str, setup: Mapping[str, Any], owner: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Write settings and setup before the first round; `owner`: exact counts of private records."""
        self.write("config.toml", config_toml.encode())
        self.write("setup.json", json.dumps(setup, ensure_ascii=False).encode())
        if owner:
            self.write(OWNER, json.dumps({"for": FOR_OWNER, **owner}).encode(), PRIVATE)

    def read(self, name: str) -> bytes | None:
        """A file's content; None where there is no such file."""
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes, mode: int = PUBLIC) -> None:
        """Write a file aside and rename it: a reader finds the old one or the new one, never a part."""
        target = self.path / name
        target.parent.mkdir(exist_ok=True)
        write_whole(target, content, mode)

    def append(self, row: Row) -> None:
        with (self.path / "rows.jsonl").open("a", encoding="utf-8") as file:
            file.write(_line(row))
            file.flush()
            os.fsync(file.fileno())

    def rows(self) -> list[Row]:
        """The rows on disk, up to the first that is not whole: a crash may have cut it off."""
        try:
            lines = (self.path / "rows.jsonl").read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        rows: list[Row] = []
        for line in lines:
            try:
                row = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                break
            if not isinstance(row, dict) or row.get("round") != len(rows) + 1:
                break
            rows.append(row)
        return rows

    def back_to(self, last: int) -> list[Row]:
        """The rows up to round `last`, after removing from the disk what is of later rounds or half written."""
        rows = self.rows()[:last]
        if len(rows) < last:
            raise PdslError(
                f"{self.path / 'rows.jsonl'}: row {len(rows) + 1} of {last} is missing or damaged; restore it, or start"
                " the run anew"
            )
        self.write("rows.jsonl", "".join(_line(row) for row in rows).encode())
        later = [file.path for file in self._checkpoints() if file.round > last]
        for file in [*later, *self.path.rglob(f"*{PART}")]:
            file.unlink()
        self.prune()
        return rows

    def save(self, checkpoint: Checkpoint, agents: range = range(0), total: int = 0, key: bytes = b"") -> None:
        """Write the rows of these agents, of `total` in the run; by default the checkpoint has everybody's."""
        name = checkpoints.file_name(checkpoint.round, agents, total)
        self.write(f"{CHECKPOINTS}/{name}", checkpoints.packed(checkpoint, key))

    def prune(self) -> None:
        """Remove all but the newest checkpoints. Every process has saved its own before."""
        rounds = list(dict.fromkeys(file.round for file in self._checkpoints()))
        for file in self._checkpoints():
            if file.round not in rounds[:KEPT]:
                file.path.unlink()

    def newest(
        self, agents: range | None = None, gather: Gather = list, key: bytes = b""
    ) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that is whole and sealed under the key, and a line about each that was passed over."""
        return checkpoints.newest(self.path / CHECKPOINTS, agents, gather, key)

    def kept(self) -> tuple[list[Checkpoint], list[str]]:
        """Every checkpoint that is whole, the oldest first, and a line about each that is not."""
        return checkpoints.kept(self.path / CHECKPOINTS)

    def _checkpoints(self) -> list[checkpoints.File]:
        return checkpoints.files_in(self.path / CHECKPOINTS)


def _line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def unused(folder: Path, name: str) -> Path:
    """folder/name, or folder/name-2, -3, … where that is taken."""
    candidates = (folder / (name if n == 1 else f"{name}-{n}") for n in range(1, 10**6))
    return next(path for path in candidates if not path.exists())
