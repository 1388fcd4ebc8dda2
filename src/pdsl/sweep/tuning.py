"""Tuning: trials with several learning rates, then final runs at the best. Shared by compare and reproduce."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdsl.sweep.job import Job, Score
from pdsl.sweep.scheduler import OnScore, Scores, run_jobs
from pdsl.utils.errors import PdslError


@dataclass(frozen=True)
class Tuning:
    """The jobs of one method: trials by learning rate, and the final jobs at a learning rate."""

    trials: Mapping[float, Job]
    finals: Callable[[float], list[Job]]

    def best_rate(self, scores: Scores) -> float | None:
        """The learning rate chosen by the trials; None if none is fit, or some are not finished."""
        found = {rate: scores[job.name] for rate, job in self.trials.items() if job.name in scores}
        return best_rate(found) if len(found) == len(self.trials) else None


def best_rate(trials: Mapping[float, Score]) -> float | None:
    """The learning rate with the best accuracy on the public set, the smallest of equals; None if none is fit."""
    fit = {rate: trials[rate].on_public for rate in sorted(trials) if trials[rate].unfit is None}
    return max(fit, key=lambda rate: fit[rate]) if fit else None


def run_tunings(
    tunings: Sequence[Tuning], folder: Path, on_score: OnScore, processes: int | None = None
) -> dict[str, Score]:
    """Run all trials, and the final jobs of each tuning as soon as its learning rate is chosen. Scores by name."""
    return run_jobs(lambda scores: needed_jobs(tunings, scores), folder, on_score, processes)


def needed_jobs(tunings: Sequence[Tuning], scores: Scores) -> list[Job]:
    """Jobs known to be needed, given the scores so far; trials first."""
    jobs = [job for tuning in tunings for job in tuning.trials.values()]
    for tuning in tunings:
        if (rate := tuning.best_rate(scores)) is not None:
            jobs += tuning.finals(rate)
    return jobs


def count_jobs(tunings: Iterable[Tuning]) -> int:
    """Number of jobs, which does not depend on the learning rates that are chosen."""
    return len({job.name for t in tunings for job in (*t.trials.values(), *t.finals(next(iter(t.trials))))})


def parse_grid(text: str) -> list[float]:
    """Learning rates of the option --grid."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as e:
        raise PdslError(f"--grid {text}: not numbers separated by commas, like 0.5,1,2") from e
