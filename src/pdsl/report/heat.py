"""The Shapley value φ of every edge over the rounds, as a heat map."""

from dataclasses import dataclass
from math import floor, log10
from statistics import fmean, quantiles

from pdsl.report.markup import element, words
from pdsl.report.numbers import agents, chunks, nice, plain, signed, span, ticks_between
from pdsl.report.picture import ROGUE, Picture
from pdsl.report.reading import Run

WIDTH, TOP = 520, 66
EDGES = 60  # beyond that many, a row is a sending agent
ROWS = 100  # beyond that many agents, a row stands for several
COLUMNS = 60
CELLS = 3600  # fewer columns where there are many rows: the page stays small
LETTER = 8.6  # what one takes on a narrow screen, where text is largest
GAP = 4  # between receivers
TALL = 16  # a row that has room for text
STEPS = (0.05, 0.1, 0.2, 0.5)  # of a large value: where a deeper colour begins

Strip = tuple[str, int, list[float]]  # a row of the map: its label, its group, a value per column and their mean


@dataclass(frozen=True)
class Frame:
    """What all rows have in common."""

    left: float  # where cells begin, and end
    right: float
    height: float  # of a row
    rounds: list[tuple[int, int]]  # of each column, the first and the last
    large: float  # the value at which colours are deepest, about
    decimals: int

    @property
    def width(self) -> float:
        """Of a cell."""
        return (self.right - self.left) / len(self.rounds)

    @property
    def written(self) -> bool:
        """Whether cells have room for their values as text."""
        return self.height >= TALL and self.width >= LETTER * len(signed(-self.large, self.decimals))


def heat_map(run: Run) -> Picture:
    """Columns are rounds, or means of several; rows are edges, or sending agents. Only for runs with values."""
    rows = [row for row in run.rows if row["phi"]]
    count = len(run.setup["edges"]) if by_edge(run) else min(run.setup["agents"], ROWS)
    columns = [[rows[t] for t in part] for part in chunks(len(rows), min(COLUMNS, CELLS // count))]
    rounds = [(part[0]["round"], part[-1]["round"]) for part in columns]
    parts = [*columns, rows]
    strips = _strips(
        run, [[fmean(of_edge) for of_edge in zip(*(row["phi"] for row in part), strict=True)] for part in parts]
    )
    frame = _frame(strips, rounds)

    marks = [_legend(frame.large), words("text", "mean φ", x=WIDTH - 2, y=TOP - 8, class_="end soft")]
    bottom = float(TOP)
    for k, strip in enumerate(strips):
        y = TOP + k * frame.height + GAP * strip[1]
        marks.append(_drawn(strip, y, frame, lettered=frame.height >= TALL or k % 2 == 0))
        bottom = y + frame.height
    for tick in ticks_between(rounds[0][0], rounds[-1][1]):
        at = next(c for c, (_, last) in enumerate(rounds) if last >= tick)
        x = frame.left + frame.width * (at + 0.5)
        marks.append(words("text", str(tick), x=x, y=bottom + 18, class_="middle"))
    marks.append(words("text", "round", x=(frame.left + frame.right) / 2, y=bottom + 35, class_="middle soft"))
    label, sign = f"Shapley values in {len(strips)} rows over rounds", (ROGUE,) if run.rogues else ()
    return Picture(WIDTH, bottom + 39, label, "".join(marks), sign)


def _frame(strips: list[Strip], rounds: list[tuple[int, int]]) -> Frame:
    """As much room for names and means as the longest of them take."""
    large = _large([abs(value) for *_, values in strips for value in values])
    decimals = max(0, 2 - floor(log10(large)))
    names = max(len(label) for label, *_ in strips)
    means = max(len(signed(values[-1], decimals)) for *_, values in strips)
    height = TALL if len(strips) <= EDGES else 9
    return Frame(12 + LETTER * names, WIDTH - 10 - LETTER * means, height, rounds, large, decimals)


def by_edge(run: Run) -> bool:
    return len(run.setup["edges"]) <= EDGES


def _strips(run: Run, phi: list[list[float]]) -> list[Strip]:
    """A strip per edge; or per sending agent, the mean over all who receive from it, itself included."""
    edges = run.setup["edges"]
    if by_edge(run):
        return [
            (f"{i} ← {agents(j, j, run.rogues)}", i, [column[e] for column in phi]) for e, (i, j, _) in enumerate(edges)
        ]
    strips = []
    for part in chunks(run.setup["agents"], ROWS):
        if sent := [e for e, (_, j, _) in enumerate(edges) if j in part]:
            who = agents(part[0], part[-1], run.rogues)
            strips.append((who, 0, [fmean(column[e] for e in sent) for column in phi]))
    return strips


def _large(sizes: list[float]) -> float:
    """A round number that all but the rarest values stay below; the colours are spread up to it."""
    usual = quantiles(sizes, n=50)[-1] if len(sizes) > 1 else sizes[0]
    return nice(usual or max(sizes) or 1)  # nothing but zeros: any scale will do


def _level(value: float, large: float) -> str:
    """The CSS class of a colour: z about zero, p1 to p4 above it, n1 to n4 below."""
    depth = sum(abs(value) >= step * large for step in STEPS)
    return f"{'p' if value > 0 else 'n'}{depth}" if depth else "z"


def _drawn(strip: Strip, y: float, frame: Frame, lettered: bool) -> str:
    label, _, (*values, mean) = strip
    width, height, middle = frame.width, frame.height, y + frame.height / 2
    cells, texts = [], []
    for c, (value, (first, last)) in enumerate(zip(values, frame.rounds, strict=True)):
        x, said = frame.left + width * c, signed(value, frame.decimals)
        line, tip = f"M{x:.1f} {middle:.1f}h{max(width - 0.6, 1):.1f}", f"round {span(first, last)}: {said}"
        cells.append(_cell(line, _level(value, frame.large), 0 if frame.written else height - 2, data_tip=tip))
        if frame.written:
            tone = "middle tight deep" if abs(value) >= STEPS[2] * frame.large else "middle tight"
            texts.append(words("text", said, x=x + width / 2, y=middle + 4, class_=tone))
    if lettered:
        texts.append(words("text", label, x=frame.left - 8, y=middle + 4, class_="end small"))
        texts.append(words("text", signed(mean, frame.decimals), x=WIDTH - 2, y=middle + 4, class_="end small"))
    return element("g", *cells, class_="heat", stroke_width=height - 2, data_of=label) + "".join(texts)


def _cell(line: str, level: str, height: float, **said: str) -> str:
    """A bar in its colour; below zero narrower, given its `height`, so that it can be told without colours."""
    narrow: dict[str, float] = {"stroke_width": 0.55 * height} if height and level[0] == "n" else {}
    return element("path", d=line, class_=level, **narrow, **said)


def _legend(large: float) -> str:
    """The colours in order, with the value at which each begins."""
    names = ("n4", "n3", "n2", "n1", "z", "p1", "p2", "p3", "p4")
    bounds = [-step for step in reversed(STEPS)] + list(STEPS)
    width = WIDTH / len(names)
    lines = [_cell(f"M{width * k:.1f} 9h{width - 1:.1f}", name, 14) for k, name in enumerate(names)]
    ends = [(width * (k + 1), plain(large * bound)) for k, bound in enumerate(bounds)]
    texts = [words("text", text, x=x, y=32, class_="middle small tight") for x, text in ends]
    return element("g", *lines, class_="heat", stroke_width=14) + "".join(texts)
