"""A report that compares several runs: results, curves, and the settings that differ."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pdsl.report.document import render, write_file
from pdsl.report.figures import EPSILON, NOT_PRIVATE, Figure
from pdsl.report.line_chart import Scale, line_chart
from pdsl.report.run_data import Run
from pdsl.report.tables import Runs, comparison_table
from pdsl.section import flat

DISTANCE = "Average distance between an agent's model and the mean model."
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
        badge="",
        headings=table.headings,
        rows=table.format_rows(),
        figures=comparison_figures(runs),
        names=list(runs),
        settings=_differing_settings(runs),
    )
    return write_file(target, html)


def comparison_figures(runs: Runs) -> list[Figure]:
    """Headline metrics, loss, ε and consensus distance over rounds, with one line for each run that has them."""
    drawn = dict(list(runs.items())[:MAX_LINES])
    limit = f" Shown: the first {MAX_LINES} of {len(runs)} runs." if len(runs) > MAX_LINES else ""

    def figure(name: str, axis: str, title: str, caption: str, scale: Scale) -> Figure:
        series = {
            run_name: [(r.number, value) for r in run.rounds if (value := r.metrics.get(name)) is not None]
            for run_name, run in drawn.items()
        }
        picture = line_chart(series, axis, scale)
        return Figure(f"comparison-{name}", title, caption + limit, picture)

    headlines = {run.metric.name: run.metric for run in drawn.values()}
    losses = next(iter(drawn.values())).task.loss
    seeded = any(run.seeded and run.epsilon() is not None for run in drawn.values())
    figures = [
        *(
            figure(name, m.label, m.title, f"Test {m.label}, mean over agents.", m.scale)
            for name, m in headlines.items()
        ),
        *(
            []
            if "loss" in headlines
            else [figure("loss", "loss", "Loss", "Test loss, mean over agents.", losses.scale)]
        ),
        replace(
            figure("epsilon", "ε spent", "ε spent", "Total ε, for the agent with the largest total.", EPSILON),
            badge=NOT_PRIVATE if seeded else "",
        ),
        figure("consensus", "consensus distance", "Consensus distance", DISTANCE, Scale()),
    ]
    return [it for it in figures if it.picture or it.name.removeprefix("comparison-") in headlines]


def _verdict(runs: Runs) -> str:
    known = {name: value for name, run in runs.items() if (value := run.headline()) is not None}
    if not known:
        return "No run has been evaluated."
    unfinished = sum(run.summary is None for run in runs.values())
    rest = f" {unfinished} run{' is' if unfinished == 1 else 's are'} unfinished." if unfinished else ""
    metrics = {runs[name].metric for name in known}
    if len(metrics) > 1:
        return f"The runs have different metrics: {', '.join(sorted(m.label for m in metrics))}.{rest}"
    (metric,) = metrics
    best = (max if metric.higher_is_better else min)(known, key=lambda name: known[name])
    extreme = "highest" if metric.higher_is_better else "lowest"
    return f"{best} has the {extreme} {metric.label}: {metric.form(known[best])}.{rest}"


def _differing_settings(runs: Runs) -> list[list[str]]:
    """The settings that are not the same in all runs: name, then the value in each run."""
    settings = [flat(run.config) for run in runs.values()]
    keys = dict.fromkeys(key for of_run in settings for key in of_run)
    differing = [key for key in keys if len({repr(of_run.get(key)) for of_run in settings}) > 1]
    return [[key, *(str(of_run.get(key, "—")) for of_run in settings)] for key in differing]
