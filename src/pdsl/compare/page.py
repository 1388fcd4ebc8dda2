"""A comparison as a page: the table, accuracy over rounds of the first seed, the task and the command."""

import json
import shlex
from pathlib import Path
from typing import Any

from pdsl.cells import measured
from pdsl.compare.plan import Cell, Plan
from pdsl.compare.shown import HEADINGS, caption, cells
from pdsl.compare.verdict import Comparison
from pdsl.config import Config
from pdsl.report.document import card, document, figure, write_aside
from pdsl.report.lines import Points, lines
from pdsl.report.markup import element, words
from pdsl.report.numbers import epsilon, percent, plain
from pdsl.settings import PrivacySettings, flat


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
        lines(curves),
    )
    reasons = [words("p", reason) for line in comparison.lines for reason in line.failed]
    failed = card("Failed", *reasons) if reasons else ""
    beside = [element("div", chart, failed), element("div", _task(comparison.plan), _repeat(comparison.plan))]
    main = [_table(comparison), element("div", *beside, class_="columns")]
    return write_aside(comparison.folder / "compare.html", document(title, verdict, *main))


def _task(plan: Plan) -> str:
    """What all runs have in common, as far as one asks first."""
    base, privacy = plan.base, PrivacySettings(**plan.base["privacy"])
    partition, rogues = base["partition"], {kind: n for kind, n in base["rogue"].items() if n}
    dealt = {"dirichlet": f", μ = {partition['mu']:g}", "quantity": f", μ = {partition['mu']:g}"}
    dealt["shards"] = f", {partition['classes']} classes each"
    told = {
        "data": base["data"]["name"],
        "partition": partition["kind"] + dealt.get(partition["kind"], ""),
        "graph": base["graph"]["kind"],
        "agents": plain(base["graph"]["agents"]),
        "rounds": plain(base["rounds"]),
        "batch": f"{plain(base['batch']['size'])}, {base['batch']['sampler']}",
        "privacy": privacy.mode,
        "total ε": "not set" if privacy.budget is None else epsilon(privacy.budget),
        "δ": "—" if privacy.mode == "none" else f"{privacy.delta:g}",
        "seeds": ", ".join(map(str, plan.seeds)),
    } | {key: str(value) for key, value in _own(plan).items()}
    if rogues:
        told["rogues"] = ", ".join(f"{n} {kind}" for kind, n in rogues.items())
    rows = [element("tr", words("th", name, scope="row"), words("td", value)) for name, value in told.items()]
    return card("Task", element("table", element("tbody", *rows)))


def _own(plan: Plan) -> dict[str, Any]:
    """Settings of algorithms: each was given to all that have it."""
    return {f"algorithm.{key}": value for settings in plan.own.values() for key, value in settings.items()}


def _repeat(plan: Plan) -> str:
    about = "All other settings are the defaults; config.toml in each run's folder has every one."
    return card("Repeat it", words("pre", command(plan)), words("p", about, class_="described"))


def command(plan: Plan) -> str:
    """The command that asks for a plan: what it compares, and each setting that is not a default."""
    default = flat(Config().as_dict()) | {"engine.workers": 1}  # which every plan sets
    asked = flat(plan.base) | {"seed": plan.seeds[0]} | _own(plan)
    changed = {key: value for key, value in asked.items() if value != default.get(key)}
    grid = ",".join(f"{rate:.12g}" for rate in plan.grid)
    given = ["--algorithms", ",".join(plan.algorithms), "--grid", grid, "--seeds", str(len(plan.seeds))]
    for key, value in changed.items():
        given += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join(["pdsl", "compare", *given])


def _table(comparison: Comparison) -> str:
    head = element("tr", *(words("th", text, scope="col") for text in HEADINGS))
    rows = []
    for line in comparison.lines:
        name, *rest = cells(line)
        rows.append(element("tr", words("th", name, scope="row"), *(words("td", text) for text in rest)))
    shown = element("table", element("thead", head), element("tbody", *rows), class_="scores")
    return card(
        "Result", element("div", shown, class_="wide", tabindex=0), words("p", caption(comparison), class_="described")
    )


def _accuracies(comparison: Comparison, cell: Cell) -> Points:
    return [(t, accuracy) for t, _, accuracy in measured(comparison.folder / cell.name)]
