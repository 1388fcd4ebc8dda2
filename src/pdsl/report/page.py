"""The page: a verdict, figures, settings and how to repeat the run, in one HTML file."""

from pathlib import Path

from pdsl.report.curves import curves
from pdsl.report.document import card, document, figure, write_aside
from pdsl.report.graph import DETAILED, LINKS, graph
from pdsl.report.heat import by_edge, heat_map
from pdsl.report.holdings import holdings
from pdsl.report.markup import element, words
from pdsl.report.numbers import duration, percent, plain, size
from pdsl.report.reading import Fields, Run, read_run


def write_report(run: Path) -> Path:
    """Write `report.html` into a run directory, aside and renamed; returns its path."""
    return write_aside(run / "report.html", page(read_run(run)))


def page(run: Run) -> str:
    main = _tiles(run), _privacy(run), _figures(run), _settings(run), _repeat(run)
    return document(run.name, _verdict(run), *main)


def _outcome(run: Run) -> Fields:
    """How the run ended or, unfinished, stood when it was last evaluated."""
    return run.summary or next((row for row in reversed(run.rows) if row["accuracy"] is not None), run.rows[-1])


def _verdict(run: Run) -> str:
    place = run.setup["graph"].split(" of ")[0]
    who = f"{run.setup['agents']} agents on {'an' if place[:1] in 'aeiou' else 'a'} {place}"
    accuracy, rounds = _outcome(run)["accuracy"], run.rows[-1]["round"]
    learnt = f"learnt {run.setup['data']}" + ("" if accuracy is None else f" to {percent(accuracy)}")
    if run.summary:
        return f"{who} {learnt} in {rounds} round{'s' * (rounds != 1)}."
    return f"This run is unfinished: {who} have {learnt} after {rounds} of {run.config.get('rounds', 'more')} rounds."


def _tiles(run: Run) -> str:
    outcome = _outcome(run)
    tiles = {
        "accuracy, mean over agents": percent(outcome["accuracy"]),
        "accuracy of the mean model": percent(outcome["accuracy_of_mean"]),
        "loss": plain(outcome["loss"]),
        "rounds": plain(run.rows[-1]["round"]),
        "time": duration(run.summary["seconds"] if run.summary else None),
        "sent between agents": size(sum(row["bytes"] or 0 for row in run.rows)),
    }
    return element("dl", *(element("div", words("dt", label), words("dd", value)) for label, value in tiles.items()))


def _privacy(run: Run) -> str:
    """The privacy statement and, beside it, what else the run noted at its end."""
    if run.summary is None:
        return card("Privacy", words("p", "The privacy of a run is stated when it has ended."))
    numbers = {"ε": run.summary["epsilon"], "σ": run.summary["sigma"]}
    known = ", ".join(f"{name} = {plain(value)}" for name, value in numbers.items() if value is not None)
    said = words("p", run.summary["privacy"] or "Nothing is stated.") + words("p", known, class_="described")
    notes = [words("p", note) for note in run.summary["notes"]]
    return (
        element("div", card("Privacy", said), card("Notes", *notes), class_="even") if notes else card("Privacy", said)
    )


def _figures(run: Run) -> str:
    accuracy = curves(
        run.rows,
        {"mean over agents": "accuracy", "mean model": "accuracy_of_mean"},
        lambda value: f"{100 * value:.3g} %",
        top=1,
        band=("worst to best agent", "accuracy_min", "accuracy_max"),
    )
    loss = curves(run.rows, {"loss": "loss"}, plain)
    consensus = curves(run.rows, {"consensus distance": "consensus"}, plain)
    held = holdings(run.setup["labels"], run.summary["accuracy_per_agent"] if run.summary else [])
    left = [
        figure("Accuracy", "On test data, in the rounds that were evaluated.", accuracy),
        figure("Loss", "Mean over agents, on test data.", loss),
        figure("Consensus distance", "How far, on average, an agent's model lies from the mean of all.", consensus),
        figure("What each agent holds", "Records by class.", held),
    ]
    if any(row["epsilon"] is not None for row in run.rows):
        left.insert(2, _spent(run))
    return element("div", element("div", *left), element("div", _graph(run), _values(run)), class_="columns")


def _spent(run: Run) -> str:
    """ε after each round and, where a total was asked for, the budget above it."""
    budget = run.config.get("privacy", {}).get("target_epsilon")
    rows = [{**row, "budget": budget} for row in run.rows]
    lines = {"ε spent": "epsilon"} | ({} if budget is None else {"budget": "budget"})
    return figure("ε spent", "Total so far of the agent that has spent most.", curves(rows, lines, plain))


def _graph(run: Run) -> str:
    share = run.mean_share()
    weights = share or [omega for *_, omega in run.setup["edges"]]
    edges = [(i, j, weight) for (i, j, _), weight in zip(run.setup["edges"], weights, strict=True)]
    described = words("p", f"{run.setup['graph'][:1].upper()}{run.setup['graph'][1:]}.", class_="described")
    if run.setup["agents"] > DETAILED:
        caption = f"Lines join neighbours; at most the {plain(LINKS)} heaviest are drawn."
    else:
        meaning = "share its receiver gives it, mean over the run" if share else "mixing weight ω"
        caption = (
            f"An arrow is a message, wider with the {meaning}. Numbers, where there is room, are percent;"
            " inside a circle, under the agent's own, what it gives its own message."
        )
    return figure("Who listens to whom", caption, described + graph(run.setup["labels"], edges))


def _values(run: Run) -> str:
    title = "What each message was worth: Shapley value φ"
    if not any(row["phi"] for row in run.rows):
        return card(title, words("p", "The algorithm of this run does not value messages.", class_="none"))
    rows = (
        "A row is an edge, receiver ← sender" if by_edge(run) else "A row is a sending agent, its mean over receivers"
    )
    caption = (
        f"{rows}; a column is a round or the mean of several."
        " Blue messages raised the receiver's accuracy on the public set, orange ones (narrow bars) lowered it."
    )
    return figure(title, caption, heat_map(run))


def _settings(run: Run) -> str:
    alone = {key: value for key, value in run.config.items() if not isinstance(value, dict)}
    sections = {"run": alone} | {key: value for key, value in run.config.items() if isinstance(value, dict)}
    tables = []
    for name, settings in sections.items():
        rows = [element("tr", words("th", key, scope="row"), words("td", str(v))) for key, v in settings.items()]
        tables.append(element("table", words("caption", name), element("tbody", *rows)) if rows else "")
    return card("Settings", element("div", *tables, class_="settings"))


def _repeat(run: Run) -> str:
    said = f"In this directory. Seed {run.config.get('seed', 'not set')}, {plain(run.setup['parameters'])} parameters."
    return card("Repeat it", words("pre", "pdsl run config.toml"), words("p", said, class_="described"))
