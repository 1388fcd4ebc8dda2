"""What a comparison came to: a row per algorithm, best first."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from pdsl.cells import Score, measured
from pdsl.cells.many import Scores
from pdsl.compare.carry_out import best_rate
from pdsl.compare.plan import Plan
from pdsl.errors import PdslError

LEVEL = 0.95  # of the best algorithm's accuracy is the level whose first round is reported


@dataclass(frozen=True)
class Line:
    """One algorithm: means over its seeds, and the deviation of the accuracy."""

    algorithm: str
    learning_rate: float | None
    runs: int
    accuracy: float | None
    deviation: float | None
    accuracy_of_mean: float | None
    loss: float | None
    rounds_to_level: float | None  # mean over the seeds that got there; None if none did
    bytes: float | None
    seconds: float | None
    epsilon: float | None  # the largest
    failed: tuple[str, ...]  # cells that failed, and why


@dataclass(frozen=True)
class Comparison:
    lines: list[Line]
    level: float  # the accuracy that rounds_to_level is about
    folder: Path
    plan: Plan

    @property
    def failed(self) -> list[str]:
        return [reason for line in self.lines for reason in line.failed]

    def check(self) -> None:
        """Refuse to show a comparison in which there is nothing to compare."""
        if all(line.accuracy is None for line in self.lines):
            raise PdslError(f"no algorithm has a result; first of {len(self.failed)} that failed: {self.failed[0]}")

    def as_dict(self) -> dict[str, Any]:
        return {
            "algorithms": [asdict(line) for line in self.lines],
            "level": self.level,
            "grid": self.plan.grid,
            "seeds": self.plan.seeds,
            "out": str(self.folder),
        }


def compared(plan: Plan, scores: Scores, folder: Path) -> Comparison:
    finals: dict[str, list[Score]] = {}
    rates: dict[str, float | None] = {}
    for name in plan.algorithms:
        rate = rates[name] = best_rate(plan, name, scores)
        finals[name] = [] if rate is None else [scores[cell.name] for cell in plan.finals(name, rate)]
    best = max((s.accuracy for found in finals.values() for s in found if s.failed is None), default=0.0)
    level = LEVEL * best
    lines = [
        _line(name, rates[name], [scores[cell.name] for cell in plan.trials(name)], finals[name], level, folder)
        for name in plan.algorithms
    ]
    return Comparison(sorted(lines, key=lambda line: -(line.accuracy or 0.0)), level, folder, plan)


def _line(name: str, rate: float | None, trials: list[Score], finals: list[Score], level: float, folder: Path) -> Line:
    good = [score for score in finals if score.failed is None]
    wrong = {score.name: score.unfit for score in trials} | {
        score.name: score.failed for score in finals if score not in trials
    }
    failed = tuple(f"{name}: {reason}" for name, reason in wrong.items() if reason is not None)
    accuracies = [score.accuracy for score in good]
    reached = [t for score in good if (t := first_round_at(folder / score.name, level)) is not None]
    epsilons = [score.epsilon for score in good if score.epsilon is not None]
    return Line(
        algorithm=name,
        learning_rate=rate,
        runs=len(good),
        accuracy=_mean(accuracies),
        deviation=stdev(accuracies) if len(accuracies) > 1 else None,
        accuracy_of_mean=_mean([score.accuracy_of_mean for score in good]),
        loss=_mean([score.loss for score in good if score.loss is not None]),
        rounds_to_level=_mean(reached),
        bytes=_mean([score.bytes for score in good]),
        seconds=_mean([score.seconds for score in good]),
        epsilon=max(epsilons, default=None),
        failed=failed,
    )


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def first_round_at(run: Path, level: float) -> int | None:
    """The first round in which the agents' mean accuracy was at least `level`."""
    return next((t for t, _, accuracy in measured(run) if accuracy >= level), None)
