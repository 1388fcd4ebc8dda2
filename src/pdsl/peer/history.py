"""History of a peer: its charges, noisy vectors, messages and mixing weights, in the order in which they happened.

An independent program compares the histories of all peers (`tests/stress/history.py`). `run/history.jsonl` is
append-only and has one object per line. Each line is written before its effect: a message leaves after its line, and
a round is stored after its line. Without a line there is no effect, so a full disk stops the peer. A message that is
fetched again has no second line, so no neighbour can fill the disk. Digests are the first half of a SHA-256.
"""

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from pdsl.utils.types import JsonDict

FILE = "history.jsonl"
DIGEST = 32  # hexadecimal digits


class History:
    """Writer of the history of one process. The file is created with the first line."""

    def __init__(self, path: Path):
        self._path = path
        self._file: int | None = None
        self._lock = threading.Lock()  # lines come from the round loop and from the event loop
        self._sent: dict[tuple[int, int, int], str] = {}  # (round, phase, receiver) → digest

    def start(self, agent: int, plan: str) -> None:
        self._write({"do": "started", "agent": agent, "plan": plan})

    def charge(self, t: int, generation: int, peers: frozenset[int], messages: int, steps: int) -> None:
        """Record that the ledger on disk has this charge: `messages` noisy vectors in each of `steps` local steps."""
        line = {"round": t, "generation": generation, "peers": sorted(peers), "messages": messages, "steps": steps}
        self._write({"do": "charged", **line})

    def make(self, generation: int, t: int, digests: Mapping[tuple[int, int, int, int], str]) -> None:
        """Record noisy vectors, by (round, step, nth, peer) of their noise."""
        draws = [[*draw[1:], digest[:DIGEST]] for draw, digest in digests.items()]
        self._write({"do": "made", "round": t, "generation": generation, "draws": draws})

    def send(self, j: int, t: int, phase: int, content: bytes) -> None:
        """Record that a message can leave, unless the same one has left before."""
        digest = _vector_digest(content)
        if self._sent.get((t, phase, j)) == digest:
            return
        self._write({"do": "sent", "round": t, "phase": phase, "to": j, "digest": digest})
        self._sent = {key: kept for key, kept in self._sent.items() if key[0] >= t - 1 or key[0] <= 0}
        self._sent[t, phase, j] = digest

    def receive(self, j: int, t: int, phase: int, content: bytes) -> None:
        digest = _vector_digest(content)
        self._write({"do": "received", "round": t, "phase": phase, "from": j, "digest": digest})

    def mix(self, t: int, mixing: JsonDict) -> None:
        """Record the weights of a round, before its row is stored."""
        self._write({"do": "mixed", "round": t, **mixing})

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, values: JsonDict) -> None:
        line = (json.dumps(values) + "\n").encode()
        with self._lock:
            if self._file is None:
                self._file = _open(self._path)
            size = os.fstat(self._file).st_size
            try:
                if os.write(self._file, line) != len(line):
                    raise OSError(28, "No space left on device")
            except OSError:
                os.ftruncate(self._file, size)
                raise


def _vector_digest(message: bytes) -> str:
    """Digest of the numbers of a message: for a noisy vector, the one in the noise log."""
    header = int.from_bytes(message[:8], "little")
    return hashlib.sha256(memoryview(message)[8 + header :]).hexdigest()[:DIGEST]


def _open(path: Path) -> int:
    """Open a history for appending, after its last complete line."""
    path.parent.mkdir(exist_ok=True)
    content = path.read_bytes() if path.exists() else b""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.ftruncate(file, content.rfind(b"\n") + 1)
    return file
