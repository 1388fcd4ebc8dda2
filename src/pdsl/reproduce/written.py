"""Results as files: in the folder of a reading, and, the small ones, wherever they are to be kept."""

from pathlib import Path

from pdsl.errors import PdslError
from pdsl.report.document import write_aside
from pdsl.reproduce import figures, kept
from pdsl.reproduce.page import figure_page, table_page
from pdsl.reproduce.paper import FIGURES, panels
from pdsl.reproduce.results import Results
from pdsl.reproduce.tables import FORMS


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
    _make(place)
    name = results.target
    if name in FIGURES:
        return [write_aside(place / f"{name}.csv", figures.comma_separated(results))]
    written = [write_aside(place / f"{name}.{kind}", FORMS[kind](results)) for kind in ("md", "csv", "json")]
    curves = write_aside(place / f"{name}-curves.csv", figures.comma_separated(results))
    return [*written, curves, kept.add(folder, results.to_keep())]


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise PdslError(f"cannot write to {folder}: {e.strerror}; choose another place") from e
