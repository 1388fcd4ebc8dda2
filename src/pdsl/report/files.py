"""What `pdsl report` writes for papers: every figure as SVG and PNG, every table as Markdown, CSV and LaTeX."""

from collections.abc import Callable
from pathlib import Path

from pdsl.errors import PdslError
from pdsl.report.comparison import Runs, compared_figures
from pdsl.report.document import write_aside
from pdsl.report.figures import Figure, figures
from pdsl.report.picture import FONTS
from pdsl.report.tables import comparison_table, file_name, summary_table, write_tables

SCALE = 3  # pixels of a PNG to a unit of its SVG: about 300 dots an inch in a column of a paper


def write_figures(runs: Runs, folder: Path) -> list[Path]:
    """Each run's figures and, of several runs, those that compare them."""
    png = rasteriser()
    make(folder)
    drawn = {f"{file_name(name)}-{figure.name}": figure for name, run in runs.items() for figure in figures(run)}
    if len(runs) > 1:
        drawn |= {figure.name: figure for figure in compared_figures(runs)}
    return [path for name, figure in drawn.items() for path in _write(figure, folder / name, png)]


def write_all_tables(runs: Runs, folder: Path) -> list[Path]:
    """Each run's summary and, of several runs, the comparison."""
    make(folder)
    tables = {f"{name}-summary": summary_table(run) for name, run in runs.items()}
    return write_tables(tables | ({"comparison": comparison_table(runs)} if len(runs) > 1 else {}), folder)


def make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PdslError(f"cannot make {str(folder)!r} ({error.strerror}); choose another folder") from error


def rasteriser() -> Callable[[str], bytes]:
    """From an SVG to the same as PNG; PdslError where that cannot be done."""
    try:
        from resvg_py import svg_to_bytes
    except ImportError as error:
        raise PdslError(
            "--figures needs a package to draw PNG; install it with: pip install 'pdsl[figures]'"
        ) from error

    def png(svg: str) -> bytes:
        return bytes(svg_to_bytes(svg_string=svg, zoom=SCALE))

    empty = f'<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20" font-family="{FONTS}">{{}}</svg>'
    if png(empty.format("")) == png(empty.format('<text y="15">x</text>')):
        raise PdslError("--figures finds no font to letter PNG with; install one, such as DejaVu or Liberation")
    return png


def _write(figure: Figure, path: Path, png: Callable[[str], bytes]) -> list[Path]:
    if figure.picture is None:
        return []
    svg = figure.picture.svg(figure.title)
    return [write_aside(Path(f"{path}.svg"), svg), write_aside(Path(f"{path}.png"), png(svg))]
