"""Several runs in one chart: a line each, told apart by colour, dashes and a name at its end."""

from collections.abc import Callable, Mapping, Sequence

from pdsl.report.curves import BOTTOM, HEIGHT, LEFT, POINTS, TOP, WIDTH, axes
from pdsl.report.markup import drawing, element, path, words
from pdsl.report.numbers import chunks, percent, ticks_between, ticks_to

RIGHT = 370  # names stand to the right of it
DASHES = ("", "7 4", "2 4", "10 3 2 3", "4 2")
APART = 14  # least distance of two names

Points = Sequence[tuple[int, float]]  # (round, value)


def lines(
    series: Mapping[str, Points], what: str = "accuracy", top: float = 1.0, form: Callable[[float], str] = percent
) -> str:
    """Values from 0 to `top` over rounds of each, in the order given; words where there is nothing to draw."""
    series = {
        name: [points[part[-1]] for part in chunks(len(points), POINTS)] for name, points in series.items() if points
    }
    if not series:
        return words("p", "Nothing was measured.", class_="none")
    rounds = [t for points in series.values() for t, _ in points]
    first, last = min(rounds), max(rounds)
    heights = ticks_to(top)

    def place(t: int, value: float) -> tuple[float, float]:
        across = (LEFT + RIGHT) / 2 if first == last else LEFT + (RIGHT - LEFT) * (t - first) / (last - first)
        return across, BOTTOM - (BOTTOM - TOP) * value / heights[-1]

    grid = [(place(first, v)[1], form(v)) for v in heights]
    marks = [axes(grid, [(place(t, 0)[0], t) for t in ticks_between(first, last)])]
    labels = []
    for n, (name, points) in enumerate(series.items()):
        line = _line(n, path([place(t, value) for t, value in points]))
        marks.append(element("g", line, data_tip=f"{name}\n{form(points[-1][1])} after round {points[-1][0]}"))
        labels.append((place(*points[-1])[1], n, name))
    for y, n, name in _spread(labels):
        marks += [_line(n, f"M{RIGHT + 8} {y:.1f}h22"), words("text", name, x=RIGHT + 36, y=y + 4)]
    return drawing(WIDTH, HEIGHT, f"{what} of {', '.join(series)} over rounds {first} to {last}", *marks)


def _line(n: int, shape: str) -> str:
    """The nth line's colour and dashes."""
    dashes = DASHES[n % len(DASHES)]
    style = {"stroke_dasharray": dashes} if dashes else {}
    return element("path", d=shape, class_=f"line own k{n % 10}", **style)


def _spread(labels: list[tuple[float, int, str]]) -> list[tuple[float, int, str]]:
    """Names moved up or down so that none covers another."""
    placed: list[tuple[float, int, str]] = []
    for y, n, name in sorted(labels):
        placed.append((max(y, placed[-1][0] + APART) if placed else y, n, name))
    excess = max(0.0, placed[-1][0] - BOTTOM)
    return [(y - excess, n, name) for y, n, name in placed]
