"""The run directory: everything a run leaves behind, written so that a crash at any moment loses at most one round.

    config.toml          every setting, resolved
    setup.json           what stays the same in all rounds: graph, holdings, sizes
    rows.jsonl           a row per round
    checkpoint/          the two newest states, one safetensors file each, written aside and renamed
    summary.json         the result
    model.safetensors    the mean model's parameters, by name
    report.html          the page

A row is on disk before the checkpoint of its round, so that the newest checkpoint always finds its rows.
"""

import fcntl
import hashlib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from pdsl.errors import PdslError

Row = dict[str, Any]
KEPT = 2  # checkpoints: the newest, and the one before it in case the newest is damaged


@dataclass(frozen=True)
class Checkpoint:
    """A state after a round, and the seconds spent on the way to it."""

    round: int
    tensors: dict[str, Tensor]
    seconds: float


class RunDirectory:
    """One run's files. `create` makes a new one, `open` takes up an old one."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def create(cls, path: Path, config_toml: str, setup: Mapping[str, Any]) -> "RunDirectory":
        """A new directory with the run's settings in it. Refuses one that holds anything already."""
        try:
            if path.is_dir() and any(path.iterdir()):
                if (path / "config.toml").exists():
                    raise PdslError(
                        f"{path} already holds a run; continue it with --resume {path}, or choose another --out"
                    )
                raise PdslError(f"{path} is not empty; choose another --out")
            (path / "checkpoint").mkdir(parents=True, exist_ok=True)
            run = cls(path)
            run.write("setup.json", json.dumps(setup, ensure_ascii=False).encode())
            run.write("config.toml", config_toml.encode())
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
                raise PdslError(
                    f"{self.path} is in use by another process; wait for it, or choose another --out"
                ) from e
            yield

    def config(self) -> dict[str, Any]:
        try:
            return tomllib.loads((self.path / "config.toml").read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
            raise PdslError(f"{self.path / 'config.toml'}: damaged: {e}; restore it, or start the run anew") from e

    def write(self, name: str, content: bytes) -> None:
        """Write a file aside and rename it: a reader finds the old one or the new one, never a part."""
        target = self.path / name
        aside = target.with_name(target.name + ".part")
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(target)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def append(self, row: Row) -> None:
        with (self.path / "rows.jsonl").open("a", encoding="utf-8") as file:
            file.write(_line(row))
            file.flush()
            os.fsync(file.fileno())

    def rows(self) -> list[Row]:
        """The rows on disk; a last line cut off by a crash is left out."""
        try:
            lines = (self.path / "rows.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def keep_rows(self, last: int) -> list[Row]:
        """The rows up to round `last`, after removing the others from the disk."""
        rows = [row for row in self.rows() if row["round"] <= last]
        if [row["round"] for row in rows] != list(range(1, last + 1)):
            raise PdslError(f"{self.path / 'rows.jsonl'}: rows are missing before round {last}; start the run anew")
        self.write("rows.jsonl", "".join(_line(row) for row in rows).encode())
        return rows

    def save(self, checkpoint: Checkpoint) -> None:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
        facts = {"round": str(checkpoint.round), "seconds": repr(checkpoint.seconds), "sha256": _sha256(tensors)}
        self.write(f"checkpoint/round-{checkpoint.round:06d}.safetensors", save(tensors, metadata=facts))
        for old in self._checkpoints()[KEPT:]:
            old.unlink()

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that is whole, and a line about each damaged one that was passed over."""
        complaints: list[str] = []
        for file in self._checkpoints():
            try:
                return _load(file), complaints
            except (SafetensorError, OSError, KeyError, ValueError) as e:
                complaints.append(f"{file} is damaged ({e}); using the one before it")
        if complaints:
            complaints[-1] = complaints[-1].replace("using the one before it", "starting from the beginning")
        return None, complaints

    def _checkpoints(self) -> list[Path]:
        return sorted((self.path / "checkpoint").glob("round-*.safetensors"), reverse=True)


def _load(file: Path) -> Checkpoint:
    with safe_open(file, framework="pt") as stored:
        facts = stored.metadata() or {}
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  not a dict
    if _sha256(tensors) != facts["sha256"]:
        raise ValueError("its checksum does not match")
    return Checkpoint(int(facts["round"]), tensors, float(facts["seconds"]))


def _sha256(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}\n".encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def unused(folder: Path, name: str) -> Path:
    """folder/name, or folder/name-2, -3, … where that is taken."""
    candidates = (folder / (name if n == 1 else f"{name}-{n}") for n in range(1, 10**6))
    return next(path for path in candidates if not path.exists())
