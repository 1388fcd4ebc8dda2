"""A table or a figure as a page."""

from pdsl.report.document import card, document, figure
from pdsl.report.markup import element, words
from pdsl.report.numbers import SPACE, epsilon
from pdsl.report.picture import Picture
from pdsl.reproduce.figures import drawn, losses
from pdsl.reproduce.layout import NAMES, Shown, blocks, caption, columns, label
from pdsl.reproduce.paper import AGENTS, FIGURES, GRAPHS, METHODS, Setting, panels
from pdsl.reproduce.results import Results
from pdsl.reproduce.tasks import READINGS


def table_page(results: Results) -> str:
    graphs = [words("th", NAMES[graph], colspan=len(AGENTS), scope="colgroup") for graph in GRAPHS]
    agents = [words("th", f"M = {agents}", scope="col") for _, agents in columns()]
    empty = words("th", SPACE)
    rows = []
    for block in blocks(results, columns()):
        title = words("span", block.title)
        rows.append(element("tr", element("th", title, colspan=len(columns()) + 1, scope="rowgroup")))
        rows += [
            element("tr", words("th", label(method), scope="row"), *map(_cell, row))
            for method, row in block.rows.items()
        ]
    head = element("thead", element("tr", empty, *graphs), element("tr", empty, *agents))
    shown = element("table", head, element("tbody", *rows), class_="scores")
    main = [
        card(
            "The paper's number, ours, the difference",
            element("div", shown, class_="wide", tabindex=0),
            words("p", caption(results), class_="described"),
        ),
        card("Command", words("pre", results.plan.command)),
    ]
    return document(results.title, results.verdict(), *main, _failed(results))


def _failed(results: Results) -> str:
    return card("Failed", *(words("p", reason) for reason in results.failed)) if results.failed else ""


def _cell(cell: Shown) -> str:
    """Three lines, so that nine columns fit a screen; one where the paper has no number."""
    ours = words("strong" if cell.first else "span", cell.ours)
    if not cell.paper:
        return element("td", ours)
    parts = [words("span", cell.paper), ours, words("span", cell.difference or SPACE)]
    return element("td", "<br/>".join(parts))


def _chart(picture: Picture | None) -> str:
    return picture.html() if picture else words("p", "Not run yet.", class_="none")


def figure_page(results: Results) -> str:
    task = results.plan.task
    drawings = [
        figure(
            f"({panel}) ε = {asked:g}; {_ours(results, agents, asked)}M = {agents}",
            "Loss on test data, mean over agents and seeds.",
            _chart(drawn(losses(results, panel))),
        )
        for panel, (agents, asked) in panels(results.target).items()
    ]
    said = f"ε is the paper's; read here as {task.reading}: {READINGS[task.reading]}."
    if task.quick:
        said += " Quick: handwritten digits and few rounds, not the paper's task."
    return document(
        results.title,
        said,
        element("div", *drawings, class_="even three"),
        card("Command", words("pre", results.plan.command)),
        _failed(results),
    )


def _ours(results: Results, agents: int, asked: float) -> str:
    """What stands in the place of a panel's ε: the total that was set or, where none was, the most that was spent."""
    task, (table, graph) = results.plan.task, FIGURES[results.target]
    settings = [Setting(table, asked, method, graph, agents) for method in METHODS]
    if task.reading == "none":
        return "ours: noise off; "
    if task.reading == "total":
        return f"ours: total {epsilon(task.epsilon(settings[0]))}; "
    spent = [total for setting in settings if (total := results.entries[setting].epsilon) is not None]
    return f"ours: total {epsilon(max(spent))}; " if spent else ""
