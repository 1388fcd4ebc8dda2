"""The page of a run: a verdict and, in tabs, how it learnt, what it spent, who helped whom, and its settings."""

from pathlib import Path

from pdsl.files import PRIVATE
from pdsl.privacy.statement import SEEDED
from pdsl.report.document import card, document, parts, write_aside
from pdsl.report.figures import Figure, helping, learning, spending
from pdsl.report.markup import element, words
from pdsl.report.numbers import duration, epsilon, percent, plain, size
from pdsl.report.reading import Run, read_run


def write_report(run: Path, owner: bool = False) -> Path:
    """Write `report.html` into a run directory, aside and renamed; returns its path.

    For the `owner` of the records, `report-owner.html`, which has exact counts of them and is readable by it alone.
    """
    if owner:
        return write_aside(run / "report-owner.html", page(read_run(run, owner=True)), PRIVATE)
    return write_aside(run / "report.html", page(read_run(run)))


def page(run: Run, state: str = "", live: bool = False) -> str:
    content = {
        "Learning": _two_columns(learning(run)),
        "Privacy": _privacy(run),
        "Who helps whom": _helping(run),
        "Settings": _settings(run) + _repeat(run),
    }
    return document(run.name, verdict(run), _tiles(run), parts(content), state=state, live=live)


def verdict(run: Run) -> str:
    """The run in a sentence: who learnt what how well, in how many rounds, at what cost in privacy."""
    place = run.setup["graph"].split(" of ")[0]
    rogues = f", {len(run.rogues)} of them {'a rogue' if len(run.rogues) == 1 else 'rogues'}," if run.rogues else ""
    who = f"{run.setup['agents']} agents{rogues} on {'an' if place[:1] in 'aeiou' else 'a'} {place}"
    accuracy, rounds = run.outcome()["accuracy"], run.rows[-1]["round"]
    learnt = f"learnt {run.setup['data']}" + ("" if accuracy is None else f" to {percent(accuracy)}")
    if run.summary is None:
        return (
            f"This run is unfinished: {who} have {learnt} after {rounds} of {run.config.get('rounds', 'more')} rounds."
        )
    return f"{who} {learnt} in {rounds} round{'s' * (rounds != 1)}, {_cost(run)}."


def _cost(run: Run) -> str:
    if run.epsilon() is None:
        return "with no bound on ε"
    spent = f"with total ε = {epsilon(run.epsilon())}" + ("" if run.budget is None else f" of {epsilon(run.budget)}")
    return f"{spent}, in a simulation" if run.summary and SEEDED in run.summary["privacy"] else spent


def _tiles(run: Run) -> str:
    outcome, rounds, spent = run.outcome(), run.rows[-1]["round"], run.epsilon()
    tiles = {
        "accuracy, mean over agents": percent(outcome["accuracy"]),
        "accuracy of the mean model": percent(outcome["accuracy_of_mean"]),
        "loss, mean over agents": plain(outcome["loss"]),
        "total ε" if run.budget is None or spent is None else f"total ε of {epsilon(run.budget)}": epsilon(spent),
        "sent between agents": size(run.sent()),
    }
    if run.summary:
        tiles[f"for {plain(rounds)} round{'s' * (rounds != 1)}"] = duration(run.summary["seconds"])
    else:
        tiles[f"of {run.config.get('rounds', 'more')} rounds"] = plain(rounds)
    return element("dl", *(element("div", words("dt", label), words("dd", value)) for label, value in tiles.items()))


def _two_columns(drawn: list[Figure]) -> str:
    return element("div", *(figure.html() for figure in drawn), class_="even")


def _helping(run: Run) -> str:
    """The graph and what agents hold on the left, what their messages weighed and were worth on the right."""
    drawn = {figure.name: figure.html() for figure in helping(run)}
    left = [drawn.pop(name) for name in ("graph", "holdings") if name in drawn]
    if {"weights", "heard"} <= drawn.keys():  # two tall ones are enough on the right
        left.append(drawn.pop("heard"))
    if "shapley" not in drawn:
        nothing = words("p", "The algorithm of this run does not value messages.", class_="none")
        drawn["shapley"] = card("What each message was worth", nothing)
    return element("div", element("div", *left), element("div", *drawn.values()), class_="columns")


def _privacy(run: Run) -> str:
    """The privacy statement, ε over the rounds, who it holds against, and what else the run noted at its end."""
    spent = [figure.html() for figure in spending(run)]
    if run.summary is None:
        return card("Statement", words("p", "The privacy of a run is stated when it has ended.")) + "".join(spent)
    forms = {"ε": ("epsilon", epsilon), "δ": ("delta", plain), "σ": ("sigma", plain)}
    values = {name: form(run.summary[field]) for name, (field, form) in forms.items()}
    known = ", ".join(f"{name} = {value}" for name, value in values.items() if value != "—")
    said = run.summary["privacy"] or "Nothing is stated."
    cards = [card("Statement", words("p", said), words("p", known, class_="described"))]
    if run.summary["adversaries"]:
        rows = [
            element("tr", words("th", who, scope="row"), words("td", epsilon(spent_on)))
            for who, spent_on in run.summary["adversaries"].items()
        ]
        about = words("p", "ε at the run's δ, for the agent that has spent most.", class_="described")
        cards.append(card("Against whom", element("table", element("tbody", *rows)), about))
    notes = [note for note in (run.summary["stopped"], *run.summary["notes"]) if note]
    if notes:
        cards.append(card("Notes", *(words("p", note) for note in notes)))
    if not spent:
        return "".join(cards)
    return element("div", element("div", *cards), element("div", *spent), class_="columns")


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
