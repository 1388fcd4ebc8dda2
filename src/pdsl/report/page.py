"""The report of a run: a verdict, key numbers, and tabs for learning, privacy, contributions, graph and settings."""

from dataclasses import dataclass
from pathlib import Path

from pdsl.algorithms import ALGORITHMS, PDSL
from pdsl.config import describe
from pdsl.metrics import BASELINES
from pdsl.report.account_text import INTERVAL, MEANING, Unit, conclude_account, describe_gain, describe_parties
from pdsl.report.document import LiveStatus, render, write_file
from pdsl.report.figures import (
    NOT_PRIVATE,
    Figure,
    contribution_figures,
    graph_figures,
    learning_figures,
    privacy_figures,
)
from pdsl.report.metric import Metric
from pdsl.report.run_data import Run, read_run
from pdsl.report.run_schema import Summary
from pdsl.section import flat
from pdsl.utils.files import PRIVATE
from pdsl.utils.format import MISSING, duration, format_epsilon, name_data, percent, plain, size

LEFT_OF_LEARNING = ("loss", "confusion", "residuals")  # figures of the left column, below the headline metric
MAX_RECALLS = 20  # classes listed with their recall; of more, those with the lowest


@dataclass(frozen=True)
class Tile:
    """A key number."""

    label: str
    value: str
    badge: str = ""


def write_report(run: Path, owner: bool = False) -> Path:
    """Write `report.html` into a run directory and return its path.

    For the data `owner`, write `report-owner.html`, which has exact record counts and is readable by its owner only.
    """
    if owner:
        return write_file(run / "report-owner.html", render_report(read_run(run, owner=True)), PRIVATE)
    return write_file(run / "report.html", render_report(read_run(run)))


def render_report(run: Run, live: LiveStatus | None = None) -> str:
    left, right = _graph_columns(run)
    learning_left, learning_right = _learning_columns(run)
    general = {key: value for key, value in run.config.items() if not isinstance(value, dict)}
    sections = {key: flat(value) for key, value in run.config.items() if isinstance(value, dict)}
    algorithm = ALGORITHMS.get(run.algorithm, PDSL)
    return render(
        "run.html.j2",
        title=run.name,
        verdict=verdict(run),
        badge=_badge(run),
        live=live,
        tiles=_tiles(run),
        learning_left=learning_left,
        learning_right=learning_right,
        measured=_measured(run),
        baselines=_baselines(run),
        baseline_metric=run.metric.title,
        gain=run.summary.gain if run.summary else "",
        recalls=_recalls(run),
        privacy=privacy_figures(run),
        finished=run.summary is not None,
        **_privacy(run.summary),
        account=_account(run),
        left=left,
        right=right,
        sections={"run": general} | sections,
        meanings={name: text for name, _, text in describe(algorithm)},
        reproduction=f"Seed {run.config.get('seed', 'not set')}, {plain(run.setup.parameters)} parameters.",
    )


def _badge(run: Run) -> str:
    """The mark beside an ε that was computed for noise from the seed; "" if there is no ε, or it holds."""
    return NOT_PRIVATE if run.seeded and run.epsilon() is not None else ""


def verdict(run: Run) -> str:
    """Summarise a run in a sentence: agents, graph, accuracy, data, rounds and privacy cost."""
    attackers = len(run.setup.attackers)
    some = f" ({attackers} attacker{'s' * (attackers != 1)})" if attackers else ""
    kind = run.setup.graph.split(" of ")[0]
    agents = f"{run.setup.agents} agents{some} on {'an' if kind[:1] in 'aeiou' else 'a'} {kind}"
    value, rounds, metric = run.headline(), run.rounds[-1].number, run.metric
    reached = f"reached a test {metric.label} of {metric.form(value)}"
    if metric.is_fraction:
        reached = f"reached {metric.form(value)} test {metric.label}"
    reached = "trained" if value is None else reached
    data = name_data(run.setup.data)
    if run.summary is None:
        total = run.config.get("rounds", "an unknown number of")
        return f"Unfinished run: {agents} {reached} on {data} after {rounds} of {total} rounds."
    return f"{agents} {reached} on {data} in {rounds} round{'s' * (rounds != 1)}, {_cost(run)}"


def _cost(run: Run) -> str:
    if run.epsilon() is None:
        return "with no bound on ε."
    spent = f"with total ε = {format_epsilon(run.epsilon())}"
    if run.budget is not None:
        spent += f" (budget {format_epsilon(run.budget)})"
    return f"{spent}."


def _tiles(run: Run) -> list[Tile]:
    """Key numbers."""
    outcome, rounds, spent, metric = run.outcome(), run.rounds[-1].number, run.epsilon(), run.metric
    total = "total ε" if run.budget is None or spent is None else f"total ε (budget {format_epsilon(run.budget)})"
    known = [value for value in run.agents_outcome() if value is not None]
    ends = [metric.form(pick(known)) for pick in (min, max)] if known else []
    spread = f" ({ends[0]} to {ends[1]})" if len(set(ends)) > 1 else ""
    tiles = [
        Tile(f"{metric.label}, mean over agents{spread}", metric.form(run.headline())),
        Tile(f"{metric.label} of the mean model", metric.form(run.headline("_of_mean"))),
        Tile("loss, mean over agents", plain(outcome["loss"])),
        Tile(total, format_epsilon(spent), _badge(run)),
        Tile("sent between agents", size(run.bytes_sent())),
    ]
    if metric.name == "loss":
        del tiles[2]
    if run.summary:
        label = f"for {plain(rounds)} round{'s' * (rounds != 1)}"
        return [*tiles, Tile(label, duration(run.summary.metrics["seconds"]))]
    return [*tiles, Tile(f"of {run.config.get('rounds', 'more')} rounds", plain(rounds))]


def _measured(run: Run) -> dict[str, str]:
    """All metrics of the mean model by label."""
    values = run.summary.model_metrics if run.summary else {}
    return {(metric := Metric.of(name)).label: metric.form(value) for name, value in values.items()}


def _baselines(run: Run) -> dict[str, str]:
    """The headline metric of the mean model and of each baseline, by label."""
    values = run.summary.baselines if run.summary else {}
    found = {BASELINES[name]: run.metric.form(value) for name, value in values.items()}
    return {"this run, mean model": run.metric.form(run.headline("_of_mean")), **found} if found else {}


def _recalls(run: Run) -> dict[str, str]:
    """Recall by class; of many classes, the lowest."""
    values = dict(enumerate(run.summary.recall)) if run.summary else {}
    names = run.setup.class_names
    shown = sorted(values, key=lambda k: 2.0 if values[k] is None else values[k] or 0.0)[:MAX_RECALLS]
    return {names.full(k): percent(values[k]) for k in sorted(shown)}


def _privacy(summary: Summary | None) -> dict[str, object]:
    """The privacy statement with its parameters, ε by adversary, and notes."""
    if summary is None:
        text = "The privacy statement is written when the run ends."
        return {"statement": text, "parameters": "", "adversaries": {}, "notes": []}
    metrics = summary.metrics
    values = {"ε": format_epsilon(metrics["epsilon"]), "δ": plain(metrics["delta"]), "σ": plain(metrics["sigma"])}
    return {
        "statement": summary.privacy or "There is no privacy statement.",
        "parameters": ", ".join(f"{name} = {value}" for name, value in values.items() if value != MISSING),
        "adversaries": {name: format_epsilon(epsilon) for name, epsilon in summary.adversaries.items()},
        "notes": [note for note in (summary.stopped, *summary.notes) if note],
    }


def _learning_columns(run: Run) -> tuple[list[Figure], list[Figure]]:
    """The headline metric, loss and errors on the left; agents, consensus and traffic on the right."""
    left = [f for f in learning_figures(run) if f.name in (run.metric.name, *LEFT_OF_LEARNING)]
    right = [f for f in learning_figures(run) if f.name not in (run.metric.name, *LEFT_OF_LEARNING)]
    return left, right


def _account(run: Run) -> dict[str, object] | None:
    """The contributions in words, as a chart and as a table; None if they were not measured."""
    if run.account is None:
        return None
    return {
        "conclusion": conclude_account(run.account),
        "gain": describe_gain(run.account),
        "meaning": MEANING,
        "figures": contribution_figures(run),
        "interval": INTERVAL,
        "unit": Unit.of(run.account).label,
        "parties": describe_parties(run.account),
        "notes": run.account.notes,
    }


def _graph_columns(run: Run) -> tuple[list[Figure], list[Figure]]:
    """The graph and the records on the left; weights and Shapley values on the right."""
    figures = {figure.name: figure for figure in graph_figures(run)}
    left = [figures.pop(name) for name in ("graph", "labels") if name in figures]
    if {"weights", "received"} <= figures.keys():  # the right column already has two tall figures
        left.append(figures.pop("received"))
    if "shapley" not in figures:
        missing = "This algorithm does not compute Shapley values."
        figures["shapley"] = Figure("shapley", "Shapley value φ of each message", "", None, missing=missing)
    return left, list(figures.values())
