"""Bar charts of agents: records by class, and average weight received."""

from collections.abc import Sequence
from statistics import fmean

from markupsafe import Markup

from pdsl.report.metric import Metric
from pdsl.report.names import MAX_LETTERS, AgentNames, ClassNames
from pdsl.report.run_schema import Edge
from pdsl.report.svg import ATTACKER, SWATCH, LegendEntry, Picture, element, join, text
from pdsl.utils.format import chunks, plain, ticks_in

WIDTH, RIGHT = 520, 456
MIN_LEFT, LETTER = 54.0, 8.6  # room for labels; width of a letter on a narrow screen, where text is largest
MAX_CLASSES = 20  # drawn separately; the last one includes all further classes
MIN_REACH = 0.05  # of the weights' axis on each side of 1, so that noise does not look like a difference
MAX_BARS = 100  # with more agents, a bar is a group of agents


def _left(names: AgentNames, letters: int = MAX_LETTERS) -> float:
    """Room for the longest label."""
    return max(MIN_LEFT, 14 + LETTER * names.longest(letters))


def label_bars(
    labels: Sequence[Sequence[int]],
    reached: Sequence[float | None],  # headline metric of each agent; [] if unknown
    metric: Metric,
    names: AgentNames,
    classes: ClassNames,
) -> Picture:
    """A stacked bar of records by class for each agent, with its number of records and its metric if known."""
    top, left = 22, _left(names)
    groups = chunks(len(labels), MAX_BARS)
    counts = [merge_classes([sum(n) for n in zip(*(labels[i] for i in group), strict=True)]) for group in groups]
    known = len(reached) == len(groups)
    right = 372 if known else RIGHT
    scale = (right - left) / max(1, *map(sum, counts))
    height = max(10, min(24, 600 // len(groups)))

    def row(y: float, agent: str, records: str, value: str, style: str) -> Markup:
        places = ((left - 8, agent), (right + 60, records), (WIDTH - 2, value))
        return join(text(content, x, y, class_=f"end {style}") for x, content in places if content)

    marks = [row(14, "agent", "records", metric.label if known else "", "soft")]
    for k, (group, of_group) in enumerate(zip(groups, counts, strict=True)):
        y = top + k * height
        bar = _stacked_bar(of_group, scale, left, y, height, classes)
        marks.append(element("g", bar, data_of=names.full(group[0], group[-1])))
        if height >= 14 or k % 2 == 0:
            label = names.label_span(group[0], group[-1])
            value = metric.form(reached[k]) if known else ""
            marks.append(row(y + height / 2 + 4, label, plain(sum(of_group)), value, ""))
    label = f"records by class of {len(labels)} agents"
    total = top + 4 + len(groups) * height
    legend = class_legend(len(labels[0]), bool(names.attackers), classes)
    return Picture(WIDTH, total, label, join(marks), legend)


def class_legend(count: int, attackers: bool, classes: ClassNames) -> tuple[LegendEntry, ...]:
    """The colours of the classes, if there are several, and the mark of attackers, if there are any."""
    if count < 2:
        return (ATTACKER,) if attackers else ()
    names = [classes.label(k, 20) for k in range(min(count, MAX_CLASSES))]
    if count > MAX_CLASSES:
        names[-1] = f"{names[-1]} and others" if classes.names else f"{names[-1]}+"
    swatches = [element("rect", width=SWATCH, height=12, rx=3, class_=class_colour(k)) for k in range(len(names))]
    entries = [LegendEntry(name, swatch, SWATCH) for name, swatch in zip(names, swatches, strict=True)]
    return (LegendEntry("class"), *entries, *([ATTACKER] if attackers else []))


def merge_classes(counts: Sequence[int]) -> list[int]:
    """Counts by class, with all classes beyond MAX_CLASSES in the last one."""
    return list(counts) if len(counts) <= MAX_CLASSES else [*counts[: MAX_CLASSES - 1], sum(counts[MAX_CLASSES - 1 :])]


def class_colour(label: int) -> str:
    """The CSS classes of a record class: ten colours, then the same ten fainter."""
    return f"k k{label % 10}" + (" faint" if label >= 10 else "")


def _stacked_bar(
    counts: Sequence[int], scale: float, left: float, y: float, height: float, classes: ClassNames
) -> Markup:
    marks, x = [], left
    for label, count in enumerate(counts):
        width = count * scale
        if count:
            box = {"x": x, "y": y + 1, "width": width, "height": height - 3}
            tip = f"{classes.full(label) if len(counts) > 1 else 'records'}: {plain(count)}"
            marks.append(element("rect", **box, class_=class_colour(label), data_tip=tip))
        if len(counts) > 1 and width >= 7.2 * len(name := classes.label(label)) + 8 and height >= 16:
            marks.append(text(name, x + width / 2, y + height / 2 + 3.5, class_="middle on"))
        x += width
    return join(marks)


def relative_weights(edges: Sequence[Edge]) -> dict[int, float]:
    """Average weight each sender receives from its neighbours; the weight of an edge is relative to an equal share."""
    received: dict[int, list[float]] = {}
    for i, j, weight in edges:
        if i != j:
            received.setdefault(j, []).append(weight)
    return {j: fmean(received[j]) for j in sorted(received)}


def weight_bars(weights: dict[int, float], names: AgentNames) -> Picture:
    """A bar for each sender from 1, the equal share, to its relative weight: to the right if it is above."""
    top, left = 10, _left(names)
    senders = list(weights)
    groups = [[senders[k] for k in part] for part in chunks(len(senders), MAX_BARS)]
    values = [fmean(weights[j] for j in group) for group in groups]
    height = max(10, min(20, 600 // len(groups)))
    reach = max(MIN_REACH, *(abs(value - 1) for value in values))
    ticks = [tick for tick in ticks_in(1 - reach, 1 + reach) if tick >= -1e-9]
    bottom = top + len(groups) * height

    def x(value: float) -> float:
        return left + (RIGHT - left) * (value - ticks[0]) / (ticks[-1] - ticks[0])

    marks = [element("path", d="".join(f"M{x(tick):.1f} {top}V{bottom}" for tick in ticks), class_="grid")]
    for k, (group, value) in enumerate(zip(groups, values, strict=True)):
        y = top + k * height
        box = {"x": min(x(1), x(value)), "y": y + 2, "width": max(abs(x(value) - x(1)), 1), "height": height - 4}
        tip = f"{names.full(group[0], group[-1])}\n{value:.3f} × equal share"
        marks.append(element("rect", **box, class_="bar" if value >= 1 else "bar less", data_tip=tip))
        if height >= 14 or k % 2 == 0:
            marks.append(text(names.label_span(group[0], group[-1]), left - 8, y + height / 2 + 4, class_="end"))
            marks.append(text(f"{value:.2f}", WIDTH - 2, y + height / 2 + 4, class_="end"))
    marks.append(element("path", d=f"M{x(1):.1f} {top - 4}V{bottom + 4}", class_="even-share"))
    marks += [text(f"{tick:.3g}", x(tick), bottom + 18, class_="middle") for tick in ticks]
    marks.append(text("average weight ÷ equal share", (left + RIGHT) / 2, bottom + 35, class_="middle soft"))
    label = f"average weight received by {len(senders)} agents"
    return Picture(WIDTH, bottom + 39, label, join(marks), (ATTACKER,) if names.attackers else ())


def describe_extremes(weights: dict[int, float], names: AgentNames) -> str:
    """Name the agents with the lowest and the highest weight."""
    lowest, highest = min(weights, key=lambda j: weights[j]), max(weights, key=lambda j: weights[j])
    if weights[highest] - weights[lowest] < 0.005:
        return "All agents received the same weight."
    ends = ((names.full(j), weights[j]) for j in (lowest, highest))
    (low, least), (high, most) = ends
    return f"Lowest: {low} ({least:.2f}). Highest: {high} ({most:.2f})."
