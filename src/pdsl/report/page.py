"""The report of a run: a verdict, key numbers, and tabs for learning, privacy, contributions and settings."""

from pathlib import Path

from pdsl.privacy.statement import SEEDED
from pdsl.report.document import LiveStatus, render, write_file
from pdsl.report.figures import Figure, contribution_figures, learning_figures, privacy_figures
from pdsl.report.run_data import Run, Summary, read_run
from pdsl.utils.files import PRIVATE
from pdsl.utils.format import MISSING, duration, format_epsilon, percent, plain, size


def write_report(run: Path, owner: bool = False) -> Path:
    """Write `report.html` into a run directory and return its path.

    For the data `owner`, write `report-owner.html`, which has exact record counts and is readable by its owner only.
    """
    if owner:
        return write_file(run / "report-owner.html", render_report(read_run(run, owner=True)), PRIVATE)
    return write_file(run / "report.html", render_report(read_run(run)))


def render_report(run: Run, live: LiveStatus | None = None) -> str:
    left, right = _contribution_columns(run)
    general = {key: value for key, value in run.config.items() if not isinstance(value, dict)}
    sections = {key: value for key, value in run.config.items() if isinstance(value, dict)}
    return render(
        "run.html.j2",
        title=run.name,
        verdict=verdict(run),
        live=live,
        tiles=_tiles(run),
        learning=learning_figures(run),
        privacy=privacy_figures(run),
        finished=run.summary is not None,
        **_privacy(run.summary),
        left=left,
        right=right,
        sections={"run": general} | sections,
        reproduction=f"Seed {run.config.get('seed', 'not set')}, {plain(run.setup.parameters)} parameters.",
    )


def verdict(run: Run) -> str:
    """Summarise a run in a sentence: agents, graph, accuracy, data, rounds and privacy cost."""
    attackers = len(run.setup.attackers)
    some = f" ({attackers} attacker{'s' * (attackers != 1)})" if attackers else ""
    kind = run.setup.graph.split(" of ")[0]
    agents = f"{run.setup.agents} agents{some} on {'an' if kind[:1] in 'aeiou' else 'a'} {kind}"
    accuracy, rounds = run.outcome()["accuracy"], run.rounds[-1].number
    reached = "trained" if accuracy is None else f"reached {percent(accuracy)} test accuracy"
    if run.summary is None:
        total = run.config.get("rounds", "an unknown number of")
        return f"Unfinished run: {agents} {reached} on {run.setup.data} after {rounds} of {total} rounds."
    return f"{agents} {reached} on {run.setup.data} in {rounds} round{'s' * (rounds != 1)}, {_cost(run)}"


def _cost(run: Run) -> str:
    if run.epsilon() is None:
        return "with no bound on ε."
    spent = f"with total ε = {format_epsilon(run.epsilon())}"
    if run.budget is not None:
        spent += f" (budget {format_epsilon(run.budget)})"
    seeded = run.summary and SEEDED in run.summary.privacy
    return f"{spent}. Simulation only, not private." if seeded else f"{spent}."


def _tiles(run: Run) -> dict[str, str]:
    """Key numbers by label."""
    outcome, rounds, spent = run.outcome(), run.rounds[-1].number, run.epsilon()
    total = "total ε" if run.budget is None or spent is None else f"total ε (budget {format_epsilon(run.budget)})"
    tiles = {
        "accuracy, mean over agents": percent(outcome["accuracy"]),
        "accuracy of the mean model": percent(outcome["accuracy_of_mean"]),
        "loss, mean over agents": plain(outcome["loss"]),
        total: format_epsilon(spent),
        "sent between agents": size(run.bytes_sent()),
    }
    if run.summary:
        tiles[f"for {plain(rounds)} round{'s' * (rounds != 1)}"] = duration(run.summary.metrics["seconds"])
    else:
        tiles[f"of {run.config.get('rounds', 'more')} rounds"] = plain(rounds)
    return tiles


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


def _contribution_columns(run: Run) -> tuple[list[Figure], list[Figure]]:
    """The graph and the records on the left; weights and Shapley values on the right."""
    figures = {figure.name: figure for figure in contribution_figures(run)}
    left = [figures.pop(name) for name in ("graph", "labels") if name in figures]
    if {"weights", "received"} <= figures.keys():  # the right column already has two tall figures
        left.append(figures.pop("received"))
    if "shapley" not in figures:
        missing = "This algorithm does not compute Shapley values."
        figures["shapley"] = Figure("shapley", "Shapley value φ of each message", "", None, missing=missing)
    return left, list(figures.values())
