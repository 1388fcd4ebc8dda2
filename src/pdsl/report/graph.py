"""The graph: agents on a circle, each a donut of its labels, and arrows as wide as what the receiver takes."""

from collections.abc import Mapping, Sequence
from math import cos, hypot, pi, sin, sqrt

from pdsl.report.holdings import colour, gathered, legend
from pdsl.report.markup import element, words
from pdsl.report.numbers import percent, plain
from pdsl.report.picture import ROGUE, Picture

SIDE, RADIUS = 520.0, 216.0
DETAILED = 40  # agents up to which each has its donut, and each direction its arrow
NUMBERED = 30  # arrows up to which each has its number
LINKS = 3000  # lines drawn of a larger graph

Edge = tuple[int, int, float]  # receiver, sender, weight
Point = tuple[float, float]


def graph(M: int, labels: Sequence[Sequence[int]], edges: Sequence[Edge], rogues: Mapping[int, str]) -> Picture:
    """Agents from the top clockwise; arrows grow wider and darker from the least weight to the largest.

    Without labels, which are for the data owner only, agents are plain circles.
    """
    places = [_on_circle(i / M) for i in range(M)]
    if M > DETAILED:
        return _outline(places, edges, rogues)
    radius = min(30.0, 0.27 * 2 * pi * RADIUS / M)
    own = {i: weight for i, j, weight in edges if i == j}
    others = sorted((edge for edge in edges if edge[0] != edge[1]), key=lambda edge: edge[2])
    thin = min(1, sqrt(60 / max(1, len(others))))  # many arrows are thin arrows
    marks = [_head(5 + 4 * thin)]
    for i, j, weight in others:
        least, most = others[0][2], others[-1][2]
        strength = (weight - least) / (most - least) if most > least else 0.5
        number = f"{100 * weight:.0f}" if len(others) <= NUMBERED else ""
        arrow = _arrow(places[j], places[i], radius, strength, thin, number)
        marks.append(element("g", arrow, class_="edge", data_tip=f"{i} ← {j}: {percent(weight)}"))
    held = [gathered(of_agent) for of_agent in labels] or [[]] * M
    marks += [_agent(i, M, radius, held[i], own.get(i, 0.0), rogues.get(i)) for i in range(M)]
    named = legend(len(labels[0]), bool(rogues)) if labels else (ROGUE,) * bool(rogues)
    return Picture(SIDE, SIDE, f"graph of {M} agents", "".join(marks), named)


def _on_circle(turn: float, away: float = 0) -> Point:
    angle = 2 * pi * turn - pi / 2
    return SIDE / 2 + (RADIUS + away) * cos(angle), SIDE / 2 + (RADIUS + away) * sin(angle)


def _head(size: float) -> str:
    place = {"viewBox": "0 0 9 9", "refX": "1", "refY": "4.5", "orient": "auto", "markerUnits": "userSpaceOnUse"}
    triangle = element("path", d="M0 0 9 4.5 0 9z", class_="tipped")
    return element("defs", element("marker", triangle, id="head", markerWidth=size, markerHeight=size, **place))


def _arrow(a: Point, b: Point, radius: float, strength: float, thin: float, number: str) -> str:
    """From donut a to donut b, bent to its left so that the two directions lie apart."""
    length = hypot(b[0] - a[0], b[1] - a[1])
    ux, uy = (b[0] - a[0]) / length, (b[1] - a[1]) / length
    free = length - 2 * radius
    bend = min(14, free / 4) + 0.04 * length
    width = (1.2 + 3.8 * strength * min(1, free / 60)) * thin

    def at(forward: float, sideways: float) -> Point:
        return a[0] + ux * forward + uy * sideways, a[1] + uy * forward - ux * sideways

    (x, y), (mx, my), (tx, ty) = at(radius + 2, 0), at(length / 2, bend), at(length - radius - 9, 1)
    curve = f"M{x:.1f} {y:.1f}Q{mx:.1f} {my:.1f} {tx:.1f} {ty:.1f}"
    look = {"stroke_width": f"{width:.1f}", "opacity": f"{0.45 + 0.55 * strength:.2f}", "marker_end": "url(#head)"}
    x, y = at(length / 2, bend / 2 + width / 2 + 9)
    return element("path", d=curve, **look) + words("text", number, x=x, y=y + 4, class_="middle small") * bool(number)


def _agent(i: int, M: int, radius: float, held: Sequence[int], own: float, rogue: str | None) -> str:
    """A donut of labels around the agent's number and what it gives itself, as far as there is room."""
    x, y = _on_circle(i / M)
    thick, total = radius * 0.32, sum(held)
    marks = [element("circle", cx=x, cy=y, r=radius, class_="disc")]
    ring, before = 2 * pi * (radius - thick / 2), 0.0
    for label, part in [(label, ring * count / total) for label, count in enumerate(held) if count]:
        arc = {"stroke_dasharray": f"{part:.2f} {ring:.2f}", "stroke_dashoffset": f"{-before:.2f}"}
        look = {"class_": f"arc {colour(label)}", "stroke_width": f"{thick:.1f}"}
        marks.append(element("circle", cx=x, cy=y, r=radius - thick / 2, **look, **arc))
        before += part
    if rogue:
        marks.append(_ringed(x, y, radius + 3))
    roomy = radius >= 24
    if radius < 15:
        x, y = _on_circle(i / M, away=radius + (18 if rogue else 13))
    marks.append(words("text", f"{i}*" if rogue else str(i), x=x, y=y + (0 if roomy else 5), class_="middle strong"))
    if roomy:
        marks.append(words("text", f"{100 * own:.0f}", x=x, y=y + 13, class_="middle small"))
    tip = [_named(i, rogue), f"gives itself {percent(own)}"]
    if held:
        classes = ", ".join(f"{label}: {plain(count)}" for label, count in enumerate(held) if count)
        tip += [f"{plain(total)} records", f"by class {classes}"]
    return element("g", *marks, data_tip="\n".join(tip))


def _named(i: int, rogue: str | None) -> str:
    return f"agent {i}, a rogue: {rogue}" if rogue else f"agent {i}"


def _ringed(x: float, y: float, radius: float) -> str:
    return element("circle", cx=x, cy=y, r=radius, class_="rogue")


def _outline(places: Sequence[Point], edges: Sequence[Edge], rogues: Mapping[int, str]) -> Picture:
    """A large graph: dots and thin lines, the heaviest links where there are too many."""
    M = len(places)
    links = {(min(i, j), max(i, j)): weight for i, j, weight in sorted(edges, key=lambda edge: edge[2]) if i != j}
    ends = [(*places[i], *places[j]) for i, j in sorted(links, key=lambda link: -links[link])[:LINKS]]
    lines = "".join(f"M{ax:.0f} {ay:.0f}L{bx:.0f} {by:.0f}" for ax, ay, bx, by in ends)
    marks = [element("path", d=lines, class_="links")]
    r = min(3, 450 / M)
    for i, (x, y) in enumerate(places):
        marks.append(element("circle", cx=x, cy=y, r=r, class_="dot", data_tip=_named(i, rogues.get(i))))
    marks += [_ringed(*places[i], r + 4) for i in rogues]
    for i in range(0, M, M // 20):
        x, y = _on_circle(i / M, away=20)
        marks.append(words("text", f"{i}*" if i in rogues else str(i), x=x, y=y + 4, class_="middle"))
    return Picture(SIDE, SIDE, f"graph of {M} agents", "".join(marks), (ROGUE,) if rogues else ())
