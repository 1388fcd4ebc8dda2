"""The communication graph: agents on a circle with rings of their classes, and arrows as wide as their weights."""

from collections.abc import Mapping, Sequence
from math import cos, hypot, pi, sin, sqrt

from markupsafe import Markup

from pdsl.report.bar_chart import class_colour, class_legend, merge_classes
from pdsl.report.run_data import Edge
from pdsl.report.svg import ATTACKER, Picture, Point, element, join, text
from pdsl.utils.format import agent_label, percent, plain

SIDE, RADIUS = 520.0, 216.0
MAX_DETAILED = 40  # agents up to which each has its ring, and each direction its arrow
MAX_NUMBERED = 30  # arrows up to which each has its number
MAX_LINKS = 3000  # lines drawn of a larger graph
ATTACKS = {"label-flip": "label flipping", "gaussian": "Gaussian noise", "free-rider": "free riding"}


def graph_chart(
    M: int, labels: Sequence[Sequence[int]], edges: Sequence[Edge], attackers: Mapping[int, str]
) -> Picture:
    """Draw agents clockwise from the top. Arrows grow wider and darker from the smallest to the largest weight.

    Without labels, which only the data owner may see, agents are plain circles.
    """
    places = [_on_circle(i / M) for i in range(M)]
    if M > MAX_DETAILED:
        return _outline(places, edges, attackers)
    radius = min(30.0, 0.27 * 2 * pi * RADIUS / M)
    own = {i: weight for i, j, weight in edges if i == j}
    others = sorted((edge for edge in edges if edge[0] != edge[1]), key=lambda edge: edge[2])
    room = min(1.0, (2 * RADIUS * sin(pi / M) - 2 * radius) / 50)  # between two agents side by side
    thin = min(room, sqrt(60 / max(1, len(others))))  # many arrows, and short ones, are drawn thinner
    head, apart = 3 + 6 * thin, 8 * (1 - room)
    marks = [_arrow_head(head)]
    for i, j, weight in others:
        lowest, highest = others[0][2], others[-1][2]
        strength = (weight - lowest) / (highest - lowest) if highest > lowest else 0.5
        number = f"{100 * weight:.0f}" if len(others) <= MAX_NUMBERED else ""
        arrow = _arrow(places[j], places[i], radius, strength, thin, head, apart, number)
        marks.append(element("g", arrow, class_="edge", data_tip=f"{i} ← {j}: {percent(weight)}"))
    counts = [merge_classes(of_agent) for of_agent in labels] or [[]] * M
    marks += [_agent(i, M, radius, counts[i], own.get(i, 0.0), attackers.get(i)) for i in range(M)]
    legend = class_legend(len(labels[0]), bool(attackers)) if labels else (ATTACKER,) * bool(attackers)
    return Picture(SIDE, SIDE, f"graph of {M} agents", join(marks), legend)


def _on_circle(turn: float, away: float = 0) -> Point:
    angle = 2 * pi * turn - pi / 2
    return SIDE / 2 + (RADIUS + away) * cos(angle), SIDE / 2 + (RADIUS + away) * sin(angle)


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


def _agent(i: int, M: int, radius: float, counts: Sequence[int], own: float, attack: str | None) -> Markup:
    """A ring of classes around the agent's number and its own weight, if there is room."""
    x, y = _on_circle(i / M)
    thick, total = radius * 0.32, sum(counts)
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
    if radius < 15:
        x, y = _on_circle(i / M, away=radius + (18 if attack else 13))
    marks.append(text(f"{i}*" if attack else str(i), x, y + (0 if roomy else 5), class_="middle strong"))
    if roomy:
        marks.append(text(f"{100 * own:.0f}", x, y + 13, class_="middle small"))
    tip = [_agent_name(i, attack), f"weight of its own message: {percent(own)}"]
    if counts:
        classes = ", ".join(f"{label}: {plain(count)}" for label, count in enumerate(counts) if count)
        tip += [f"{plain(total)} records", f"by class {classes}"]
    return element("g", *marks, data_tip="\n".join(tip))


def _agent_name(i: int, attack: str | None) -> str:
    return f"agent {i}, attacker ({ATTACKS.get(attack, attack)})" if attack else f"agent {i}"


def _attacker_ring(x: float, y: float, radius: float) -> Markup:
    return element("circle", cx=x, cy=y, r=radius, class_="attack")


def _outline(places: Sequence[Point], edges: Sequence[Edge], attackers: Mapping[int, str]) -> Picture:
    """A large graph as dots and thin lines. If there are too many lines, those with the largest weights."""
    M = len(places)
    links = {(min(i, j), max(i, j)): weight for i, j, weight in sorted(edges, key=lambda edge: edge[2]) if i != j}
    ends = [(*places[i], *places[j]) for i, j in sorted(links, key=lambda link: -links[link])[:MAX_LINKS]]
    lines = "".join(f"M{ax:.0f} {ay:.0f}L{bx:.0f} {by:.0f}" for ax, ay, bx, by in ends)
    marks = [element("path", d=lines, class_="links")]
    r = min(3, 450 / M)
    for i, (x, y) in enumerate(places):
        marks.append(element("circle", cx=x, cy=y, r=r, class_="dot", data_tip=_agent_name(i, attackers.get(i))))
    marks += [_attacker_ring(*places[i], r + 4) for i in attackers]
    for i in range(0, M, M // 20):
        x, y = _on_circle(i / M, away=20)
        marks.append(text(agent_label(i, i, attackers), x, y + 4, class_="middle"))
    return Picture(SIDE, SIDE, f"graph of {M} agents", join(marks), (ATTACKER,) if attackers else ())
