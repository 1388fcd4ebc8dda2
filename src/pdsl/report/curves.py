"""Curves over rounds: a solid line and a dashed one, a band, and the values of the round under the pointer."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from pdsl.report.markup import element, path, words
from pdsl.report.numbers import chunks, exact, ticks_between, ticks_to
from pdsl.report.picture import LINE, Picture, Sample
from pdsl.report.reading import Fields

WIDTH, HEIGHT = 520, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 510, 12, 212
POINTS = 150  # more would not be seen
STYLES = ("line first", "line second")

Band = tuple[str, str, str]  # what it is, and the fields of its lower and upper side
Form = Callable[[float], str]


def curves(
    what: str,
    rows: Sequence[Fields],
    lines: Mapping[str, str],  # what it is, and its field
    form: Form,  # on the axis
    said: Form = exact,  # under the pointer
    top: float | None = None,
    band: Band | None = None,
) -> Picture | None:
    """A chart from 0 to `top`, or to the largest value, with its legend; None where there is nothing to draw."""
    first, last = rows[0]["round"], rows[-1]["round"]
    rows = [row for row in rows if any(row[field] is not None for field in lines.values())]
    rows = [rows[part[-1]] for part in chunks(len(rows), POINTS)]
    if not rows:
        return None
    if band and all(row[band[1]] is None or row[band[2]] is None for row in rows):
        band = None  # of a run that did not measure it
    shown = [*lines.values(), *(band[1:] if band else ())]
    largest = max(row[field] for row in rows for field in shown if row[field] is not None)
    heights = ticks_to(top or largest or 1)  # all values 0: an axis to 1

    def x(number: int) -> float:
        return (LEFT + RIGHT) / 2 if first == last else LEFT + (RIGHT - LEFT) * (number - first) / (last - first)

    def points(field: str) -> list[tuple[float, float]]:
        values = [(x(row["round"]), row[field]) for row in rows if row[field] is not None]
        return [(x, BOTTOM - (BOTTOM - TOP) * value / heights[-1]) for x, value in values]

    places = [(x(tick), tick) for tick in ticks_between(first, last)]
    marks = [axes([(BOTTOM - (BOTTOM - TOP) * v / heights[-1], form(v)) for v in heights], places)]
    if band and (area := points(band[1]) + points(band[2])[::-1]):
        marks.append(element("path", d=path(area) + "z", class_="band"))
    for style, field in zip(STYLES, lines.values(), strict=False):
        if line := points(field):
            marks.append(element("path", d=path(line), class_=style + " lone" * (len(line) == 1)))
    told = dict(lines) | ({f"{end} agent": field for end, field in _ends(band)} if band else {})
    marks.append(under_the_pointer(rows, [x(row["round"]) for row in rows], RIGHT, told, said))
    label = f"{' and '.join(lines)} over rounds {first} to {last}"
    return Picture(WIDTH, HEIGHT, label, "".join(marks), _legend(lines, band), what)


def axes(heights: list[tuple[float, str]], places: list[tuple[float, int]], right: float = RIGHT) -> str:
    marks = [element("path", d="".join(f"M{LEFT} {y:.1f}H{right:.1f}" for y, _ in heights), class_="grid")]
    marks += [words("text", text, x=LEFT - 8, y=y + 4, class_="end") for y, text in heights]
    marks += [words("text", str(tick), x=x, y=BOTTOM + 18, class_="middle") for x, tick in places]
    return "".join(marks) + words("text", "round", x=(LEFT + right) / 2, y=HEIGHT - 3, class_="middle soft")


def under_the_pointer(
    rows: Sequence[Fields], places: list[float], right: float, lines: Mapping[str, str], form: Form
) -> str:
    """A strip for each round that says its values."""
    sides = [LEFT, *((a + b) / 2 for a, b in pairwise(places)), right]
    strips = []
    for row, (start, end) in zip(rows, pairwise(sides), strict=True):
        said = [f"{label} {form(row[field])}" for label, field in lines.items() if row[field] is not None]
        shape = f"M{start:.1f} {TOP}H{end:.1f}V{BOTTOM}H{start:.1f}"
        strips.append(element("path", d=shape, data_tip="\n".join([f"round {row['round']}", *said])))
    return element("g", *strips, class_="hit")


def _ends(band: Band) -> list[tuple[str, str]]:
    """What the two sides of a band are called: of "worst to best agent", worst and best."""
    low, _, high = band[0].removesuffix(" agent").partition(" to ")
    return [(low, band[1]), (high, band[2])]


def _legend(lines: Mapping[str, str], band: Band | None) -> tuple[Sample, ...]:
    samples = [
        Sample(label, element("path", d="M2 6H28", class_=style), LINE)
        for label, style in zip(lines, STYLES, strict=False)
    ]
    if band:
        samples.append(Sample(band[0], element("path", d="M0 0H30V12H0z", class_="band"), LINE))
    return tuple(samples) if len(samples) > 1 else ()
