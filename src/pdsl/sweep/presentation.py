"""The result of a comparison in words and as a table on the terminal."""

from rich.table import Table

from pdsl.metrics import BASELINES
from pdsl.privacy.statement import SEEDED
from pdsl.report.metric import Metric
from pdsl.settings import PrivacySettings
from pdsl.sweep.comparison import ACCURACY, LEVEL, Comparison, ComparisonPlan, Line
from pdsl.sweep.significance import CONFIDENCE, MIN_PAIRS
from pdsl.sweep.tuning import Edge
from pdsl.training.baselines import describe_gain
from pdsl.utils.format import duration, format_epsilon, plain, size

WORSE = "*"  # marks an accuracy that is significantly below the best


def headings(comparison: Comparison) -> list[str]:
    reached = f"rounds to {_level(comparison)}"
    return ["algorithm", "rate", comparison.metric.label, "mean model", "loss", reached, "sent", "time", "total ε"]


def _level(comparison: Comparison) -> str:
    return f"{comparison.level:.1%}" if comparison.metric.is_fraction else plain(comparison.level)


def cells(line: Line, metric: Metric = ACCURACY) -> list[str]:
    """A line of the table as text, in the order of the headings."""
    form = "{:.4f}" if metric.is_fraction else "{:.4g}"
    if line.accuracy is None:
        return [line.algorithm, "—", "failed", *["—"] * 6]
    spread = "" if line.deviation is None else f" ± {form.format(line.deviation)}"
    return [
        line.algorithm,
        plain(line.learning_rate),
        f"{form.format(line.accuracy)}{spread}{WORSE * line.is_worse}",
        form.format(line.accuracy_of_mean),
        plain(line.loss),
        plain(line.rounds_to_level),
        size(line.bytes or 0),
        duration(line.seconds),
        "no noise" if line.epsilon is None else format_epsilon(line.epsilon),
    ]


def caption(comparison: Comparison) -> str:
    p, m = comparison.plan, comparison.metric
    runs = f"{len(p.seeds)} seeds ± deviation" if len(p.seeds) > 1 else "1 seed"
    rates = ", ".join(f"{rate:g}" for rate in p.grid)
    seeded = f" {SEEDED[:1].upper()}{SEEDED[1:]}." if is_seeded(p) else ""
    return (
        f"{m.title}: mean over agents and {runs}. {WORSE}: significantly worse than the first (paired t-test over"
        f" seeds, {CONFIDENCE:.0%}). Learning rate: the best of {rates} on the public set, tried on seed {p.seeds[0]}."
        f" To {_level(comparison)}: the first round with that {m.label}, {1 - LEVEL:.0%} worse than the best run's."
        f" ε is that of one run: on private data, every trial would spend its own.{seeded}"
    )


def is_seeded(plan: ComparisonPlan) -> bool:
    """Whether the runs have noise from the seed: their ε protects nobody."""
    privacy = PrivacySettings(**plan.base["privacy"])
    return privacy.mode != "none" and privacy.randomness == "seeded"


def headline(comparison: Comparison) -> str:
    """Name the winner, if the differences over seeds are significant; else say what is not decided."""
    (first, *others), m = comparison.lines, comparison.metric
    if first.accuracy is None:
        return "No run has finished."
    reached = f"{first.algorithm} reaches " + (
        f"{m.form(first.accuracy)} {m.label}" if m.is_fraction else f"{m.label} {m.form(first.accuracy)}"
    )
    if not any(line.accuracy is not None for line in others):
        return f"{reached}."
    if comparison.winner is not None:
        others_are = "every other algorithm" if len(others) > 1 else others[0].algorithm
        return f"{reached}, significantly better than {others_are}."
    rivals = " and ".join(f"{line.algorithm} ({m.form(line.accuracy)})" for line in comparison.undecided)
    seeds = min(sum(value is not None for value in line.accuracy_per_seed) for line in [first, *comparison.undecided])
    if seeds < MIN_PAIRS:
        reason = f"{seeds} seed{'s are' if seeds != 1 else ' is'} too few to test; use --seeds {MIN_PAIRS} or more"
    else:
        reason = f"the difference over {seeds} seeds is not significant; more --seeds may decide"
    return f"Not decided: {reached}, and {rivals} may be as good: {reason}."


def describe_edges(comparison: Comparison) -> list[str]:
    """A line for each algorithm whose learning rates went beyond the grid, or whose best rate is at the edge."""
    found = []
    for line in comparison.lines:
        added = [rate for rate in line.rates if rate not in comparison.plan.grid]
        rates = ", ".join(f"{rate:g}" for rate in added)
        also = f" (added to the grid: {rates})" if added else ""
        if line.edge is not None:
            extreme, beyond = ("smallest", "smaller") if line.edge is Edge.LOWER else ("largest", "larger")
            found.append(
                f"{line.algorithm}: the best learning rate, {plain(line.learning_rate)}, is the {extreme} that was"
                f" tried{also}; a {beyond} one may be better: extend --grid"
            )
        elif added:
            were = "was" if len(added) == 1 else "were"
            found.append(
                f"{line.algorithm}: the best learning rate was at the edge of the grid, so {rates} {were} added"
            )
    return found


def baseline_cells(comparison: Comparison) -> list[list[str]]:
    """A line of the table for each baseline: its name and metric."""
    form = "{:.4f}" if comparison.metric.is_fraction else "{:.4g}"
    empty = ["—"] * (len(headings(comparison)) - 3)
    return [
        [BASELINES[name], "—", "diverged" if value is None else form.format(value), *empty]
        for name, value in comparison.baselines.items()
    ]


def describe_worth(comparison: Comparison) -> list[str]:
    """What collaboration was worth with the best algorithm, in one sentence; none without baselines."""
    best, m = comparison.lines[0].accuracy_of_mean, comparison.metric
    if best is None:
        return []
    sentence = describe_gain(best, dict(comparison.baselines), m.name, m.higher_is_better)
    return [f"{comparison.lines[0].algorithm}: {sentence}"] if sentence else []


def table(comparison: Comparison) -> Table:
    """The table for the terminal. Headings have two lines, so that the paper's five methods fit 80 characters."""
    rich_table = Table(box=None, header_style="bold", padding=(0, 1), pad_edge=False)
    for heading in headings(comparison):
        rich_table.add_column(heading.removeprefix("rounds ").replace(" ", "\n"), no_wrap=True)
    for line in comparison.lines:
        rich_table.add_row(*cells(line, comparison.metric))
    for row in baseline_cells(comparison):
        rich_table.add_row(*row)
    return rich_table


def footer(comparison: Comparison) -> str:
    """Text below the table: the headline, the caption, the edges of grids and the failed runs."""
    failed = (f"failed: {reason}" for reason in comparison.failed)
    lines = [headline(comparison), *describe_worth(comparison), caption(comparison), *describe_edges(comparison)]
    return "\n".join([*lines, *failed])
