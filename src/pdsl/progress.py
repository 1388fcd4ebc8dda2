"""A live bar where there is a terminal, plain lines where there is none."""

import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

LINES = 10  # without a terminal, a line for every tenth of the rounds


class Progress:
    """Shows rounds, loss, accuracy and the time left."""

    def __init__(self, console: Console, rounds: int, shown: bool = True):
        self._console = console
        self._rounds = rounds
        self._measured = ""
        self._start = time.monotonic()
        self._first = 0
        self._bar = Bar(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[measured]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not (shown and console.is_terminal),
        )
        self._task = self._bar.add_task("rounds", total=rounds, measured="")

    def row(self, row: dict[str, Any]) -> None:
        t = row["round"]
        if "accuracy" in row:
            loss = "not finite" if row["loss"] is None else f"{row['loss']:.4f}"
            self._measured = f"loss {loss}  accuracy {row['accuracy']:.4f}"
        self._bar.update(self._task, completed=t, measured=self._measured)
        if not self._console.is_terminal:
            self._line(t)

    def _line(self, t: int) -> None:
        self._first = self._first or t
        if t != self._rounds and t * LINES // self._rounds == (t - 1) * LINES // self._rounds:
            return
        spent = time.monotonic() - self._start
        left = spent / max(1, t - self._first + 1) * (self._rounds - t)
        line = f"round {t}/{self._rounds}  {self._measured}  {spent:.0f} s, about {left:.0f} s left"
        self._console.print(line, highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        self._console.print(f"pdsl: {text}", highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()
