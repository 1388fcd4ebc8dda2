"""`pdsl report` and `pdsl watch`: reports of runs, written or served live."""

from pathlib import Path
from typing import Annotated

import typer

from pdsl.cli.common import INTERRUPTED
from pdsl.utils.errors import PdslError


def report(
    run: Annotated[list[Path], typer.Argument(help="Run directories.")],
    out: Annotated[
        Path | None, typer.Option(help="Report that compares several runs; default comparison.html.")
    ] = None,
    figures: Annotated[Path | None, typer.Option(help="Folder for all figures, as SVG and PNG.")] = None,
    tables: Annotated[Path | None, typer.Option(help="Folder for tables, as Markdown, CSV and LaTeX.")] = None,
    owner: Annotated[
        bool, typer.Option("--owner", help="Write report-owner.html with exact record counts, for the data owner.")
    ] = False,
) -> None:
    """Write the report of each run, a comparison of several runs, and figures and tables for papers."""
    from pdsl.report import export, write_report
    from pdsl.report.comparison import name_runs, write_comparison
    from pdsl.report.run_data import read_run
    from pdsl.utils.files import check_file, check_folder

    runs = name_runs([(directory, read_run(directory)) for directory in run])
    if len(run) == 1 and out is not None:
        raise PdslError(f"--out is for a comparison of several runs; the report of one is {run[0] / 'report.html'}")
    target = out or Path("comparison.html")
    if len(run) > 1:
        check_file(target, "--out")
    if figures is not None:
        export.load_rasteriser()
        check_folder(figures, "--figures")
    if tables is not None:
        check_folder(tables, "--tables")
    for directory in run:
        print(write_report(directory, owner))
    if len(run) > 1:
        print(write_comparison(runs, target))
    for path in export.write_figures(runs, figures) if figures else ():
        print(path)
    for path in export.write_tables(runs, tables) if tables else ():
        print(path)


def watch(
    run: Annotated[Path, typer.Argument(help="Directory of a run, in progress or finished.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Local port; 0 chooses a free one.")] = 0,
) -> None:
    """Serve the live report of a run to browsers on this machine. Ctrl-C ends it."""
    from pdsl.report.watch import server

    with server(run, port) as serving:
        print(f"http://127.0.0.1:{serving.server_port}/", flush=True)
        try:
            serving.serve_forever()
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None
