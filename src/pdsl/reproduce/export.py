"""Write results: all files into the folder of a reading, and the small ones into the folder of --keep."""

import csv
from collections.abc import Mapping, Set
from pathlib import Path

from pdsl.report.document import write_file
from pdsl.reproduce import archive, figures
from pdsl.reproduce.archive import KeptCell
from pdsl.reproduce.cells import SweepPlan, Task
from pdsl.reproduce.page import figure_page, table_page
from pdsl.reproduce.paper import FIGURES, Setting, panels
from pdsl.reproduce.results import Results, collect, kept_runs
from pdsl.reproduce.tables import FORMS
from pdsl.utils.errors import PdslError
from pdsl.utils.files import check_folder


def write_results(results: Results, folder: Path) -> Path:
    """Write a table or figure in all formats and return the path of the report."""
    _make_folder(folder)
    name = results.target
    if name in FIGURES:
        for panel in panels(name):
            picture = figures.draw_panel(figures.losses(results, panel))
            if picture is not None:
                write_file(folder / f"{name}-{panel}.svg", picture.svg(f"{name} ({panel})"))
        write_file(folder / f"{name}.csv", figures.comma_separated(results))
        return write_file(folder / f"{name}.html", figure_page(results))
    for kind, form in FORMS.items():
        write_file(folder / f"{name}.{kind}", form(results))
    return write_file(folder / f"{name}.html", table_page(results))


def keep_results(results: Results, folder: Path) -> list[Path]:
    """Write the small files: a table without its report, the loss curves as CSV, and the kept cells."""
    place = folder / results.plan.task.folder
    name = results.target
    _check_no_loss(name, place, results.runs)
    _make_folder(place)
    forms = () if name in FIGURES else ("md", "csv", "json")
    written = [write_file(place / f"{name}.{kind}", FORMS[kind](results)) for kind in forms]
    curves = write_file(place / _curves(name), figures.comma_separated(results))
    return [*written, curves, archive.add(folder, results.to_keep())]


def check_keep(plan: SweepPlan, out: Path, folder: Path, earlier: Mapping[str, KeptCell]) -> None:
    """Refuse, before any run, a folder that is not writable or in which a kept table would lose runs.

    If tasks.toml has changed, kept runs may be replaced by runs that the command asks for or that are in `out`, but
    never by runs with settings from the command line.
    """
    check_folder(folder, "--keep")
    task = plan.task
    for name in plan.targets:
        runs = kept_runs(name, plan, earlier)
        if task == Task(task.reading, variant=task.variant):
            asked = {(setting, seed) for setting in plan.asked for seed in plan.seeds}
            runs |= asked | collect(name, plan, out, earlier).runs
        _check_no_loss(name, folder / task.folder, runs)


def _check_no_loss(name: str, place: Path, runs: Set[tuple[Setting, int]]) -> None:
    if lost := len(_runs_in(place / _curves(name)) - runs):
        raise PdslError(
            f"{place / _curves(name)} has {lost} runs with other settings or seeds than this command's, which would be"
            " lost; choose another --keep, or move the file away"
        )


def _curves(name: str) -> str:
    return f"{name}.csv" if name in FIGURES else f"{name}-curves.csv"


def _runs_in(file: Path) -> set[tuple[Setting, int]]:
    """Runs whose curves are in a kept file."""
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


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise PdslError(f"cannot write to {folder}: {e.strerror}; choose another folder") from e
