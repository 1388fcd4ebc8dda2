"""Bar chart of the parties' contributions with their intervals."""

from collections.abc import Collection, Sequence

from markupsafe import Markup

from pdsl.report.account_text import INTERVAL, Unit, full_name
from pdsl.report.names import MAX_LETTERS, shorten
from pdsl.report.svg import ATTACKER, SWATCH, LegendEntry, Picture, element, join, text
from pdsl.shapley.account import Account, Contribution
from pdsl.utils.format import ticks_in

WIDTH, TOP = 520, 6
MIN_LEFT, LETTER = 54.0, 8.6  # room for labels; width of a letter on a narrow screen, where text is largest
GAP = 14  # between the plot and the column of values
HEIGHT, MIN_HEIGHT = 30, 18  # of a row with few parties, and with many
MAX_TALL = 12  # parties up to which rows are tall
MAX_BARS = 40  # of more parties, the largest and the smallest contributions are drawn
CAP = 4  # half of the length of a whisker's end


def drawn_parties(account: Account) -> list[Contribution]:
    """The parties of the chart, the largest contribution first; of many, those at both ends."""
    parties = list(account.by_agent().values())
    half = MAX_BARS // 2
    return parties if len(parties) <= MAX_BARS else [*parties[:half], *parties[-half:]]


def contribution_bars(account: Account, attackers: Collection[str] = ()) -> Picture:
    """A bar for each party from 0 to its contribution, with its interval as a whisker."""
    unit, parties = Unit.of(account), drawn_parties(account)
    labels = [shorten(c.name, MAX_LETTERS) + "*" * (c.name in attackers) for c in parties]
    values = [unit.form(c.value) for c in parties]
    left = max(MIN_LEFT, 14 + LETTER * max(map(len, labels)))
    right = WIDTH - GAP - LETTER * max(map(len, values))
    height = HEIGHT if len(parties) <= MAX_TALL else MIN_HEIGHT
    bottom = TOP + len(parties) * height
    ticks = _ticks([unit.scale * end for c in parties for end in (c.low, c.high)])

    def x(value: float) -> float:
        return left + (right - left) * (value - ticks[0]) / (ticks[-1] - ticks[0])

    marks = [element("path", d="".join(f"M{x(tick):.1f} {TOP}V{bottom}" for tick in ticks), class_="grid")]
    for k, (c, label, value) in enumerate(zip(parties, labels, values, strict=True)):
        middle = TOP + (k + 0.5) * height
        ends = [x(unit.scale * end) for end in (0.0, c.value, c.low, c.high)]
        tip = f"{full_name(c.name, account)}\n{value}{unit.word}\ninterval {unit.interval(c.low, c.high)}"
        marks.append(_bar(c, ends, middle, height, tip))
        marks.append(text(label, left - 8, middle + 4, class_="end"))
        marks.append(text(value, WIDTH - 2, middle + 4, class_="end"))
    marks.append(element("path", d=f"M{x(0):.1f} {TOP}V{bottom}", class_="zero"))
    marks += [text(f"{tick:.3g}".replace("-", "−"), x(tick), bottom + 18, class_="middle") for tick in ticks]
    marks.append(text(f"contribution ({unit.label})", (left + right) / 2, bottom + 36, class_="middle soft"))
    label = f"contributions of {len(parties)} parties"
    return Picture(WIDTH, bottom + 40, label, join(marks), _legend(parties, bool(attackers)))


def _ticks(ends: Sequence[float]) -> list[float]:
    low, high = min(0.0, *ends), max(0.0, *ends)
    return ticks_in(low, high) if high > low else [0.0, 1.0]


def _bar(c: Contribution, ends: Sequence[float], middle: float, height: float, tip: str) -> Markup:
    """The bar and the whisker of a party; `ends`: places of 0, its value and its interval."""
    zero, value, low, high = ends
    box = {"x": min(zero, value), "y": middle - 0.35 * height, "width": max(abs(value - zero), 1)}
    bar = element("rect", **box, height=0.7 * height, class_=_colour(c), data_tip=tip)
    caps = "".join(f"M{end:.1f} {middle - CAP:.1f}v{2 * CAP}" for end in (low, high))
    return bar + element("path", d=f"M{low:.1f} {middle:.1f}H{high:.1f}{caps}", class_="whisker")


def _colour(c: Contribution) -> str:
    """The CSS class: by sign, and fainter if the interval includes zero."""
    sign = "gain" if c.value >= 0 else "harm"
    return f"{sign} unclear" if c.low <= 0 <= c.high else sign


def _legend(parties: Sequence[Contribution], attackers: bool) -> tuple[LegendEntry, ...]:
    whisker = element("path", d=f"M1 6H23M1 {6 - CAP}v{2 * CAP}M23 {6 - CAP}v{2 * CAP}", class_="whisker")
    entries = [LegendEntry(INTERVAL, whisker, 24.0)]
    if any(c.low <= 0 <= c.high for c in parties):
        swatch = element("rect", width=SWATCH, height=12, rx=3, class_="gain unclear")
        entries.append(LegendEntry("interval includes zero", swatch, SWATCH))
    return (*entries, *([ATTACKER] if attackers else []))
