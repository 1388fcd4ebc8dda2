"""Several runs in one chart: a line each, told apart by colour, dashes and a name at its end."""

from collections.abc import Mapping, Sequence

from pdsl.report.curves import BOTTOM, HEIGHT, LEFT, POINTS, TOP, WIDTH, Form, axes, under_the_pointer
from pdsl.report.markup import element, path, words
from pdsl.report.numbers import chunks, exact, exact_percent, percents, ticks_between, ticks_to
from pdsl.report.picture import Picture

DASHES = ("", "7 4", "2 4", "10 3 2 3", "4 2")
APART = 16  # least distance of two names
LETTERS = 20  # of a name that are shown
SIZE = 13.5  # of a name on a narrow screen, where it is largest

Points = Sequence[tuple[int, float]]  # (round, value)


def lines(series: Mapping[str, Points]) -> str:
    """Accuracy over rounds of each, in the order given; words where there is nothing to draw."""
    picture = overlaid(series, "accuracy", percents, exact_percent, top=1)
    return picture.html() if picture else words("p", "Nothing was measured.", class_="none")


def overlaid(
    series: Mapping[str, Points], what: str, form: Form, said: Form = exact, top: float | None = None
) -> Picture | None:
    """A line each, from 0 to `top` or to the largest value; None where there is nothing to draw.

    Values are written as `form` has them on the axis, and as `said` has them under the pointer.
    """
    series = {name: points for name, points in series.items() if points}
    if not series:
        return None
    rounds = sorted({t for points in series.values() for t, _ in points})
    first, last = rounds[0], rounds[-1]
    names = {name: name if len(name) <= LETTERS else f"{name[: LETTERS - 1]}…" for name in series}
    right = WIDTH - 38 - max(map(_wide, names.values()))
    heights = ticks_to(top or max(value for points in series.values() for _, value in points) or 1)

    def place(t: int, value: float) -> tuple[float, float]:
        across = (LEFT + right) / 2 if first == last else LEFT + (right - LEFT) * (t - first) / (last - first)
        return across, BOTTOM - (BOTTOM - TOP) * value / heights[-1]

    grid = [(place(first, v)[1], form(v)) for v in heights]
    marks = [axes(grid, [(place(t, 0)[0], t) for t in ticks_between(first, last)], right)]
    labels = []
    for n, (name, points) in enumerate(series.items()):
        kept = [points[part[-1]] for part in chunks(len(points), POINTS)]
        marks.append(_line(n, path([place(t, value) for t, value in kept]), " lone" * (len(kept) == 1)))
        labels.append((place(*points[-1])[1], n, name))
    for y, n, name in _spread(labels):
        sample = _line(n, f"M{right + 8:.1f} {y:.1f}h22")
        marks += [sample, words("text", names[name], x=right + 36, y=y + 4, class_="name")]
    at = [rounds[part[-1]] for part in chunks(len(rounds), POINTS)]
    values = {name: dict(points) for name, points in series.items()}
    rows = [{"round": t, **{name: of_round.get(t) for name, of_round in values.items()}} for t in at]
    marks.append(under_the_pointer(rows, [place(t, 0)[0] for t in at], right, {name: name for name in series}, said))
    label = f"{what} of {', '.join(series)} over rounds {first} to {last}"
    return Picture(WIDTH, HEIGHT, label, "".join(marks), axis=what)


def _wide(name: str) -> float:
    """About as wide as a name is drawn."""
    return SIZE * sum(0.72 if letter.isupper() else 0.62 for letter in name)


def _line(n: int, shape: str, extra: str = "") -> str:
    """The nth line's colour and dashes."""
    dashes = DASHES[n % len(DASHES)]
    style = {"stroke_dasharray": dashes} if dashes else {}
    return element("path", d=shape, class_=f"line own l{n % 10}{extra}", **style)


def _spread(labels: list[tuple[float, int, str]]) -> list[tuple[float, int, str]]:
    """Names moved up or down so that none covers another."""
    placed: list[tuple[float, int, str]] = []
    for y, n, name in sorted(labels):
        placed.append((max(y, placed[-1][0] + APART) if placed else y, n, name))
    excess = max(0.0, placed[-1][0] - BOTTOM)
    return [(y - excess, n, name) for y, n, name in placed]
