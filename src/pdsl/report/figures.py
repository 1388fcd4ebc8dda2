"""The figures of a run with their titles and captions."""

from dataclasses import dataclass
from itertools import accumulate

from pdsl.privacy.statement import SEEDED
from pdsl.report.bar_chart import describe_extremes, label_bars, relative_weights, weight_bars
from pdsl.report.conclusions import conclude
from pdsl.report.confusion_chart import (
    MAX_CLASSES,
    confusion_matrix,
    describe_confusion,
    describe_residuals,
    residual_histogram,
)
from pdsl.report.contribution_chart import contribution_bars, drawn_parties
from pdsl.report.graph_chart import ATTACKS, MAX_DETAILED, MAX_LINKS, MAX_NUMBERED, graph_chart
from pdsl.report.heat_map import MAX_WRITTEN, has_row_per_edge, shapley_heat_map, weight_matrix
from pdsl.report.line_chart import Band, Scale, line_chart, metric_chart
from pdsl.report.metric import Metric
from pdsl.report.run_data import Run
from pdsl.report.svg import Picture
from pdsl.utils.format import exact_size, format_epsilon, plain, size

NOT_MEASURED = "Nothing was measured."
# By shapley.value: the effect of a message with a positive value, the metric, and the effect of a negative value.
EFFECTS = {
    "accuracy": ("raised", "accuracy", "lowered"),
    "loss": ("lowered", "loss", "raised"),
    "centred": ("lowered", "loss with centred logits", "raised"),
}
NOT_PRIVATE = SEEDED.partition(",")[0]  # badge beside an ε that protects nobody
BYTES = Scale(size, exact_size, "size")
EPSILON = Scale(plain, format_epsilon)
MAX_AGENT_LINES = 12  # of more agents, the best and the worst are drawn
OWNER_NOTE = "For the data owner only: exact record counts are not covered by ε. Do not share this report."


@dataclass(frozen=True)
class Figure:
    """A picture with its title and caption."""

    name: str  # of its file
    title: str
    caption: str
    picture: Picture | None
    note: str = ""  # between title and picture
    conclusion: str = ""  # below the picture
    badge: str = ""  # beside the title
    missing: str = NOT_MEASURED  # text if there is no picture


def run_figures(run: Run) -> list[Figure]:
    """All figures of a run, in the order of the report."""
    return [*learning_figures(run), *privacy_figures(run), *contribution_figures(run), *graph_figures(run)]


def learning_figures(run: Run) -> list[Figure]:
    rounds = [r.number for r in run.rounds]
    metric, loss = run.metric, run.task.loss
    distance = metric_chart("consensus distance", rounds, {"consensus distance": run.series("consensus")}, Scale())
    total = list(accumulate(value or 0 for value in run.series("bytes")))
    sent = metric_chart("sent between agents", rounds, {"sent so far": total}, BYTES)
    about = "Average distance between an agent's model and the mean of all models."
    return [
        _metric_figure(run, metric, {"mean over agents": "", "mean model": "_of_mean"}),
        *_agents_figure(run),
        *([_metric_figure(run, loss, {"mean over agents": ""})] if metric.name != "loss" else []),
        Figure("consensus", "Consensus distance", about, distance),
        Figure("bytes", "Sent between agents", "Total size of all messages so far, over all edges.", sent),
        *error_figures(run),
    ]


def _metric_figure(run: Run, metric: Metric, lines: dict[str, str]) -> Figure:
    """A metric on the test set over rounds, with a band from the worst agent to the best."""
    name, rounds = metric.name, [r.number for r in run.rounds]
    sides = ("worst", "best") if metric.higher_is_better else ("best", "worst")
    picture = metric_chart(
        metric.label,
        rounds,
        {label: run.series(f"{name}{suffix}") for label, suffix in lines.items()},
        metric.scale,
        Band(*sides, run.series(f"{name}_min"), run.series(f"{name}_max")),
        _extreme_agents(run) if metric == run.metric else None,
    )
    caption = f"Test {metric.label}, in the rounds that were evaluated."
    return Figure(name, metric.title, caption + _describe_cut(picture), picture)


def _describe_cut(picture: Picture | None) -> str:
    if picture is None or picture.data.get("data-view") == picture.data.get("data-whole"):
        return ""
    return " The first rounds are outside of the axis: double-click to show all of them."


def _extreme_agents(run: Run) -> dict[int, list[str]]:
    """A line for the tip of each round that names its worst and its best agent."""
    names, found = run.setup.agent_names, {}
    for r in run.rounds:
        known = {i: value for i, value in enumerate(r.per_agent) if value is not None}
        if len(set(known.values())) > 1:
            low, high = min(known, key=lambda i: known[i]), max(known, key=lambda i: known[i])
            worst, best = (low, high) if run.metric.higher_is_better else (high, low)
            found[r.number] = [f"worst: {names.full(worst)}, best: {names.full(best)}"]
    return found


def _agents_figure(run: Run) -> list[Figure]:
    """The headline metric of each agent over rounds; none if the rows do not have it."""
    evaluated = [r for r in run.rounds if r.per_agent]
    if not evaluated:
        return []
    metric, names = run.metric, run.setup.agent_names
    known = [i for i, value in enumerate(evaluated[-1].per_agent) if value is not None]
    ordered = sorted(known, key=lambda i: evaluated[-1].per_agent[i] or 0.0, reverse=metric.higher_is_better)
    half = MAX_AGENT_LINES // 2
    shown = ordered if len(ordered) <= MAX_AGENT_LINES else [*ordered[:half], *ordered[-half:]]
    series = {
        names.full(i): [(r.number, value) for r in evaluated if (value := r.per_agent[i]) is not None] for i in shown
    }
    picture = line_chart(series, metric.label, metric.scale)
    caption = f"Test {metric.label} of each agent's own model."
    if len(shown) < len(ordered):
        caption = f"Test {metric.label} of the {half} best and the {half} worst of {len(ordered)} agents."
    return [Figure("agents", f"{metric.title} of each agent", caption + _describe_cut(picture), picture)]


def error_figures(run: Run) -> list[Figure]:
    """The confusion matrix or the residuals of the mean model; none for other tasks and unfinished runs."""
    if run.summary is None:
        return []
    classes, figures = run.setup.class_names, []
    if confusion := run.summary.confusion:
        picture = confusion_matrix(confusion, classes)
        caption = (
            f"{describe_confusion(confusion, classes)} Test records by true class (row) and predicted class (column),"
            " for the mean model. Colours are fractions of a row: blue is correct, orange is wrong."
        )
        missing = f"A matrix of more than {MAX_CLASSES} classes is not drawn."
        figures.append(Figure("confusion", "Confusion matrix", caption, picture, missing=missing))
    if residuals := run.summary.residuals:
        caption = f"{describe_residuals(residuals)} Test records by prediction minus target, for the mean model."
        figures.append(Figure("residuals", "Residuals", caption, residual_histogram(residuals)))
    return figures


def privacy_figures(run: Run) -> list[Figure]:
    """ε after each round and the budget, if one was set; empty for a run without noise."""
    if all(value is None for value in run.series("epsilon")):
        return []
    lines = {"ε spent": run.series("epsilon")}
    if run.budget is not None:
        lines["budget"] = [run.budget] * len(run.rounds)
    picture = metric_chart("ε spent", [r.number for r in run.rounds], lines, EPSILON)
    caption = "Total ε after each round, for the agent with the largest total."
    return [Figure("epsilon", "ε spent", caption, picture, badge=NOT_PRIVATE if run.seeded else "")]


def contribution_figures(run: Run) -> list[Figure]:
    """Contributions with their intervals; none if the run has no account."""
    if run.account is None:
        return []
    count, drawn = len(run.account.names), len(drawn_parties(run.account))
    caption = (
        "Bars are contributions, largest first. A whisker is the interval that contains the true value in 19 of 20"
        " cases. If it crosses zero, the party may have contributed nothing. An orange bar is below zero."
    )
    if drawn < count:
        caption += f" Drawn are the {drawn // 2} largest and the {drawn // 2} smallest of {count}."
    picture = contribution_bars(run.account, {run.setup.agent_names.name(i) for i in run.setup.attackers})
    return [Figure("contributions", "Contribution of each party", caption, picture)]


def graph_figures(run: Run) -> list[Figure]:
    """The graph, the agents' records, the weights and, if the algorithm computes them, the Shapley values."""
    setup, shares, names = run.setup, run.mean_share(), run.setup.agent_names
    weights = shares or [omega for *_, omega in setup.edges]
    edges = [(i, j, weight) for (i, j, _), weight in zip(setup.edges, weights, strict=True)]
    meaning = "average weight over the run" if shares else "mixing weight ω"
    figures = [
        Figure(
            "graph",
            "Communication graph",
            _describe_graph(run, meaning) + _describe_attackers(run),
            graph_chart(setup.agents, run.labels, edges, names, setup.class_names),
            note=f"{setup.graph[:1].upper()}{setup.graph[1:]}.",
        ),
    ]
    if run.labels:
        picture = label_bars(run.labels, run.agents_outcome(), run.metric, names, setup.class_names)
        note = OWNER_NOTE if run.private else ""
        caption = "Training records by class." if run.task.has_classes else "Training records."
        figures.append(Figure("labels", "Records per agent", caption, picture, note=note))
    if setup.agents <= MAX_DETAILED and sum(i != j for i, j, _ in edges) > MAX_NUMBERED:
        written = setup.agents <= MAX_WRITTEN
        values = f"Numbers: {meaning}, in percent" if written else f"Colours: {meaning}; hover for the percentage"
        caption = f"Rows are receivers, columns are senders. {values}."
        picture = weight_matrix(setup.agents, edges, names)
        figures.append(Figure("weights", "Weight of each edge", caption, picture))
    relative = [(i, j, weight) for (i, j, _), weight in zip(setup.edges, run.relative_share(), strict=bool(shares))]
    if shares and (received := relative_weights(relative)):
        caption = (
            "Average weight of an agent's messages at its neighbours, divided by the weight they would have if all"
            f" messages counted equally (dotted line). {describe_extremes(received, names)}"
        )
        picture = weight_bars(received, names)
        figures.append(Figure("received", "Average weight received (1 = equal share)", caption, picture))
    if any(r.phi for r in run.rounds):
        row = "an edge (receiver ← sender)" if has_row_per_edge(run) else "a sending agent (mean over its receivers)"
        positive, metric, negative = EFFECTS[run.value_function if run.task.has_classes else "loss"]
        caption = (
            f"Each row is {row}, each column a round or the mean of several. Blue: the message {positive} the"
            f" receiver's {metric} on the public set. Orange (narrow bars, or numbers with −): the message {negative}"
            " it."
        )
        if any(value is None for r in run.rounds for value in r.phi):
            caption += " Empty: the graph of the round does not have the edge."
        picture, title = shapley_heat_map(run), "Shapley value φ of each message"
        figures.append(Figure("shapley", title, caption, picture, conclusion=conclude(run)))
    return figures


def _describe_attackers(run: Run) -> str:
    """Name the attackers by kind."""
    kinds: dict[str, list[str]] = {}
    for i, kind in run.setup.attackers.items():
        kinds.setdefault(kind, []).append(run.setup.agent_names.name(i))
    named = "; ".join(f"{ATTACKS.get(kind, kind)}: {', '.join(agents)}" for kind, agents in kinds.items())
    return f" An asterisk and a dashed ring mark an attacker ({named})." if named else ""


def _describe_graph(run: Run, meaning: str) -> str:
    if run.setup.agents > MAX_DETAILED:
        return f"Lines connect neighbours. At most {plain(MAX_LINKS)} are drawn: those with the largest weights."
    ring = ", with a ring of its records by class" if run.labels and run.task.has_classes else ""
    return (
        f"Each arrow is a message; its width shows the {meaning}. Each circle is an agent{ring}. Numbers are"
        " percentages, if there is room for them. The small number inside a circle is the weight of the agent's own"
        " message."
    )
