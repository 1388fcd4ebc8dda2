"""Results of runs as tables: Markdown and LaTeX with rounded numbers, CSV with all digits."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pdsl.report.metric import Metric
from pdsl.report.run_data import Run
from pdsl.utils.format import duration, format_epsilon, name_data, plain, size

Form = Callable[[Any], str]
Runs = dict[str, Run]  # by unique names

Column = tuple[str, Callable[[Run], Any], Form]  # heading, value of a run, and format for readers


def _columns(runs: Iterable[Run]) -> list[Column]:
    """The columns for runs. Runs with different metrics have one column for each."""
    metrics = {run.metric.name: run.metric for run in runs}
    return [
        ("algorithm", lambda run: run.algorithm, str),
        ("data", lambda run: name_data(run.setup.data), str),
        ("graph", lambda run: run.setup.graph.partition(" of ")[0], str),
        ("agents", lambda run: run.setup.agents, plain),
        ("rounds", lambda run: run.rounds[-1].number, plain),
        *(column for metric in metrics.values() for column in _metric_columns(metric, len(metrics) > 1)),
        *([] if "loss" in metrics else [("loss", lambda run: run.outcome()["loss"], plain)]),
        ("total ε", lambda run: run.epsilon(), format_epsilon),
        ("noise", _noise, str),
        ("sent", lambda run: run.bytes_sent(), size),
        ("time", lambda run: run.summary.metrics["seconds"] if run.summary else None, duration),
    ]


def _metric_columns(metric: Metric, several: bool) -> list[Column]:
    def value(suffix: str) -> Callable[[Run], Any]:
        return lambda run: run.headline(suffix) if run.metric == metric else None

    of_mean = f"{metric.label}, mean model" if several else "mean model"
    return [(metric.label, value(""), metric.form), (of_mean, value("_of_mean"), metric.form)]


def _noise(run: Run) -> str:
    if run.seeded:
        return "seeded: not private"
    return "system" if run.private else "none"


UNITS = {"sent": "sent (bytes)", "time": "time (s)"}  # headings in CSV, where numbers have no unit
LATEX = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"ε": r"$\varepsilon$", "δ": r"$\delta$", "σ": r"$\sigma$", "−": "$-$", "—": "---", "\N{NO-BREAK SPACE}": "~"}
)


@dataclass(frozen=True)
class Table:
    headings: list[str]
    rows: list[list[Any]]
    forms: list[list[Form]]  # format of each cell

    def format_rows(self) -> list[list[str]]:
        return [
            [form(cell) for form, cell in zip(forms, row, strict=True)]
            for forms, row in zip(self.forms, self.rows, strict=True)
        ]

    def markdown(self) -> str:
        rows = [self.headings, ["---"] * len(self.headings), *self.format_rows()]
        lines = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows)
        return "".join(f"| {line} |\n" for line in lines)

    def latex(self) -> str:
        head, *rows = (
            " & ".join(cell.translate(LATEX) for cell in row) + r" \\" for row in (self.headings, *self.format_rows())
        )
        columns = "l" + "r" * (len(self.headings) - 1)
        body = "\n".join(rows)
        return f"\\begin{{tabular}}{{{columns}}}\n\\hline\n{head}\n\\hline\n{body}\n\\hline\n\\end{{tabular}}\n"

    def csv(self) -> str:
        """Numbers with all digits; empty cells for values that were not measured."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(
            [[UNITS.get(heading, heading) for heading in self.headings], *self.rows]
        )
        return text.getvalue()


def summary_table(run: Run) -> Table:
    """One row per result of a run."""
    columns = _columns([run])
    rows = [[UNITS.get(heading, heading), value(run)] for heading, value, _ in columns]
    return Table([run.name, "value"], rows, [[_without_unit, form] for *_, form in columns])


def comparison_table(runs: Mapping[str, Run]) -> Table:
    """One row per run."""
    columns = _columns(runs.values())
    rows = [[name, *(value(run) for _, value, _ in columns)] for name, run in runs.items()]
    headings = ["run", *(heading for heading, *_ in columns)]
    return Table(headings, rows, [[str, *(form for *_, form in columns)]] * len(rows))


def _without_unit(text: str) -> str:
    return text.partition(" (")[0]
