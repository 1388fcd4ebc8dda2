"""A table in the paper's layout, as Markdown, CSV, LaTeX, JSON, and on the terminal.

The layout has a block of rows for each ε, and a column for each graph and M.
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from rich.table import Table

from pdsl.reproduce.cells import READINGS, VARIANTS, cell_command
from pdsl.reproduce.paper import AGENTS, EPSILONS, GRAPHS, METHODS, Setting
from pdsl.reproduce.results import Entry, Results, round5
from pdsl.sweep.tuning import AUTO_RATE, show_rate
from pdsl.utils.errors import PdslError
from pdsl.utils.format import format_epsilon, signed
from pdsl.utils.types import JsonDict

GRAPH_NAMES = {"full": "Fully-connected", "bipartite": "Bipartite", "ring": "Ring"}
OFF = "noise off"
MISSING = "—"
MIN_SEEDS = 5  # for a line of paired differences
DECIDED = "†"  # marks a lead that is decided
SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


class TableCell(NamedTuple):
    """Text of a cell, and whether our accuracy is the best of the five methods."""

    paper: str
    ours: str
    difference: str
    first: bool
    decided: bool = False  # first, and the intervals of all leads exclude zero


class Block(NamedTuple):
    """Rows of one ε: one per method, with a column for each graph and M."""

    title: str
    rows: dict[str, list[TableCell]]


def columns() -> list[tuple[str, int]]:
    return [(graph, agents) for graph in GRAPHS for agents in AGENTS]


def label(method: str) -> str:
    return method.upper()


def blocks(results: Results, columns: Sequence[tuple[str, int]], methods: Sequence[str] = METHODS) -> Iterator[Block]:
    """A block for each ε, and one without noise if there are such runs."""
    for epsilon in EPSILONS[results.target]:
        first = Setting(results.target, epsilon, METHODS[0], GRAPHS[0], AGENTS[0])
        settings = {m: [replace(first, method=m, graph=g, agents=a) for g, a in columns] for m in methods}
        rows = {m: [_cell(results, s) for s in row] for m, row in settings.items()}
        yield Block(_title(results, first), rows)
    off = results.noise_off
    at = EPSILONS[results.target][0]  # all ε share one run
    cells = {m: [off.get(Setting(results.target, at, m, g, a)) for g, a in columns] for m in methods}
    if any(entry for row in cells.values() for entry in row):
        yield Block(OFF, {m: [_without_noise(results, entry) for entry in row] for m, row in cells.items()})


def _title(results: Results, setting: Setting) -> str:
    """The paper's ε, and ours."""
    task = results.plan.task
    alike = (e for e in results.entries.values() if e.setting.epsilon == setting.epsilon)
    spent = sorted(e.epsilon for e in alike if e.epsilon is not None)
    ends = dict.fromkeys(format_epsilon(value) for value in (*spent[:1], *spent[-1:]))
    total = f", total {'–'.join(ends)}" if spent else ""
    match task.reading:
        case "total":
            return f"ε = {setting.epsilon:g}; ours: total ε = {task.epsilon(setting):g}"
        case "per-round":
            return f"ε = {setting.epsilon:g} per round{total}"
        case "paper":
            return f"ε = {setting.epsilon:g} by Theorem 1{total}"
        case _:
            return f"ε = {setting.epsilon:g}; ours: noise off"


def _cell(results: Results, setting: Setting) -> TableCell:
    entry = results.entries[setting]
    if entry.difference is None:
        return TableCell(f"{entry.paper:.3f}", MISSING, "", False)
    first = results.first(setting)
    decided = first and results.decided(setting)
    return TableCell(f"{entry.paper:.3f}", _ours(results, entry), signed(entry.difference, 3), first, decided)


def _without_noise(results: Results, entry: Entry | None) -> TableCell:
    return TableCell("", MISSING if entry is None else _ours(results, entry), "", False)


def _ours(results: Results, entry: Entry) -> str:
    """Our accuracy, with the number of seeds as a superscript if it is not that of most cells."""
    if entry.ours is None:
        return MISSING
    return (
        f"{entry.ours:.3f}{f'{len(entry.seeds)}'.translate(SUPERSCRIPTS) if _has_other_seeds(results, entry) else ''}"
    )


def _usual_seeds(results: Results) -> int:
    """Number of seeds of most cells that have runs; the largest if several numbers are equally frequent."""
    counts = Counter(len(entry.seeds) for entry in results.entries.values() if entry.seeds)
    return max(counts, key=lambda seeds: (counts[seeds], seeds), default=len(results.plan.seeds))


def _has_other_seeds(results: Results, entry: Entry) -> bool:
    return bool(entry.seeds) and len(entry.seeds) != _usual_seeds(results)


def caption(results: Results) -> str:
    p, seeds = results.plan, _usual_seeds(results)
    rates = p.task.rates_of(results.target)
    chosen = (
        f"the best of {', '.join(map(show_rate, rates))} on the public set, for each method and graph, at"
        f" M = {AGENTS[0]}, middle ε, seed {p.seeds[0]}"
    )
    if rates == (AUTO_RATE,):
        chosen = "automatic, by the same rule for all methods"
    models = "" if p.task.quick else f" Models: {VARIANTS[p.task.variant]}."  # --quick has models of its own
    text = (
        f"The paper's accuracy, ours, and the difference. Ours: test accuracy, mean over the agents' models and"
        f" {seeds} seed{'s' * (seeds > 1)}; ε read as {p.task.reading}: {READINGS[p.task.reading]}."
        f"{models} Learning rate: {chosen}. {_lengths(results)}. {MISSING}: not run."
        f" Bold: first of the five. {DECIDED}: the 95 % intervals of its paired differences to all others exclude zero."
    )
    if any(_has_other_seeds(results, entry) for entry in (*results.entries.values(), *results.noise_off.values())):
        text += " A superscript is the number of seeds, where it differs."
    return text if not p.task.quick else f"{text} Quick: handwritten digits and few rounds, not the paper's task."


def _lengths(results: Results) -> str:
    """Rounds and batch size, and the ε at which they differ."""
    task, at = results.plan.task, Setting(results.target, EPSILONS[results.target][0], METHODS[0], GRAPHS[0], AGENTS[0])
    texts: dict[str, list[str]] = {}
    for setting in (replace(at, epsilon=epsilon) for epsilon in EPSILONS[results.target]):
        config = task.config(setting, learning_rate=task.rates_of(results.target)[0], seed=0)
        ema = ", EMA of models" if config.ema_decay else ""
        text = f"{config.rounds} rounds, batches of {config.batch.size}{ema}"
        texts.setdefault(text, []).append(f"{task.epsilon(setting) or setting.epsilon:g}")
    if len(texts) == 1:
        return next(iter(texts))
    return "; ".join(f"ε = {' and '.join(epsilons)}: {text}" for text, epsilons in texts.items())


def markdown(results: Results) -> str:
    heads = ["ε", "method", *(f"{GRAPH_NAMES[graph]} M = {agents}" for graph, agents in columns())]
    lines = [
        f"# {results.title}",
        "",
        results.verdict(),
        "",
        f"`{results.plan.command}`" + (", and kept cells" if results.kept else ""),
        "",
        _row(heads),
        _row(["---"] * len(heads)),
    ]
    for block in blocks(results, columns()):
        for n, (method, row) in enumerate(block.rows.items()):
            lines.append(_row(["" if n else block.title, label(method), *map(_markdown_cell, row)]))
    lines += [
        "",
        caption(results),
        "",
        "| method | graph | learning rate | accuracy on the public set |",
        _row(["---"] * 4),
    ]
    for trials in results.trials:
        tried = ", ".join(
            f"{show_rate(rate)}: {MISSING if v is None else f'{v:.3f}'}" for rate, v in trials.on_public.items()
        )
        chosen = MISSING if trials.chosen is None else show_rate(trials.chosen)
        lines.append(_row([label(trials.method), trials.graph, chosen, tried]))
    lines += _lead_lines(results)
    if results.failed:
        lines += ["", "Failed:", "", *(f"- {reason}" for reason in results.failed)]
    return "\n".join(lines) + "\n"


def _lead_lines(results: Results) -> list[str]:
    """PDSL's paired differences to the other methods, where there are enough seeds for an interval of some use."""
    lines = []
    for setting, entry in results.entries.items():
        if setting.method == "pdsl" and len(entry.seeds) >= MIN_SEEDS:
            leads = results.leads(setting)
            texts = [
                "{} [{}, {}]".format(*(signed(100 * v, 2) for v in d[:3])) if (d := leads.get(m)) else MISSING
                for m in METHODS
                if m != "pdsl"
            ]
            epsilon = results.plan.task.epsilon(setting)
            head = [setting.graph, str(setting.agents), MISSING if epsilon is None else f"{epsilon:g}"]
            lines.append(_row([*head, str(len(entry.seeds)), f"{entry.ours or 0.0:.4f}", *texts]))
    if not lines:
        return []
    heads = ["graph", "M", "ε", "seeds", "PDSL", *(f"over {label(m)}" for m in METHODS if m != "pdsl")]
    title = "PDSL's paired differences in points, with 95 % intervals:"
    return ["", title, "", _row(heads), _row(["---"] * len(heads)), *lines]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown_cell(cell: TableCell) -> str:
    ours = f"**{cell.ours}**{DECIDED * cell.decided}" if cell.first else cell.ours
    return " ".join(part for part in (cell.paper, ours, cell.difference) if part)


def latex(results: Results) -> str:
    """A tabular, which needs the package multirow; a cell has the paper's number, ours and the difference."""
    lines = [
        f"% {caption(results)}",
        r"\begin{tabular}{c|c|" + "|".join("c" * len(columns())) + "}",
        r"\hline",
        r"\multirow{2}{*}{Privacy budget} & \multirow{2}{*}{Methods} & "
        + " & ".join(rf"\multicolumn{{{len(AGENTS)}}}{{c}}{{{GRAPH_NAMES[graph]}}}" for graph in GRAPHS)
        + r" \\",
        " & & " + " & ".join(f"$M={agents}$" for _, agents in columns()) + r" \\",
    ]
    for block in blocks(results, columns()):
        lines.append(r"\hline")
        title = block.title.replace("ε", r"$\epsilon$").replace("–", "--")
        title = rf"\multirow{{{len(block.rows)}}}{{*}}{{{title}}}"
        for n, (method, row) in enumerate(block.rows.items()):
            lines.append(f"{'' if n else title} & {label(method)} & {' & '.join(map(_latex_cell, row))} " + r"\\")
    return "\n".join([*lines, r"\hline", r"\end{tabular}"]) + "\n"


def _latex_cell(cell: TableCell) -> str:
    superscripts = {raised: f"$^{chr(digit)}$" for digit, raised in SUPERSCRIPTS.items()}
    ours = cell.ours.replace(MISSING, "---").translate(superscripts)
    mark = r"$^\dagger$" if cell.decided else ""
    ours = rf"\textbf{{{ours}}}{mark}" if cell.first else ours
    parts = (cell.paper, ours, cell.difference.replace("−", "$-$").replace("+", "$+$"))
    return r"\shortstack{" + r"\\".join(part for part in parts if part) + "}"


def comma_separated(results: Results) -> str:
    """One row per setting; the values of several seeds are separated by spaces."""
    out = io.StringIO()
    rows = as_dict(results)["cells"]
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: " ".join(map(str, v)) if isinstance(v, list) else v for key, v in row.items()})
    return out.getvalue()


def as_dict(results: Results) -> JsonDict:
    p, off = results.plan, results.noise_off
    return {
        "table": results.target,
        "title": results.title,
        "reading": p.task.reading,
        "quick": p.task.quick,
        "verdict": results.verdict(),
        "public_set_alone": results.public,
        "command": p.command,
        "cells": [
            entry.as_dict()
            | {"first": results.first(setting), "decided": results.decided(setting)}
            | {"epsilon": p.task.epsilon(setting), "noise_off": round5(off[setting].ours) if setting in off else None}
            | {"command": cell_command(p.task, setting, max(len(entry.seeds), len(p.seeds)))}
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


def terminal_tables(results: Results) -> Iterator[Table]:
    """Tables for the terminal, one per graph so that they fit; only the cells that the command asks for."""
    asked = results.plan.asked
    methods = [method for method in METHODS if any(s.method == method for s in asked)]
    for graph in GRAPHS:
        columns = [(graph, m) for m in sorted({s.agents for s in asked if s.graph == graph})]
        if not columns:
            continue
        heads = [f"M = {agents}\npaper ours   diff" for _, agents in columns]
        title = f"{results.title}\n{GRAPH_NAMES[graph]} graph"
        table = Table(label("methods"), *heads, box=None, header_style="bold", title=title, title_justify="left")
        for block in blocks(results, columns, methods):
            if any(cell.ours != "—" for row in block.rows.values() for cell in row):
                table.add_row(block.title)
                for method, row in block.rows.items():
                    table.add_row(f"  {label(method)}", *map(_text, row))
        yield table


def list_failures(results: Sequence[Results]) -> list[str]:
    """Failed runs with their reasons; refused if no run that the command asks for has finished."""
    failed = list(dict.fromkeys(reason for result in results for reason in result.failed))
    entries = (result.entries.get(setting) for result in results for setting in result.plan.asked)
    if failed and all(entry is None or entry.ours is None for entry in entries):
        raise PdslError(f"no cell has a result; first of {len(failed)} that failed: {failed[0]}")
    return failed


def _text(cell: TableCell) -> str:
    return f"{cell.paper:5} {cell.ours:6} {cell.difference}".rstrip()
