"""Comparison of algorithms on one task: the plan, its execution and the result."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from pdsl.algorithms import Algorithm
from pdsl.config import Config, find_algorithm, load, validate
from pdsl.report.metric import Metric
from pdsl.section import flat, setting_names
from pdsl.sweep.job import Job, Score, check_data, read_curve, read_metric
from pdsl.sweep.scheduler import OnScore, Scores
from pdsl.sweep.significance import is_significant, paired_p_value
from pdsl.sweep.tuning import Edge, Tuning, run_tunings
from pdsl.utils.errors import PdslError
from pdsl.utils.files import write_whole
from pdsl.utils.types import JsonDict

PLAN = "plan.json"
LEVEL = 0.95  # of the best run's metric: the first round that is at most 5 % worse is reported
ACCURACY = Metric.of("accuracy")


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
            _find_algorithm(name)
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
        return Job(f"{algorithm.replace(':', '.')}-{learning_rate:g}-seed{seed}", config)

    def tuning(self, algorithm: str) -> Tuning:
        """Trials on the first seed, and a final job for each seed. The first final job is one of the trials."""
        return Tuning(
            {rate: self.job(algorithm, rate, self.seeds[0]) for rate in self.grid},
            lambda rate: [self.job(algorithm, rate, seed) for seed in self.seeds],
            lambda rate: self.job(algorithm, rate, self.seeds[0]),
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


def _find_algorithm(name: str) -> type[Algorithm]:
    try:
        return find_algorithm(name)
    except ValueError as e:
        raise PdslError(f"--algorithms: {e}") from e


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
    found = [name for name in algorithms if key in setting_names(_find_algorithm(name))]
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
    """One algorithm: means over its seeds. `accuracy` is the headline metric of the task."""

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
    accuracy_per_seed: tuple[float | None, ...] = ()  # None: the run failed
    rates: tuple[float, ...] = ()  # learning rates that were tried
    edge: Edge | None = None  # end of `rates` at which the best is: a rate beyond may be better
    p_value: float | None = None  # of the paired difference to the best line; None: the best, or too few seeds

    @property
    def is_worse(self) -> bool:
        """Whether the accuracy is significantly below the best."""
        return is_significant(self.p_value)


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison: a line per algorithm, best first."""

    lines: list[Line]
    level: float  # the accuracy of rounds_to_level
    folder: Path
    plan: ComparisonPlan
    metric: Metric = ACCURACY
    baselines: Mapping[str, float | None] = field(default_factory=dict)  # headline metric, mean over seeds

    @property
    def failed(self) -> list[str]:
        return [reason for line in self.lines for reason in line.failed]

    @property
    def undecided(self) -> list[Line]:
        """The lines that may be as good as the first."""
        return [line for line in self.lines[1:] if line.accuracy is not None and not line.is_worse]

    @property
    def winner(self) -> str | None:
        """The algorithm that is significantly better than every other one; None if there is none."""
        first, *others = self.lines
        compared = [line for line in others if line.accuracy is not None]
        return first.algorithm if compared and not self.undecided else None

    def check(self) -> None:
        """Refuse a comparison without any result."""
        if all(line.accuracy is None for line in self.lines):
            raise PdslError(f"no algorithm has a result; first of {len(self.failed)} that failed: {self.failed[0]}")

    def as_dict(self) -> JsonDict:
        name = self.metric.name
        lines = [{key.replace("accuracy", name): value for key, value in asdict(line).items()} for line in self.lines]
        return {
            "algorithms": lines,
            "metric": name,
            "winner": self.winner,
            "baselines": dict(self.baselines),
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
    good = [score for found in finals.values() for score in found if score.failed is None]
    metric = read_metric(folder / good[0].name) if good else ACCURACY
    best = (max if metric.higher_is_better else min)((score.accuracy for score in good), default=0.0)
    level = best - (1 - LEVEL) * abs(best) * (1 if metric.higher_is_better else -1)
    lines = []
    for name, tuning in tunings.items():
        trials = tuning.wanted_trials(scores)
        line = _line(name, rates[name], [scores[job.name] for job in trials.values()], finals[name])
        reached = [first_round_at(folder / s.name, level, metric) for s in finals[name] if s.failed is None]
        line = replace(line, rounds_to_level=_mean([t for t in reached if t is not None]))
        lines.append(replace(line, rates=tuple(sorted(trials)), edge=tuning.edge(scores)))
    first, *others = sorted(lines, key=lambda line: _order(line, metric))
    tested = [replace(line, p_value=_p_value(first, line)) for line in others]
    return Comparison([first, *tested], level, folder, plan, metric)


def _order(line: Line, metric: Metric) -> float:
    """Best first, failed last."""
    if line.accuracy is None or math.isnan(line.accuracy):
        return math.inf
    return -line.accuracy if metric.higher_is_better else line.accuracy


def _p_value(first: Line, line: Line) -> float | None:
    if first.accuracy is None or line.accuracy is None:
        return None
    return paired_p_value(first.accuracy_per_seed, line.accuracy_per_seed)


def _line(name: str, rate: float | None, trials: list[Score], finals: list[Score]) -> Line:
    good = [score for score in finals if score.failed is None]
    wrong = {score.name: score.unfit for score in trials} | {
        score.name: score.failed for score in finals if score not in trials
    }
    failed = tuple(f"{name}: {reason}" for name, reason in wrong.items() if reason is not None)
    accuracies = [score.accuracy for score in good]
    epsilons = [score.epsilon for score in good if score.epsilon is not None]
    return Line(
        algorithm=name,
        learning_rate=rate,
        runs=len(good),
        accuracy=_mean(accuracies),
        deviation=stdev(accuracies) if len(accuracies) > 1 else None,
        accuracy_of_mean=_mean([score.accuracy_of_mean for score in good]),
        loss=_mean([score.loss for score in good if score.loss is not None]),
        rounds_to_level=None,
        bytes=_mean([score.bytes for score in good]),
        seconds=_mean([score.seconds for score in good]),
        epsilon=max(epsilons, default=None),
        failed=failed,
        accuracy_per_seed=tuple(None if score.failed is not None else score.accuracy for score in finals),
    )


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def first_round_at(run: Path, level: float, metric: Metric = ACCURACY) -> int | None:
    """The first round in which the mean metric over agents was at least as good as `level`."""
    sign = 1 if metric.higher_is_better else -1
    return next((t for t, _, value in read_curve(run) if sign * value >= sign * level), None)
