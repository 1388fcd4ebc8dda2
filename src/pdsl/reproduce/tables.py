"""A table as Markdown, CSV, LaTeX and JSON."""

import csv
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

from pdsl.reproduce.layout import MISSING, NAMES, RAISED, Shown, blocks, caption, columns, label
from pdsl.reproduce.paper import AGENTS, GRAPHS
from pdsl.reproduce.results import Results, short


def markdown(results: Results) -> str:
    heads = ["ε", "method", *(f"{NAMES[graph]} M = {agents}" for graph, agents in columns())]
    lines = [
        f"# {results.title}",
        "",
        results.verdict(),
        "",
        f"`{results.plan.command}`" + (", and cells that were kept before" if results.kept else ""),
        "",
        _row(heads),
        _row(["---"] * len(heads)),
    ]
    for block in blocks(results, columns()):
        for n, (method, row) in enumerate(block.rows.items()):
            lines.append(_row(["" if n else block.title, label(method), *map(_plain, row)]))
    lines += [
        "",
        caption(results),
        "",
        "| method | graph | learning rate | accuracy on the public set |",
        _row(["---"] * 4),
    ]
    for trials in results.trials:
        tried = ", ".join(f"{rate:g}: {MISSING if v is None else f'{v:.3f}'}" for rate, v in trials.on_public.items())
        chosen = MISSING if trials.chosen is None else f"{trials.chosen:g}"
        lines.append(_row([label(trials.method), trials.graph, chosen, tried]))
    if results.failed:
        lines += ["", "Failed:", "", *(f"- {reason}" for reason in results.failed)]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(cell: Shown) -> str:
    ours = f"**{cell.ours}**" if cell.first else cell.ours
    return " ".join(part for part in (cell.paper, ours, cell.difference) if part)


def latex(results: Results) -> str:
    """A tabular for a paper that loads multirow; in each cell the paper's number, ours, and the difference."""
    lines = [
        f"% {caption(results)}",
        r"\begin{tabular}{c|c|" + "|".join("c" * len(columns())) + "}",
        r"\hline",
        r"\multirow{2}{*}{Privacy budget} & \multirow{2}{*}{Methods} & "
        + " & ".join(rf"\multicolumn{{{len(AGENTS)}}}{{c}}{{{NAMES[graph]}}}" for graph in GRAPHS)
        + r" \\",
        " & & " + " & ".join(f"$M={agents}$" for _, agents in columns()) + r" \\",
    ]
    for block in blocks(results, columns()):
        lines.append(r"\hline")
        title = block.title.replace("ε", r"$\epsilon$").replace("–", "--")
        title = rf"\multirow{{{len(block.rows)}}}{{*}}{{{title}}}"
        for n, (method, row) in enumerate(block.rows.items()):
            lines.append(f"{'' if n else title} & {label(method)} & {' & '.join(map(_tex, row))} " + r"\\")
    return "\n".join([*lines, r"\hline", r"\end{tabular}"]) + "\n"


def _tex(cell: Shown) -> str:
    ours = cell.ours.replace(MISSING, "---").translate({raised: f"$^{chr(digit)}$" for digit, raised in RAISED.items()})
    ours = rf"\textbf{{{ours}}}" if cell.first else ours
    parts = (cell.paper, ours, cell.difference.replace("−", "$-$").replace("+", "$+$"))
    return r"\shortstack{" + r"\\".join(part for part in parts if part) + "}"


def comma_separated(results: Results) -> str:
    """A row per setting; the values of several seeds have spaces between."""
    out = io.StringIO()
    rows = as_dict(results)["cells"]
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: " ".join(map(str, v)) if isinstance(v, list) else v for key, v in row.items()})
    return out.getvalue()


def as_dict(results: Results) -> dict[str, Any]:
    p, off = results.plan, results.noise_off
    return {
        "table": results.target,
        "title": results.title,
        "reading": p.task.reading,
        "quick": p.task.quick,
        "verdict": results.verdict(),
        "command": p.command,
        "cells": [
            entry.as_dict()
            | {"epsilon": p.task.epsilon(setting), "noise_off": short(off[setting].ours) if setting in off else None}
            for setting, entry in results.entries.items()
        ],
        "learning_rates": [trials.as_dict() for trials in results.trials],
    }


FORMS: dict[str, Callable[[Results], str]] = {
    "md": markdown,
    "csv": comma_separated,
    "tex": latex,
    "json": lambda results: json.dumps(as_dict(results), indent=1, ensure_ascii=False) + "\n",
}
