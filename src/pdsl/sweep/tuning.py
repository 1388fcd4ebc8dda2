"""Tuning: trials with several learning rates, then final runs at the best. Shared by compare and reproduce."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

from pdsl.sweep.job import Job, Score
from pdsl.sweep.scheduler import Known, OnScore, Scores, run_jobs
from pdsl.utils.errors import PdslError

MAX_EXTENSIONS = 4  # learning rates added beyond the edges of a grid
AUTO_RATE = 0.0  # in a grid: the automatic learning rate
FACTOR = 2.0  # between an edge and the learning rate added beyond it


class Edge(StrEnum):
    """The end of a grid at which its best learning rate is."""

    LOWER = "lower"
    UPPER = "upper"


@dataclass(frozen=True)
class Tuning:
    """The jobs of one method: trials by learning rate, and the final jobs at a learning rate.

    With `extend`, a grid of several learning rates grows by a factor of two while its best is at an edge, at most
    MAX_EXTENSIONS times. The added trials follow from the scores alone, so an interrupted sweep continues the same way.
    """

    trials: Mapping[float, Job]
    finals: Callable[[float], list[Job]]
    extend: Callable[[float], Job] | None = None  # the trial at a learning rate outside of the grid

    def wanted_trials(self, scores: Scores) -> dict[float, Job]:
        """Trials known to be needed, given the scores so far: the grid and its extensions."""
        jobs = dict(self.trials)
        if self.extend is None or len(jobs) < 2:  # one learning rate is a choice, not a grid
            return jobs
        while len(jobs) < len(self.trials) + MAX_EXTENSIONS and (edge := _edge(jobs, scores)) is not None:
            rate = min(jobs) / FACTOR if edge is Edge.LOWER else max(jobs) * FACTOR
            jobs[rate] = self.extend(rate)
        return jobs

    def best_rate(self, scores: Scores) -> float | None:
        """The learning rate chosen by the trials; None if none is fit, or some are not finished."""
        found = _finished(self.wanted_trials(scores), scores)
        return None if found is None else best_rate(found)

    def edge(self, scores: Scores) -> Edge | None:
        """The edge at which the best learning rate still is; None if it is inside, or the grid is one rate."""
        jobs = self.wanted_trials(scores)
        return _edge(jobs, scores) if len(jobs) > 1 else None


def _finished(jobs: Mapping[float, Job], scores: Scores) -> dict[float, Score] | None:
    found = {rate: scores[job.name] for rate, job in jobs.items() if job.name in scores}
    return found if len(found) == len(jobs) else None


def _edge(jobs: Mapping[float, Job], scores: Scores) -> Edge | None:
    found = _finished(jobs, scores)
    best = None if found is None else best_rate(found)
    if best is None:
        return None
    return Edge.LOWER if best == min(jobs) else Edge.UPPER if best == max(jobs) else None


def best_rate(trials: Mapping[float, Score]) -> float | None:
    """The learning rate with the best score on the public set, the smallest of equals; None if none is fit."""
    fit = {rate: trials[rate].on_public for rate in sorted(trials) if trials[rate].unfit is None}
    return max(fit, key=lambda rate: fit[rate]) if fit else None


def run_tunings(
    tunings: Sequence[Tuning],
    folder: Path,
    on_score: OnScore,
    processes: int | None = None,
    known: Known | None = None,
) -> dict[str, Score]:
    """Run all trials, and the final jobs of each tuning as soon as its learning rate is chosen. Scores by name.

    `known`: the score of a job that need not be run, or None.
    """
    return run_jobs(lambda scores: needed_jobs(tunings, scores), folder, on_score, processes, known)


def needed_jobs(tunings: Sequence[Tuning], scores: Scores) -> list[Job]:
    """Jobs known to be needed, given the scores so far; trials first."""
    jobs = [job for tuning in tunings for job in tuning.wanted_trials(scores).values()]
    for tuning in tunings:
        if (rate := tuning.best_rate(scores)) is not None:
            jobs += tuning.finals(rate)
    return jobs


def count_jobs(tunings: Iterable[Tuning], scores: Scores = MappingProxyType({})) -> int:
    """Number of jobs known to be needed, given the scores so far. Only extensions of a grid change it."""
    return len(
        {job.name for t in tunings for job in (*t.wanted_trials(scores).values(), *t.finals(next(iter(t.trials))))}
    )


def show_rate(rate: float) -> str:
    return "auto" if rate == AUTO_RATE else f"{rate:g}"


def parse_grid(text: str) -> list[float]:
    """Learning rates of the option --grid."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as e:
        raise PdslError(f"--grid {text}: not numbers separated by commas, like 0.5,1,2") from e
