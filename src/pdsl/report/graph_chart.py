"""The communication graph: agents on a circle with rings of their classes, and arrows as wide as their weights."""

from collections.abc import Sequence
from math import cos, hypot, pi, sin, sqrt

from markupsafe import Markup

from pdsl.report.bar_chart import class_colour, class_legend, merge_classes
from pdsl.report.names import AgentNames, ClassNames
from pdsl.report.run_schema import Edge
from pdsl.report.svg import ATTACKER, Picture, Point, element, join, text
from pdsl.utils.format import percent, plain

SIDE, RADIUS = 520.0, 216.0
ASIDE = 70.0  # room for names on the left and on the right
MAX_LEVEL = 16  # named agents up to which names are level; of more, along the radius
NAME_LETTERS = 10  # of an agent's name in the graph
LETTER = 7.2  # width of a letter of a name along the radius
MAX_DETAILED = 40  # agents up to which each has its ring, and each direction its arrow
MAX_NUMBERED = 30  # arrows up to which each has its number
MAX_LINKS = 3000  # lines drawn of a larger graph
ATTACKS = {
    "label-flip": "label flipping",
    "gaussian": "Gaussian noise",
    "free-rider": "free riding",
    "reversed-model": "reversed models",
    "constant-model": "constant models",
    "copied-model": "copied models",
    "drifting-model": "drifting models",
}


def graph_chart(
    M: int, labels: Sequence[Sequence[int]], edges: Sequence[Edge], names: AgentNames, classes: ClassNames
) -> Picture:
    """Draw agents clockwise from the top. Arrows grow wider and darker from the smallest to the largest weight.

    Without labels, which only the data owner may see, agents are plain circles.
    """
    if M > MAX_DETAILED:
        return _outline(M, edges, names)
    around = RADIUS - _name_room(M, names)
    radius = min(30.0, 0.27 * 2 * pi * around / M)
    places = [_on_circle(i / M, around) for i in range(M)]
    own = {i: weight for i, j, weight in edges if i == j}
    others = sorted((edge for edge in edges if edge[0] != edge[1]), key=lambda edge: edge[2])
    room = min(1.0, (2 * around * sin(pi / M) - 2 * radius) / 50)  # between two agents side by side
    thin = min(room, sqrt(60 / max(1, len(others))))  # many arrows, and short ones, are drawn thinner
    head, apart = 3 + 6 * thin, 8 * (1 - room)
    marks = [_arrow_head(head)]
    for i, j, weight in others:
        lowest, highest = others[0][2], others[-1][2]
        strength = (weight - lowest) / (highest - lowest) if highest > lowest else 0.5
        number = f"{100 * weight:.0f}" if len(others) <= MAX_NUMBERED else ""
        arrow = _arrow(places[j], places[i], radius, strength, thin, head, apart, number)
        tip = f"{names.name(i)} ← {names.name(j)}: {percent(weight)}"
        marks.append(element("g", arrow, class_="edge", data_tip=tip))
    counts = [merge_classes(of_agent) for of_agent in labels] or [[]] * M
    marks += [_agent(i, M, around, radius, counts[i], own.get(i, 0.0), names, classes) for i in range(M)]
    attackers = bool(names.attackers)
    legend = class_legend(len(labels[0]), attackers, classes) if labels else (ATTACKER,) * attackers
    aside = ASIDE if names.names else 0.0
    shifted = element("g", *marks, transform=f"translate({aside:g} 0)") if aside else join(marks)
    return Picture(SIDE + 2 * aside, SIDE, f"graph of {M} agents", shifted, legend)


def _name_room(M: int, names: AgentNames) -> float:
    """How much smaller the circle of agents is, so that their names fit around it."""
    if not names.names:
        return 0.0
    return 10.0 if M <= MAX_LEVEL else max(4.0, LETTER * names.longest(NAME_LETTERS) - 24)


def _on_circle(turn: float, radius: float) -> Point:
    angle = 2 * pi * turn - pi / 2
    return SIDE / 2 + radius * cos(angle), SIDE / 2 + radius * sin(angle)


def _arrow_head(size: float) -> Markup:
    place = {"viewBox": "0 0 9 9", "refX": "1", "refY": "4.5", "orient": "auto", "markerUnits": "userSpaceOnUse"}
    triangle = element("path", d="M0 0 9 4.5 0 9z", class_="tipped")
    return element("defs", element("marker", triangle, id="head", markerWidth=size, markerHeight=size, **place))


def _arrow(
    a: Point, b: Point, radius: float, strength: float, thin: float, head: float, apart: float, number: str
) -> Markup:
    """From circle a to circle b, bent to its left so that the two directions do not overlap."""
    length = hypot(b[0] - a[0], b[1] - a[1])
    ux, uy = (b[0] - a[0]) / length, (b[1] - a[1]) / length
    free = length - 2 * radius
    bend = min(14, free / 4) + 0.04 * length
    width = (1.2 + 3.8 * strength * min(1, free / 60)) * thin

    def at(forward: float, sideways: float) -> Point:
        return a[0] + ux * forward + uy * sideways, a[1] + uy * forward - ux * sideways

    (x, y), (mx, my), (tx, ty) = at(radius + 2, apart), at(length / 2, bend), at(length - radius - head, 1 + apart)
    curve = f"M{x:.1f} {y:.1f}Q{mx:.1f} {my:.1f} {tx:.1f} {ty:.1f}"
    look = {"stroke_width": f"{width:.1f}", "opacity": f"{0.45 + 0.55 * strength:.2f}", "marker_end": "url(#head)"}
    x, y = at(length / 2, bend / 2 + width / 2 + 9)
    return element("path", d=curve, **look) + (text(number, x, y + 4, class_="middle small") if number else "")


def _agent(
    i: int,
    M: int,
    around: float,
    radius: float,
    counts: Sequence[int],
    own: float,
    names: AgentNames,
    classes: ClassNames,
) -> Markup:
    """A ring of classes around the agent's number and its own weight, if there is room; a name is outside."""
    x, y = _on_circle(i / M, around)
    thick, total, attack = radius * 0.32, sum(counts), i in names.attackers
    marks = [element("circle", cx=x, cy=y, r=radius, class_="disc")]
    ring, before = 2 * pi * (radius - thick / 2), 0.0
    for label, part in [(label, ring * count / total) for label, count in enumerate(counts) if count]:
        arc = {"stroke_dasharray": f"{part:.2f} {ring:.2f}", "stroke_dashoffset": f"{-before:.2f}"}
        look = {"class_": f"arc {class_colour(label)}", "stroke_width": f"{thick:.1f}"}
        marks.append(element("circle", cx=x, cy=y, r=radius - thick / 2, **look, **arc))
        before += part
    if attack:
        marks.append(_attacker_ring(x, y, radius + 3))
    roomy = radius >= 24
    if names.names:
        marks.append(_name(i, M, around, radius + 4 * attack, names))
    elif radius < 15:
        outside = _on_circle(i / M, around + radius + (18 if attack else 13))
        marks.append(text(names.label(i), outside[0], outside[1] + 5, class_="middle strong"))
    else:
        marks.append(text(names.label(i), x, y + (0 if roomy else 5), class_="middle strong"))
    if roomy:
        marks.append(text(f"{100 * own:.0f}", x, y + (4 if names.names else 13), class_="middle small"))
    tip = [_describe(i, names), f"weight of its own message: {percent(own)}"]
    if counts:
        by_class = ", ".join(f"{classes.name(label)}: {plain(count)}" for label, count in enumerate(counts) if count)
        tip += [f"{plain(total)} records", *([f"by class {by_class}"] if len(counts) > 1 else [])]
    return element("g", *marks, data_tip="\n".join(tip))


def _name(i: int, M: int, around: float, radius: float, names: AgentNames) -> Markup:
    """A name beside the agent's circle, on the outside; of many agents, along the radius."""
    label, angle = names.label(i, NAME_LETTERS), 360 * i / M - 90
    x, y = _on_circle(i / M, around + radius + 6)
    if M > MAX_LEVEL:
        left = 90 < angle < 270
        turn = f"rotate({angle + 180 * left:.1f} {x:.1f} {y:.1f})"
        return text(label, x, y + 4, transform=turn, class_="end" if left else "")
    if abs(x - SIDE / 2) < 0.25 * around:
        return text(label, x, y + (12 if y > SIDE / 2 else -2), class_="middle strong")
    return text(label, x, y + 5, class_="strong" if x > SIDE / 2 else "end strong")


def _describe(i: int, names: AgentNames) -> str:
    kind = names.attackers.get(i)
    name = names.names[i] if names.names else f"agent {i}"
    return name if kind is None else f"{name}, attacker ({ATTACKS.get(kind, kind)})"


def _attacker_ring(x: float, y: float, radius: float) -> Markup:
    return element("circle", cx=x, cy=y, r=radius, class_="attack")


def _outline(M: int, edges: Sequence[Edge], names: AgentNames) -> Picture:
    """A large graph as dots and thin lines. If there are too many lines, those with the largest weights."""
    places = [_on_circle(i / M, RADIUS) for i in range(M)]
    links = {(min(i, j), max(i, j)): weight for i, j, weight in sorted(edges, key=lambda edge: edge[2]) if i != j}
    ends = [(*places[i], *places[j]) for i, j in sorted(links, key=lambda link: -links[link])[:MAX_LINKS]]
    lines = "".join(f"M{ax:.0f} {ay:.0f}L{bx:.0f} {by:.0f}" for ax, ay, bx, by in ends)
    marks = [element("path", d=lines, class_="links")]
    r = min(3, 450 / M)
    for i, (x, y) in enumerate(places):
        marks.append(element("circle", cx=x, cy=y, r=r, class_="dot", data_tip=_describe(i, names)))
    marks += [_attacker_ring(*places[i], r + 4) for i in names.attackers]
    for i in range(0, M, M // 20):
        x, y = _on_circle(i / M, RADIUS + 20)
        marks.append(text(names.label(i, 6), x, y + 4, class_="middle"))
    return Picture(SIDE, SIDE, f"graph of {M} agents", join(marks), (ATTACKER,) if names.attackers else ())
