"""The weight of every edge as a table of colours and numbers, where a graph has too many arrows to number."""

from collections.abc import Container, Sequence

from pdsl.report.graph import Edge
from pdsl.report.markup import element, words
from pdsl.report.numbers import percent
from pdsl.report.picture import ROGUE, SWATCH, Picture, Sample

WIDTH, LEFT, TOP = 520.0, 52.0, 44.0
WRITTEN = 16  # agents up to which each cell has its number
DEPTHS = (0.2, 0.4, 0.6, 0.8)  # of the way from the least to the largest weight: where a deeper colour begins


def matrix(agents: int, edges: Sequence[Edge], rogues: Container[int]) -> Picture:
    """A row per receiver, a column per sender; a deeper colour is a larger weight, by a scale where numbers lack."""
    side = (WIDTH - LEFT) / agents
    least, most = (pick(weight for *_, weight in edges) for pick in (min, max))
    rows: dict[int, list[str]] = {}
    texts = []
    for i, j, weight in edges:
        x, y = LEFT + side * j, TOP + side * (i + 0.5)
        depth = sum(weight >= bound for bound in _bounds(least, most)) if most > least else 2
        tip = f"{i} ← {j}: {percent(weight)}"
        line = f"M{x + 0.5:.1f} {y:.1f}h{side - 1:.1f}"
        rows.setdefault(i, []).append(element("path", d=line, class_=_colour(depth), data_tip=tip))
        if agents <= WRITTEN:
            tone = "middle small deep" if depth >= 3 else "middle small"
            texts.append(words("text", f"{100 * weight:.0f}", x=x + side / 2, y=y + 4, class_=tone))
    cells = [element("g", *row, class_="heat", stroke_width=side - 1) for row in rows.values()]
    every = 1 if agents <= 20 else 2
    for k in range(agents):
        middle, name = side * (k + 0.5), f"{k}*" if k in rogues else str(k)
        if k % every == 0 or k in rogues:
            above = name if k % every == 0 else "*"  # where there is no room for more
            texts.append(words("text", above, x=LEFT + middle, y=TOP - 8, class_="middle small"))
            texts.append(words("text", name, x=LEFT - 8, y=TOP + middle + 4, class_="end small"))
    texts.append(words("text", "sender →", x=(LEFT + WIDTH) / 2, y=14, class_="middle soft"))
    texts.append(words("text", "receiver ↓", x=0, y=14, class_="soft"))
    legend = [*([] if agents <= WRITTEN else _scale(least, most)), *([ROGUE] if rogues else [])]
    marks = "".join([*cells, *texts])
    return Picture(WIDTH, TOP + side * agents + 2, f"weights between {agents} agents", marks, tuple(legend))


def _bounds(least: float, most: float) -> list[float]:
    return [least + step * (most - least) for step in DEPTHS]


def _colour(depth: int) -> str:
    return f"p{depth}" if depth else "z"


def _scale(least: float, most: float) -> list[Sample]:
    """Each colour with the least weight that has it."""
    if most == least:
        return [Sample(f"{percent(least)}, all", _swatch(2), SWATCH)]
    begins = [least, *_bounds(least, most)]
    return [Sample(f"from {percent(weight)}", _swatch(depth), SWATCH) for depth, weight in enumerate(begins)]


def _swatch(depth: int) -> str:
    return element("g", element("path", d=f"M0 6h{SWATCH:g}", class_=_colour(depth)), class_="heat", stroke_width=12)
