"""What is said while cells run: a line for each that ends, with the time left."""

import time

from rich.console import Console

from pdsl.cells.one import Score
from pdsl.report.numbers import duration


class Countdown:
    """Told about every score. Those of an earlier call are counted, not listed."""

    def __init__(self, console: Console, total: int):
        self._console = console
        self._total = total
        self._start = time.monotonic()
        self._before: int | None = None  # how many an earlier call had done

    def __call__(self, score: Score, done: int, new: bool) -> None:
        if self._before is None:
            if not new:
                return
            self._before = done - 1
            if self._before:
                self._say(f"{self._before} of {self._total} cells were done before")
        left = (time.monotonic() - self._start) / (done - self._before) * (self._total - done)
        how = (
            f"failed: {score.failed}" if score.failed else f"accuracy {score.accuracy:.4f}, on Q {score.on_public:.4f}"
        )
        how += f" ({score.note})" * bool(score.note)
        self._say(f"[{done}/{self._total}] {score.name}  {how}  about {duration(round(left))} left")

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)
