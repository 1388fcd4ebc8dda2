"""The report of `pdsl compare`: the table, accuracy over rounds, the task and the command."""

import json
import shlex
from pathlib import Path
from statistics import fmean

from pdsl.config import Config
from pdsl.report.document import render, write_file
from pdsl.report.figures import NOT_PRIVATE, Figure
from pdsl.report.line_chart import Points, line_chart
from pdsl.section import flat
from pdsl.settings import PrivacySettings
from pdsl.sweep.comparison import Comparison, ComparisonPlan, Line
from pdsl.sweep.job import read_curve
from pdsl.sweep.presentation import (
    baseline_cells,
    caption,
    cells,
    describe_edges,
    describe_worth,
    headings,
    headline,
    is_seeded,
)
from pdsl.utils.format import format_epsilon, plain
from pdsl.utils.types import JsonDict


def write_page(comparison: Comparison) -> Path:
    """Write compare.html into the folder of a comparison and return its path."""
    base = comparison.plan.base
    html = render(
        "compare_algorithms.html.j2",
        title=f"{len(comparison.lines)} algorithms on {base['data']['name']}, {base['graph']['kind']} graph",
        verdict=headline(comparison),
        badge=NOT_PRIVATE if is_seeded(comparison.plan) else "",
        headings=headings(comparison),
        rows=[*(cells(line, comparison.metric) for line in comparison.lines), *baseline_cells(comparison)],
        about=_about(comparison),
        chart=_chart(comparison),
        failed=[reason for line in comparison.lines for reason in line.failed],
        task=_task(comparison.plan),
        command=command(comparison.plan),
    )
    return write_file(comparison.folder / "compare.html", html)


def _about(comparison: Comparison) -> str:
    edges = [f"{line}." for line in describe_edges(comparison)]
    return " ".join([*describe_worth(comparison), caption(comparison), *edges])


def _chart(comparison: Comparison) -> Figure:
    """The metric of each algorithm at its best learning rate: mean over seeds, with a band over seeds."""
    series: dict[str, Points] = {}
    bands: dict[str, tuple[Points, Points]] = {}
    for line in comparison.lines:
        curves = _curves(comparison, line)
        series[line.algorithm] = [(t, fmean(values)) for t, values in curves.items()]
        if line.runs > 1:
            low, high = ([(t, pick(values)) for t, values in curves.items()] for pick in (min, max))
            bands[line.algorithm] = (low, high)
    metric = comparison.metric
    picture = line_chart(series, metric.label, metric.scale, bands)
    over = "mean over agents and seeds; bands are from the lowest to the highest seed" if bands else "mean over agents"
    return Figure(metric.name, f"{metric.title} over rounds", f"Test {metric.label}, {over}.", picture)


def _curves(comparison: Comparison, line: Line) -> dict[int, list[float]]:
    """The metric by round, of the seeds whose runs did not fail."""
    found: dict[int, list[float]] = {}
    for seed, known in zip(comparison.plan.seeds, line.accuracy_per_seed, strict=False):
        if known is not None and line.learning_rate is not None:
            job = comparison.plan.job(line.algorithm, line.learning_rate, seed)
            for t, _, value in read_curve(comparison.folder / job.name):
                found.setdefault(t, []).append(value)
    return found


def _task(plan: ComparisonPlan) -> dict[str, str]:
    """The most important settings that all runs share."""
    base, privacy = plan.base, PrivacySettings(**plan.base["privacy"])
    partition, attackers = base["partition"], {kind: n for kind, n in base["attack"].items() if n and kind != "drift"}
    details = {"dirichlet": f", μ = {partition['mu']:g}", "quantity": f", μ = {partition['mu']:g}"}
    details["shards"] = f", {partition['classes']} classes each"
    task = {
        "data": base["data"]["name"],
        "partition": partition["kind"] + details.get(partition["kind"], ""),
        "graph": base["graph"]["kind"],
        "agents": plain(base["graph"]["agents"]),
        "rounds": plain(base["rounds"]),
        "batch": f"{plain(base['batch']['size'])}, {base['batch']['sampler']}",
        "privacy": privacy.mode,
        "total ε": "not set" if privacy.budget is None else format_epsilon(privacy.budget),
        "δ": "—" if privacy.mode == "none" else f"{privacy.delta:g}",
        "seeds": ", ".join(map(str, plan.seeds)),
    } | {key: str(value) for key, value in _algorithm_settings(plan).items()}
    if attackers:
        task["attackers"] = ", ".join(f"{n} {kind}" for kind, n in attackers.items())
    return task


def _algorithm_settings(plan: ComparisonPlan) -> JsonDict:
    """Settings of algorithms: each applies to all algorithms that have it."""
    return {key: value for settings in plan.own.values() for key, value in flat(settings, "algorithm.").items()}


def command(plan: ComparisonPlan) -> str:
    """The command line of a plan, with each setting that is not a default."""
    default = flat(Config().as_dict()) | {"engine.workers": 1}  # every plan sets one worker
    settings = flat(plan.base) | {"seed": plan.seeds[0]} | _algorithm_settings(plan)
    changed = {key: value for key, value in settings.items() if value != default.get(key)}
    grid = ",".join(f"{rate:.12g}" for rate in plan.grid)
    options = ["--algorithms", ",".join(plan.algorithms), "--grid", grid, "--seeds", str(len(plan.seeds))]
    for key, value in changed.items():
        options += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join(["pdsl", "compare", *options])
