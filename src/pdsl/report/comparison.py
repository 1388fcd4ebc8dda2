"""A report that compares several runs: results, curves, and the settings that differ."""

from collections.abc import Sequence
from pathlib import Path

from pdsl.report.document import render, write_file
from pdsl.report.figures import Figure
from pdsl.report.line_chart import Form, line_chart
from pdsl.report.run_data import Run
from pdsl.report.tables import Runs, comparison_table
from pdsl.settings import flat
from pdsl.utils.format import axis_percent, exact, exact_percent, format_epsilon, percent, plain

MAX_LINES = 12  # runs drawn in a figure; more names would not fit


def name_runs(runs: Sequence[tuple[Path, Run]]) -> Runs:
    """Key runs by name. Runs with the same name have their directory added."""
    names = [run.name for _, run in runs]
    found: Runs = {}
    for path, run in runs:
        name = run.name if names.count(run.name) == 1 else f"{run.name} ({path})"
        found[name if name not in found else f"{name}, again"] = run
    return found


def write_comparison(runs: Runs, target: Path) -> Path:
    """Write the report and return its path."""
    table = comparison_table(runs)
    html = render(
        "compare_runs.html.j2",
        title=f"{len(runs)} runs",
        verdict=_verdict(runs),
        headings=table.headings,
        rows=table.format_rows(),
        figures=comparison_figures(runs),
        names=list(runs),
        settings=_differing_settings(runs),
    )
    return write_file(target, html)


def comparison_figures(runs: Runs) -> list[Figure]:
    """Accuracy, loss, ε and consensus distance over rounds, with one line for each run that has them."""
    drawn = dict(list(runs.items())[:MAX_LINES])
    limit = f" Shown: the first {MAX_LINES} of {len(runs)} runs." if len(runs) > MAX_LINES else ""

    def figure(
        metric: str, title: str, caption: str, form: Form = plain, tip_form: Form = exact, top: float | None = None
    ) -> Figure:
        series = {
            name: [(r.number, value) for r in run.rounds if (value := r.metrics[metric]) is not None]
            for name, run in drawn.items()
        }
        picture = line_chart(series, title.lower(), form, tip_form, top)
        return Figure(f"comparison-{metric}", title, caption + limit, picture)

    figures = [
        figure("accuracy", "Accuracy", "Test accuracy, mean over agents.", axis_percent, exact_percent, top=1),
        figure("loss", "Loss", "Test loss, mean over agents."),
        figure("epsilon", "ε spent", "Total ε, for the agent with the largest total.", tip_form=format_epsilon),
        figure("consensus", "Consensus distance", "Average distance between an agent's model and the mean model."),
    ]
    return [figure for figure in figures if figure.picture or figure.name == "comparison-accuracy"]


def _verdict(runs: Runs) -> str:
    known = {name: value for name, run in runs.items() if (value := run.outcome()["accuracy"]) is not None}
    if not known:
        return "No run has been evaluated."
    best = max(known, key=lambda name: known[name])
    unfinished = sum(run.summary is None for run in runs.values())
    rest = f" {unfinished} run{' is' if unfinished == 1 else 's are'} unfinished." if unfinished else ""
    return f"{best} has the highest accuracy: {percent(known[best])}.{rest}"


def _differing_settings(runs: Runs) -> list[list[str]]:
    """The settings that are not the same in all runs: name, then the value in each run."""
    settings = [flat(run.config) for run in runs.values()]
    keys = dict.fromkeys(key for of_run in settings for key in of_run)
    differing = [key for key in keys if len({repr(of_run.get(key)) for of_run in settings}) > 1]
    return [[key, *(str(of_run.get(key, "—")) for of_run in settings)] for key in differing]
