"""Comparison of algorithms on one task: the plan, the result and its table on the terminal."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.table import Table

from pdsl.algorithms import ALGORITHMS
from pdsl.config import Config, load, validate
from pdsl.settings import flat, setting_names
from pdsl.sweep.job import Job, Score, check_data, read_curve
from pdsl.sweep.scheduler import OnScore, Scores
from pdsl.sweep.tuning import Tuning, run_tunings
from pdsl.utils.errors import PdslError
from pdsl.utils.files import write_whole
from pdsl.utils.format import duration, format_epsilon, plain, size
from pdsl.utils.types import JsonDict

PLAN = "plan.json"
LEVEL = 0.95  # fraction of the best run's accuracy whose first round is reported


@dataclass(frozen=True)
class ComparisonPlan:
    """One task for all algorithms. Each algorithm tries the same learning rates on the first seed."""

    base: JsonDict  # settings without those of the algorithm
    algorithms: tuple[str, ...]
    grid: tuple[float, ...]  # learning rates
    seeds: tuple[int, ...]
    own: dict[str, JsonDict] = field(default_factory=dict)  # settings of each algorithm, if any are given

    @classmethod
    def of(
        cls,
        config: Config,
        algorithms: Sequence[str],
        grid: Sequence[float],
        seeds: int,
        assignments: Sequence[str] = (),
    ) -> "ComparisonPlan":
        """A plan for the task of `config`; invalid settings are refused now.

        `assignments` set algorithm.*: each goes to all algorithms that have the setting.
        """
        base = config.as_dict()
        first = base.pop("seed")
        base.pop("algorithm")
        base["engine"] = {**base["engine"], "workers": 1}  # jobs run in parallel, one core each
        for name in algorithms:
            if name not in ALGORITHMS:
                raise PdslError(f"--algorithms: no algorithm '{name}'; 'pdsl algorithms' lists them")
        if len(set(algorithms)) < len(algorithms):
            raise PdslError("--algorithms: give each algorithm once, like pdsl,dp-dpsgd")
        if not grid or min(grid) <= 0:
            raise PdslError("--grid: give learning rates above 0, like 0.5,1,2")
        check_data([config.data.name])
        own = _algorithm_settings(config, algorithms, assignments)
        plan = cls(base, tuple(algorithms), tuple(sorted(set(grid))), tuple(range(first, first + seeds)), own)
        for name in algorithms:
            plan.job(name, plan.grid[0], plan.seeds[0])
        return plan

    def job(self, algorithm: str, learning_rate: float, seed: int) -> Job:
        values = {**self.own.get(algorithm, {}), "name": algorithm, "learning_rate": learning_rate}
        config = validate({**self.base, "seed": seed, "algorithm": values}, "compare")
        return Job(f"{algorithm}-{learning_rate:g}-seed{seed}", config)

    def tuning(self, algorithm: str) -> Tuning:
        """Trials on the first seed, and a final job for each seed. The first final job is one of the trials."""
        return Tuning(
            {rate: self.job(algorithm, rate, self.seeds[0]) for rate in self.grid},
            lambda rate: [self.job(algorithm, rate, seed) for seed in self.seeds],
        )

    @property
    def tunings(self) -> list[Tuning]:
        return [self.tuning(name) for name in self.algorithms]

    def as_dict(self) -> JsonDict:
        values = {"base": self.base, "algorithms": self.algorithms, "grid": self.grid, "seeds": self.seeds}
        return values | ({"own": self.own} if self.own else {})

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "ComparisonPlan":
        algorithms, grid, seeds = (tuple(stored[name]) for name in ("algorithms", "grid", "seeds"))
        return cls(stored["base"], algorithms, grid, seeds, stored.get("own", {}))

    @property
    def key(self) -> str:
        """Eight letters for the name of the default folder, so that the same command finds it again."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()[:8]


def _algorithm_settings(config: Config, algorithms: Sequence[str], assignments: Sequence[str]) -> dict[str, JsonDict]:
    """Settings algorithm.* of the task's file and of the command, for each algorithm that has them.

    The algorithm that the file names and its learning rate are ignored, because the file may be that of a run.
    """
    given = flat(config.algorithm.model_dump(mode="json", exclude_unset=True, exclude_none=True))
    given.pop("learning_rate", None)
    keys = [assignment.partition("=")[0].strip().removeprefix("algorithm.") for assignment in assignments]
    having = {key: _algorithms_with(key, algorithms) for key in (*given, *keys)}
    own: dict[str, JsonDict] = {}
    for name in algorithms:
        texts = [f"algorithm.{key}={json.dumps(value)}" for key, value in given.items() if name in having[key]]
        texts += [text for key, text in zip(keys, assignments, strict=True) if name in having[key]]
        algorithm = load(None, [f"algorithm.name={name}", *texts]).algorithm
        if settings := algorithm.model_dump(mode="json", exclude_unset=True, exclude_none=True):
            own[name] = settings
    return own


def _algorithms_with(key: str, algorithms: Sequence[str]) -> list[str]:
    """The algorithms that have a setting; it is refused if none has."""
    if key in ("name", "learning_rate"):
        option = "--algorithms" if key == "name" else "--grid"
        raise PdslError(f"compare: algorithm.{key} is given by {option}; leave it out of the settings")
    if key == "algorithm":
        raise PdslError("compare: give each algorithm.* setting by itself, like --set algorithm.momentum=0.3")
    found = [name for name in algorithms if key in setting_names(ALGORITHMS[name])]
    if not found:
        raise PdslError(
            f"compare: none of {', '.join(algorithms)} has a setting algorithm.{key}; 'pdsl algorithms' lists them"
        )
    return found


def run_comparison(
    plan: ComparisonPlan, folder: Path, on_score: OnScore, processes: int | None = None
) -> dict[str, Score]:
    """Run all jobs of a plan that are not finished. Returns all scores by name."""
    _claim(plan, folder)
    return run_tunings(plan.tunings, folder, on_score, processes)


def _claim(plan: ComparisonPlan, folder: Path) -> None:
    """Write the plan into a new folder; refuse a folder with another plan or other files."""
    file = folder / PLAN
    if file.exists():
        try:
            stored = ComparisonPlan.from_dict(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError) as e:
            raise PdslError(f"{file}: damaged: {e}; remove the folder, or choose another --out") from e
        if stored.key != plan.key:
            raise PdslError(f"{folder} holds another comparison; choose another --out")
        return
    if folder.exists() and any(folder.iterdir()):
        raise PdslError(f"{folder} is not empty; choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(plan.as_dict(), indent=1).encode())
    except OSError as e:
        raise PdslError(f"cannot write to {folder}: {e.strerror}; choose another --out") from e


@dataclass(frozen=True)
class Line:
    """One algorithm: means over its seeds, and the standard deviation of the accuracy."""

    algorithm: str
    learning_rate: float | None
    runs: int
    accuracy: float | None
    deviation: float | None
    accuracy_of_mean: float | None
    loss: float | None
    rounds_to_level: float | None  # mean over the seeds that reached the level; None if none did
    bytes: float | None
    seconds: float | None
    epsilon: float | None  # the largest
    failed: tuple[str, ...]  # failed jobs, with their reasons


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison: a line per algorithm, best first."""

    lines: list[Line]
    level: float  # the accuracy of rounds_to_level
    folder: Path
    plan: ComparisonPlan

    @property
    def failed(self) -> list[str]:
        return [reason for line in self.lines for reason in line.failed]

    def check(self) -> None:
        """Refuse a comparison without any result."""
        if all(line.accuracy is None for line in self.lines):
            raise PdslError(f"no algorithm has a result; first of {len(self.failed)} that failed: {self.failed[0]}")

    def as_dict(self) -> JsonDict:
        return {
            "algorithms": [asdict(line) for line in self.lines],
            "level": self.level,
            "grid": self.plan.grid,
            "seeds": self.plan.seeds,
            "out": str(self.folder),
        }


def summarise(plan: ComparisonPlan, scores: Scores, folder: Path) -> Comparison:
    """The comparison that follows from all scores of a plan."""
    tunings = {name: plan.tuning(name) for name in plan.algorithms}
    rates = {name: tuning.best_rate(scores) for name, tuning in tunings.items()}
    finals = {
        name: [] if (rate := rates[name]) is None else [scores[job.name] for job in tuning.finals(rate)]
        for name, tuning in tunings.items()
    }
    best = max((s.accuracy for found in finals.values() for s in found if s.failed is None), default=0.0)
    level = LEVEL * best
    lines = [
        _line(name, rates[name], [scores[job.name] for job in tuning.trials.values()], finals[name], level, folder)
        for name, tuning in tunings.items()
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
    """The first round in which the mean accuracy over agents was at least `level`."""
    return next((t for t, _, accuracy in read_curve(run) if accuracy >= level), None)


def headings(comparison: Comparison) -> list[str]:
    reached = f"rounds to {comparison.level:.1%}"
    return ["algorithm", "rate", "accuracy", "mean model", "loss", reached, "sent", "time", "total ε"]


def cells(line: Line) -> list[str]:
    """A line of the table as text, in the order of the headings."""
    if line.accuracy is None:
        return [line.algorithm, "—", "failed", *["—"] * 6]
    spread = "" if line.deviation is None else f" ± {line.deviation:.4f}"
    return [
        line.algorithm,
        plain(line.learning_rate),
        f"{line.accuracy:.4f}{spread}",
        f"{line.accuracy_of_mean:.4f}",
        plain(line.loss),
        plain(line.rounds_to_level),
        size(line.bytes or 0),
        duration(line.seconds),
        "no noise" if line.epsilon is None else format_epsilon(line.epsilon),
    ]


def caption(comparison: Comparison) -> str:
    p = comparison.plan
    runs = f"{len(p.seeds)} seeds ± deviation" if len(p.seeds) > 1 else "1 seed"
    rates = ", ".join(f"{rate:g}" for rate in p.grid)
    return (
        f"Accuracy: mean over agents and {runs}. Learning rate: the best of {rates} on the public set, tried on seed"
        f" {p.seeds[0]}. To {comparison.level:.1%}: the first round with that accuracy, {LEVEL:.0%} of the best run's."
        " ε is that of one run: on private data, every trial would spend its own."
    )


def table(comparison: Comparison) -> Table:
    """The table for the terminal. Headings have two lines, so that the paper's five methods fit 80 characters."""
    rich_table = Table(box=None, header_style="bold", padding=(0, 1), pad_edge=False)
    for heading in headings(comparison):
        rich_table.add_column(heading.removeprefix("rounds ").replace(" ", "\n"), no_wrap=True)
    for line in comparison.lines:
        rich_table.add_row(*cells(line))
    return rich_table


def footer(comparison: Comparison) -> str:
    """Text below the table: the caption and the failed runs."""
    return "\n".join([caption(comparison), *(f"failed: {reason}" for reason in comparison.failed)])
