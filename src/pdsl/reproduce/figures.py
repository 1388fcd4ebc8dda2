"""A figure: nine panels of loss curves, five methods each, as drawings and as numbers."""

import csv
import io
import math
from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean

from pdsl.report.lines import Points, overlaid
from pdsl.report.numbers import plain
from pdsl.report.picture import Picture
from pdsl.reproduce.layout import label
from pdsl.reproduce.paper import FIGURES, METHODS, Setting, panels
from pdsl.reproduce.results import Results

HIGHEST = 2 * math.log(10)  # twice the loss of guessing among ten classes; what is above is drawn there


def losses(results: Results, panel: str) -> dict[str, Points]:
    """Each method's loss over rounds in a panel: mean over agents and seeds, on test data."""
    table, graph = FIGURES[results.target]
    agents, epsilon = panels(results.target)[panel]
    found: dict[str, Points] = {}
    for method in METHODS:
        at: dict[int, list[float]] = defaultdict(list)
        for rows in results.curves(Setting(table, epsilon, method, graph, agents)).values():
            for t, loss, _ in rows:
                at[t].append(HIGHEST if loss is None else min(loss, HIGHEST))
        found[label(method)] = [(t, fmean(values)) for t, values in at.items()]
    return found


def drawn(curves: Mapping[str, Points]) -> Picture | None:
    """A panel; None where nothing has been run."""
    return overlaid(curves, "loss", plain)


def comma_separated(results: Results) -> str:
    """Loss and accuracy wherever they were measured, run by run."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["table", "graph", "agents", "paper_epsilon", "method", "seed", "round", "loss", "accuracy"])
    for s in results.entries:
        for seed, rows in results.curves(s).items():
            for t, loss, accuracy in rows:
                shown = "" if loss is None else f"{loss:.4f}"
                writer.writerow([s.table, s.graph, s.agents, s.epsilon, s.method, seed, t, shown, f"{accuracy:.4f}"])
    return out.getvalue()
