"""The command line: pdsl run, compare, reproduce, report and the others; `pdsl --help` has all of them.

A command imports what only it needs when it runs.
"""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from pdsl.compare.plan import GRID, REFERENCE
from pdsl.errors import ContactError, PdslError
from pdsl.peer.commands import app as peer_app
from pdsl.places import check_file, check_folder
from pdsl.privacy import calculator
from pdsl.theory import command as theory

WIDE = 120  # columns that a table may take where a narrower one would lose names
INTERRUPTED = 130  # exit code: 128 + SIGINT

app = typer.Typer(
    help="Private, serverless, peer-to-peer machine learning.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Data sets: which are here, and fetching them.")
app.add_typer(data_app, name="data")
app.add_typer(peer_app, name="peer")

Assignments = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting, like --set batch.size=64; nothing after = for its default.",
    ),
]


def _console(stderr: bool = False) -> Console:
    """What is printed may be the user's own words, in which brackets and colons mean nothing."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


class WithSettings(TyperCommand):
    """A command whose help ends with every setting, its default and one line about it."""

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        super().format_help(ctx, formatter)
        _console().print(_settings_table())


def _settings_table() -> Table:
    from pdsl.config import describe

    table = Table(
        "setting", "default", "what it is", box=None, header_style="bold", title="Settings", title_justify="left"
    )
    for name, default, text in describe():
        table.add_row(name, "" if default is None else str(default), text)
    return table


@app.command(cls=WithSettings)
def run(
    config: Annotated[Path | None, typer.Argument(help="Settings as TOML; without it, the defaults.")] = None,
    assignments: Assignments = [],  # noqa: B006  typer's way to say none
    out: Annotated[Path | None, typer.Option(help="New directory for the results; default runs/<what it is>.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Directory of an interrupted run to continue, or extend.")] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder for TensorBoard to read, a point a round.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Train: agents on a graph learn one model."""
    from pdsl import runner
    from pdsl.board import Board
    from pdsl.config import load
    from pdsl.engine.ranks import joined
    from pdsl.progress import Progress

    if resume is not None and (config is not None or out is not None):
        raise PdslError("--resume takes its config and its place from the run itself; leave out CONFIG and --out")
    with joined() as ranks:
        board = Board(tensorboard) if tensorboard is not None and ranks.rank == 0 else None
        if resume is not None:
            experiment, directory = runner.take_up(resume, assignments, ranks)
        else:
            settings = ranks.together(lambda: load(config, assignments))
            path, there = runner.begun(settings, out, ranks)
            experiment, directory = runner.take_up(path, [], ranks) if there else runner.start(settings, path, ranks)

        def begin() -> None:
            if not as_json:
                _console().print(_heading(experiment))

        try:
            with Progress(_console(stderr=True), experiment.config.rounds, shown=ranks.rank == 0) as progress:

                def told(row: dict[str, Any]) -> None:
                    progress.row(row)
                    if board is not None:
                        board.row(row)

                summary = runner.execute(experiment, directory, begin, told, progress.note)
        except KeyboardInterrupt:
            again = shlex.join(["pdsl", "run", "--resume", str(directory.path)])
            _say(f"interrupted; continue with: {again}")
            raise SystemExit(INTERRUPTED) from None
    if not summary:
        return  # another rank has it
    if as_json:
        print(json.dumps(summary))
    else:
        _console().print(_summary_table(summary))


def _heading(experiment: Any) -> Text:
    e, c = experiment, experiment.config
    sizes = sorted(e.batches.sizes)
    return Text.assemble(
        (c.algorithm.name, "bold"),
        f" on {e.data.name}: {e.graph.describe()}\n"
        f"{sum(sizes):,} records ({sizes[0]:,} to {sizes[-1]:,} an agent), {e.network.d:,} parameters,"
        f" Q of {len(e.validation[1]):,}, tested on {len(e.test[1]):,}",
    )


def _summary_table(s: dict[str, Any]) -> Table:
    table = Table(show_header=False, title=f"{s['algorithm']}, {s['agents']} agents, {s['rounds']} rounds")
    loss = "not finite" if s["loss"] is None else f"{s['loss']:.4f}"
    worst, best = min(s["accuracy_per_agent"]), max(s["accuracy_per_agent"])
    table.add_row("accuracy, mean over agents", f"{s['accuracy']:.4f}  ({worst:.4f} to {best:.4f})")
    table.add_row("accuracy of the mean model", f"{s['accuracy_of_mean']:.4f}")
    table.add_row("loss, mean over agents", loss)
    table.add_row("privacy", s["privacy"])
    if s["stopped"]:
        table.add_row("stopped", s["stopped"])
    table.add_row("sent", f"{s['bytes'] / 1e6:,.1f} MB")
    table.add_row("time", f"{s['seconds']:.1f} s")
    for note in s["notes"]:
        table.add_row("note", note)
    table.add_row("results", s["run"])
    table.add_row("page", f"{s['run']}/report.html")
    return table


@app.command(cls=WithSettings)
def config(
    file: Annotated[Path | None, typer.Argument(help="Settings as TOML to start from.")] = None,
    assignments: Assignments = [],  # noqa: B006
) -> None:
    """Print every setting as TOML, one line about each: a config to save and change."""
    from pdsl.config import commented_toml, load

    print(commented_toml(load(file, assignments)), end="")


@app.command()
def report(
    run: Annotated[list[Path], typer.Argument(help="Run directories.")],
    out: Annotated[
        Path | None, typer.Option(help="The page that compares several runs; default comparison.html.")
    ] = None,
    figures: Annotated[Path | None, typer.Option(help="Folder for every figure, as SVG and PNG.")] = None,
    tables: Annotated[Path | None, typer.Option(help="Folder for the tables, as Markdown, CSV and LaTeX.")] = None,
    owner: Annotated[
        bool, typer.Option("--owner", help="Write report-owner.html, with exact counts of records, for their owner.")
    ] = False,
) -> None:
    """Write the page of each run again; of several, one that compares them; figures and tables for papers."""
    from pdsl.report import files, write_report
    from pdsl.report.comparison import named, write_comparison
    from pdsl.report.reading import read_run

    runs = named([(directory, read_run(directory)) for directory in run])
    if len(run) == 1 and out is not None:
        raise PdslError(f"--out is for a page that compares several runs; the page of one is {run[0] / 'report.html'}")
    target = out or Path("comparison.html")
    if len(run) > 1:
        check_file(target, "--out")
    if figures is not None:
        files.rasteriser()
        check_folder(figures, "--figures")
    if tables is not None:
        check_folder(tables, "--tables")
    for directory in run:
        print(write_report(directory, owner))
    if len(run) > 1:
        print(write_comparison(runs, target))
    for path in files.write_figures(runs, figures) if figures else ():
        print(path)
    for path in files.write_all_tables(runs, tables) if tables else ():
        print(path)


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(help="Directory of a run that goes on, or has ended.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="On this machine; 0 for any that is free.")] = 0,
) -> None:
    """Show the page of a run while it goes on, to this machine's browser alone. Ctrl-C ends it."""
    from pdsl.report.watch import server

    with server(run, port) as serving:
        print(f"http://127.0.0.1:{serving.server_port}/", flush=True)
        try:
            serving.serve_forever()
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


@app.command()
def algorithms(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list, one object per algorithm.")] = False,
) -> None:
    """Every algorithm: its source, its update in a line, what it sends, what it costs in privacy, its settings."""
    from pdsl.algorithms.catalogue import EXAMPLE, catalogue

    entries = catalogue()
    if as_json:
        print(json.dumps(entries, ensure_ascii=False))
        return
    for entry in entries:
        k = "|M_i|" if entry["k_is_neighbourhood"] else f"{entry['k']}"
        times = "once a round" if entry["releases_per_round"] == 1 else f"{entry['releases_per_round']} times a round"
        settings = ", ".join(f"{s['name'].removeprefix('algorithm.')}={s['default']}" for s in entry["settings"])
        _console().print(Text.assemble((entry["name"], "bold"), f"  {entry['what']} ({entry['paper']})"))
        for label, text in (
            ("rule", entry["rule"]),
            ("sends", f"{_count(entry['messages_per_round'], 'vector')} a round to each neighbour"),
            ("privacy", f"k = {k}: so many noisy vectors on one batch, {times}"),
            ("settings", settings.replace("=None", "=auto")),
        ):
            _console().print(f"  {label:9} {text}")
    print(f"Numbers that depend on the graph are for {EXAMPLE.describe()}. Choose with --set algorithm.name=NAME.")


app.command("privacy")(calculator.command)
app.command("theory")(theory.command)


@app.command(cls=WithSettings)
def compare(
    config: Annotated[
        Path | None, typer.Argument(help="The task's settings as TOML; without it, the defaults.")
    ] = None,
    assignments: Assignments = [],  # noqa: B006
    algorithms: Annotated[str, typer.Option(help="Which, with commas between.")] = ",".join(REFERENCE),
    grid: Annotated[str, typer.Option(help="Learning rates that each tries, chosen on the public set.")] = ",".join(
        f"{rate:g}" for rate in GRID
    ),
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each at its best learning rate.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Folder; the same one goes on with what is missing.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Compare algorithms on one task under one budget, each with the learning rate that suits it."""
    from pdsl.cells.countdown import Countdown
    from pdsl.compare import Plan, carry_out, compared
    from pdsl.compare.page import write_page
    from pdsl.compare.shown import below, rates, table
    from pdsl.config import load

    own = [assignment for assignment in assignments if assignment.strip().startswith("algorithm")]
    task = load(config, [assignment for assignment in assignments if assignment not in own])
    plan = Plan.of(task, algorithms.split(","), rates(grid), seeds, own)
    folder = out or Path("runs") / f"compare-{task.data.name}-{task.graph.kind}-{plan.key}"
    try:
        scores = carry_out(plan, folder, Countdown(_console(stderr=True), plan.total))
    except KeyboardInterrupt:
        print(f"pdsl: interrupted; the same command goes on with what is missing in {folder}", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    comparison = compared(plan, scores, folder)
    comparison.check()
    page = write_page(comparison)
    if as_json:
        print(json.dumps(comparison.as_dict()))
    else:
        console = _console()
        console.width = max(console.width, WIDE)
        console.print(table(comparison))
        print(f"{below(comparison)}\npage: {page}")


@app.command()
def reproduce(
    target: Annotated[str, typer.Argument(help="table1, table2, fig1 … fig6, or all.")],
    only: Annotated[
        str | None, typer.Option(help="Part of it, like graph=ring,agents=10,epsilon=1,method=pdsl.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of each cell; default 3, with --quick 1.")] = None,
    reading: Annotated[
        str, typer.Option(help="What ε means: total, per-round, paper, or none for no noise.")
    ] = "total",
    quick: Annotated[
        bool, typer.Option("--quick", help="All the steps on handwritten digits, in a minute or two.")
    ] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of every run, instead of the table's.")] = None,
    grid: Annotated[str | None, typer.Option(help="Learning rates that every method tries, like 0.5,1,2.")] = None,
    assignments: Assignments = [],  # noqa: B006
    processes: Annotated[int | None, typer.Option(min=1, help="Runs side by side; default: one per core.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder; the same one goes on with what is missing.")] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Folder for the small result files; what is there already counts.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Run the paper's tables and figures, and show its numbers beside ours."""
    from pdsl.cells import carry_out
    from pdsl.cells.countdown import Countdown
    from pdsl.compare.shown import rates
    from pdsl.reproduce import CELLS, Plan, Task, collected
    from pdsl.reproduce.kept import read
    from pdsl.reproduce.layout import caption
    from pdsl.reproduce.shown import failures, tables
    from pdsl.reproduce.tables import as_dict
    from pdsl.reproduce.written import check_keep, write
    from pdsl.reproduce.written import keep as keep_small

    task = Task(reading, quick, rounds, tuple(rates(grid)) if grid else None, tuple(assignments))
    plan = Plan.of(target, task, only, seeds or (1 if quick else 3))
    folder = out or Path("runs") / ("reproduce-quick" if quick else "reproduce")
    check_folder(folder, "--out")
    earlier = read(keep) if keep else {}
    if keep:
        check_keep(plan, folder, keep, earlier)
    try:
        carry_out(plan.wanted, folder / CELLS, Countdown(_console(stderr=True), plan.total), processes)
    except KeyboardInterrupt:
        print(f"pdsl: interrupted; the same command goes on with what is missing in {folder}", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    found = {name: collected(name, plan, folder, earlier) for name in plan.targets}
    failed = failures(list(found.values()))
    pages = {name: write(result, folder / reading) for name, result in found.items()}
    kept = [path for result in found.values() if keep for path in keep_small(result, keep)]
    if as_json:
        shown = {name: as_dict(result) for name, result in found.items() if name.startswith("table")}
        print(json.dumps({"tables": shown, "pages": {name: str(page) for name, page in pages.items()}}))
        return
    for name, result in found.items():
        if name.startswith("table"):
            for table in tables(result):
                _console().print(table)
            print(f"{result.verdict()}\n{caption(result)}")
        print(f"page: {pages[name]}")
    for reason in failed:
        print(f"failed: {reason}")
    for path in dict.fromkeys(kept):
        print(f"kept: {path}")


@app.command()
def bench(
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each measurement; medians are shown.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Measure speed on this machine, as ratios: to the literal algorithm, to the hardware's peak, to one core."""
    from pdsl.bench import measure
    from pdsl.bench.table import table

    measured = measure(repeats, lambda what: print(f"measuring {what}", file=sys.stderr))
    if as_json:
        print(json.dumps(measured))
    else:
        _console().print(table(measured))


@app.command()
def audit(
    run: Annotated[Path, typer.Argument(help="Directory of a run.")],
    canaries: Annotated[
        int | None, typer.Option(min=0, help="Canaries to train with; 0: none; default: as many as there is room for.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds to train with canaries; default: all.")] = None,
    algorithm: Annotated[str | None, typer.Option(help="Own algorithm, package.module:Class.")] = None,
    model: Annotated[str | None, typer.Option(help="Own model given in Python, package.module:name.")] = None,
    data: Annotated[str | None, typer.Option(help="Own data given in Python, package.module:name.")] = None,
    graph: Annotated[str | None, typer.Option(help="Own graph given in Python, package.module:name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Try to refute a run's privacy statement. Exit code 0: it holds; 1: refuted; 2: nothing can be said."""
    from pdsl.auditing.own import imported_objects
    from pdsl.auditing.run import audit_run

    objects = imported_objects(run, algorithm=algorithm, model=model, data=data, graph=graph)
    report = audit_run(run, canaries, rounds, **objects)
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        table = Table("check", "verdict", "what was found", header_style="bold")
        for finding in report.findings:
            table.add_row(finding.check, finding.verdict.name.lower(), finding.detail)
        _console().print(table)
        print(f"{report.verdict.name.lower()}: {report.claim}")
    raise SystemExit(int(report.verdict))


@data_app.command("list")
def data_list() -> None:
    """Which data sets are here, and where."""
    from pdsl.data import data_root, status

    table = Table("data set", "here", "where", box=None, header_style="bold")
    for name, present, where in status(data_root()):
        table.add_row(name, "yes" if present else "no", str(where))
    _console().print(table)


@data_app.command("fetch")
def data_fetch(name: Annotated[str, typer.Argument(help="mnist, fashion-mnist or cifar10")]) -> None:
    """Download a data set to PDSL_DATA, or to the user's cache, and check it."""
    from pdsl.data import data_root, fetch

    for path in fetch(name, data_root()):
        print(path)


def main() -> NoReturn:
    """A user's mistake is one line on stderr and exit code 2."""
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="pdsl", standalone_mode=False)
        sys.stdout.flush()
    except PdslError as e:
        _fail(str(e))
    except ContactError as e:
        _fail(f"{e}; what is on disk is whole: start again, or let torchrun (--max-restarts)", code=1)
    except typer.TyperException as e:  # what is wrong with the command line itself
        _fail(f"{e.format_message().rstrip('.')}; try --help after the command")
    except OSError as e:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or else Python tries to write it again when it exits
        _fail(f"cannot write to {e.filename or 'standard output'}: {e.strerror}; make room or choose another place")
    if code == INTERRUPTED:
        _say("interrupted")
    raise SystemExit(code or 0)


def _fail(message: str, code: int = 2) -> NoReturn:
    _say(" ".join(message.split()))
    raise SystemExit(code) from None


def _say(message: str) -> None:
    """One line on stderr; of the ranks of a run, which all have the same to say, only the first speaks."""
    from pdsl.engine.ranks import place

    if (here := place()) is None or here.rank == 0:
        print(f"pdsl: {message}", file=sys.stderr)
