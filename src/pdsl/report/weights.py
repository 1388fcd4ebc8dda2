"""The weight of every edge as a table of colours and numbers, where a graph has too many arrows to number."""

from collections.abc import Sequence

from pdsl.report.graph import Edge
from pdsl.report.markup import element, words
from pdsl.report.numbers import percent
from pdsl.report.picture import Picture

WIDTH, LEFT, TOP = 520.0, 52.0, 44.0
NUMBERED = 16  # agents up to which each cell has its number
DEPTHS = (0.2, 0.4, 0.6, 0.8)  # of the way from the least to the largest weight: where a deeper colour begins


def matrix(agents: int, edges: Sequence[Edge]) -> Picture:
    """A row per receiver, a column per sender; a deeper colour is a larger weight."""
    side = (WIDTH - LEFT) / agents
    least, most = (pick(weight for *_, weight in edges) for pick in (min, max))
    rows: dict[int, list[str]] = {}
    texts = []
    for i, j, weight in edges:
        x, y = LEFT + side * j, TOP + side * (i + 0.5)
        depth = sum(weight >= least + step * (most - least) for step in DEPTHS) if most > least else 2
        tip = f"{i} ← {j}: {percent(weight)}"
        line = f"M{x + 0.5:.1f} {y:.1f}h{side - 1:.1f}"
        rows.setdefault(i, []).append(element("path", d=line, class_=f"p{depth}" if depth else "z", data_tip=tip))
        if agents <= NUMBERED:
            tone = "middle small deep" if depth >= 3 else "middle small"
            texts.append(words("text", f"{100 * weight:.0f}", x=x + side / 2, y=y + 4, class_=tone))
    cells = [element("g", *row, class_="heat", stroke_width=side - 1) for row in rows.values()]
    every = 1 if agents <= 20 else 2
    for k in range(0, agents, every):
        middle = side * (k + 0.5)
        texts.append(words("text", str(k), x=LEFT + middle, y=TOP - 8, class_="middle small"))
        texts.append(words("text", str(k), x=LEFT - 8, y=TOP + middle + 4, class_="end small"))
    texts.append(words("text", "sender →", x=(LEFT + WIDTH) / 2, y=14, class_="middle soft"))
    texts.append(words("text", "receiver ↓", x=0, y=14, class_="soft"))
    return Picture(WIDTH, TOP + side * agents + 2, f"weights between {agents} agents", "".join([*cells, *texts]))
