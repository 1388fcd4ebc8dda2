"""Files for papers: figures as SVG and PNG, tables as Markdown, CSV and LaTeX."""

import re
from collections.abc import Callable
from pathlib import Path

from pdsl.report.comparison import comparison_figures
from pdsl.report.document import write_file
from pdsl.report.figures import run_figures
from pdsl.report.svg import FONTS
from pdsl.report.tables import Runs, comparison_table, summary_table
from pdsl.utils.errors import PdslError

SCALE = 3  # PNG pixels per SVG unit: about 300 dots per inch in a column of a paper


def write_figures(runs: Runs, folder: Path) -> list[Path]:
    """Write the figures of each run and, for several runs, those that compare them."""
    png = load_rasteriser()
    _make_folder(folder)
    figures = {f"{file_name(name)}-{figure.name}": figure for name, run in runs.items() for figure in run_figures(run)}
    if len(runs) > 1:
        figures |= {figure.name: figure for figure in comparison_figures(runs)}
    written = []
    for name, figure in figures.items():
        if figure.picture:
            svg = figure.picture.svg(figure.title)
            written.append(write_file(folder / f"{name}.svg", svg))
            written.append(write_file(folder / f"{name}.png", png(svg)))
    return written


def write_tables(runs: Runs, folder: Path) -> list[Path]:
    """Write the summary of each run and, for several runs, their comparison."""
    _make_folder(folder)
    tables = {f"{name}-summary": summary_table(run) for name, run in runs.items()}
    if len(runs) > 1:
        tables["comparison"] = comparison_table(runs)
    written = []
    for name, table in tables.items():
        for suffix, text in ((".md", table.markdown()), (".csv", table.csv()), (".tex", table.latex())):
            written.append(write_file(folder / f"{file_name(name)}{suffix}", text))
    return written


def file_name(name: str) -> str:
    """Replace the characters of a run's name that are not portable in file names."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"


def load_rasteriser() -> Callable[[str], bytes]:
    """Return a function from SVG to PNG; PdslError if the package or a font is missing."""
    try:
        from resvg_py import svg_to_bytes
    except ImportError as error:
        raise PdslError("--figures needs a package to draw PNG; install it with: pip install resvg-py") from error

    def png(svg: str) -> bytes:
        return bytes(svg_to_bytes(svg_string=svg, zoom=SCALE))

    empty = f'<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20" font-family="{FONTS}">{{}}</svg>'
    if png(empty.format("")) == png(empty.format('<text y="15">x</text>')):
        raise PdslError("--figures found no font for PNG; install one, such as DejaVu or Liberation")
    return png


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PdslError(f"cannot make {str(folder)!r} ({error.strerror}); choose another folder") from error
