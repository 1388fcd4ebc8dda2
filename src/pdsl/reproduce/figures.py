"""A figure of the paper: nine panels with the loss curves of five methods, as drawings and as CSV."""

import csv
import io
import math
from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean

from pdsl.report.line_chart import Points, Scale, line_chart
from pdsl.report.svg import Picture
from pdsl.reproduce.paper import FIGURES, METHODS, Setting, panels
from pdsl.reproduce.results import Results
from pdsl.reproduce.tables import label

MAX_LOSS = 2 * math.log(10)  # twice the loss of guessing among ten classes; larger losses are drawn here


def losses(results: Results, panel: str) -> dict[str, Points]:
    """Test loss over rounds of each method in a panel, mean over agents and seeds."""
    table, graph = FIGURES[results.target]
    agents, epsilon = panels(results.target)[panel]
    found: dict[str, Points] = {}
    for method in METHODS:
        at: dict[int, list[float]] = defaultdict(list)
        for rows in results.curves(Setting(table, epsilon, method, graph, agents)).values():
            for t, loss, _ in rows:
                at[t].append(MAX_LOSS if loss is None else min(loss, MAX_LOSS))
        found[label(method)] = [(t, fmean(values)) for t, values in at.items()]
    return found


def draw_panel(curves: Mapping[str, Points]) -> Picture | None:
    """The chart of a panel; None without runs."""
    return line_chart(curves, "loss", Scale(lowest=None, low=0.0, cut="above"))


def comma_separated(results: Results) -> str:
    """Loss and accuracy of every run in all evaluated rounds."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["table", "graph", "agents", "paper_epsilon", "method", "seed", "round", "loss", "accuracy"])
    for s in results.entries:
        for seed, rows in results.curves(s).items():
            for t, loss, accuracy in rows:
                text = "" if loss is None else f"{loss:.4f}"
                writer.writerow([s.table, s.graph, s.agents, s.epsilon, s.method, seed, t, text, f"{accuracy:.4f}"])
    return out.getvalue()
