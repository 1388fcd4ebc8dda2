"""Line charts over rounds: metrics of one run with a band, or one line per run, agent or algorithm."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from statistics import quantiles
from typing import NamedTuple

from markupsafe import Markup

from pdsl.report.svg import LINE, LegendEntry, Picture, Point, element, join, path, text
from pdsl.utils.format import chunks, exact, plain, ticks_between, ticks_in

WIDTH, HEIGHT = 520, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 510, 12, 212
MAX_POINTS = 150  # of a line; more could not be told apart
STYLES = ("line first", "line second")
DASHES = ("", "7 4", "2 4", "10 3 2 3", "4 2")
MAX_BOLD = 6  # lines; more are drawn thin
MIN_NAME_DISTANCE = 16  # between the names of two lines
MAX_NAME = 20  # letters shown of a name
NAME_SIZE = 13.5  # font size of a name on a narrow screen, where it is largest
CUT = 0.1  # part of the points, at most, that may lie outside of the axis
MAX_KEPT = 0.6  # of the whole range: an axis that would keep more shows all of it
MARGIN = 0.04  # of the range, beyond the values

Form = Callable[[float], str]
Points = Sequence[tuple[int, float]]  # (round, value)
Values = Sequence[float | None]  # one per round; None: not measured


@dataclass(frozen=True)
class Scale:
    """The vertical axis: how values are written, and which of them it shows."""

    form: Form = plain  # of ticks
    tip_form: Form = exact  # of values in tips
    unit: str = "plain"  # name of `form` for the script that zooms: plain, percent or size
    lowest: float | None = 0.0  # start of the axis; None: at the values
    low: float = -inf  # limits of the values
    high: float = inf
    cut: str = ""  # "below" or "above": the side where a few bad values of the first rounds are left out


class Band(NamedTuple):
    """An area between two lines: the names of its lower and upper side, and their values."""

    lower: str
    upper: str
    low: Values
    high: Values

    @property
    def label(self) -> str:
        return f"{self.lower} to {self.upper} agent"


@dataclass(frozen=True)
class Axes:
    """Scales: rounds to the right, values upwards from the first tick to the last."""

    first: int
    last: int
    ticks: list[float]
    right: float = RIGHT

    def x(self, t: int) -> float:
        if self.first == self.last:
            return (LEFT + self.right) / 2
        return LEFT + (self.right - LEFT) * (t - self.first) / (self.last - self.first)

    def y(self, value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (value - self.ticks[0]) / (self.ticks[-1] - self.ticks[0])

    def place(self, points: Points) -> list[Point]:
        return [(self.x(t), self.y(value)) for t, value in points]

    def marks(self, form: Form) -> Markup:
        """Grid lines and tick labels; the script replaces them when it zooms."""
        lines = "".join(f"M{LEFT} {self.y(tick):.1f}H{self.right:.1f}" for tick in self.ticks)
        marks = [element("path", d=lines, class_="grid")]
        marks += [text(form(tick), LEFT - 8, self.y(tick) + 4, class_="end") for tick in self.ticks]
        rounds = ticks_between(self.first, self.last)
        marks += [text(str(t), self.x(t), BOTTOM + 18, class_="middle") for t in rounds]
        name = text("round", (LEFT + self.right) / 2, HEIGHT - 3, class_="middle soft")
        return element("g", *marks, class_="axes") + name

    def tips(self, tips: Mapping[int, Sequence[str]]) -> Markup:
        """One invisible strip per round, which shows the lines of its tip under the pointer."""
        sides = [LEFT, *((self.x(a) + self.x(b)) / 2 for a, b in pairwise(tips)), self.right]
        strips = []
        for (t, lines), (start, end) in zip(tips.items(), pairwise(sides), strict=True):
            shape = f"M{start:.1f} {TOP}H{end:.1f}V{BOTTOM}H{start:.1f}"
            strips.append(element("path", d=shape, data_tip="\n".join([f"round {t}", *lines])))
        return element("g", *strips, class_="hit")

    def plot(self, shapes: Sequence[Markup], tips: Mapping[int, Sequence[str]]) -> Markup:
        """Shapes and tips, clipped to the area between the axes."""
        inside = element("g", *shapes, class_="zoom")
        name = f"clip-{hashlib.sha256(f'{self}{inside}'.encode()).hexdigest()[:10]}"  # unique within a report
        box = element("rect", x=LEFT - 2, y=TOP - 5, width=self.right - LEFT + 4, height=BOTTOM - TOP + 7)
        clip = element("clipPath", box, id=name)
        return clip + element("g", inside, self.tips(tips), clip_path=f"url(#{name})")


@dataclass(frozen=True)
class Range:
    """The values that an axis shows, and all values."""

    low: float
    high: float
    whole: tuple[float, float]

    @property
    def is_cut(self) -> bool:
        return (self.low, self.high) != self.whole


def choose_range(scale: Scale, lows: Sequence[float], highs: Sequence[float]) -> Range:
    """The range of an axis for the lowest and highest values of each round."""
    lowest, highest = min(lows), max(highs)
    whole = _widen(scale, lowest, highest)
    if scale.cut == "below" and len(lows) > 1:
        lowest = _cut(lowest, quantiles(lows, n=round(1 / CUT))[0], highest)
    if scale.cut == "above" and len(highs) > 1:
        highest = _cut(highest, quantiles(highs, n=round(1 / CUT))[-1], lowest)
    return Range(*_widen(scale, lowest, highest), whole)


def _cut(extreme: float, usual: float, other: float) -> float:
    """The usual value in place of the extreme, if that shows the rest much larger."""
    return usual if abs(usual - other) < MAX_KEPT * abs(extreme - other) else extreme


def _widen(scale: Scale, low: float, high: float) -> tuple[float, float]:
    """A margin around the values, within the limits; the axis starts at `lowest`, if that is set."""
    margin = MARGIN * (high - low) or 0.05 * abs(high) or 1.0
    if scale.lowest is not None:
        return min(low, scale.lowest), high if high > scale.lowest else scale.lowest + 1
    return max(low - margin, scale.low), min(high + margin, scale.high)


def metric_chart(
    axis: str,
    rounds: Sequence[int],
    lines: Mapping[str, Values],  # at most two
    scale: Scale,
    band: Band | None = None,
    notes: Mapping[int, Sequence[str]] | None = None,  # further lines of the tip of a round
) -> Picture | None:
    """Metrics of one run over its rounds; None if nothing was measured."""
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
    shown = choose_range(scale, *_envelopes([*drawn.values(), *sides.values()]))
    axes = Axes(rounds[0], rounds[-1], ticks_in(shown.low, shown.high))

    shapes = []
    if sides:
        low, high = map(axes.place, sides.values())
        shapes.append(element("path", d=path(low + high[::-1]) + "z", class_="band"))
    for style, line in zip(STYLES, drawn.values(), strict=False):
        if line:
            shapes.append(element("path", d=path(axes.place(line)), class_=style + " lone" * (len(line) == 1)))
    tips = _tips([rounds[k] for k in kept], drawn | sides, scale.tip_form)
    if notes:
        tips = {t: [*told, *notes.get(t, ())] for t, told in tips.items()}
    label = f"{' and '.join(lines)} over rounds {axes.first} to {axes.last}"
    marks = axes.marks(scale.form) + axes.plot(shapes, tips)
    return Picture(WIDTH, HEIGHT, label, marks, _legend(list(lines), band), axis, _zoom_data(axes, shown, scale))


def line_chart(
    series: Mapping[str, Points],
    axis: str,
    scale: Scale,
    bands: Mapping[str, tuple[Points, Points]] | None = None,  # low and high of some series
) -> Picture | None:
    """One line per series with its name at the end, some with a band; None without points."""
    series = {name: points for name, points in series.items() if points}
    if not series:
        return None
    rounds = sorted({t for points in series.values() for t, _ in points})
    names = {name: name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…" for name in series}
    right = WIDTH - 38 - max(map(_name_width, names.values()))
    bands = {name: sides for name, sides in (bands or {}).items() if name in series and sides[0]}
    shown = choose_range(scale, *_envelopes([*series.values(), *(side for sides in bands.values() for side in sides)]))
    axes = Axes(rounds[0], rounds[-1], ticks_in(shown.low, shown.high), right)

    shapes, lines, labels = [], [], []
    for n, (name, points) in enumerate(series.items()):
        if name in bands:
            low, high = (axes.place(_thin(side)) for side in bands[name])
            shapes.append(element("path", d=path(low + high[::-1]) + "z", class_=f"spread l{n % 10}"))
        kept = _thin(points)
        lines.append(_line(n, path(axes.place(kept)), " lone" * (len(kept) == 1) + " thin" * (len(series) > MAX_BOLD)))
        labels.append((min(max(axes.y(points[-1][1]), TOP), BOTTOM), n, name))
    marks = [axes.marks(scale.form)]
    for y, n, name in _spread(labels):
        marks += [_line(n, f"M{right + 8:.1f} {y:.1f}h22"), text(names[name], right + 36, y + 4, class_="name")]
    tips = _tips([rounds[part[-1]] for part in chunks(len(rounds), MAX_POINTS)], series, scale.tip_form)
    marks.append(axes.plot([*shapes, *lines], tips))
    label = f"{axis} of {', '.join(series)} over rounds {axes.first} to {axes.last}"
    return Picture(WIDTH, HEIGHT, label, join(marks), axis=axis, data=_zoom_data(axes, shown, scale))


def _thin(points: Points) -> list[tuple[int, float]]:
    return [points[part[-1]] for part in chunks(len(points), MAX_POINTS)]


def _envelopes(lines: Sequence[Points]) -> tuple[list[float], list[float]]:
    """The lowest and the highest value of each round."""
    low: dict[int, float] = {}
    high: dict[int, float] = {}
    for points in lines:
        for t, value in points:
            low[t], high[t] = min(value, low.get(t, inf)), max(value, high.get(t, -inf))
    return list(low.values()), list(high.values())


def _zoom_data(axes: Axes, shown: Range, scale: Scale) -> dict[str, str]:
    """Attributes for the script that zooms: the area of the plot, the ranges of both axes, the unit."""
    if axes.first == axes.last:
        return {}
    whole = ticks_in(*shown.whole)

    def view(ticks: Sequence[float]) -> str:
        return f"{axes.first} {axes.last} {ticks[0]:.12g} {ticks[-1]:.12g}"

    box = f"{LEFT} {axes.right:.1f} {TOP} {BOTTOM}"
    return {"data-box": box, "data-view": view(axes.ticks), "data-whole": view(whole), "data-unit": scale.unit}


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
