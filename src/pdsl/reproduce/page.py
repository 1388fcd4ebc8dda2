"""A table or a figure as a page."""

from pdsl.report.document import card, document, figure
from pdsl.report.markup import element, words
from pdsl.report.numbers import SPACE
from pdsl.report.picture import Picture
from pdsl.reproduce.figures import drawn, losses
from pdsl.reproduce.layout import NAMES, Shown, blocks, caption, columns, label
from pdsl.reproduce.paper import AGENTS, GRAPHS, panels
from pdsl.reproduce.results import Results
from pdsl.reproduce.tasks import READINGS


def table_page(results: Results) -> str:
    graphs = [words("th", NAMES[graph], colspan=len(AGENTS), scope="colgroup") for graph in GRAPHS]
    agents = [words("th", f"M = {agents}", scope="col") for _, agents in columns()]
    empty = words("th", SPACE)
    rows = []
    for block in blocks(results, columns()):
        rows.append(element("tr", words("th", block.title, colspan=len(columns()) + 1, scope="rowgroup")))
        rows += [
            element("tr", words("th", label(method), scope="row"), *map(_cell, row))
            for method, row in block.rows.items()
        ]
    head = element("thead", element("tr", empty, *graphs), element("tr", empty, *agents))
    shown = element("table", head, element("tbody", *rows), class_="scores")
    main = [
        card(
            "The paper's number, ours, the difference",
            element("div", shown, class_="wide"),
            words("p", caption(results), class_="described"),
        ),
        card("Command", words("pre", results.plan.command)),
    ]
    if results.failed:
        main.append(card("Failed", *(words("p", reason) for reason in results.failed)))
    return document(results.title, results.verdict(), *main)


def _cell(cell: Shown) -> str:
    """Three lines, so that nine columns fit a screen."""
    ours = words("strong" if cell.first else "span", cell.ours)
    parts = [words("span", cell.paper or SPACE), ours, words("span", cell.difference or SPACE)]
    return element("td", "<br/>".join(parts))


def _chart(picture: Picture | None) -> str:
    return picture.html() if picture else words("p", "Not run yet.", class_="none")


def figure_page(results: Results) -> str:
    task = results.plan.task
    drawings = [
        figure(
            f"({panel}) ε = {epsilon:g} with M = {agents}",
            "Loss on test data, mean over agents and seeds.",
            element("div", _chart(drawn(losses(results, panel))), class_="chart"),
        )
        for panel, (agents, epsilon) in panels(results.target).items()
    ]
    said = f"ε is the paper's; read here as {task.reading}: {READINGS[task.reading]}."
    if task.quick:
        said += " Quick: handwritten digits and few rounds, not the paper's task."
    return document(
        results.title,
        said,
        element("div", *drawings, class_="columns"),
        card("Command", words("pre", results.plan.command)),
    )
