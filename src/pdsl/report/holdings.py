"""What each agent holds: a stacked bar of its labels, coloured and numbered by class."""

from collections.abc import Container, Sequence

from pdsl.report.markup import element, words
from pdsl.report.numbers import agents, chunks, percent, plain
from pdsl.report.picture import ROGUE, SWATCH, Picture, Sample

WIDTH, LEFT, TOP = 520, 54, 22
CLASSES = 20  # shown apart; the rest of them are one
BARS = 100  # beyond that many agents a bar stands for several


def holdings(labels: Sequence[Sequence[int]], accuracy: Sequence[float | None], rogues: Container[int]) -> Picture:
    """A bar for each agent, with its records and, where it is known, its accuracy."""
    groups = chunks(len(labels), BARS)
    held = [gathered([sum(of_class) for of_class in zip(*(labels[i] for i in group), strict=True)]) for group in groups]
    known = len(accuracy) == len(groups)
    right = 372 if known else 456
    scale = (right - LEFT) / max(1, *map(sum, held))
    height = max(10, min(24, 600 // len(groups)))

    marks = [_line(14, "agent", "records", "accuracy" if known else "", right, "soft")]
    for k, (group, counts) in enumerate(zip(groups, held, strict=True)):
        y = TOP + k * height
        who = agents(group[0], group[-1], rogues)
        marks.append(element("g", _bar(counts, scale, y, height), data_of=f"agent {who}"))
        if height >= 14 or k % 2 == 0:
            own = percent(accuracy[k]) if known else ""
            marks.append(_line(y + height / 2 + 4, who, plain(sum(counts)), own, right, ""))
    label = f"records by class of {len(labels)} agents"
    height = TOP + 4 + len(groups) * height
    return Picture(WIDTH, height, label, "".join(marks), legend(len(labels[0]), bool(rogues)))


def legend(classes: int, rogues: bool) -> tuple[Sample, ...]:
    """The colours of the classes and, where there are rogues, their sign."""
    names = [str(k) for k in range(min(classes, CLASSES))]
    if classes > CLASSES:
        names[-1] += "+"
    swatches = [element("rect", width=SWATCH, height=12, rx=3, class_=colour(k)) for k in range(len(names))]
    samples = [Sample(name, swatch, SWATCH) for name, swatch in zip(names, swatches, strict=True)]
    return (Sample("class"), *samples, *([ROGUE] if rogues else []))


def gathered(counts: Sequence[int]) -> list[int]:
    """Counts by class, with the last of too many classes as one."""
    return list(counts) if len(counts) <= CLASSES else [*counts[: CLASSES - 1], sum(counts[CLASSES - 1 :])]


def colour(label: int) -> str:
    """The CSS classes of a class of records: ten colours, and fainter the same ten again."""
    return f"k k{label % 10}" + (" faint" if label >= 10 else "")


def _line(y: float, agent: str, records: str, accuracy: str, right: float, style: str) -> str:
    places = ((LEFT - 8, agent), (right + 60, records), (WIDTH - 2, accuracy))
    return "".join(words("text", text, x=x, y=y, class_=f"end {style}") for x, text in places if text)


def _bar(counts: Sequence[int], scale: float, y: float, height: float) -> str:
    marks, x = [], float(LEFT)
    for label, count in enumerate(counts):
        width = count * scale
        if count:
            tip = f"class {label}: {plain(count)}"
            box = element("rect", x=x, y=y + 1, width=width, height=height - 3, class_=colour(label), data_tip=tip)
            marks.append(box)
        if width >= 16 and height >= 16:
            marks.append(words("text", str(label), x=x + width / 2, y=y + height / 2 + 3.5, class_="middle on"))
        x += width
    return "".join(marks)
