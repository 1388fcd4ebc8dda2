"""A comparison as a page: the table, and accuracy over rounds of the first seed."""

import json
from pathlib import Path

from pdsl.compare.plan import Cell
from pdsl.compare.shown import HEADINGS, caption, cells
from pdsl.compare.verdict import Comparison
from pdsl.report.document import card, document, figure, write_aside
from pdsl.report.lines import Points, lines
from pdsl.report.markup import element, words
from pdsl.report.numbers import percent


def write_page(comparison: Comparison) -> Path:
    """Write compare.html into the comparison's folder; returns its path."""
    base = comparison.plan.base
    title = f"{len(comparison.lines)} algorithms on {base['data']['name']}, {base['graph']['kind']} graph"
    best = comparison.lines[0]
    verdict = f"{best.algorithm} comes first with {percent(best.accuracy)}." if best.accuracy else "No run ended."
    curves = {
        line.algorithm: _accuracies(comparison, Cell(line.algorithm, line.learning_rate, comparison.plan.seeds[0]))
        for line in comparison.lines
        if line.learning_rate is not None
    }
    chart = figure(
        "Accuracy over rounds",
        "Mean over agents, first seed, on test data.",
        element("div", lines(curves), class_="chart"),
    )
    reasons = [words("p", reason) for line in comparison.lines for reason in line.failed]
    main = [_table(comparison), chart, *([card("Failed", *reasons)] if reasons else [])]
    return write_aside(comparison.folder / "compare.html", document(title, verdict, *main))


def _table(comparison: Comparison) -> str:
    head = element("tr", *(words("th", text, scope="col") for text in HEADINGS))
    rows = []
    for line in comparison.lines:
        name, *rest = cells(line)
        rows.append(element("tr", words("th", name, scope="row"), *(words("td", text) for text in rest)))
    shown = element("table", element("thead", head), element("tbody", *rows), class_="scores")
    return card("Result", element("div", shown, class_="wide"), words("p", caption(comparison), class_="described"))


def _accuracies(comparison: Comparison, cell: Cell) -> Points:
    file = comparison.folder / cell.name / "rows.jsonl"
    rows = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
    return [(row["round"], row["accuracy"]) for row in rows if "accuracy" in row]
