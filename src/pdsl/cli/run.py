"""`pdsl run`: train in a run directory."""

import json
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.table import Table
from rich.text import Text

from pdsl.cli.common import INTERRUPTED, AsJson, Assignments, console, say, shown_computations
from pdsl.utils.errors import PdslError
from pdsl.utils.types import JsonDict

if TYPE_CHECKING:
    from pdsl.runs.result import Summary
    from pdsl.training.experiment import Experiment
    from pdsl.training.records import RoundRecord

MAX_NAMES = 8  # agents named in the heading


def run(
    config: Annotated[Path | None, typer.Argument(help="Settings as TOML; default: the built-in defaults.")] = None,
    assignments: Assignments = [],  # noqa: B006  typer's way to say none
    out: Annotated[
        Path | None,
        typer.Option(help="Run directory; the same directory with the same settings resumes. Default: runs/<name>."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Run directory to continue, or to extend with more rounds.")
    ] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder for TensorBoard event files.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train one model with agents on a graph."""
    from pdsl.config import load
    from pdsl.engine.launch import process_group
    from pdsl.runs import runner
    from pdsl.runs.listeners import Listeners, Progress, RunListener
    from pdsl.runs.loggers import TensorBoard

    class Heading(RunListener):
        """Print the task before the first round."""

        def on_start(self, experiment: "Experiment", path: Path | None, records: "Sequence[RoundRecord]") -> None:
            console().print(_heading(experiment))
            if records:
                console().print(f"resuming {path} after round {records[-1]['round']}")

    if resume is not None and (config is not None or out is not None):
        raise PdslError("--resume takes config and directory from the run itself; leave out CONFIG and --out")
    with process_group() as ranks, shown_computations() if ranks.rank == 0 and not as_json else nullcontext():
        listeners: list[RunListener] = [] if as_json else [Heading()]
        if tensorboard is not None and ranks.rank == 0:
            listeners.append(TensorBoard(tensorboard))
        if resume is not None:
            experiment, directory = runner.resume(resume, assignments, ranks)
        else:
            settings = ranks.all_or_raise(lambda: load(config, assignments))
            experiment, directory = runner.open_run(settings, out, ranks)
        try:
            with Progress(console(stderr=True), experiment.config.rounds, visible=ranks.rank == 0) as progress:
                summary = runner.execute(experiment, directory, Listeners(*listeners, progress))
        except KeyboardInterrupt:
            say(f"interrupted; continue with: {shlex.join(['pdsl', 'run', '--resume', str(directory.path)])}")
            raise SystemExit(INTERRUPTED) from None
    if summary is None:
        return  # the main rank prints it
    if as_json:
        print(json.dumps(summary))
    else:
        console().print(_summary_table(summary))


def _heading(e: "Experiment") -> Text:
    sizes = sorted(e.batches.sizes)
    known = e.data.agent_names
    names = f" ({', '.join(known[:MAX_NAMES])}{', …' if len(known) > MAX_NAMES else ''})" if known else ""
    return Text.assemble(
        (e.config.algorithm.name, "bold"),
        f" on {e.data.name}: {e.graph.describe()}{names}\n"
        f"{sum(sizes):,} records ({sizes[0]:,} to {sizes[-1]:,} per agent), {e.network.num_parameters:,} parameters,"
        f" {len(e.validation[1]):,} public validation records, {len(e.test[1]):,} test records",
    )


def _summary_table(s: "Summary") -> Table:
    table = Table(show_header=False, title=f"{s['algorithm']}, {s['agents']} agents, {s['rounds']} rounds")
    loss = "not finite" if s["loss"] is None else f"{s['loss']:.4f}"
    from pdsl.metrics import BASELINES
    from pdsl.runs.result import headline

    m, values = s["metric"], cast(JsonDict, s)
    own = [value for value in values[f"{m}_per_agent"] if value is not None]
    spread = f"  ({min(own):.4f} to {max(own):.4f})" if own else ""
    table.add_row(f"{m}, mean over agents", f"{headline(s):.4f}{spread}")
    table.add_row(f"{m} of the mean model", f"{headline(s, '_of_mean'):.4f}")
    if m != "loss":
        table.add_row("loss, mean over agents", loss)
    for name, value in s["baselines"].items():
        table.add_row(f"{m}: {BASELINES[name]}", "not finite" if value is None else f"{value:.4f}")
    if s["gain"]:
        table.add_row("conclusion", s["gain"])
    table.add_row("privacy", s["privacy"])
    if s["stopped"]:
        table.add_row("stopped", s["stopped"])
    table.add_row("sent", f"{s['bytes'] / 1e6:,.1f} MB")
    table.add_row("time", f"{s['seconds']:.1f} s")
    for note in s["notes"]:
        table.add_row("note", note)
    table.add_row("results", s["run"])
    table.add_row("report", f"{s['run']}/report.html")
    return table
