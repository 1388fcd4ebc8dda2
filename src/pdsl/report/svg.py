"""SVG markup and pictures. A picture is drawn inside a report, or written as a file for a paper."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from markupsafe import Markup, escape

Value = str | float
Point = tuple[float, float]

SHAPES = ("path", "rect", "circle")  # the elements that close themselves
LINE, SWATCH = 30.0, 12.0  # widths of the marks in a legend
LETTER, ROW = 7.2, 20.0  # approximate width of a letter and height of a row in a legend
MARGIN = 12.0
FONTS = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
STYLE_SHEET = Path(__file__).with_name("templates") / "figure.css"


def element(name: str, *children: str, **attributes: Value) -> Markup:
    """Build an element. Attributes and plain strings are escaped; `class_` becomes class and `a_b` becomes a-b."""
    inside = "".join(f' {key.rstrip("_").replace("_", "-")}="{_attribute(v)}"' for key, v in attributes.items())
    return Markup(f"<{name}{inside}/>" if name in SHAPES else f"<{name}{inside}>{join(children)}</{name}>")


def text(content: str, x: float, y: float, **attributes: Value) -> Markup:
    return element("text", content, x=x, y=y, **attributes)


def join(parts: Iterable[str]) -> Markup:
    """Concatenate markup; plain strings are escaped."""
    return Markup("").join(parts)


def drawing(width: float, height: float, label: str, *children: str, **attributes: Value) -> Markup:
    """Build an SVG that fills the width of its container; `label` is its alternative text."""
    box = f"0 0 {_attribute(width)} {_attribute(height)}"
    return element("svg", *children, viewBox=box, role="img", aria_label=label, **attributes)


def path(points: list[Point]) -> str:
    """Path data of a line through points. With round line caps, a single point is a dot."""
    x, y = points[0]
    return f"M{x:.1f} {y:.1f}h0" + "".join(f"L{x:.1f} {y:.1f}" for x, y in points[1:])


def _attribute(value: Value) -> str:
    return escape(value) if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")


@dataclass(frozen=True)
class LegendEntry:
    """A label, and a mark drawn in a box of `width` by 12."""

    label: str
    mark: Markup | None = None
    width: float = 0.0

    @property
    def icon(self) -> Markup:
        if self.mark is None:
            return Markup()
        return element("svg", self.mark, viewBox=f"0 0 {self.width:g} 12", width=self.width, aria_hidden="true")


ATTACKER = LegendEntry("* attacker")


@dataclass(frozen=True)
class Picture:
    """Marks in a box, with a legend."""

    width: float
    height: float
    label: str  # alternative text
    marks: Markup
    legend: tuple[LegendEntry, ...] = ()
    axis: str = ""  # name of the vertical axis, written in files only: a report has it in the title
    data: Mapping[str, str] = field(default_factory=dict)  # attributes data-… for the script of a report

    @property
    def drawing(self) -> Markup:
        """The marks without the legend, which a report writes as text."""
        return drawing(self.width, self.height, self.label, self.marks, **self.data)

    def svg(self, title: str) -> str:
        """Write a standalone file: legend inside, light colours, white background."""
        legend, taken = _rows((LegendEntry(self.axis), *self.legend) if self.axis else self.legend, self.width)
        top = MARGIN + taken
        width, height = self.width + 2 * MARGIN, self.height + top + MARGIN
        box: dict[str, Value] = {"viewBox": f"0 0 {width:.1f} {height:.1f}", "width": width, "height": height}
        return element(
            "svg",
            element("title", title),
            element("style", Markup(light_styles(STYLE_SHEET.read_text(encoding="utf-8")))),
            element("rect", width=width, height=height, fill="#fff"),
            element("g", legend, transform=f"translate({MARGIN} {MARGIN})"),
            element("g", self.marks, transform=f"translate({MARGIN} {top:.1f})"),
            xmlns="http://www.w3.org/2000/svg",
            font_family=FONTS,
            **box,
        )


def light_styles(css: str) -> str:
    """Rules for marks with the light colours inserted, because many programs do not support var()."""
    colours = dict(re.findall(r"--([\w-]+): ([^;]+);", css.partition("@media")[0]))
    rules = css.partition("/* marks */")[2]
    return re.sub(r"var\(--([\w-]+)\)", lambda found: colours[found[1]], rules)


def _rows(legend: tuple[LegendEntry, ...], width: float) -> tuple[Markup, float]:
    """Lay out a legend in rows; returns its marks and its height."""
    marks, x, y = [], 0.0, 0.0
    for entry in legend:
        indent = entry.width + 6 * bool(entry.mark)
        wide = indent + LETTER * len(entry.label)
        if x and x + wide > width:
            x, y = 0.0, y + ROW
        if entry.mark:
            marks.append(element("g", entry.mark, transform=f"translate({x:.1f} {y:.1f})"))
        marks.append(text(entry.label, x + indent, y + 10))
        x += wide + 14
    return join(marks), y + ROW if legend else 0.0
