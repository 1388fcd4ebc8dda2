"""Listeners of a run: the interface, several at once, and the progress bar."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from pdsl.training.experiment import Experiment
from pdsl.training.records import RoundRecord
from pdsl.training.trainer import CompletedRound
from pdsl.utils.types import JsonDict

if TYPE_CHECKING:
    from pdsl.runs.result import Summary

LINES = 10  # progress lines of a run without a terminal


class StopTraining(Exception):  # noqa: N818  not an error
    """Raised by a listener to end the run after the round that has just ended.

    `rule` describes a rule over the public records of the rounds. An audit repeats the rule, and accepts the end of the
    run if the rule gives the same round.
    """

    def __init__(self, reason: str, rule: JsonDict | None = None):
        super().__init__(reason)
        self.rule = rule


class RunListener:
    """Callbacks of a run. Override those that you need; the others do nothing.

    `on_start` and `on_round` may raise `StopTraining`. Any other exception ends the run at once; a run directory can be
    resumed from there.
    """

    def on_start(self, experiment: Experiment, path: Path | None, records: Sequence[RoundRecord]) -> None:
        """Everything is checked and the rounds begin.

        `path`: the run directory; None without files. `records`: those of rounds that were run before.
        """

    def on_models(self, completed: CompletedRound) -> None:
        """A round has ended; its state has the agents' models. Its checkpoint is not on disk yet."""

    def on_round(self, record: RoundRecord) -> None:
        """A round has ended; with a run directory, its record is on disk."""

    def on_warning(self, text: str) -> None:
        """Something was wrong and has been repaired, for example a damaged checkpoint was skipped."""

    def on_end(self, summary: "Summary") -> None:
        """The run has ended; with a run directory, its files are on disk."""

    def close(self) -> None:
        """The run has ended, or an exception has ended it."""


class Listeners(RunListener):
    """Several listeners, called one after another. All are called before one of them stops the run."""

    def __init__(self, *listeners: RunListener):
        self._listeners = listeners

    def on_start(self, experiment: Experiment, path: Path | None, records: Sequence[RoundRecord]) -> None:
        self._call(lambda listener: listener.on_start(experiment, path, records))

    def on_models(self, completed: CompletedRound) -> None:
        self._call(lambda listener: listener.on_models(completed))

    def on_round(self, record: RoundRecord) -> None:
        self._call(lambda listener: listener.on_round(record))

    def on_warning(self, text: str) -> None:
        self._call(lambda listener: listener.on_warning(text))

    def on_end(self, summary: "Summary") -> None:
        self._call(lambda listener: listener.on_end(summary))

    def close(self) -> None:
        self._call(lambda listener: listener.close())

    def _call(self, call: Callable[[RunListener], None]) -> None:
        stop = None
        for listener in self._listeners:
            try:
                call(listener)
            except StopTraining as raised:
                stop = stop or raised
        if stop is not None:
            raise stop


class Progress(RunListener):
    """Rounds, loss, accuracy and time left: a live bar on a terminal, plain lines elsewhere. A context manager."""

    def __init__(self, console: Console, rounds: int, visible: bool = True):
        self._console = console
        self._rounds = rounds
        self._measured = ""
        self._metric = "accuracy"
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
            disable=not (visible and console.is_terminal),
        )
        self._task = self._bar.add_task("rounds", total=rounds, measured="")

    def on_start(self, experiment: Experiment, path: Path | None, records: Sequence[RoundRecord]) -> None:
        self._metric = experiment.task.metric
        for record in records[-1:]:
            self.on_round(record)

    def on_round(self, record: RoundRecord) -> None:
        t = record["round"]
        values: JsonDict = dict(record)
        if "loss" in record:
            shown = [name for name in ("loss", self._metric) if name in values]
            self._measured = "  ".join(
                f"{name} {'not finite' if values[name] is None else f'{values[name]:.4f}'}"
                for name in dict.fromkeys(shown)
            )
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

    def on_warning(self, text: str) -> None:
        self._console.print(f"pdsl: {text}", highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()
