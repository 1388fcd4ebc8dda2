"""`pdsl reproduce`: the paper's tables and figures."""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from pdsl.cli.common import INTERRUPTED, AsJson, Assignments, console, say, shown_computations
from pdsl.utils.errors import PdslError
from pdsl.utils.files import check_folder


def reproduce(
    target: Annotated[str, typer.Argument(help="table1, table2, fig1 … fig6, or all.")],
    only: Annotated[str | None, typer.Option(help="Some cells only, like graph=ring,agents=10.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of each cell; default 3, with --quick 1.")] = None,
    reading: Annotated[
        str, typer.Option(help="Meaning of ε: total, per-round, paper, or none for no noise.")
    ] = "total",
    variant: Annotated[
        str, typer.Option(help="features (linear models on public features) or scratch (untrained networks).")
    ] = "features",
    quick: Annotated[
        bool, typer.Option("--quick", help="All steps on handwritten digits, in a minute or two.")
    ] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of every run, instead of the table's.")] = None,
    grid: Annotated[str | None, typer.Option(help="Learning rates that every method tries, like 0.5,1,2.")] = None,
    assignments: Assignments = [],  # noqa: B006
    processes: Annotated[int | None, typer.Option(min=1, help="Parallel runs; default: one per core.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of runs; finished ones are skipped. Default: runs/reproduce.")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Folder for the small result files; results kept there are used.")
    ] = None,
    missing: Annotated[
        bool, typer.Option("--missing", help="Do not run again what --keep has with the same settings.")
    ] = False,
    no_run: Annotated[
        bool, typer.Option("--no-run", help="Show finished and kept results. Runs nothing, and needs no data.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run the paper's tables and figures, and show its numbers beside ours."""
    from pdsl.reproduce import CELLS, SweepPlan, Task, collect
    from pdsl.reproduce.archive import kept_score, read
    from pdsl.reproduce.baselines import public_alone
    from pdsl.reproduce.export import check_keep, keep_results, write_results
    from pdsl.reproduce.tables import as_dict, caption, list_failures, terminal_tables
    from pdsl.sweep.job import compute_features
    from pdsl.sweep.progress import SweepProgress
    from pdsl.sweep.tuning import count_jobs, needed_jobs, parse_grid, run_tunings

    task = Task(reading, quick, variant, rounds, tuple(parse_grid(grid)) if grid else None, tuple(assignments))
    plan = SweepPlan.of(target, task, only, seeds or (1 if quick else 3), needs_data=not no_run)
    if missing and keep is None:
        raise PdslError("--missing skips kept results, and there are none; name their folder with --keep")
    folder = out or Path("runs") / ("reproduce-quick" if quick else "reproduce")
    check_folder(folder, "--out")
    earlier = read(keep) if keep else {}
    if keep and not no_run:
        check_keep(plan, folder, keep, earlier)
    try:
        if not no_run:
            with shown_computations() if not as_json else nullcontext():
                compute_features(needed_jobs(plan.tunings, {}), folder / CELLS)
            progress = SweepProgress(console(stderr=True), lambda scores: count_jobs(plan.tunings))
            known = partial(kept_score, earlier) if missing else None
            run_tunings(plan.tunings, folder / CELLS, progress, processes, known)
    except KeyboardInterrupt:
        say(f"interrupted; to continue in {folder}, run the same command again")
        raise SystemExit(INTERRUPTED) from None
    found = {name: collect(name, plan, folder, earlier) for name in plan.targets}
    if no_run and not any(results.runs for results in found.values()):
        raise PdslError(f"no finished run in {folder}{f', and none in {keep}' if keep else ''}; leave out --no-run")
    folders = [folder / task.folder, *([keep / task.folder] if keep else [])]
    for name in [] if quick or assignments or rounds else [name for name in found if name.startswith("table")]:
        found[name] = replace(found[name], public=public_alone(plan, name, folders, compute=not no_run))
    failed = list_failures(list(found.values()))
    pages = {name: write_results(results, folder / task.folder) for name, results in found.items()}
    kept = [path for results in found.values() if keep and not no_run for path in keep_results(results, keep)]
    if as_json:
        tables = {name: as_dict(results) for name, results in found.items() if name.startswith("table")}
        print(json.dumps({"tables": tables, "pages": {name: str(page) for name, page in pages.items()}}))
        return
    for name, results in found.items():
        if name.startswith("table"):
            for table in terminal_tables(results):
                console().print(table)
            print(f"{results.verdict()}\n{caption(results)}")
        print(f"report: {pages[name]}")
    for reason in failed:
        print(f"failed: {reason}")
    for path in dict.fromkeys(kept):
        print(f"kept: {path}")
