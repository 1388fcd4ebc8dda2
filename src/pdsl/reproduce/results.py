"""Results of the runs in a folder: our accuracy beside the paper's, and loss over rounds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

from pdsl.algorithms.schedule import AUTO
from pdsl.reproduce.archive import KeptCell, digest, matching_scores
from pdsl.reproduce.cells import SweepPlan, cell_and_seed, job_of
from pdsl.reproduce.paper import METHODS, TITLES, Setting, accuracies, settings_of
from pdsl.sweep.job import Curve, Job, Score, load_failure, load_score, read_curve
from pdsl.sweep.significance import PairedDifference, paired_difference
from pdsl.sweep.tuning import show_rate
from pdsl.utils.types import JsonDict

CELLS = "cells"  # folder of the runs, in --out


def round5(value: float | None) -> float | None:
    """Round to the five digits of result files. Not for ε, which must not be rounded down."""
    return None if value is None else round(value, 5)


@dataclass(frozen=True)
class Entry:
    """One setting: the paper's accuracy, and our finished runs, one per seed."""

    setting: Setting
    paper: float
    learning_rate: float | None  # None: not chosen
    seeds: tuple[int, ...] = ()
    scores: tuple[Score, ...] = ()  # one per seed
    failed: tuple[str, ...] = ()  # failed runs, with their reasons

    @property
    def ours(self) -> float | None:
        """Test accuracy, mean over the agents' models and over seeds; None without runs."""
        return fmean(score.accuracy for score in self.scores) if self.scores else None

    @property
    def accuracies(self) -> tuple[float, ...]:
        """Test accuracy of each seed."""
        return tuple(score.accuracy for score in self.scores)

    @property
    def deviation(self) -> float | None:
        return stdev(score.accuracy for score in self.scores) if len(self.scores) > 1 else None

    @property
    def difference(self) -> float | None:
        return None if self.ours is None else self.ours - self.paper

    @property
    def epsilon(self) -> float | None:
        """Largest total ε of the runs; None without noise."""
        return max((score.epsilon for score in self.scores if score.epsilon is not None), default=None)

    def as_dict(self) -> JsonDict:
        s = self.setting
        return {
            "table": s.table,
            "paper_epsilon": s.epsilon,
            "method": s.method,
            "graph": s.graph,
            "agents": s.agents,
            "paper": self.paper,
            "ours": round5(self.ours),
            "difference": round5(self.difference),
            "deviation": round5(self.deviation),
            "accuracies": [round5(score.accuracy) for score in self.scores],
            "accuracies_of_mean_model": [round5(score.accuracy_of_mean) for score in self.scores],
            "losses": [round5(score.loss) for score in self.scores],
            "seeds": list(self.seeds),
            "learning_rate": None if self.learning_rate is None else self.learning_rate or AUTO,
            "total_epsilon": self.epsilon,
            "failed": list(self.failed),
        }


@dataclass(frozen=True)
class Trials:
    """Choice of a method's learning rate on a graph: accuracy on the public set for each candidate."""

    method: str
    graph: str
    on_public: Mapping[float, float | None]  # None: failed, or not run
    chosen: float | None

    def as_dict(self) -> JsonDict:
        tried = {show_rate(rate): round5(value) for rate, value in self.on_public.items()}
        return {
            "method": self.method,
            "graph": self.graph,
            "on_public": tried,
            "chosen": None if self.chosen is None else self.chosen or AUTO,
        }


@dataclass(frozen=True)
class Results:
    """All finished runs of one table or figure."""

    target: str
    plan: SweepPlan
    entries: Mapping[Setting, Entry]
    trials: Sequence[Trials]
    noise_off: Mapping[Setting, Entry]  # runs without noise of the same settings, if any
    folder: Path
    kept: Mapping[str, KeptCell]  # from earlier commands
    public: float | None = None  # accuracy of the public set alone

    @property
    def title(self) -> str:
        title, task, at = TITLES[self.target], self.plan.task, next(iter(self.entries))
        usual = replace(task, assignments=(), quick=False)
        data, papers = (t.config(at, t.rates_of(at.table)[0], 0).data.name for t in (task, usual))
        if task.quick and data == "digits":
            return f"{title} (quick: handwritten digits instead)"
        return title if data == papers else f"{title} ({data} instead)"

    def comparable(self, setting: Setting) -> bool:
        """Whether all five methods have runs with this graph, M and ε, and with the same seeds."""
        seeds = {self.entries[replace(setting, method=method)].seeds for method in METHODS}
        return len(seeds) == 1 and () not in seeds

    def first(self, setting: Setting) -> bool:
        """Whether no other method has a better accuracy with this graph, M and ε. False if not comparable."""
        rivals = (self.entries[replace(setting, method=method)].ours or 0.0 for method in METHODS)
        return self.comparable(setting) and self.entries[setting].ours == max(rivals)

    def leads(self, setting: Setting) -> dict[str, PairedDifference]:
        """Paired difference to each other method with this graph, M and ε, over the common seeds."""
        ours, found = self.entries[setting], dict[str, PairedDifference]()
        for method in METHODS:
            theirs = self.entries[replace(setting, method=method)]
            if method != setting.method and self.comparable(setting):
                difference = paired_difference(ours.accuracies, theirs.accuracies)
                found |= {method: difference} if difference is not None else {}
        return found

    def decided(self, setting: Setting) -> bool:
        """Whether this method is first, and the 95 % intervals of all its leads exclude zero."""
        leads = self.leads(setting)
        return self.first(setting) and len(leads) == len(METHODS) - 1 and all(d.low > 0 for d in leads.values())

    def verdict(self) -> str:
        """Number of cells in which PDSL is first, and in which it reaches the paper's number."""
        done = [e for e in self.entries.values() if e.setting.method == "pdsl" and e.ours is not None]
        whole = [e for e in done if self.comparable(e.setting)]
        above = sum(round(e.ours or 0.0, 3) >= e.paper for e in done)
        first = sum(self.first(e.setting) for e in whole)
        ended = sum(e.ours is not None for e in self.entries.values())
        text = f"{ended} of {len(self.entries)} cells have runs."
        if done:
            text += f" PDSL is at or above the paper's number in {above} of {len(done)} cells"
            text += f", and first of the five in {first} of {len(whole)}" if whole else ""
            text += f" (significantly in {sum(self.decided(e.setting) for e in whole)})." if whole else "."
        if done and self.public is not None:
            above = sum((e.ours or 0.0) > self.public for e in done)
            text += f" The public set alone has {self.public:.3f}; PDSL is above it in {above} of {len(done)} cells."
        return text

    @property
    def runs(self) -> set[tuple[Setting, int]]:
        """Settings and seeds of the finished runs."""
        return _runs(self.entries)

    @property
    def failed(self) -> list[str]:
        return list(dict.fromkeys(reason for entry in self.entries.values() for reason in entry.failed))

    def job(self, setting: Setting, seed: int) -> Job:
        """The job of a finished run."""
        rate = self.entries[setting].learning_rate
        assert rate is not None
        return job_of(self.plan.task, setting, rate, seed)

    def curves(self, setting: Setting) -> dict[int, Curve]:
        """Loss and accuracy over rounds, by seed."""
        return {seed: self._curve(self.job(setting, seed)) for seed in self.entries[setting].seeds}

    def _curve(self, job: Job) -> Curve:
        if load_score(job, self.folder / CELLS) is None:
            return self.kept[job.name].curve
        found = read_curve(self.folder / CELLS / job.name)
        return [(t, round5(loss), round(accuracy, 5)) for t, loss, accuracy in found]

    def to_keep(self) -> dict[str, KeptCell]:
        """Every run of the table that is in the folder, failed ones too, because a rate that diverged was tried."""
        trials = [job for setting in self.entries for job in self.plan.tuning(setting).trials.values()]
        finals = [self.job(setting, seed) for setting, entry in self.entries.items() for seed in entry.seeds]
        jobs = {job.name: job for job in (*trials, *finals)}
        scores = _scores(list(jobs.values()), self.folder, {})
        return {
            name: KeptCell(score, digest(jobs[name]), [] if score.failed else self._curve(jobs[name]))
            for name, score in scores.items()
        }


def collect(target: str, plan: SweepPlan, folder: Path, kept: Mapping[str, KeptCell]) -> Results:
    """All finished runs of a table or figure in a folder, from any command; kept cells fill the gaps."""
    settings = settings_of(target)
    tunings = {s: plan.tuning(s) for s in settings}
    scores = _scores([job for tuning in tunings.values() for job in tuning.trials.values()], folder, kept)
    trials = {}
    for s, tuning in tunings.items():
        tried = {rate: scores.get(job.name) for rate, job in tuning.trials.items()}
        values = {r: None if score is None or score.unfit else score.on_public for r, score in tried.items()}
        trials[s.method, s.graph] = Trials(s.method, s.graph, values, tuning.best_rate(scores))
    off = replace(plan, task=replace(plan.task, reading="none"))
    noise_off = {} if plan.task.reading == "none" else _entries(settings, off, folder, kept)
    return Results(
        target,
        plan,
        _entries(settings, plan, folder, kept),
        [found for found in trials.values() if any(value is not None for value in found.on_public.values())],
        {setting: entry for setting, entry in noise_off.items() if entry.ours is not None},
        folder,
        kept,
    )


def kept_runs(target: str, plan: SweepPlan, kept: Mapping[str, KeptCell]) -> set[tuple[Setting, int]]:
    """Settings and seeds that are kept with the settings of this plan."""
    return _runs(_entries(settings_of(target), plan, None, kept))


def _runs(entries: Mapping[Setting, Entry]) -> set[tuple[Setting, int]]:
    return {(setting, seed) for setting, entry in entries.items() for seed in entry.seeds}


def _entries(
    settings: Sequence[Setting], plan: SweepPlan, folder: Path | None, kept: Mapping[str, KeptCell]
) -> dict[Setting, Entry]:
    tunings = {s: plan.tuning(s) for s in settings}
    scores = _scores([job for tuning in tunings.values() for job in tuning.trials.values()], folder, kept)
    seeds, entries = _known_seeds(folder, kept), {}
    for s, tuning in tunings.items():
        rate = tuning.best_rate(scores)
        finals = {} if rate is None else _finals(plan, s, rate, seeds)
        found = _scores(list(finals.values()), folder, kept)
        good = {
            seed: found[job.name]
            for seed, job in finals.items()
            if job.name in found and found[job.name].failed is None
        }
        wrong = {name: score.failed for name, score in found.items()}
        wrong |= {job.name: scores[job.name].unfit for job in tuning.trials.values() if job.name in scores}
        failed = tuple(f"{name}: {reason}" for name, reason in wrong.items() if reason)
        entries[s] = Entry(s, accuracies()[s], rate, tuple(good), tuple(good.values()), failed)
    return entries


def _finals(plan: SweepPlan, setting: Setting, rate: float, known: Mapping[str, set[int]]) -> dict[int, Job]:
    """Final runs of a setting by seed: those of the plan, and of further seeds that have runs already."""
    cell = cell_and_seed(job_of(plan.task, setting, rate, plan.seeds[0]).name)[0]
    seeds = sorted({*plan.seeds, *known.get(cell, ())})
    return {seed: job_of(plan.task, setting, rate, seed) for seed in seeds}


def _known_seeds(folder: Path | None, kept: Mapping[str, KeptCell]) -> dict[str, set[int]]:
    """Seeds of the runs in a folder and of the kept runs, by cell."""
    places = [] if folder is None else (folder / CELLS).glob("*-seed*")
    names = [*kept, *(path.name for path in places if path.is_dir())]
    seeds: dict[str, set[int]] = {}
    for name in names:
        cell, seed = cell_and_seed(name)
        seeds.setdefault(cell, set()).add(seed)
    return seeds


def _scores(jobs: Sequence[Job], folder: Path | None, kept: Mapping[str, KeptCell]) -> dict[str, Score]:
    """Scores of finished and failed jobs in the folder; for the others, those that are kept."""
    scores = matching_scores(kept, jobs)
    if folder is not None:
        for job in {job.name: job for job in jobs}.values():
            if found := load_score(job, folder / CELLS) or load_failure(job.name, folder / CELLS):
                scores[job.name] = found
    return scores
