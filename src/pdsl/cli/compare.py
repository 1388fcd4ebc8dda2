"""`pdsl compare`: several algorithms on one task."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from pdsl.cli.common import INTERRUPTED, WIDE, AsJson, Assignments, console, say, shown_computations

REFERENCE = "pdsl,dp-dpsgd,muffliato,dp-cga,dp-net-fleet"  # the paper's five methods
GRID = "0.25,0.5,1,2"  # learning rates


def compare(
    config: Annotated[
        Path | None, typer.Argument(help="The task's settings as TOML; without it, the defaults.")
    ] = None,
    assignments: Assignments = [],  # noqa: B006
    algorithms: Annotated[
        str, typer.Option(help="Algorithms, separated by commas; your own as package.module:Class.")
    ] = REFERENCE,
    grid: Annotated[
        str, typer.Option(help="Learning rates to try; the public set chooses the best. Grows if that is at an edge.")
    ] = GRID,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each algorithm at its best learning rate.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Folder; finished runs in it are skipped.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare algorithms on one task under one privacy budget, each at its best learning rate."""
    from pdsl.config import load
    from pdsl.sweep.baselines import load_or_compute
    from pdsl.sweep.comparison import ComparisonPlan, run_comparison, summarise
    from pdsl.sweep.page import write_page
    from pdsl.sweep.presentation import footer, table
    from pdsl.sweep.progress import SweepProgress
    from pdsl.sweep.tuning import count_jobs, parse_grid

    own = [assignment for assignment in assignments if assignment.strip().startswith("algorithm")]
    task = load(config, [assignment for assignment in assignments if assignment not in own])
    plan = ComparisonPlan.of(task, algorithms.split(","), parse_grid(grid), seeds, own)
    folder = out or Path("runs") / f"compare-{task.data.name}-{task.graph.kind}-{plan.key}"
    try:
        progress = SweepProgress(console(stderr=True), lambda scores: count_jobs(plan.tunings, scores))
        comparison = summarise(plan, run_comparison(plan, folder, progress), folder)
        comparison.check()
        with shown_computations() if not as_json else nullcontext():
            comparison = replace(comparison, baselines=load_or_compute(plan, folder))
    except KeyboardInterrupt:
        say(f"interrupted; to continue in {folder}, run the same command again")
        raise SystemExit(INTERRUPTED) from None
    page = write_page(comparison)
    if as_json:
        print(json.dumps(comparison.as_dict()))
    else:
        wide = console()
        wide.width = max(wide.width, WIDE)
        wide.print(table(comparison))
        print(f"{footer(comparison)}\nreport: {page}")
