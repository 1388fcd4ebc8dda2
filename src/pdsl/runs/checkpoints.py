"""Checkpoints on disk: a round's state in one file, or in one for each process that owns some of the agents.

    round-000007.safetensors                  all agents' rows
    round-000007.0-499-of-1000.safetensors    those of agents 0 to 499

A checkpoint is complete when its files cover every agent, however many processes wrote them. Each file carries a
checksum of its content and, in a private run, a seal (HMAC of the checksum under the run's key): a changed state, or
one of another run, would get noise that was used already.
"""

import hashlib
import hmac
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

NAME = re.compile(r"round-(\d+)(?:\.(\d+)-(\d+)-of-(\d+))?\.safetensors")

KEPT = 2  # checkpoints: the newest, and the one before it in case the newest is damaged

Gather = Callable[[list[Any]], list[Any]]  # all-gather of plain values; see `engine.Engine`


@dataclass(frozen=True)
class Checkpoint:
    """State after a round, and the seconds spent so far."""

    round: int
    tensors: dict[str, Tensor]
    seconds: float


@dataclass(frozen=True)
class File:
    """File of a checkpoint with agents first..last of `total`; (0, 0, 0) if it has all agents."""

    path: Path
    round: int
    first: int
    last: int
    total: int

    @property
    def whole(self) -> bool:
        return self.total == 0


def file_name(t: int, agents: range, total: int) -> str:
    part = "" if len(agents) == total else f".{agents.start}-{agents.stop - 1}-of-{total}"
    return f"round-{t:06d}{part}.safetensors"


def files_in(folder: Path) -> list[File]:
    """Checkpoint files, newest first. Files with other names are ignored."""
    found = ((path, NAME.fullmatch(path.name)) for path in folder.glob("round-*.safetensors"))
    files = [File(path, *(int(n or 0) for n in match.groups())) for path, match in found if match]
    return sorted(files, key=lambda file: (-file.round, file.first, file.path.name))


def complete(files: list[File]) -> dict[int, list[File]]:
    """Rounds with a complete checkpoint, newest first, each with the files that cover all agents."""
    rounds: dict[int, list[File]] = {}
    for t in dict.fromkeys(file.round for file in files):
        of_round = [file for file in files if file.round == t]
        chain = [file for file in of_round if file.whole][:1] or _chain(of_round)
        if chain:
            rounds[t] = chain
    return rounds


def _chain(files: list[File]) -> list[File]:
    """Files that cover agents 0 to the last without a gap; none if there is a gap."""
    for total in {file.total for file in files}:
        chain: list[File] = []
        while (after := chain[-1].last + 1 if chain else 0) < total:
            following = next((file for file in files if (file.first, file.total) == (after, total)), None)
            if following is None or following.last < after:
                break
            chain.append(following)
        else:
            return chain
    return []


def newest(folder: Path, agents: range | None, gather: Gather, key: bytes = b"") -> tuple[Checkpoint | None, list[str]]:
    """The newest valid checkpoint, with these agents' rows (None: all), and a warning about each damaged one.

    With a key, a file without its seal counts as damaged. All processes get the same round.
    """
    mine = complete(files_in(folder))
    everyones = gather([list(mine)])
    complaints: list[str] = []
    for t in (t for t in mine if all(t in rounds for rounds in everyones)):
        found, complaint = _try_load(mine[t], agents, key)
        problems = [line for line in gather([complaint]) if line]
        if not problems:
            return found, complaints
        complaints += [f"{line}; using the one before it" for line in dict.fromkeys(problems)]
    if complaints:
        complaints[-1] = complaints[-1].replace("using the one before it", "starting from the beginning")
    return None, complaints


def kept(folder: Path) -> tuple[list[Checkpoint], list[str]]:
    """Every valid checkpoint, oldest first, and a warning about each damaged one."""
    tried = [_try_load(files, None, b"") for files in reversed(complete(files_in(folder)).values())]
    return [found for found, _ in tried if found], [f"{problem} and left out" for _, problem in tried if problem]


def _try_load(files: list[File], agents: range | None, key: bytes) -> tuple[Checkpoint | None, str | None]:
    parts: list[Checkpoint] = []
    for file in files:
        if agents is not None and not file.whole and (file.last < agents.start or file.first >= agents.stop):
            continue
        try:
            parts.append(_rows(_load(file.path, key), file, agents))
        except (SafetensorError, OSError, KeyError, ValueError) as e:
            return None, f"{file.path} is damaged ({e})"
    first = parts[0]
    if len(parts) == 1:
        return first, None
    joined = {name: torch.cat([part.tensors[name] for part in parts]) for name in first.tensors}
    return Checkpoint(first.round, joined, first.seconds), None


def _rows(checkpoint: Checkpoint, file: File, agents: range | None) -> Checkpoint:
    """The rows of a file that belong to these agents."""
    if agents is None:
        return checkpoint
    rows = slice(max(0, agents.start - file.first), agents.stop - file.first)
    tensors = {name: tensor[rows].clone() for name, tensor in checkpoint.tensors.items()}
    return Checkpoint(checkpoint.round, tensors, checkpoint.seconds)


def pack(checkpoint: Checkpoint, key: bytes = b"") -> bytes:
    """A file's content, sealed under a key if there is one."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
    metadata = {"round": str(checkpoint.round), "seconds": repr(checkpoint.seconds)}
    metadata["sha256"] = _sha256(metadata, tensors)
    if key:
        metadata["seal"] = _seal(key, metadata["sha256"])
    return save(tensors, metadata=metadata)


def _seal(key: bytes, checksum: str) -> str:
    return hmac.digest(key, checksum.encode(), "sha256").hex()


def _load(file: Path, key: bytes) -> Checkpoint:
    with safe_open(file, framework="pt") as stored:
        metadata = stored.metadata() or {}
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  not a dict
    seal, checksum = metadata.pop("seal", ""), metadata.pop("sha256")
    if checksum != _sha256(metadata, tensors):
        raise ValueError("its checksum does not match")
    if key and not hmac.compare_digest(seal, _seal(key, checksum)):
        raise ValueError("it is not sealed by this run")
    return Checkpoint(int(metadata["round"]), tensors, float(metadata["seconds"]))


def _sha256(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}\n".encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
