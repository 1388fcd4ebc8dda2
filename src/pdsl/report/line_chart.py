"""Line charts over rounds: metrics of one run with a band, or one line per run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from markupsafe import Markup

from pdsl.report.svg import LINE, LegendEntry, Picture, Point, element, join, path, text
from pdsl.utils.format import chunks, exact, ticks_between, ticks_to

WIDTH, HEIGHT = 520, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 510, 12, 212
MAX_POINTS = 150  # of a line; more could not be told apart
STYLES = ("line first", "line second")
DASHES = ("", "7 4", "2 4", "10 3 2 3", "4 2")
MIN_NAME_DISTANCE = 16  # between the names of two lines
MAX_NAME = 20  # letters shown of a name
NAME_SIZE = 13.5  # font size of a name on a narrow screen, where it is largest

Form = Callable[[float], str]
Points = Sequence[tuple[int, float]]  # (round, value)
Values = Sequence[float | None]  # one per round; None: not measured


class Band(NamedTuple):
    """An area between two agents' values: the names of its lower and upper side, and their values."""

    lower: str
    upper: str
    low: Values
    high: Values

    @property
    def label(self) -> str:
        return f"{self.lower} to {self.upper} agent"


@dataclass(frozen=True)
class Axes:
    """Scales: rounds to the right, values upwards from 0 to the last tick."""

    first: int
    last: int
    ticks: list[float]
    right: float = RIGHT

    def x(self, t: int) -> float:
        if self.first == self.last:
            return (LEFT + self.right) / 2
        return LEFT + (self.right - LEFT) * (t - self.first) / (self.last - self.first)

    def y(self, value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * value / self.ticks[-1]

    def place(self, points: Points) -> list[Point]:
        return [(self.x(t), self.y(value)) for t, value in points]

    def marks(self, form: Form) -> Markup:
        """Grid lines and tick labels."""
        lines = "".join(f"M{LEFT} {self.y(tick):.1f}H{self.right:.1f}" for tick in self.ticks)
        marks = [element("path", d=lines, class_="grid")]
        marks += [text(form(tick), LEFT - 8, self.y(tick) + 4, class_="end") for tick in self.ticks]
        rounds = ticks_between(self.first, self.last)
        marks += [text(str(t), self.x(t), BOTTOM + 18, class_="middle") for t in rounds]
        return join([*marks, text("round", (LEFT + self.right) / 2, HEIGHT - 3, class_="middle soft")])

    def tips(self, tips: Mapping[int, Sequence[str]]) -> Markup:
        """One invisible strip per round, which shows the lines of its tip under the pointer."""
        sides = [LEFT, *((self.x(a) + self.x(b)) / 2 for a, b in pairwise(tips)), self.right]
        strips = []
        for (t, lines), (start, end) in zip(tips.items(), pairwise(sides), strict=True):
            shape = f"M{start:.1f} {TOP}H{end:.1f}V{BOTTOM}H{start:.1f}"
            strips.append(element("path", d=shape, data_tip="\n".join([f"round {t}", *lines])))
        return element("g", *strips, class_="hit")


def metric_chart(
    axis: str,
    rounds: Sequence[int],
    lines: Mapping[str, Values],  # at most two
    form: Form,  # of values on the axis
    tip_form: Form = exact,  # of values in tips
    top: float | None = None,
    band: Band | None = None,
) -> Picture | None:
    """Metrics of one run, from 0 to `top` or the largest value; None if nothing was measured."""
    kept = [k for k in range(len(rounds)) if any(values[k] is not None for values in lines.values())]
    kept = [kept[part[-1]] for part in chunks(len(kept), MAX_POINTS)]
    if not kept:
        return None
    if band and not any(band.low[k] is not None and band.high[k] is not None for k in kept):
        band = None

    def points(values: Values) -> list[tuple[int, float]]:
        return [(rounds[k], value) for k in kept if (value := values[k]) is not None]

    drawn = {label: points(values) for label, values in lines.items()}
    sides = {f"{band.lower} agent": points(band.low), f"{band.upper} agent": points(band.high)} if band else {}
    largest = max(value for line in (*drawn.values(), *sides.values()) for _, value in line)
    axes = Axes(rounds[0], rounds[-1], ticks_to(top or largest or 1))  # if all values are 0, the axis ends at 1

    marks = [axes.marks(form)]
    if sides:
        low, high = map(axes.place, sides.values())
        marks.append(element("path", d=path(low + high[::-1]) + "z", class_="band"))
    for style, line in zip(STYLES, drawn.values(), strict=False):
        if line:
            marks.append(element("path", d=path(axes.place(line)), class_=style + " lone" * (len(line) == 1)))
    marks.append(axes.tips(_tips([rounds[k] for k in kept], drawn | sides, tip_form)))
    label = f"{' and '.join(lines)} over rounds {axes.first} to {axes.last}"
    return Picture(WIDTH, HEIGHT, label, join(marks), _legend(list(lines), band), axis)


def line_chart(
    series: Mapping[str, Points], axis: str, form: Form, tip_form: Form = exact, top: float | None = None
) -> Picture | None:
    """One line per series with its name at the end, from 0 to `top` or the largest value; None without points."""
    series = {name: points for name, points in series.items() if points}
    if not series:
        return None
    rounds = sorted({t for points in series.values() for t, _ in points})
    names = {name: name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…" for name in series}
    right = WIDTH - 38 - max(map(_name_width, names.values()))
    largest = max(value for points in series.values() for _, value in points)
    axes = Axes(rounds[0], rounds[-1], ticks_to(top or largest or 1), right)

    marks = [axes.marks(form)]
    labels = []
    for n, (name, points) in enumerate(series.items()):
        kept = [points[part[-1]] for part in chunks(len(points), MAX_POINTS)]
        marks.append(_line(n, path(axes.place(kept)), " lone" * (len(kept) == 1)))
        labels.append((axes.y(points[-1][1]), n, name))
    for y, n, name in _spread(labels):
        marks += [_line(n, f"M{right + 8:.1f} {y:.1f}h22"), text(names[name], right + 36, y + 4, class_="name")]
    marks.append(axes.tips(_tips([rounds[part[-1]] for part in chunks(len(rounds), MAX_POINTS)], series, tip_form)))
    label = f"{axis} of {', '.join(series)} over rounds {axes.first} to {axes.last}"
    return Picture(WIDTH, HEIGHT, label, join(marks), axis=axis)


def _tips(rounds: Sequence[int], series: Mapping[str, Points], form: Form) -> dict[int, list[str]]:
    """The values of each round, one line per series that has one."""
    values = {name: dict(points) for name, points in series.items()}
    return {t: [f"{name} {form(of[t])}" for name, of in values.items() if t in of] for t in rounds}


def _legend(lines: list[str], band: Band | None) -> tuple[LegendEntry, ...]:
    entries = [
        LegendEntry(label, element("path", d="M2 6H28", class_=style), LINE)
        for label, style in zip(lines, STYLES, strict=False)
    ]
    if band:
        entries.append(LegendEntry(band.label, element("path", d="M0 0H30V12H0z", class_="band"), LINE))
    return tuple(entries) if len(entries) > 1 else ()


def _name_width(name: str) -> float:
    """Approximate width of a name as drawn."""
    return NAME_SIZE * sum(0.72 if letter.isupper() else 0.62 for letter in name)


def _line(n: int, shape: str, extra: str = "") -> Markup:
    """A path with the colour and dashes of line n."""
    dashes = DASHES[n % len(DASHES)]
    style = {"stroke_dasharray": dashes} if dashes else {}
    return element("path", d=shape, class_=f"line own l{n % 10}{extra}", **style)


def _spread(labels: list[tuple[float, int, str]]) -> list[tuple[float, int, str]]:
    """Move names up or down so that none overlap."""
    placed: list[tuple[float, int, str]] = []
    for y, n, name in sorted(labels):
        placed.append((max(y, placed[-1][0] + MIN_NAME_DISTANCE) if placed else y, n, name))
    excess = max(0.0, placed[-1][0] - BOTTOM)
    return [(y - excess, n, name) for y, n, name in placed]
