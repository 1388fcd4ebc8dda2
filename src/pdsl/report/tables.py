"""What runs came to, as tables for papers and programs: Markdown and LaTeX as people read, CSV with every digit."""

import csv
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdsl.report.document import write_aside
from pdsl.report.numbers import duration, epsilon, percent, plain, size
from pdsl.report.reading import Run

Form = Callable[[Any], str]

# What it is, where it stands in a run, and how people read it.
COLUMNS: tuple[tuple[str, Callable[[Run], Any], Form], ...] = (
    ("algorithm", lambda run: run.algorithm, str),
    ("data", lambda run: run.setup["data"], str),
    ("graph", lambda run: run.setup["graph"].partition(" of ")[0], str),
    ("agents", lambda run: run.setup["agents"], plain),
    ("rounds", lambda run: run.rows[-1]["round"], plain),
    ("accuracy", lambda run: run.outcome()["accuracy"], percent),
    ("mean model", lambda run: run.outcome()["accuracy_of_mean"], percent),
    ("loss", lambda run: run.outcome()["loss"], plain),
    ("total ε", lambda run: run.epsilon(), epsilon),
    ("sent", lambda run: run.sent(), size),
    ("time", lambda run: run.summary["seconds"] if run.summary else None, duration),
)
UNITS = {"sent": "sent (bytes)", "time": "time (s)"}  # of what CSV has as bare numbers
LATEX = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"ε": r"$\varepsilon$", "δ": r"$\delta$", "σ": r"$\sigma$", "−": "$-$", "—": "---", "\N{NO-BREAK SPACE}": "~"}
)


@dataclass(frozen=True)
class Table:
    headings: list[str]
    rows: list[list[Any]]
    forms: list[list[Form]]  # how each cell is read

    def shown(self) -> list[list[str]]:
        return [
            [form(cell) for form, cell in zip(forms, row, strict=True)]
            for forms, row in zip(self.forms, self.rows, strict=True)
        ]

    def markdown(self) -> str:
        rows = [self.headings, ["---"] * len(self.headings), *self.shown()]
        lines = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows)
        return "".join(f"| {line} |\n" for line in lines)

    def latex(self) -> str:
        rows = [" & ".join(cell.translate(LATEX) for cell in row) + r" \\" for row in (self.headings, *self.shown())]
        columns = "l" + "r" * (len(self.headings) - 1)
        body = "\n".join(rows[1:])
        return f"\\begin{{tabular}}{{{columns}}}\n\\hline\n{rows[0]}\n\\hline\n{body}\n\\hline\n\\end{{tabular}}\n"

    def csv(self) -> str:
        """Numbers with all their digits; nothing where nothing was measured."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(
            [[UNITS.get(heading, heading) for heading in self.headings], *self.rows]
        )
        return text.getvalue()


def summary_table(run: Run) -> Table:
    """One run: a line for each thing that can be said of it."""
    rows = [[UNITS.get(heading, heading), value(run)] for heading, value, _ in COLUMNS]
    return Table([run.name, "value"], rows, [[_without_unit, form] for *_, form in COLUMNS])


def comparison_table(runs: Mapping[str, Run]) -> Table:
    """Several runs: a line each."""
    rows = [[name, *(value(run) for _, value, _ in COLUMNS)] for name, run in runs.items()]
    return Table(
        ["run", *(heading for heading, *_ in COLUMNS)], rows, [[str, *(form for *_, form in COLUMNS)]] * len(rows)
    )


def write_tables(tables: Mapping[str, Table], folder: Path) -> list[Path]:
    """Each as name.md, name.csv and name.tex."""
    written = []
    for name, table in tables.items():
        for suffix, text in ((".md", table.markdown()), (".csv", table.csv()), (".tex", table.latex())):
            written.append(write_aside(folder / f"{file_name(name)}{suffix}", text))
    return written


def file_name(name: str) -> str:
    """A run's name without what a file's name cannot have everywhere."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"


def _without_unit(text: str) -> str:
    return text.partition(" (")[0]
