"""HTML and SVG elements as strings; whatever comes from a run is escaped here."""

from html import escape

Value = str | float
SHAPES = ("path", "rect", "circle")  # of SVG: what alone may close itself, since HTML takes <div/> for <div>


def element(name: str, *children: str, **attributes: Value) -> str:
    """An element: children are markup already, attributes are escaped; `class_` is class and `a_b` is a-b."""
    inside = "".join(f' {key.rstrip("_").replace("_", "-")}="{_attribute(v)}"' for key, v in attributes.items())
    return f"<{name}{inside}/>" if name in SHAPES else f"<{name}{inside}>{''.join(children)}</{name}>"


def words(name: str, text: str, **attributes: Value) -> str:
    """An element around plain text, which is escaped."""
    return element(name, escape(text), **attributes)


def drawing(width: float, height: float, label: str, *children: str) -> str:
    """An SVG picture that takes the width it is given, with a label for those who do not see it."""
    box = f"0 0 {_attribute(width)} {_attribute(height)}"
    return element("svg", *children, viewBox=box, role="img", aria_label=label)


def path(points: list[tuple[float, float]]) -> str:
    """Path data through the points; a single point is a dot where line caps are round."""
    x, y = points[0]
    return f"M{x:.1f} {y:.1f}h0" + "".join(f"L{x:.1f} {y:.1f}" for x, y in points[1:])


def _attribute(value: Value) -> str:
    return escape(value) if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")
