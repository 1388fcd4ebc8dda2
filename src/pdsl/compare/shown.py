"""A comparison on the terminal."""

from rich.table import Table

from pdsl.compare.verdict import Comparison, Line
from pdsl.errors import PdslError
from pdsl.report.numbers import duration, plain, size

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
        "no noise" if line.epsilon is None else f"{line.epsilon:.4g}",
    ]


def caption(comparison: Comparison) -> str:
    p = comparison.plan
    return (
        f"Accuracy: mean over agents and {len(p.seeds)} seeds ± deviation. Learning rate: the best of"
        f" {', '.join(f'{rate:g}' for rate in p.grid)} on the public set, tried on seed {p.seeds[0]}. Level:"
        f" {comparison.level:.3f}. ε is that of one run: on data that matter, every trial would spend its own."
    )


def table(comparison: Comparison) -> Table:
    shown = Table(*HEADINGS, box=None, header_style="bold", caption=caption(comparison), caption_justify="left")
    for line in comparison.lines:
        shown.add_row(*cells(line))
    for line in comparison.lines:
        for reason in line.failed:
            shown.add_row("failed", reason)
    return shown
