"""Results as files: in the folder of a reading, and, the small ones, wherever they are to be kept."""

import csv
from collections.abc import Mapping, Set
from pathlib import Path

from pdsl.errors import PdslError
from pdsl.places import check_folder
from pdsl.report.document import write_aside
from pdsl.reproduce import figures, kept
from pdsl.reproduce.kept import KeptCell
from pdsl.reproduce.page import figure_page, table_page
from pdsl.reproduce.paper import FIGURES, Setting, panels
from pdsl.reproduce.plan import Plan
from pdsl.reproduce.results import Results, collected, kept_runs
from pdsl.reproduce.tables import FORMS
from pdsl.reproduce.tasks import Task


def write(results: Results, folder: Path) -> Path:
    """Everything there is to look at; returns the page."""
    _make(folder)
    name = results.target
    if name in FIGURES:
        for panel in panels(name):
            picture = figures.drawn(figures.losses(results, panel))
            if picture is not None:
                write_aside(folder / f"{name}-{panel}.svg", picture.svg(f"{name} ({panel})"))
        write_aside(folder / f"{name}.csv", figures.comma_separated(results))
        return write_aside(folder / f"{name}.html", figure_page(results))
    for kind, form in FORMS.items():
        write_aside(folder / f"{name}.{kind}", form(results))
    return write_aside(folder / f"{name}.html", table_page(results))


def keep(results: Results, folder: Path) -> list[Path]:
    """The small files: a table without its page, the loss curves of its runs as numbers, and its cells."""
    place = folder / results.plan.task.reading
    name = results.target
    _check_none_lost(name, place, results.runs)
    _make(place)
    forms = () if name in FIGURES else ("md", "csv", "json")
    written = [write_aside(place / f"{name}.{kind}", FORMS[kind](results)) for kind in forms]
    curves = write_aside(place / _curves(name), figures.comma_separated(results))
    return [*written, curves, kept.add(folder, results.to_keep())]


def check_keep(plan: Plan, out: Path, folder: Path, earlier: Mapping[str, KeptCell]) -> None:
    """Refuse, before anything is run, a place that cannot be written to or where a kept table would lose runs.

    Runs that tasks.toml has other settings for by now are replaced by those that are asked for, or in `out` already;
    never by runs whose settings are the command's own.
    """
    check_folder(folder, "--keep")
    task = plan.task
    for name in plan.targets:
        runs = kept_runs(name, plan, earlier)
        if task == Task(task.reading):
            asked = {(setting, seed) for setting in plan.asked for seed in plan.seeds}
            runs |= asked | collected(name, plan, out, earlier).runs
        _check_none_lost(name, folder / task.reading, runs)


def _check_none_lost(name: str, place: Path, runs: Set[tuple[Setting, int]]) -> None:
    if lost := len(_shown_in(place / _curves(name)) - runs):
        raise PdslError(
            f"{place / _curves(name)} has {lost} runs with other settings or seeds than this command's, which would be"
            " lost; choose another --keep, or move it away"
        )


def _curves(name: str) -> str:
    return f"{name}.csv" if name in FIGURES else f"{name}-curves.csv"


def _shown_in(file: Path) -> set[tuple[Setting, int]]:
    """The runs whose curves are in a file that was kept."""
    if not file.exists():
        return set()
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            return {
                (
                    Setting(r["table"], float(r["paper_epsilon"]), r["method"], r["graph"], int(r["agents"])),
                    int(r["seed"]),
                )
                for r in csv.DictReader(lines)
            }
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise PdslError(f"{file} is damaged ({e}); restore it, or choose another --keep") from e


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise PdslError(f"cannot write to {folder}: {e.strerror}; choose another place") from e
