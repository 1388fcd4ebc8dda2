"""Bar charts of agents: records by class, and average weight received."""

from collections.abc import Collection, Sequence
from statistics import fmean

from markupsafe import Markup

from pdsl.report.run_data import Edge
from pdsl.report.svg import ATTACKER, SWATCH, LegendEntry, Picture, element, join, text
from pdsl.utils.format import agent_label, chunks, percent, plain, ticks_to

WIDTH, LEFT, RIGHT = 520, 54, 456
MAX_CLASSES = 20  # drawn separately; the last one includes all further classes
MAX_BARS = 100  # with more agents, a bar is a group of agents


def label_bars(
    labels: Sequence[Sequence[int]], accuracy: Sequence[float | None], attackers: Collection[int]
) -> Picture:
    """A stacked bar of records by class for each agent, with its number of records and its accuracy if known."""
    top = 22
    groups = chunks(len(labels), MAX_BARS)
    counts = [merge_classes([sum(n) for n in zip(*(labels[i] for i in group), strict=True)]) for group in groups]
    known = len(accuracy) == len(groups)
    right = 372 if known else RIGHT
    scale = (right - LEFT) / max(1, *map(sum, counts))
    height = max(10, min(24, 600 // len(groups)))

    def row(y: float, agent: str, records: str, accuracy: str, style: str) -> Markup:
        places = ((LEFT - 8, agent), (right + 60, records), (WIDTH - 2, accuracy))
        return join(text(content, x, y, class_=f"end {style}") for x, content in places if content)

    marks = [row(14, "agent", "records", "accuracy" if known else "", "soft")]
    for k, (group, of_group) in enumerate(zip(groups, counts, strict=True)):
        y, name = top + k * height, agent_label(group[0], group[-1], attackers)
        marks.append(element("g", _stacked_bar(of_group, scale, y, height), data_of=f"agent {name}"))
        if height >= 14 or k % 2 == 0:
            reached = percent(accuracy[k]) if known else ""
            marks.append(row(y + height / 2 + 4, name, plain(sum(of_group)), reached, ""))
    label = f"records by class of {len(labels)} agents"
    total = top + 4 + len(groups) * height
    return Picture(WIDTH, total, label, join(marks), class_legend(len(labels[0]), bool(attackers)))


def class_legend(classes: int, attackers: bool) -> tuple[LegendEntry, ...]:
    """The colours of the classes and, if there are attackers, their mark."""
    names = [str(k) for k in range(min(classes, MAX_CLASSES))]
    if classes > MAX_CLASSES:
        names[-1] += "+"
    swatches = [element("rect", width=SWATCH, height=12, rx=3, class_=class_colour(k)) for k in range(len(names))]
    entries = [LegendEntry(name, swatch, SWATCH) for name, swatch in zip(names, swatches, strict=True)]
    return (LegendEntry("class"), *entries, *([ATTACKER] if attackers else []))


def merge_classes(counts: Sequence[int]) -> list[int]:
    """Counts by class, with all classes beyond MAX_CLASSES in the last one."""
    return list(counts) if len(counts) <= MAX_CLASSES else [*counts[: MAX_CLASSES - 1], sum(counts[MAX_CLASSES - 1 :])]


def class_colour(label: int) -> str:
    """The CSS classes of a record class: ten colours, then the same ten fainter."""
    return f"k k{label % 10}" + (" faint" if label >= 10 else "")


def _stacked_bar(counts: Sequence[int], scale: float, y: float, height: float) -> Markup:
    marks, x = [], float(LEFT)
    for label, count in enumerate(counts):
        width = count * scale
        if count:
            box = {"x": x, "y": y + 1, "width": width, "height": height - 3}
            tip = f"class {label}: {plain(count)}"
            marks.append(element("rect", **box, class_=class_colour(label), data_tip=tip))
        if width >= 16 and height >= 16:
            marks.append(text(str(label), x + width / 2, y + height / 2 + 3.5, class_="middle on"))
        x += width
    return join(marks)


def relative_weights(edges: Sequence[Edge]) -> dict[int, float]:
    """Average weight each sender receives from its neighbours; the weight of an edge is relative to an equal share."""
    received: dict[int, list[float]] = {}
    for i, j, weight in edges:
        if i != j:
            received.setdefault(j, []).append(weight)
    return {j: fmean(received[j]) for j in sorted(received)}


def weight_bars(weights: dict[int, float], attackers: Collection[int]) -> Picture:
    """A bar of the relative weight of each sender, with a dotted line at 1, the equal share."""
    top = 10
    senders = list(weights)
    groups = [[senders[k] for k in part] for part in chunks(len(senders), MAX_BARS)]
    values = [fmean(weights[j] for j in group) for group in groups]
    height = max(10, min(20, 600 // len(groups)))
    ticks = ticks_to(max(1.0, *values))
    bottom = top + len(groups) * height

    def x(value: float) -> float:
        return LEFT + (RIGHT - LEFT) * value / ticks[-1]

    marks = [element("path", d="".join(f"M{x(tick):.1f} {top}V{bottom}" for tick in ticks), class_="grid")]
    for k, (group, value) in enumerate(zip(groups, values, strict=True)):
        y, name = top + k * height, agent_label(group[0], group[-1], attackers)
        box = {"x": LEFT, "y": y + 2, "width": x(value) - LEFT, "height": height - 4}
        marks.append(element("rect", **box, class_="bar", data_tip=f"agent {name}\n{value:.3f} × equal share"))
        if height >= 14 or k % 2 == 0:
            marks.append(text(name, LEFT - 8, y + height / 2 + 4, class_="end"))
            marks.append(text(f"{value:.2f}", WIDTH - 2, y + height / 2 + 4, class_="end"))
    marks.append(element("path", d=f"M{x(1):.1f} {top - 4}V{bottom + 4}", class_="even-share"))
    marks += [text(plain(tick), x(tick), bottom + 18, class_="middle") for tick in ticks]
    marks.append(text("average weight ÷ equal share", (LEFT + RIGHT) / 2, bottom + 35, class_="middle soft"))
    label = f"average weight received by {len(senders)} agents"
    return Picture(WIDTH, bottom + 39, label, join(marks), (ATTACKER,) if attackers else ())


def describe_extremes(weights: dict[int, float]) -> str:
    """Name the agents with the lowest and the highest weight."""
    lowest, highest = min(weights, key=lambda j: weights[j]), max(weights, key=lambda j: weights[j])
    if weights[highest] - weights[lowest] < 0.005:
        return "All agents received the same weight."
    return f"Lowest: agent {lowest} ({weights[lowest]:.2f}). Highest: agent {highest} ({weights[highest]:.2f})."
