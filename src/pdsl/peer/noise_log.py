"""Log of noisy vectors and the secret key of their noise, so that no noise is used on two different gradients.

A noise stream belongs to one (round, step, nth, peer). Used on two gradients, it would cancel out and reveal their
difference. A second use is allowed only if the result is the same bytes, as in a round that is repeated after a crash.
Any other second use is a `ConflictError`, and nothing is sent. The log keeps the SHA-256 of every vector, and it is on
disk before the vector can leave.

A key and its log are a *generation*. Every process starts a new one, because the folder may be an older copy: its log
would not know how the noise of later rounds was used. Only a round whose vectors are all in the log of the last
generation is repeated with the old key, and then nothing but these vectors can be made. Any other round that is
repeated is charged in addition.

A log with missing lines counts as lost: it records the start of each round, and each charge in the ledger has the
`Mark` of the log at that time, so an older copy of the log does not match.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from pdsl.peer.ledger import Mark, PeerLedger
from pdsl.peer.status import Events
from pdsl.privacy import Noise
from pdsl.training.records import RoundRecord
from pdsl.utils.errors import PdslError
from pdsl.utils.files import PRIVATE, read_private, write_whole
from pdsl.utils.random import KEY_BYTES

Draw = tuple[int, int, int, int]  # round, step, nth, peer


class ConflictError(Exception):
    """Noise that was used already would be used on another gradient."""


class DamagedError(PdslError):
    """A key or a log is missing, incomplete or unreadable."""


class NoiseLog:
    """Append-only file of JSON lines: [round] at the start of a round, [round, step, nth, peer, digest] per vector.

    A last line cut off by a crash is removed: its vector was not sent.
    """

    def __init__(self, path: Path, key: bytes = b"", mark: Mark = (0, ""), read_only: bool = False):
        """Open the log of a `key`; DamagedError if it does not start with the content at the `mark`.

        With `read_only`, no vector can be made that the log does not have.
        """
        self.path, self._read_only = path, read_only
        content = _read_complete_lines(path)
        size, digest = mark
        if size and hashlib.sha256(key + content[:size]).hexdigest() != digest:
            raise DamagedError(f"{path.name} is incomplete or belongs to another key")
        self._started, self._digests = _parse(content, path)
        self._content = hashlib.sha256(key + content)
        self._size = len(content)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.fsync(self._file)  # a process that was killed may have written lines without syncing them

    def begin_round(self, t: int) -> Mark:
        """Record the start of a round, before its charge. Returns the mark for that charge."""
        if t not in self._started:
            self._append([[t]])
            self._started.add(t)
        return self._size, self._content.hexdigest()

    def record(self, digests: dict[Draw, str]) -> None:
        """Append digests durably; ConflictError, without any change, if a draw has another digest already."""
        for draw, digest in digests.items():
            if self._digests.get(draw, digest) != digest:
                raise ConflictError(
                    f"round {draw[0]}: the noise for agent {draw[3]} was already used on another gradient"
                )
        new = {draw: digest for draw, digest in digests.items() if draw not in self._digests}
        if new and self._read_only:
            raise ConflictError(f"round {min(new)[0]}: its noise may have been used by an earlier process")
        if new:
            self._append([[*draw, digest] for draw, digest in new.items()])
            self._digests |= new

    @property
    def draws(self) -> list[Draw]:
        """All draws whose vectors may have been sent."""
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
            os.ftruncate(self._file, size)  # a partial line would make the whole log unreadable
            raise
        self._content.update(lines)
        self._size += len(lines)


def _read_complete_lines(path: Path) -> bytes:
    """Read the complete lines of a log, and truncate the file after them."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return b""
    size = content.rfind(b"\n") + 1
    if size < len(content):
        os.truncate(path, size)
    return content[:size]


def _parse(content: bytes, path: Path) -> tuple[set[int], dict[Draw, str]]:
    started: set[int] = set()
    digests: dict[Draw, str] = {}
    for line in content.splitlines():
        try:
            match json.loads(line):
                case [int(t)]:
                    started.add(t)
                case [int(t), int(step), int(nth), int(peer), str(digest)]:
                    digests[t, step, nth, peer] = digest
                case _:
                    raise ValueError("neither a round nor a vector")
        except (ValueError, RecursionError) as e:
            raise DamagedError(f"{path} is damaged, so the messages sent are unknown") from e
    return started, digests


@dataclass(frozen=True)
class LoggedNoise(Noise):
    """Noise that logs every result before returning it."""

    log: NoiseLog
    on_release: Callable[[int, dict[Draw, str]], None] = lambda t, digests: None  # called before vectors can leave

    def add(self, t: int, makers: Tensor, peers: Tensor, g: Tensor, step: int = 0, nth: int = 0) -> Tensor:
        noisy = super().add(t, makers, peers, g, step, nth)
        digests = {
            (t, step, nth, int(peer)): hashlib.sha256(row.cpu().numpy().tobytes()).hexdigest()
            for peer, row in zip(peers, noisy, strict=True)
        }
        self.log.record(digests)
        self.on_release(t, digests)
        return noisy


class Generation(NamedTuple):
    """A secret key for noise and batches, with its log."""

    number: int
    key: bytes
    log: NoiseLog


def key_file(run: Path, number: int) -> Path:
    return run / f"secret-{number}.key"


def log_file(run: Path, number: int) -> Path:
    return run / f"sent-{number}.log"


class Generations:
    """The generation of this process, and that of the process before, for a round that is repeated."""

    def __init__(self, run: Path, ledger: PeerLedger, events: Events):
        """Draw a new key. It is written with its first round."""
        self._run = run
        self._previous = _load_previous(run, ledger, events)
        used = [*_find_numbers(run, "secret-*.key"), *(of for _, of in ledger.charges)]
        self.number = max([ledger.since, *(1 + number for number in used)])
        self.key = secrets.token_bytes(KEY_BYTES)
        self._current: Generation | None = None

    def choose(self, t: int, present: frozenset[int], ledger: PeerLedger) -> Generation:
        """The generation for round t with these neighbours: the previous one if it has made all vectors of it.

        A generation of an earlier stage of the plan is never used again.
        """
        if (previous := self._previous) is not None and previous.number >= ledger.since:
            charged = ledger.charges.get((t, previous.number))
            if charged is not None and present <= charged:
                release = ledger.mechanism_with(charged)
                if sum(draw[0] == t for draw in previous.log.draws) == release.messages * release.steps:
                    return previous
        if self._current is None:
            write_whole(key_file(self._run, self.number), self.key, PRIVATE)
            self._current = Generation(self.number, self.key, NoiseLog(log_file(self._run, self.number), self.key))
        return self._current

    def refund(self, t: int, ledger: PeerLedger) -> PeerLedger:
        """The ledger without the charge of the previous generation for round t, if it made no vector of it."""
        if self._previous is None or self.has_vectors(t):
            return ledger
        return ledger.refund(t, self._previous.number)

    def has_vectors(self, t: int) -> bool:
        """Whether the previous generation made vectors of round t; also if that is unknown."""
        return self._previous is None or any(draw[0] == t for draw in self._previous.log.draws)

    def close(self) -> None:
        """Close the logs; a second call does nothing."""
        for generation in (self._previous, self._current):
            if generation is not None:
                generation.log.close()
        self._previous = self._current = None


def _load_previous(run: Path, ledger: PeerLedger, events: Events) -> Generation | None:
    """Load the generation of the last charge; None if there is none, or if its key or log is lost."""
    if not ledger.charges:
        return None
    number = ledger.generation
    key, log = key_file(run, number), log_file(run, number)
    try:
        if not key.exists() or not log.exists():
            raise DamagedError(f"{(log if key.exists() else key).name} is missing")
        content = read_private(key)
        if len(content) != KEY_BYTES:
            raise DamagedError(f"{key.name} is damaged")
        return Generation(number, content, NoiseLog(log, content, ledger.mark, read_only=True))
    except DamagedError as e:
        events.log("lost key or log", number=number, why=str(e))
        return None


def _find_numbers(run: Path, pattern: str) -> list[int]:
    """Numbers of the generations with a file of this pattern; other file names are ignored."""
    named = (file.stem.partition("-")[2] for file in run.glob(pattern))
    return sorted(int(number) for number in named if number.isdecimal())


def check_ledger(run: Path, ledger: PeerLedger, rows: Iterable[RoundRecord]) -> None:
    """PdslError unless the ledger has charges for all messages in the logs and all rounds in the rows."""
    for t in (row["round"] for row in rows if "absent" not in row):
        if t > ledger.last_round:
            raise _missing_charge(run, t, "rows.jsonl")
    for number, (t, _, _, peer) in find_draws(run):
        charged = ledger.charges.get((t, number))
        if charged is None or peer not in charged | {ledger.me}:
            raise _missing_charge(run, t, log_file(run, number).name)


def find_draws(run: Path) -> Iterator[tuple[int, Draw]]:
    """All draws in the logs, each with its generation. A damaged log has unknown ones."""
    for number in _find_numbers(run, "sent-*.log"):
        try:
            log = NoiseLog(log_file(run, number))
        except DamagedError:
            continue
        log.close()
        yield from ((number, draw) for draw in log.draws)


def find_generations(run: Path) -> list[int]:
    """Numbers of the generations with a key or a log."""
    return sorted({*_find_numbers(run, "secret-*.key"), *_find_numbers(run, "sent-*.log")})


def _missing_charge(run: Path, t: int, witness: str) -> PdslError:
    return PdslError(
        f"{run / 'ledger.json'} does not account for all of round {t}, which was sent according to {witness};"
        " restore the newest ledger"
    )
