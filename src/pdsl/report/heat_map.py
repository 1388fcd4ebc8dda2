"""Heat maps: Shapley values of edges over rounds, and the matrix of edge weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import floor, log10
from statistics import quantiles
from typing import NamedTuple

from markupsafe import Markup

from pdsl.report.names import AgentNames
from pdsl.report.run_data import Run, mean_present
from pdsl.report.run_schema import Edge
from pdsl.report.svg import ATTACKER, SWATCH, LegendEntry, Picture, element, join, text
from pdsl.utils.format import chunks, nice, percent, plain, signed, span, ticks_between

WIDTH, TOP = 520, 66
MAX_EDGES = 60  # with more edges, a row is a sending agent
MAX_ROWS = 100  # with more agents, a row is a group of agents
MAX_COLUMNS = 60
MAX_CELLS = 3600  # with many rows there are fewer columns, to limit the size of the report
LETTER = 8.6  # width of a letter on a narrow screen, where text is largest
GAP = 4  # between receivers
TEXT_HEIGHT = 16  # of a row with room for text
STEPS = (0.05, 0.1, 0.2, 0.5)  # fractions of the colour scale at which the next colour starts

PAIR_LETTERS = 9  # of each of the two names of an edge

MATRIX_LEFT, MATRIX_TOP = 52.0, 44.0
MAX_WRITTEN = 16  # agents up to which each cell of the matrix has its number
DEPTHS = (0.2, 0.4, 0.6, 0.8)  # between the smallest and the largest weight: where the next colour starts


class Strip(NamedTuple):
    """A row of the Shapley heat map."""

    label: str
    tip: str  # the label with whole names
    group: int  # rows of different groups have a gap between them
    values: list[float | None]  # one per column; None if there was no message
    mean: float


@dataclass(frozen=True)
class Frame:
    """The layout that all rows share."""

    left: float  # of the first cell
    right: float  # of the last cell
    height: float  # of a row
    rounds: list[tuple[int, int]]  # first and last round of each column
    scale: float  # absolute value at which the colour scale ends
    decimals: int

    @property
    def cell_width(self) -> float:
        return (self.right - self.left) / len(self.rounds)

    @property
    def written(self) -> bool:
        """Whether cells have room for their values as text."""
        return self.height >= TEXT_HEIGHT and self.cell_width >= LETTER * len(signed(-self.scale, self.decimals))


def shapley_heat_map(run: Run) -> Picture:
    """Rows are edges or sending agents, columns are rounds or means over several. The run must have values."""
    rounds = [r for r in run.rounds if r.phi]
    count = len(run.setup.edges) if has_row_per_edge(run) else min(run.setup.agents, MAX_ROWS)
    columns = [[rounds[t] for t in part] for part in chunks(len(rounds), min(MAX_COLUMNS, MAX_CELLS // count))]
    spans = [(part[0].number, part[-1].number) for part in columns]
    parts = [*columns, rounds]
    strips = _strips(run, [[mean_present(phi) for phi in zip(*(r.phi for r in part), strict=True)] for part in parts])
    frame = _frame(strips, spans)

    marks = [_legend(frame.scale), text("mean φ", WIDTH - 2, TOP - 8, class_="end soft")]
    bottom = float(TOP)
    for k, strip in enumerate(strips):
        y = TOP + k * frame.height + GAP * strip.group
        marks.append(_draw(strip, y, frame, lettered=frame.height >= TEXT_HEIGHT or k % 2 == 0))
        bottom = y + frame.height
    for tick in ticks_between(spans[0][0], spans[-1][1]):
        column = next(c for c, (_, last) in enumerate(spans) if last >= tick)
        marks.append(text(str(tick), frame.left + frame.cell_width * (column + 0.5), bottom + 18, class_="middle"))
    marks.append(text("round", (frame.left + frame.right) / 2, bottom + 35, class_="middle soft"))
    label = f"Shapley values in {len(strips)} rows over rounds"
    return Picture(WIDTH, bottom + 39, label, join(marks), (ATTACKER,) if run.setup.attackers else ())


def has_row_per_edge(run: Run) -> bool:
    return len(run.setup.edges) <= MAX_EDGES


def _frame(strips: list[Strip], rounds: list[tuple[int, int]]) -> Frame:
    """Leave as much room for labels and means as the longest of them need."""
    scale = _scale([abs(value) for strip in strips for value in (*strip.values, strip.mean) if value is not None])
    decimals = max(0, 2 - floor(log10(scale)))
    labels = max(len(strip.label) for strip in strips)
    means = max(len(signed(strip.mean, decimals)) for strip in strips)
    height = TEXT_HEIGHT if len(strips) <= MAX_EDGES else 9
    return Frame(12 + LETTER * labels, WIDTH - 10 - LETTER * means, height, rounds, scale, decimals)


def _strips(run: Run, phi: list[list[float | None]]) -> list[Strip]:
    """One strip per edge; or per sending agent, as the mean over its receivers, itself included."""
    edges, names = run.setup.edges, run.setup.agent_names
    if has_row_per_edge(run):
        found = []
        for e, (i, j, _) in enumerate(edges):
            *values, mean = (column[e] for column in phi)
            receiver = replace(names, attackers={}).label(i, PAIR_LETTERS)
            tip = f"{names.name(i)} ← {names.name(j)}{'*' * (j in names.attackers)}"
            found.append(Strip(f"{receiver} ← {names.label(j, PAIR_LETTERS)}", tip, i, values, mean or 0.0))
        return found
    strips = []
    for part in chunks(run.setup.agents, MAX_ROWS):
        if sent := [e for e, (_, j, _) in enumerate(edges) if j in part]:
            *values, mean = (mean_present(column[e] for e in sent) for column in phi)
            label = names.label_span(part[0], part[-1])
            tip = names.full(part[0], part[-1]) if names.names else label
            strips.append(Strip(label, tip, 0, values, mean or 0.0))
    return strips


def _scale(sizes: list[float]) -> float:
    """A round number above 98 % of the sizes."""
    usual = quantiles(sizes, n=50)[-1] if len(sizes) > 1 else sizes[0]
    return nice(usual or max(sizes) or 1)  # if all are zero, any scale works


def _colour(value: float, scale: float) -> str:
    """The CSS class of a value: z near zero, p1 to p4 above, n1 to n4 below."""
    depth = sum(abs(value) >= step * scale for step in STEPS)
    return f"{'p' if value > 0 else 'n'}{depth}" if depth else "z"


def _draw(strip: Strip, y: float, frame: Frame, lettered: bool) -> Markup:
    width, height, middle = frame.cell_width, frame.height, y + frame.height / 2
    cells, texts = [], []
    for c, (value, (first, last)) in enumerate(zip(strip.values, frame.rounds, strict=True)):
        if value is None:
            continue
        x, number = frame.left + width * c, signed(value, frame.decimals)
        line, tip = f"M{x:.1f} {middle:.1f}h{max(width - 0.6, 1):.1f}", f"round {span(first, last)}: {number}"
        cells.append(_cell(line, _colour(value, frame.scale), 0 if frame.written else height - 2, data_tip=tip))
        if frame.written:
            tone = "middle tight deep" if abs(value) >= STEPS[2] * frame.scale else "middle tight"
            texts.append(text(number, x + width / 2, middle + 4, class_=tone))
    if lettered:
        texts.append(text(strip.label, frame.left - 8, middle + 4, class_="end small"))
        texts.append(text(signed(strip.mean, frame.decimals), WIDTH - 2, middle + 4, class_="end small"))
    return element("g", *cells, class_="heat", stroke_width=height - 2, data_of=strip.tip) + join(texts)


def _cell(line: str, colour: str, height: float, **attributes: str) -> Markup:
    """A bar. Given a `height`, negative values are narrower, so that the sign does not depend on colour."""
    narrow: dict[str, float] = {"stroke_width": 0.55 * height} if height and colour[0] == "n" else {}
    return element("path", d=line, class_=colour, **narrow, **attributes)


def _legend(scale: float) -> Markup:
    """The colours in order, with the value at which each starts."""
    names = ("n4", "n3", "n2", "n1", "z", "p1", "p2", "p3", "p4")
    bounds = [-step for step in reversed(STEPS)] + list(STEPS)
    width = WIDTH / len(names)
    lines = [_cell(f"M{width * k:.1f} 9h{width - 1:.1f}", name, 14) for k, name in enumerate(names)]
    texts = [
        text(plain(scale * bound), width * (k + 1), 32, class_="middle small tight") for k, bound in enumerate(bounds)
    ]
    return element("g", *lines, class_="heat", stroke_width=14) + join(texts)


def weight_matrix(agents: int, edges: Sequence[Edge], names: AgentNames) -> Picture:
    """One row per receiver, one column per sender. Above MAX_WRITTEN agents, a colour scale replaces the numbers."""
    room = LETTER * names.longest(PAIR_LETTERS)
    left, top = max(MATRIX_LEFT, 12 + room), max(MATRIX_TOP, 30 + room)
    side = (WIDTH - left) / agents
    lowest, highest = (pick(weight for *_, weight in edges) for pick in (min, max))
    rows: dict[int, list[Markup]] = {}
    texts = []
    for i, j, weight in edges:
        x, y = left + side * j, top + side * (i + 0.5)
        depth = sum(weight >= bound for bound in _bounds(lowest, highest)) if highest > lowest else 2
        tip = f"{names.name(i)} ← {names.name(j)}: {percent(weight)}"
        line = f"M{x + 0.5:.1f} {y:.1f}h{side - 1:.1f}"
        rows.setdefault(i, []).append(element("path", d=line, class_=depth_colour(depth), data_tip=tip))
        if agents <= MAX_WRITTEN:
            tone = "middle small deep" if depth >= 3 else "middle small"
            texts.append(text(f"{100 * weight:.0f}", x + side / 2, y + 4, class_=tone))
    cells = [element("g", *row, class_="heat", stroke_width=side - 1) for row in rows.values()]
    every = 1 if agents <= 20 else 2
    for k in range(agents):
        middle, name = side * (k + 0.5), names.label(k, PAIR_LETTERS)
        if k % every == 0 or k in names.attackers:
            above = name if k % every == 0 else "*"  # there is no room for the number
            texts.append(column_label(above, left + middle, top - 8, upright=not names.names))
            texts.append(text(name, left - 8, top + middle + 4, class_="end small"))
    texts.append(text("sender →", (left + WIDTH) / 2, 14, class_="middle soft"))
    texts.append(text("receiver ↓", 0, 14, class_="soft"))
    legend = [] if agents <= MAX_WRITTEN else _depth_legend(lowest, highest)
    legend += [ATTACKER] if names.attackers else []
    return Picture(
        WIDTH, top + side * agents + 2, f"weights between {agents} agents", join(cells + texts), tuple(legend)
    )


def column_label(label: str, x: float, y: float, upright: bool) -> Markup:
    """The label above a column: a number upright, a name along the column."""
    if upright:
        return text(label, x, y, class_="middle small")
    return text(label, x + 4, y, class_="small", transform=f"rotate(-90 {x + 4:.1f} {y:.1f})")


def _bounds(lowest: float, highest: float) -> list[float]:
    return [lowest + depth * (highest - lowest) for depth in DEPTHS]


def depth_colour(depth: int) -> str:
    return f"p{depth}" if depth else "z"


def _depth_legend(lowest: float, highest: float) -> list[LegendEntry]:
    """Each colour with the smallest weight that has it."""
    if highest == lowest:
        return [LegendEntry(f"{percent(lowest)}, all", _swatch(2), SWATCH)]
    starts = [lowest, *_bounds(lowest, highest)]
    return [LegendEntry(f"from {percent(weight)}", _swatch(depth), SWATCH) for depth, weight in enumerate(starts)]


def _swatch(depth: int) -> Markup:
    line = element("path", d=f"M0 6h{SWATCH:g}", class_=depth_colour(depth))
    return element("g", line, class_="heat", stroke_width=12)
