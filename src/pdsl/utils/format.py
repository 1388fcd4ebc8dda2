"""Numbers as text for readers, and round numbers for axes."""

import math
from decimal import ROUND_CEILING, Context

SPACE = "\N{NO-BREAK SPACE}"
MISSING = "—"


def name_data(name: str) -> str:
    """Name of a data set for readers; data given in Python have none."""
    return "custom data" if name == "python" else name


def printable(text: str, limit: int = 200) -> str:
    """Text from outside for a terminal or a log: on one line, without control characters, and not long."""
    return "".join(c if c.isprintable() else "?" for c in text[:limit])


def percent(value: float | None) -> str:
    """One decimal."""
    return MISSING if value is None else f"{100 * value:.1f}{SPACE}%"


def axis_percent(value: float) -> str:
    """No trailing zeros."""
    return f"{100 * value:.3g}{SPACE}%"


def exact(value: float) -> str:
    """Five digits, or all digits of a large number."""
    return f"{value:,.0f}" if 1e5 <= abs(value) < 1e12 else f"{value:.5g}".replace("-", "−")


def exact_percent(value: float) -> str:
    return f"{100 * value:.5g}{SPACE}%"


def exact_size(count: float) -> str:
    return f"{count:,.0f}{SPACE}B"


def plain(value: float | None) -> str:
    """Three digits, or all digits before the point of a larger number."""
    if value is None:
        return MISSING
    return (f"{value:,.0f}" if 100 <= abs(value) < 1e9 else f"{value:.3g}").replace("-", "−")


def format_epsilon(epsilon: float | None) -> str:
    """Four digits, rounded up: the text is never below the value."""
    if epsilon is None:
        return MISSING
    if 1000 <= epsilon < 1e9:
        return f"{math.ceil(epsilon):,}"
    digits = repr(epsilon)  # the shortest decimal: the float 0.1 is slightly above 0.1 and would become 0.1001
    return f"{float(Context(prec=4, rounding=ROUND_CEILING).create_decimal(digits)):.4g}"


def signed(value: float, decimals: int) -> str:
    """With + or −, except for values that round to 0."""
    return f"{value:+.{decimals}f}".replace("-", "−") if round(value, decimals) else "0"


def size(count: float) -> str:
    """Bytes, with a decimal prefix."""
    power = min(4, int(math.log10(count)) // 3) if count >= 1 else 0
    return f"{plain(count / 1000**power)}{SPACE}{('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def duration(seconds: float | None) -> str:
    """Seconds up to two minutes, then minutes and hours."""
    if seconds is None:
        return MISSING
    if seconds < 120:
        return f"{seconds:.3g}{SPACE}s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours}{SPACE}h {minutes}{SPACE}min" if hours else f"{minutes}{SPACE}min"


def span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}–{last}"


def nice(value: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is not below a positive value."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))


def ticks_to(top: float) -> list[float]:
    """Ticks from 0 to the first round number that is not below a positive top."""
    step = nice(top / 5)
    return [step * k for k in range(math.ceil(top / step - 1e-9) + 1)]


def ticks_in(low: float, high: float) -> list[float]:
    """Ticks from the last round number that is not above `low` to the first that is not below `high` > `low`."""
    step = nice((high - low) / 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * k for k in range(first, max(last, first + 1) + 1)]


def ticks_between(first: int, last: int) -> list[int]:
    """Round whole numbers between two bounds."""
    step = max(1, int(nice(max(1, last - first) / 6)))
    return list(range(-(-first // step) * step, last + 1, step))


def chunks(length: int, most: int) -> list[range]:
    """Split 0..length-1 into at most `most` consecutive ranges of equal length; the last may be shorter."""
    each = max(1, -(-length // most))
    return [range(start, min(start + each, length)) for start in range(0, length, each)]
