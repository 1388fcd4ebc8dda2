"""The figures of a run, in the page's order: for the page, and as files of their own."""

from dataclasses import dataclass
from itertools import accumulate

from pdsl.report.curves import curves
from pdsl.report.document import figure
from pdsl.report.graph import DETAILED, LINKS, NUMBERED, graph
from pdsl.report.heard import extremes, fair_shares, heard
from pdsl.report.heat import by_edge, heat_map
from pdsl.report.holdings import holdings
from pdsl.report.markup import words
from pdsl.report.numbers import epsilon, exact_percent, exact_size, percents, plain, size
from pdsl.report.picture import Picture
from pdsl.report.reading import Run
from pdsl.report.weights import WRITTEN, matrix

WORTH = {  # by shapley.value: what a message of positive value did, to what, and one of negative value
    "accuracy": ("raised", "accuracy", "lowered"),
    "loss": ("lowered", "loss", "raised"),
    "centred": ("lowered", "loss with centred logits", "raised"),
}
FOR_OWNER = "For the data owner only: exact counts of private records, which no ε covers. Do not pass this page on."
SPOILT = {"flipped": "labels flipped", "noise": "noise sent", "idle": "zeros sent"}


@dataclass(frozen=True)
class Figure:
    name: str  # of its file
    title: str
    caption: str
    picture: Picture | None  # None: nothing was measured
    above: str = ""  # a line between title and picture

    def html(self) -> str:
        above = words("p", self.above, class_="described") if self.above else ""
        nothing = words("p", "Nothing was measured.", class_="none")
        return figure(self.title, self.caption, above + (self.picture.html() if self.picture else nothing))


def figures(run: Run) -> list[Figure]:
    """All of a run's figures."""
    return [*learning(run), *spending(run), *helping(run)]


def learning(run: Run) -> list[Figure]:
    accuracy = curves(
        "accuracy",
        run.rows,
        {"mean over agents": "accuracy", "mean model": "accuracy_of_mean"},
        percents,
        exact_percent,
        top=1,
        band=("worst to best agent", "accuracy_min", "accuracy_max"),
    )
    loss = curves(
        "loss", run.rows, {"mean over agents": "loss"}, plain, band=("best to worst agent", "loss_min", "loss_max")
    )
    consensus = curves("consensus distance", run.rows, {"consensus distance": "consensus"}, plain)
    so_far = accumulate(row["bytes"] or 0 for row in run.rows)
    sent = curves(
        "sent between agents",
        [{**row, "sent": total} for row, total in zip(run.rows, so_far, strict=True)],
        {"sent so far": "sent"},
        size,
        exact_size,
    )
    return [
        Figure("accuracy", "Accuracy", "On test data, in the rounds that were evaluated.", accuracy),
        Figure("loss", "Loss", "On test data.", loss),
        Figure(
            "consensus",
            "Consensus distance",
            "How far, on average, an agent's model lies from the mean of all.",
            consensus,
        ),
        Figure("bytes", "Sent between agents", "Bytes of all messages so far, over all edges.", sent),
    ]


def spending(run: Run) -> list[Figure]:
    """ε after each round and, where a total was set, the budget above it; nothing for a run without noise."""
    if all(row["epsilon"] is None for row in run.rows):
        return []
    rows = [{**row, "budget": run.budget} for row in run.rows]
    lines = {"ε spent": "epsilon"} | ({} if run.budget is None else {"budget": "budget"})
    caption = "Total so far of the agent that has spent most, after each round."
    return [Figure("epsilon", "ε spent", caption, curves("ε spent", rows, lines, plain, epsilon))]


def helping(run: Run) -> list[Figure]:
    """Who holds what, who listens to whom and, where messages are valued, what they were worth."""
    agents, shares = run.setup["agents"], run.mean_share()
    weights = shares or [omega for *_, omega in run.setup["edges"]]
    edges = [(i, j, weight) for (i, j, _), weight in zip(run.setup["edges"], weights, strict=True)]
    meaning = "share its receiver gives it, mean over the run" if shares else "mixing weight ω"
    drawn = [
        Figure(
            "graph",
            "Who listens to whom",
            _about_the_graph(agents, meaning, bool(run.labels)) + _about_rogues(run),
            graph(agents, run.labels, edges, run.rogues),
            above=f"{run.setup['graph'][:1].upper()}{run.setup['graph'][1:]}.",
        ),
    ]
    if run.labels:
        accuracy = run.summary["accuracy_per_agent"] if run.summary else []
        note = FOR_OWNER if run.private else ""
        picture = holdings(run.labels, accuracy, run.rogues)
        drawn.append(Figure("holdings", "What each agent holds", "Records by class.", picture, above=note))
    if agents <= DETAILED and sum(i != j for i, j, _ in edges) > NUMBERED:
        form = "in percent" if agents <= WRITTEN else "the deeper the larger, each in percent under the pointer"
        caption = f"Of a message, the {meaning}: {form}. Rows are receivers, columns senders."
        drawn.append(Figure("weights", "The weight of every edge", caption, matrix(agents, edges, run.rogues)))
    if shares and (fair := fair_shares(edges)):
        caption = (
            "The share an agent's messages were given by its neighbours, over the share they would have if all were"
            f" weighed alike (dotted). {extremes(fair)}"
        )
        drawn.append(Figure("heard", "Who is heard", caption, heard(fair, run.rogues)))
    if any(row["phi"] for row in run.rows):
        rows = "an edge, receiver ← sender" if by_edge(run) else "a sending agent, its mean over receivers"
        good, of_what, bad = WORTH[run.worth]
        caption = (
            f"A row is {rows}; a column is a round or the mean of several. Blue messages {good} the receiver's"
            f" {of_what} on the public set, orange ones (narrow bars, or numbers with a −) {bad} it."
        )
        drawn.append(Figure("shapley", "What each message was worth: Shapley value φ", caption, heat_map(run)))
    return drawn


def _about_rogues(run: Run) -> str:
    """Who they are, kind by kind."""
    kinds = dict.fromkeys(run.rogues.values())
    of_kind = {kind: ", ".join(str(i) for i, other in run.rogues.items() if other == kind) for kind in kinds}
    told = "; ".join(f"{SPOILT.get(kind, kind)}: {who}" for kind, who in of_kind.items())
    return f" An asterisk and a dashed ring are a rogue, who spoils what it sends ({told})." if told else ""


def _about_the_graph(agents: int, meaning: str, labels: bool) -> str:
    if agents > DETAILED:
        return f"Lines join neighbours; at most the {plain(LINKS)} heaviest are drawn."
    return (
        f"An arrow is a message, wider with the {meaning}. A circle is an agent"
        f"{', coloured by the classes it holds' if labels else ''}. Numbers, where there is room, are percent; inside a"
        " circle, under the agent's own, what it gives its own message."
    )
