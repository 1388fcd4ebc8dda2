"""A picture: marks in a box, and what its lines and colours mean. On a page, or as a file of its own for a paper."""

import re
from dataclasses import dataclass
from pathlib import Path

from pdsl.report.markup import Value, drawing, element, words

LINE, SWATCH = 30.0, 12.0  # widths of a legend's samples
LETTER, ROW = 7.2, 20.0  # about what a letter and a line of a legend take
MARGIN = 12.0
FONTS = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"


@dataclass(frozen=True)
class Sample:
    """An entry of a legend: what is meant, and how it is drawn in a box `width` by 12."""

    label: str
    mark: str = ""
    width: float = 0.0


ROGUE = Sample("* rogue")


@dataclass(frozen=True)
class Picture:
    width: float
    height: float
    label: str  # for those who do not see it
    marks: str
    legend: tuple[Sample, ...] = ()
    axis: str = ""  # what is measured upwards: a page says it above the picture, a file inside

    def html(self) -> str:
        """The legend as text that wraps, and the marks as wide as there is room."""
        entries = [element("span", _icon(sample), words("span", sample.label)) for sample in self.legend]
        legend = element("div", *entries, class_="legend") if entries else ""
        return legend + drawing(self.width, self.height, self.label, self.marks)

    def svg(self, title: str) -> str:
        """A file of its own: the legend inside, colours as on a light page, on white."""
        legend, taken = _rows((Sample(self.axis), *self.legend) if self.axis else self.legend, self.width)
        top = MARGIN + taken
        width, height = self.width + 2 * MARGIN, self.height + top + MARGIN
        box: dict[str, Value] = {"viewBox": f"0 0 {width:.1f} {height:.1f}", "width": width, "height": height}
        return element(
            "svg",
            words("title", title),
            element("style", light(_text("figure.css"))),
            element("rect", width=width, height=height, fill="#fff"),
            element("g", legend, transform=f"translate({MARGIN} {MARGIN})"),
            element("g", self.marks, transform=f"translate({MARGIN} {top:.1f})"),
            xmlns="http://www.w3.org/2000/svg",
            font_family=FONTS,
            **box,
        )


def light(css: str) -> str:
    """The rules for marks with the light colours put in, for programs that know neither var() nor dark pages."""
    colours = dict(re.findall(r"--([\w-]+): ([^;]+);", css.partition("@media")[0]))
    rules = css.partition("/* marks */")[2]
    return re.sub(r"var\(--([\w-]+)\)", lambda found: colours[found[1]], rules)


def styles() -> str:
    """All of a page's CSS."""
    return _text("figure.css") + _text("page.css")


def _text(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _icon(sample: Sample) -> str:
    if not sample.mark:
        return ""
    return element("svg", sample.mark, viewBox=f"0 0 {sample.width:g} 12", width=sample.width, aria_hidden="true")


def _rows(legend: tuple[Sample, ...], width: float) -> tuple[str, float]:
    """The legend's entries beside each other, in as many rows as they need, and the height of these."""
    marks, x, y = [], 0.0, 0.0
    for sample in legend:
        wide = sample.width + 6 * bool(sample.mark) + LETTER * len(sample.label)
        if x and x + wide > width:
            x, y = 0.0, y + ROW
        marks.append(element("g", sample.mark, transform=f"translate({x:.1f} {y:.1f})") if sample.mark else "")
        marks.append(words("text", sample.label, x=x + sample.width + 6 * bool(sample.mark), y=y + 10))
        x += wide + 14
    return "".join(marks), y + ROW if legend else 0.0
