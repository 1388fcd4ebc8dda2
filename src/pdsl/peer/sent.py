"""The log of noisy vectors: each is written down, and on the disk, before it can leave.

A noise stream belongs to one (round, peer, step, nth). Used on two different gradients it would cancel out and show
their difference, so a second use is allowed only if it comes to the same bytes: a round that is run again after a
crash, for neighbours that ask the same again. Anything else is a `ConflictError`, and nothing leaves.

Of a vector only its SHA-256 is kept. If the log is lost, nobody knows any more what was answered: the peer then goes on
as a new incarnation, with another secret key, and pays for what it sends once more. A log that lacks something is lost
as well: it says when a round begins, and the ledger has its `mark` from then on, so that an older copy does not pass.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from pdsl.errors import PdslError
from pdsl.privacy import Noise

Draw = tuple[int, int, int, int]  # round, step, nth, peer
Mark = tuple[int, str]  # how many bytes a log had, and the SHA-256 of its key and them


class ConflictError(Exception):
    """A noise stream that was used already would be used on something else."""


class DamagedError(PdslError):
    """The log is there but cannot be read to its end."""


class SentLog:
    """An append-only file: a JSON line [round] when a round begins, [round, step, nth, peer, digest] per noisy vector.

    The last line may be cut off by a crash: it never left.
    """

    def __init__(self, path: Path, key: bytes = b"", mark: Mark = (0, "")):
        """The log of a `key`; DamagedError if it does not begin with what it had at the `mark`."""
        self.path = path
        content = _whole(path)
        size, digest = mark
        if size and hashlib.sha256(key + content[:size]).hexdigest() != digest:
            raise DamagedError(f"{path.name} lacks something that was in it, or is another key's")
        self._begun, self._digests = _parsed(content, path)
        self._content = hashlib.sha256(key + content)
        self._size = len(content)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def begin(self, t: int) -> Mark:
        """Write down that a round begins, before it is charged. Returns the mark to charge it with."""
        if t not in self._begun:
            self._append([[t]])
            self._begun.add(t)
        return self._size, self._content.hexdigest()

    def record(self, digests: dict[Draw, str]) -> None:
        """Write these down for good; ConflictError, and nothing is written, if one was used for something else."""
        for draw, digest in digests.items():
            if self._digests.get(draw, digest) != digest:
                raise ConflictError(
                    f"round {draw[0]}: the noise for agent {draw[3]} was used already, on another gradient"
                )
        new = {draw: digest for draw, digest in digests.items() if draw not in self._digests}
        if new:
            self._append([[*draw, digest] for draw, digest in new.items()])
            self._digests |= new

    @property
    def draws(self) -> list[Draw]:
        """Everything that may have been sent."""
        return list(self._digests)

    def close(self) -> None:
        os.close(self._file)

    def _append(self, values: list[list[int | str]]) -> None:
        lines = "".join(json.dumps(value) + "\n" for value in values).encode()
        size = os.fstat(self._file).st_size
        try:
            if os.write(self._file, lines) != len(lines):
                raise OSError(28, "No space left on device")
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, size)  # half a line in the middle would make the whole log unreadable
            raise
        self._content.update(lines)
        self._size += len(lines)


def _whole(path: Path) -> bytes:
    """The log's whole lines; what a crash left of a last one is removed from the file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return b""
    size = content.rfind(b"\n") + 1
    if size < len(content):
        os.truncate(path, size)
    return content[:size]


def _parsed(content: bytes, path: Path) -> tuple[set[int], dict[Draw, str]]:
    begun: set[int] = set()
    digests: dict[Draw, str] = {}
    for line in content.splitlines():
        try:
            match json.loads(line):
                case [int(t)]:
                    begun.add(t)
                case [int(t), int(step), int(nth), int(peer), str(digest)]:
                    digests[t, step, nth, peer] = digest
                case _:
                    raise ValueError("neither a round nor a vector")
        except (ValueError, RecursionError) as e:
            raise DamagedError(f"{path} is damaged; what was sent is not known") from e
    return begun, digests


@dataclass(frozen=True)
class LoggedNoise(Noise):
    """Noise whose every result is in the log before it is handed on."""

    log: SentLog

    def add(self, t: int, makers: Tensor, peers: Tensor, g: Tensor, step: int = 0, nth: int = 0) -> Tensor:
        noisy = super().add(t, makers, peers, g, step, nth)
        draws = {
            (t, step, nth, int(peer)): hashlib.sha256(row.cpu().numpy().tobytes()).hexdigest()
            for peer, row in zip(peers, noisy, strict=True)
        }
        self.log.record(draws)
        return noisy
