"""Progress of a sweep on the terminal: a line for each job that ends, with the time left."""

import time
from collections.abc import Callable

from rich.console import Console

from pdsl.sweep.job import Score
from pdsl.sweep.scheduler import Scores
from pdsl.utils.format import duration


class SweepProgress:
    """Prints every new score. Scores of an earlier call are counted, not listed."""

    def __init__(self, console: Console, count: Callable[[Scores], int]):
        """`count`: the number of jobs that are needed, given the scores so far."""
        self._console = console
        self._count = count
        self._scores: dict[str, Score] = {}
        self._start = time.monotonic()
        self._earlier: int | None = None  # scores of an earlier call

    def __call__(self, score: Score, done: int, new: bool) -> None:
        self._scores[score.name] = score
        if self._earlier is None:
            if not new:
                return
            self._earlier = done - 1
            if self._earlier:
                self._print(f"{self._earlier} of {self._count(self._scores)} runs were finished before")
        total = self._count(self._scores)
        left = (time.monotonic() - self._start) / (done - self._earlier) * (total - done)
        result = (
            f"failed: {score.failed}"
            if score.failed
            else f"test {score.accuracy:.4f}, public set {abs(score.on_public):.4f}"
        )
        result += f" ({score.note})" * bool(score.note)
        self._print(f"[{done}/{total}] {score.name}  {result}  about {duration(round(left))} left")

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)
