"""Who was listened to: how much of a fair share each agent's messages were given by its neighbours."""

from collections.abc import Container, Sequence
from statistics import fmean

from pdsl.report.graph import Edge
from pdsl.report.markup import element, words
from pdsl.report.numbers import agents, chunks, plain, ticks_to
from pdsl.report.picture import ROGUE, Picture

WIDTH, LEFT, RIGHT, TOP = 520, 54, 456, 10
BARS = 100  # beyond that many agents a bar stands for several


def fair_shares(edges: Sequence[Edge]) -> dict[int, float]:
    """Of each sender, over its receivers but itself: share times |M_i|, so that 1 is an even share."""
    members: dict[int, int] = {}
    for i, _, _ in edges:
        members[i] = members.get(i, 0) + 1
    given: dict[int, list[float]] = {}
    for i, j, share in edges:
        if i != j:
            given.setdefault(j, []).append(share * members[i])
    return {j: fmean(given[j]) for j in sorted(given)}


def heard(shares: dict[int, float], rogues: Container[int]) -> Picture:
    """A bar for each sender, and a dotted line at the share that all would have if they were weighed alike."""
    senders = list(shares)
    groups = [[senders[k] for k in part] for part in chunks(len(senders), BARS)]
    values = [fmean(shares[j] for j in group) for group in groups]
    height = max(10, min(20, 600 // len(groups)))
    ticks = ticks_to(max(1.0, *values))
    bottom = TOP + len(groups) * height

    def x(value: float) -> float:
        return LEFT + (RIGHT - LEFT) * value / ticks[-1]

    marks = [element("path", d="".join(f"M{x(t):.1f} {TOP}V{bottom}" for t in ticks), class_="grid")]
    for k, (group, value) in enumerate(zip(groups, values, strict=True)):
        y, who = TOP + k * height, agents(group[0], group[-1], rogues)
        box = {"x": LEFT, "y": y + 2, "width": x(value) - LEFT, "height": height - 4}
        tip = f"agent {who}\n{value:.3f} of an even share"
        marks.append(element("rect", **box, class_="bar", data_tip=tip))
        if height >= 14 or k % 2 == 0:
            marks.append(words("text", who, x=LEFT - 8, y=y + height / 2 + 4, class_="end"))
            marks.append(words("text", f"{value:.2f}", x=WIDTH - 2, y=y + height / 2 + 4, class_="end"))
    marks.append(element("path", d=f"M{x(1):.1f} {TOP - 4}V{bottom + 4}", class_="even-share"))
    marks += [words("text", plain(t), x=x(t), y=bottom + 18, class_="middle") for t in ticks]
    title = words("text", "times an even share", x=(LEFT + RIGHT) / 2, y=bottom + 35, class_="middle soft")
    label, sign = f"how much {len(senders)} agents were listened to", (ROGUE,) if rogues else ()
    return Picture(WIDTH, bottom + 39, label, "".join(marks) + title, sign)


def extremes(shares: dict[int, float]) -> str:
    """Who was heard least and most, in words."""
    least, most = min(shares, key=lambda j: shares[j]), max(shares, key=lambda j: shares[j])
    if shares[most] - shares[least] < 0.005:
        return "All are heard alike."
    return f"Least heard: agent {least} ({shares[least]:.2f}); most: agent {most} ({shares[most]:.2f})."
