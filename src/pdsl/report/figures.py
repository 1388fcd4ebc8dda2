"""The figures of a run with their titles and captions."""

from dataclasses import dataclass
from itertools import accumulate

from pdsl.report.bar_chart import describe_extremes, label_bars, relative_weights, weight_bars
from pdsl.report.graph_chart import ATTACKS, MAX_DETAILED, MAX_LINKS, MAX_NUMBERED, graph_chart
from pdsl.report.heat_map import MAX_WRITTEN, has_row_per_edge, shapley_heat_map, weight_matrix
from pdsl.report.line_chart import Band, metric_chart
from pdsl.report.run_data import Run
from pdsl.report.svg import Picture
from pdsl.utils.format import axis_percent, exact_percent, exact_size, format_epsilon, plain, size

NOT_MEASURED = "Nothing was measured."
# By shapley.value: the effect of a message with a positive value, the metric, and the effect of a negative value.
EFFECTS = {
    "accuracy": ("raised", "accuracy", "lowered"),
    "loss": ("lowered", "loss", "raised"),
    "centred": ("lowered", "loss with centred logits", "raised"),
}
OWNER_NOTE = "For the data owner only: exact record counts are not covered by ε. Do not share this report."


@dataclass(frozen=True)
class Figure:
    """A picture with its title and caption."""

    name: str  # of its file
    title: str
    caption: str
    picture: Picture | None
    note: str = ""  # between title and picture
    missing: str = NOT_MEASURED  # text if there is no picture


def run_figures(run: Run) -> list[Figure]:
    """All figures of a run, in the order of the report."""
    return [*learning_figures(run), *privacy_figures(run), *contribution_figures(run)]


def learning_figures(run: Run) -> list[Figure]:
    rounds = [r.number for r in run.rounds]
    accuracy = metric_chart(
        "accuracy",
        rounds,
        {"mean over agents": run.series("accuracy"), "mean model": run.series("accuracy_of_mean")},
        axis_percent,
        exact_percent,
        top=1,
        band=Band("worst", "best", run.series("accuracy_min"), run.series("accuracy_max")),
    )
    loss = metric_chart(
        "loss",
        rounds,
        {"mean over agents": run.series("loss")},
        plain,
        band=Band("best", "worst", run.series("loss_min"), run.series("loss_max")),
    )
    distance = metric_chart("consensus distance", rounds, {"consensus distance": run.series("consensus")}, plain)
    total = list(accumulate(value or 0 for value in run.series("bytes")))
    sent = metric_chart("sent between agents", rounds, {"sent so far": total}, size, exact_size)
    about = "Average distance between an agent's model and the mean of all models."
    return [
        Figure("accuracy", "Accuracy", "Test accuracy, in the rounds that were evaluated.", accuracy),
        Figure("loss", "Loss", "Test loss, in the rounds that were evaluated.", loss),
        Figure("consensus", "Consensus distance", about, distance),
        Figure("bytes", "Sent between agents", "Total size of all messages so far, over all edges.", sent),
    ]


def privacy_figures(run: Run) -> list[Figure]:
    """ε after each round and the budget, if one was set; empty for a run without noise."""
    if all(value is None for value in run.series("epsilon")):
        return []
    lines = {"ε spent": run.series("epsilon")}
    if run.budget is not None:
        lines["budget"] = [run.budget] * len(run.rounds)
    picture = metric_chart("ε spent", [r.number for r in run.rounds], lines, plain, format_epsilon)
    return [Figure("epsilon", "ε spent", "Total ε after each round, for the agent with the largest total.", picture)]


def contribution_figures(run: Run) -> list[Figure]:
    """The graph, the agents' records, the weights and, if the algorithm computes them, the Shapley values."""
    setup, shares = run.setup, run.mean_share()
    weights = shares or [omega for *_, omega in setup.edges]
    edges = [(i, j, weight) for (i, j, _), weight in zip(setup.edges, weights, strict=True)]
    meaning = "average weight over the run" if shares else "mixing weight ω"
    figures = [
        Figure(
            "graph",
            "Communication graph",
            _describe_graph(run, meaning) + _describe_attackers(run),
            graph_chart(setup.agents, run.labels, edges, setup.attackers),
            note=f"{setup.graph[:1].upper()}{setup.graph[1:]}.",
        ),
    ]
    if run.labels:
        accuracy = run.summary.accuracy_per_agent if run.summary else []
        picture = label_bars(run.labels, accuracy, setup.attackers)
        note = OWNER_NOTE if run.private else ""
        figures.append(Figure("labels", "Records per agent", "Training records by class.", picture, note=note))
    if setup.agents <= MAX_DETAILED and sum(i != j for i, j, _ in edges) > MAX_NUMBERED:
        written = setup.agents <= MAX_WRITTEN
        values = f"Numbers: {meaning}, in percent" if written else f"Colours: {meaning}; hover for the percentage"
        caption = f"Rows are receivers, columns are senders. {values}."
        picture = weight_matrix(setup.agents, edges, setup.attackers)
        figures.append(Figure("weights", "Weight of each edge", caption, picture))
    relative = [(i, j, weight) for (i, j, _), weight in zip(setup.edges, run.relative_share(), strict=bool(shares))]
    if shares and (received := relative_weights(relative)):
        caption = (
            "Average weight of an agent's messages at its neighbours, divided by the weight they would have if all"
            f" messages counted equally (dotted line). {describe_extremes(received)}"
        )
        picture = weight_bars(received, setup.attackers)
        figures.append(Figure("received", "Average weight received (1 = equal share)", caption, picture))
    if any(r.phi for r in run.rounds):
        row = "an edge (receiver ← sender)" if has_row_per_edge(run) else "a sending agent (mean over its receivers)"
        positive, metric, negative = EFFECTS[run.value_function]
        caption = (
            f"Each row is {row}, each column a round or the mean of several. Blue: the message {positive} the"
            f" receiver's {metric} on the public set. Orange (narrow bars, or numbers with −): the message {negative}"
            " it."
        )
        figures.append(Figure("shapley", "Shapley value φ of each message", caption, shapley_heat_map(run)))
    return figures


def _describe_attackers(run: Run) -> str:
    """Name the attackers by kind."""
    kinds: dict[str, list[str]] = {}
    for i, kind in run.setup.attackers.items():
        kinds.setdefault(kind, []).append(str(i))
    named = "; ".join(f"{ATTACKS.get(kind, kind)}: {', '.join(agents)}" for kind, agents in kinds.items())
    return f" An asterisk and a dashed ring mark an attacker ({named})." if named else ""


def _describe_graph(run: Run, meaning: str) -> str:
    if run.setup.agents > MAX_DETAILED:
        return f"Lines connect neighbours. At most {plain(MAX_LINKS)} are drawn: those with the largest weights."
    ring = ", with a ring of its records by class" if run.labels else ""
    return (
        f"Each arrow is a message; its width shows the {meaning}. Each circle is an agent{ring}. Numbers are"
        " percentages, if there is room for them. The small number inside a circle is the weight of the agent's own"
        " message."
    )
