"""The log of noisy vectors: each is written down, and on the disk, before it can leave.

A noise stream belongs to one (round, peer, step, nth). Used on two different gradients it would cancel out and show
their difference, so a second use is allowed only if it comes to the same bytes: a round that is run again after a
crash, for neighbours that ask the same again. Anything else is a `ConflictError`, and nothing leaves.

Of a vector only its SHA-256 is kept. If the log is lost, nobody knows any more what was answered: the peer then goes on
as a new incarnation, with another secret key, and pays for what it sends once more.
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


class ConflictError(Exception):
    """A noise stream that was used already would be used on something else."""


class DamagedError(PdslError):
    """The log is there but cannot be read to its end."""


class SentLog:
    """An append-only file: one JSON line per noisy vector. The last line may be cut off by a crash: it never left."""

    def __init__(self, path: Path):
        self.path = path
        self._digests = _read(path)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def record(self, digests: dict[Draw, str]) -> None:
        """Write these down for good; ConflictError, and nothing is written, if one was used for something else."""
        for draw, digest in digests.items():
            if self._digests.get(draw, digest) != digest:
                raise ConflictError(
                    f"round {draw[0]}: the noise for agent {draw[3]} was used already, on another gradient"
                )
        new = {draw: digest for draw, digest in digests.items() if draw not in self._digests}
        if not new:
            return
        lines = "".join(json.dumps([*draw, digest]) + "\n" for draw, digest in new.items()).encode()
        size = os.fstat(self._file).st_size
        try:
            if os.write(self._file, lines) != len(lines):
                raise OSError(28, "No space left on device")
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, size)  # half a line in the middle would make the whole log unreadable
            raise
        self._digests |= new

    @property
    def draws(self) -> list[Draw]:
        """Everything that may have been sent."""
        return list(self._digests)

    def close(self) -> None:
        os.close(self._file)


def _read(path: Path) -> dict[Draw, str]:
    """The log's content; what a crash left of a last line is removed from the file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    whole, _, rest = content.rpartition(b"\n")
    digests: dict[Draw, str] = {}
    for line in whole.splitlines():
        try:
            *draw, digest = json.loads(line)
            a, b, c, d = (int(n) for n in draw)
            digests[a, b, c, d] = str(digest)
        except (ValueError, TypeError, OverflowError, RecursionError) as e:
            raise DamagedError(f"{path} is damaged; what was sent is not known") from e
    if rest:
        os.truncate(path, len(content) - len(rest))
    return digests


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
