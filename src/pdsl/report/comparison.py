"""Several runs on one page: what each came to, their curves over each other, and the settings in which they differ."""

from collections.abc import Sequence
from pathlib import Path

from pdsl.report.curves import Form
from pdsl.report.document import card, document, write_aside
from pdsl.report.figures import Figure
from pdsl.report.lines import overlaid
from pdsl.report.markup import element, words
from pdsl.report.numbers import epsilon, exact, exact_percent, percent, percents, plain
from pdsl.report.reading import Run
from pdsl.report.tables import Table, comparison_table
from pdsl.settings import flat

DRAWN = 12  # runs with a line of their own: more names would not fit

Runs = dict[str, Run]  # by names that differ


def named(runs: Sequence[tuple[Path, Run]]) -> Runs:
    """Runs by their names; those of one name by their directories too."""
    names = [run.name for _, run in runs]
    found: Runs = {}
    for path, run in runs:
        name = run.name if names.count(run.name) == 1 else f"{run.name} ({path})"
        found[name if name not in found else f"{name}, again"] = run
    return found


def write_comparison(runs: Runs, target: Path) -> Path:
    """Write the page; returns its path."""
    drawn = element("div", *(figure.html() for figure in compared_figures(runs)), class_="even")
    main = [_table(comparison_table(runs)), drawn, _differences(runs)]
    return write_aside(target, document(f"{len(runs)} runs", _verdict(runs), *main))


def compared_figures(runs: Runs) -> list[Figure]:
    """Accuracy, loss, ε and consensus distance over rounds, a line for each run that has them."""
    drawn = dict(list(runs.items())[:DRAWN])
    which = f" The first {DRAWN} of {len(runs)} runs." if len(runs) > DRAWN else ""

    def of(
        name: str, title: str, caption: str, form: Form = plain, said: Form = exact, top: float | None = None
    ) -> Figure:
        series = {who: [(r["round"], r[name]) for r in run.rows if r[name] is not None] for who, run in drawn.items()}
        return Figure(f"comparison-{name}", title, caption + which, overlaid(series, title.lower(), form, said, top))

    figures = [
        of("accuracy", "Accuracy", "Mean over agents, on test data.", percents, exact_percent, top=1),
        of("loss", "Loss", "Mean over agents, on test data."),
        of("epsilon", "ε spent", "Total so far of the agent that has spent most.", said=epsilon),
        of("consensus", "Consensus distance", "How far, on average, an agent's model lies from the mean."),
    ]
    return [figure for figure in figures if figure.picture or figure.name == "comparison-accuracy"]


def _verdict(runs: Runs) -> str:
    measured = {name: run.outcome()["accuracy"] for name, run in runs.items()}
    known = {name: accuracy for name, accuracy in measured.items() if accuracy is not None}
    if not known:
        return "No run has been evaluated."
    best = max(known, key=lambda name: known[name])
    unfinished = sum(run.summary is None for run in runs.values())
    rest = f" {unfinished} of them {'is' if unfinished == 1 else 'are'} unfinished." if unfinished else ""
    return f"{best} is the most accurate, with {percent(known[best])}.{rest}"


def _table(table: Table) -> str:
    head = element("tr", *(words("th", text, scope="col") for text in table.headings))
    rows = []
    for name, *cells in table.shown():
        rows.append(element("tr", words("th", name, scope="row"), *(words("td", text) for text in cells)))
    return _scores("Result", head, rows, "Accuracy and loss are means over agents, on test data; ε is the total.")


def _differences(runs: Runs) -> str:
    """The settings that are not the same in all runs."""
    settings_of = {name: flat(run.config) for name, run in runs.items()}
    keys = dict.fromkeys(key for settings in settings_of.values() for key in settings)
    differing = [key for key in keys if len({repr(settings.get(key)) for settings in settings_of.values()}) > 1]
    if not differing:
        return card("Settings", words("p", "All settings are the same.", class_="none"))
    head = element("tr", words("th", "setting", scope="col"), *(words("th", name, scope="col") for name in runs))
    rows = [
        element(
            "tr",
            words("th", key, scope="row"),
            *(words("td", str(settings.get(key, "—"))) for settings in settings_of.values()),
        )
        for key in differing
    ]
    return _scores(
        "Settings that differ",
        head,
        rows,
        "All others are the same. —: the algorithm has no such setting, or it is left at its default.",
    )


def _scores(title: str, head: str, rows: list[str], said: str) -> str:
    shown = element("table", element("thead", head), element("tbody", *rows), class_="scores")
    return card(title, element("div", shown, class_="wide", tabindex=0), words("p", said, class_="described"))
