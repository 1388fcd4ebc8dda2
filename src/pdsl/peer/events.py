"""What happened, in a file: refusals with their reasons, gradients that were too long, who went and who came.

Never a secret, never a number sent.
"""

import json
import threading
import time
from collections import Counter
from pathlib import Path

MOST = 10_000  # lines of one process: whoever sends garbage cannot fill the disk


class Events:
    """Lines of JSON, and how many of each kind there were."""

    def __init__(self, path: Path):
        self.path = path
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def log(self, kind: str, **facts: str | int | float | None) -> None:
        with self._lock:
            self.counts[kind] += 1
            if self.counts.total() > MOST:
                return
            line = json.dumps({"time": round(time.time(), 3), "event": kind, **facts}, ensure_ascii=False)
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
            except OSError:
                self.counts["event not written"] += 1  # a full disk is found out where it matters

    def read(self) -> list[dict[str, object]]:
        try:
            return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]
        except FileNotFoundError:
            return []
