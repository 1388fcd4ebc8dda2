"""A comparison on the terminal."""

from rich.table import Table

from pdsl.compare.verdict import LEVEL, Comparison, Line
from pdsl.errors import PdslError
from pdsl.report.numbers import duration, plain, size
from pdsl.rounded import rounded_up

HEADINGS = (
    "algorithm",
    "rate",
    "accuracy",
    "mean model",
    "loss",
    "to level",
    "sent",
    "time",
    "total ε",
)


def rates(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as e:
        raise PdslError(f"--grid {text}: not numbers with commas between, like 0.5,1,2") from e


def cells(line: Line) -> list[str]:
    """A line of the table as text, in the order of HEADINGS."""
    if line.accuracy is None:
        return [line.algorithm, "—", "failed", *["—"] * (len(HEADINGS) - 3)]
    spread = "" if line.deviation is None else f" ± {line.deviation:.4f}"
    return [
        line.algorithm,
        plain(line.learning_rate),
        f"{line.accuracy:.4f}{spread}",
        f"{line.accuracy_of_mean:.4f}",
        plain(line.loss),
        plain(line.rounds_to_level),
        size(line.bytes or 0),
        duration(line.seconds),
        "no noise" if line.epsilon is None else rounded_up(line.epsilon),
    ]


def caption(comparison: Comparison) -> str:
    p = comparison.plan
    runs = f"{len(p.seeds)} seeds ± deviation" if len(p.seeds) > 1 else "1 seed"
    return (
        f"Accuracy: mean over agents and {runs}. Learning rate: the best of"
        f" {', '.join(f'{rate:g}' for rate in p.grid)} on the public set, tried on seed {p.seeds[0]}. To level: the"
        f" first round with an accuracy of {comparison.level:.3f}, {LEVEL:.0%} of the best run's. ε is that of one run:"
        " on data that matter, every trial would spend its own."
    )


def table(comparison: Comparison) -> Table:
    """The paper's five fit 80 characters: the words of a heading stand below each other."""
    shown = Table(box=None, header_style="bold", padding=(0, 1), pad_edge=False)
    for heading in HEADINGS:
        shown.add_column(heading.replace(" ", "\n"), no_wrap=True)
    for line in comparison.lines:
        shown.add_row(*cells(line))
    return shown


def below(comparison: Comparison) -> str:
    """What is said under the table: what it shows, and what failed."""
    return "\n".join([caption(comparison), *(f"failed: {reason}" for reason in comparison.failed)])
