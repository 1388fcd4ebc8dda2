"""What the cells in a folder came to: ours beside the paper's, and loss over rounds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from pdsl.cells import Measured, Score, failure, finished, measured
from pdsl.reproduce.kept import KeptCell, digest, with_settings_of_now
from pdsl.reproduce.paper import METHODS, TITLES, Setting, accuracies, settings_of
from pdsl.reproduce.plan import Cell, Plan

CELLS = "cells"  # the runs, in the folder of --out


def short(value: float | None) -> float | None:
    """As many digits as files need."""
    return None if value is None else round(value, 5)


@dataclass(frozen=True)
class Entry:
    """One setting: the paper's accuracy, and our runs of it that have ended, a value per seed."""

    setting: Setting
    paper: float
    learning_rate: float | None  # None: not chosen yet
    seeds: tuple[int, ...] = ()
    scores: tuple[Score, ...] = ()  # of these seeds
    failed: tuple[str, ...] = ()  # cells that went wrong, and why

    @property
    def ours(self) -> float | None:
        """Test accuracy, mean over agents' own models and seeds; None where nothing has ended."""
        return fmean(score.accuracy for score in self.scores) if self.scores else None

    @property
    def deviation(self) -> float | None:
        return stdev(score.accuracy for score in self.scores) if len(self.scores) > 1 else None

    @property
    def difference(self) -> float | None:
        return None if self.ours is None else self.ours - self.paper

    @property
    def epsilon(self) -> float | None:
        """The largest total ε of the runs; None without noise."""
        return max((score.epsilon for score in self.scores if score.epsilon is not None), default=None)

    def as_dict(self) -> dict[str, Any]:
        s = self.setting
        return {
            "table": s.table,
            "paper_epsilon": s.epsilon,
            "method": s.method,
            "graph": s.graph,
            "agents": s.agents,
            "paper": self.paper,
            "ours": short(self.ours),
            "difference": short(self.difference),
            "deviation": short(self.deviation),
            "accuracies": [short(score.accuracy) for score in self.scores],
            "accuracies_of_mean_model": [short(score.accuracy_of_mean) for score in self.scores],
            "losses": [short(score.loss) for score in self.scores],
            "seeds": list(self.seeds),
            "learning_rate": self.learning_rate,
            "total_epsilon": self.epsilon,
            "failed": list(self.failed),
        }


@dataclass(frozen=True)
class Trials:
    """How a method's learning rate was chosen on a graph: accuracy on the public set of each that was tried."""

    method: str
    graph: str
    on_public: Mapping[float, float | None]  # None: went wrong, or not done
    chosen: float | None

    def as_dict(self) -> dict[str, Any]:
        tried = {f"{rate:g}": short(value) for rate, value in self.on_public.items()}
        return {"method": self.method, "graph": self.graph, "on_public": tried, "chosen": self.chosen}


@dataclass(frozen=True)
class Results:
    """Everything that has ended in a folder under one task, for one table or one figure."""

    target: str
    plan: Plan
    entries: Mapping[Setting, Entry]
    trials: Sequence[Trials]
    noise_off: Mapping[Setting, Entry]  # of those settings whose runs without noise are there too
    folder: Path
    kept: Mapping[str, KeptCell]  # of earlier commands, here or elsewhere

    @property
    def title(self) -> str:
        title, task, at = TITLES[self.target], self.plan.task, next(iter(self.entries))
        usual = replace(task, assignments=(), quick=False)
        data, papers = (t.config(at, t.rates_of(at.table)[0], 0).data.name for t in (task, usual))
        if task.quick and data == "digits":
            return f"{title} (quick: handwritten digits instead)"
        return title if data == papers else f"{title} ({data} instead)"

    def comparable(self, setting: Setting) -> bool:
        """Whether all five methods have runs of this graph, M and ε, and of the same seeds."""
        seeds = {self.entries[replace(setting, method=method)].seeds for method in METHODS}
        return len(seeds) == 1 and () not in seeds

    def first(self, setting: Setting) -> bool:
        """Whether no other method of this graph, M and ε does better, where they can be compared."""
        rivals = (self.entries[replace(setting, method=method)].ours or 0.0 for method in METHODS)
        return self.comparable(setting) and self.entries[setting].ours == max(rivals)

    def verdict(self) -> str:
        """In how many cells PDSL is first, and at or above the paper's number."""
        done = [e for e in self.entries.values() if e.setting.method == "pdsl" and e.ours is not None]
        whole = [e for e in done if self.comparable(e.setting)]
        above = sum(round(e.ours or 0.0, 3) >= e.paper for e in done)
        first = sum(self.first(e.setting) for e in whole)
        ended = sum(e.ours is not None for e in self.entries.values())
        text = f"{ended} of {len(self.entries)} cells have runs."
        if done:
            text += f" PDSL is at or above the paper's number in {above} of {len(done)} cells"
            text += f", and first of the five in {first} of {len(whole)}." if whole else "."
        return text

    @property
    def runs(self) -> set[tuple[Setting, int]]:
        """Settings and seeds that have ended."""
        return _runs(self.entries)

    @property
    def failed(self) -> list[str]:
        return list(dict.fromkeys(reason for entry in self.entries.values() for reason in entry.failed))

    def cell(self, setting: Setting, seed: int) -> Cell:
        """The cell of a setting that has ended."""
        rate = self.entries[setting].learning_rate
        assert rate is not None
        return self.plan.finals(setting, rate)[self.plan.seeds.index(seed)]

    def curves(self, setting: Setting) -> dict[int, Measured]:
        """By seed, where it was measured."""
        return {seed: self._curve(self.cell(setting, seed)) for seed in self.entries[setting].seeds}

    def _curve(self, cell: Cell) -> Measured:
        if finished(*cell, self.folder / CELLS) is None:
            return self.kept[cell.name].curve
        found = measured(self.folder / CELLS / cell.name)
        return [(t, short(loss), round(accuracy, 5)) for t, loss, accuracy in found]

    def to_keep(self) -> dict[str, KeptCell]:
        """Every cell of the table whose run is here; what failed too, for a rate that diverged was tried."""
        trials = [cell for setting in self.entries for cell in self.plan.trials(setting).values()]
        finals = [self.cell(setting, seed) for setting, entry in self.entries.items() for seed in entry.seeds]
        cells = {cell.name: cell for cell in (*trials, *finals)}
        scores = _scores(list(cells.values()), self.folder, {})
        return {
            name: KeptCell(score, digest(cells[name]), [] if score.failed else self._curve(cells[name]))
            for name, score in scores.items()
        }


def collected(target: str, plan: Plan, folder: Path, kept: Mapping[str, KeptCell]) -> Results:
    """Whatever has ended in the folder, by this command or another one, for the whole of a table or a figure.

    Where nothing has, what was kept of it.
    """
    settings = settings_of(target)
    scores = _scores([c for s in settings for c in plan.trials(s).values()], folder, kept)
    trials = {}
    for s in settings:
        tried = {rate: scores.get(cell.name) for rate, cell in plan.trials(s).items()}
        values = {r: None if score is None or score.unfit else score.on_public for r, score in tried.items()}
        trials[s.method, s.graph] = Trials(s.method, s.graph, values, plan.rate(s, scores))
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


def kept_runs(target: str, plan: Plan, kept: Mapping[str, KeptCell]) -> set[tuple[Setting, int]]:
    """Settings and seeds that were kept with the settings which this plan gives them."""
    return _runs(_entries(settings_of(target), plan, None, kept))


def _runs(entries: Mapping[Setting, Entry]) -> set[tuple[Setting, int]]:
    return {(setting, seed) for setting, entry in entries.items() for seed in entry.seeds}


def _entries(
    settings: Sequence[Setting], plan: Plan, folder: Path | None, kept: Mapping[str, KeptCell]
) -> dict[Setting, Entry]:
    trials = {s: plan.trials(s).values() for s in settings}
    scores = _scores([cell for cells in trials.values() for cell in cells], folder, kept)
    entries = {}
    for s in settings:
        rate = plan.rate(s, scores)
        finals = [] if rate is None else plan.finals(s, rate)
        found = _scores(finals, folder, kept)
        good = {
            seed: found[cell.name]
            for seed, cell in zip(plan.seeds, finals, strict=False)
            if cell.name in found and found[cell.name].failed is None
        }
        wrong = {name: score.failed for name, score in found.items()}
        wrong |= {cell.name: scores[cell.name].unfit for cell in trials[s] if cell.name in scores}
        failed = tuple(f"{name}: {reason}" for name, reason in wrong.items() if reason)
        entries[s] = Entry(s, accuracies()[s], rate, tuple(good), tuple(good.values()), failed)
    return entries


def _scores(cells: Sequence[Cell], folder: Path | None, kept: Mapping[str, KeptCell]) -> dict[str, Score]:
    """Those that have ended in the folder, or failed there; in the place of others, what was kept."""
    scores = with_settings_of_now(kept, cells)
    if folder is not None:
        for cell in {cell.name: cell for cell in cells}.values():
            if found := finished(*cell, folder / CELLS) or failure(cell.name, folder / CELLS):
                scores[cell.name] = found
    return scores
