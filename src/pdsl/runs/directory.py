"""The run directory. Every file is written so that a crash at any moment loses at most one round.

    config.toml          every setting, resolved
    setup.json           graph, sizes and noise, which stay the same in all rounds
    owner.json           exact counts of the agents' records, which no ε covers: readable by their owner only
    rows.jsonl           one record per round
    ledger.json          messages and ε of every agent, written before the first message of a round is sent
    secret.key           the run's random key (system randomness only); keep it secret
    checkpoint/          the two newest states, as safetensors files
    summary.json         the result
    contributions.json   each party's contribution with its interval, if the algorithm measures them
    initial.safetensors  weights before round 1 of a model given in Python, from which the same call resumes
    model.safetensors    state_dict of the mean model; its metadata have architecture, scaling, classes and task
    README.md            model card
    report.html          the report

A record is on disk before the checkpoint of its round, so that the newest checkpoint always finds its records.
"""

import json
import os
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from filelock import FileLock, Timeout

from pdsl import topology
from pdsl.privacy import Ledger
from pdsl.runs import checkpoints
from pdsl.runs.checkpoints import Checkpoint, Gather
from pdsl.topology import Graph
from pdsl.training.records import RoundRecord
from pdsl.utils.errors import PdslError
from pdsl.utils.files import PART, PRIVATE, PUBLIC, read_private, write_whole
from pdsl.utils.random import KEY_BYTES
from pdsl.utils.types import JsonDict
from pdsl.utils.versions import versions

CONFIG, SETUP, OWNER, ROWS = "config.toml", "setup.json", "owner.json", "rows.jsonl"
LEDGER, KEY, SUMMARY, MODEL = "ledger.json", "secret.key", "summary.json", "model.safetensors"
CHECKPOINTS, REPORT, LOCK, CARD = "checkpoint", "report.html", ".lock", "README.md"
FEATURES = "features.safetensors"  # feature map before the model, fitted on the public set
CONTRIBUTIONS = "contributions.json"  # the account of the run
INITIAL = "initial.safetensors"  # weights before round 1 of a model given in Python
FOR_OWNER = "the data owner only: exact counts of private records, which no epsilon covers; do not pass this file on"


class RunDirectory:
    """The files of one run. `create` makes a new directory, `open` opens an existing one."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def create(
        cls, path: Path, config_toml: str, setup: Mapping[str, Any], owner: Mapping[str, Any] = MappingProxyType({})
    ) -> "RunDirectory":
        """Create a directory with the run's settings. Refuse a folder that holds anything else.

        It counts as a run as soon as config.toml exists; leftovers of a kill before that are ignored. Of two processes
        at a time, one creates it.
        """
        run = cls(path)
        try:
            run._check_unused()
            path.mkdir(parents=True, exist_ok=True)
            with run.lock():
                run._check_unused()
                run.describe(config_toml, setup, owner)
        except OSError as e:
            raise PdslError(f"cannot write to {path}: {e.strerror}; choose another folder") from e
        return run

    def _check_unused(self) -> None:
        """Raise PdslError if the directory has files other than leftovers of an interrupted creation."""
        leftovers, path = (SETUP, OWNER, LOCK), self.path
        if path.is_dir() and any(file.suffix != PART and file.name not in leftovers for file in path.iterdir()):
            if (path / CONFIG).exists():
                raise PdslError(f"{path} already holds a run; choose another folder")
            raise PdslError(f"{path} is not empty; choose another folder")

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        run = cls(path)
        if not run.exists():
            raise PdslError(f"{path} is not a run directory: it has no {CONFIG}; see the folders in runs/")
        return run

    def exists(self) -> bool:
        try:
            return (self.path / CONFIG).is_file()
        except OSError as e:  # for example a name that is too long
            raise PdslError(f"cannot write to {self.path}: {e.strerror}; choose another folder") from e

    def is_finished(self) -> bool:
        return (self.path / SUMMARY).exists()

    def is_locked(self) -> bool:
        """Whether another process writes here."""
        try:
            with self.lock():
                return False
        except (PdslError, OSError):
            return True

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Exclusive use by this process. The operating system releases the lock when the process dies."""
        lock = FileLock(self.path / LOCK, timeout=0)
        try:
            lock.acquire()
        except Timeout as e:
            raise PdslError(f"{self.path} is in use by another process; wait until it has ended") from e
        try:
            yield
        finally:
            lock.release()

    def config(self) -> JsonDict:
        """The settings as nested plain values."""
        try:
            return tomllib.loads((self.path / CONFIG).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
            raise PdslError(f"{self.path / CONFIG}: damaged: {e}; restore it, or start the run anew") from e

    def given(self) -> dict[str, str]:
        """Settings of the config that were chosen for this run, as they were given: {name: "auto"}."""
        try:
            stored = json.loads(self.read(SETUP) or b"{}").get("given", {})
            return {str(name): str(value) for name, value in stored.items()}
        except (ValueError, AttributeError):
            return {}  # a damaged setup.json is written anew

    def describe(
        self, config_toml: str, setup: Mapping[str, Any], owner: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Write settings and setup before the first round; `owner`: exact counts of private records."""
        date = self._started() or datetime.now(UTC).isoformat(timespec="seconds")
        self.write(SETUP, json.dumps({**setup, "versions": versions(), "date": date}, ensure_ascii=False).encode())
        if owner:
            self.write(OWNER, json.dumps({"for": FOR_OWNER, **owner}).encode(), PRIVATE)
        self.write(CONFIG, config_toml.encode())  # last: with it the directory counts as a run

    def graph(self) -> Graph:
        """The graph of the run, from setup.json."""
        try:
            return topology.from_setup(json.loads((self.path / SETUP).read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as e:
            raise PdslError(f"{self.path / SETUP}: damaged: {e}; restore it, or start the run anew") from e

    def _started(self) -> str | None:
        """Date of the run's start in setup.json; None in a new directory."""
        try:
            return cast(str | None, json.loads(self.read(SETUP) or b"{}").get("date"))
        except (ValueError, AttributeError):
            return None

    def reopen(self) -> None:
        """Remove the summary and the account of a finished run that is extended."""
        for name in (SUMMARY, CONTRIBUTIONS):
            self.remove(name)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        (self.path / name).unlink(missing_ok=True)

    @property
    def ledger_path(self) -> Path:
        return self.path / LEDGER

    @property
    def key_path(self) -> Path:
        return self.path / KEY

    def ledger_text(self) -> str:
        """The ledger file's text; empty if there is none."""
        return (self.read(LEDGER) or b"").decode(errors="replace")

    def ledger(self) -> Ledger | None:
        """The ledger; None if there is no file."""
        stored = self.read(LEDGER)
        return None if stored is None else Ledger.from_json(stored.decode(errors="replace"), str(self.ledger_path))

    def write_ledger(self, text: str) -> None:
        self.write(LEDGER, text.encode())

    def secret_key(self) -> bytes | None:
        """The run's secret; None if it has none yet."""
        key = read_private(self.key_path) if self.key_path.exists() else None
        if key is not None and len(key) != KEY_BYTES:
            raise PdslError(
                f"{self.key_path} is damaged: a repeated round would draw new noise; restore it, or start anew"
            )
        return key

    def write_secret_key(self, key: bytes) -> None:
        self.write(KEY, key, PRIVATE)

    def read(self, name: str) -> bytes | None:
        """A file's content; None if there is no such file."""
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes, mode: int = PUBLIC) -> None:
        """Write a file atomically: a reader finds the old one or the new one, never a part."""
        target = self.path / name
        target.parent.mkdir(exist_ok=True)
        write_whole(target, content, mode)

    def link(self, name: str, source: Path) -> None:
        """Add a file that already exists elsewhere: as a hard link, which takes no space, or else as a copy."""
        target, aside = self.path / name, self.path / f"{name}{PART}"
        aside.unlink(missing_ok=True)
        try:
            os.link(source, aside)
        except OSError:  # another file system
            shutil.copyfile(source, aside)
        aside.replace(target)

    def append(self, record: Mapping[str, object]) -> None:
        with (self.path / ROWS).open("a", encoding="utf-8") as file:
            file.write(_line(record))
            file.flush()
            os.fsync(file.fileno())

    def rows(self) -> list[RoundRecord]:
        """The records on disk, up to the first that is incomplete, because a crash may have cut the file."""
        try:
            lines = (self.path / ROWS).read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        rows: list[RoundRecord] = []
        for line in lines:
            try:
                row = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                break
            if not isinstance(row, dict) or row.get("round") != len(rows) + 1:
                break
            rows.append(cast(RoundRecord, row))
        return rows

    def back_to(self, last: int) -> list[RoundRecord]:
        """The records up to round `last`, after removing later and incomplete ones from the disk."""
        rows = self.rows()[:last]
        if len(rows) < last:
            raise PdslError(
                f"{self.path / ROWS}: row {len(rows) + 1} of {last} is missing or damaged; restore it, or start"
                " the run anew"
            )
        self.write(ROWS, "".join(_line(row) for row in rows).encode())
        later = [file.path for file in self._checkpoints() if file.round > last]
        for file in [*later, *self.path.rglob(f"*{PART}")]:
            file.unlink()
        self.prune()
        return rows

    def save(self, checkpoint: Checkpoint, agents: range = range(0), total: int = 0, key: bytes = b"") -> None:
        """Write a checkpoint of these agents, of `total` in the run; by default of all."""
        name = checkpoints.file_name(checkpoint.round, agents, total)
        self.write(f"{CHECKPOINTS}/{name}", checkpoints.pack(checkpoint, key))

    def prune(self) -> None:
        """Remove all but the newest checkpoints, after every process has saved its own."""
        rounds = list(dict.fromkeys(file.round for file in self._checkpoints()))
        for file in self._checkpoints():
            if file.round not in rounds[: checkpoints.KEPT]:
                file.path.unlink()

    def newest(
        self, agents: range | None = None, gather: Gather = list, key: bytes = b""
    ) -> tuple[Checkpoint | None, list[str]]:
        """The newest complete checkpoint with a valid seal, and a warning about each that was skipped."""
        return checkpoints.newest(self.path / CHECKPOINTS, agents, gather, key)

    def kept(self) -> tuple[list[Checkpoint], list[str]]:
        """Every complete checkpoint, oldest first, and a warning about each that is not complete."""
        return checkpoints.kept(self.path / CHECKPOINTS)

    def _checkpoints(self) -> list[checkpoints.File]:
        return checkpoints.files_in(self.path / CHECKPOINTS)


def _line(record: Mapping[str, object]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"


def unused(folder: Path, name: str) -> Path:
    """folder/name, or folder/name-2, -3, … if that exists."""
    candidates = (folder / (name if n == 1 else f"{name}-{n}") for n in range(1, 10**6))
    return next(path for path in candidates if not path.exists())
