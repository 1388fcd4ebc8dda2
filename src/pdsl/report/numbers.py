"""Numbers as people read them, and the round numbers at which axes have ticks."""

import math
from collections.abc import Container

from pdsl.rounded import rounded_up

SPACE = "\N{NO-BREAK SPACE}"


def percent(value: float | None) -> str:
    return "—" if value is None else f"{100 * value:.1f}{SPACE}%"


def percents(value: float) -> str:
    """For axes: no zeros that say nothing."""
    return f"{100 * value:.3g}{SPACE}%"


def exact(value: float) -> str:
    """For those who ask: five digits."""
    return f"{value:,.0f}" if 1e5 <= abs(value) < 1e12 else f"{value:.5g}".replace("-", "−")


def exact_percent(value: float) -> str:
    return f"{100 * value:.5g}{SPACE}%"


def exact_size(count: float) -> str:
    return f"{count:,.0f}{SPACE}B"


def plain(value: float | None) -> str:
    """Three digits, or all of a larger whole number."""
    if value is None:
        return "—"
    return (f"{value:,.0f}" if 100 <= abs(value) < 1e9 else f"{value:.3g}").replace("-", "−")


def epsilon(value: float | None) -> str:
    return "—" if value is None else rounded_up(value)


def signed(value: float, decimals: int) -> str:
    """With + or −, unless it rounds to 0."""
    return f"{value:+.{decimals}f}".replace("-", "−") if round(value, decimals) else "0"


def size(count: float) -> str:
    """A number of bytes."""
    power = min(4, int(math.log10(count)) // 3) if count >= 1 else 0
    return f"{plain(count / 1000**power)}{SPACE}{('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "—"
    if seconds < 120:
        return f"{seconds:.3g}{SPACE}s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours}{SPACE}h {minutes}{SPACE}min" if hours else f"{minutes}{SPACE}min"


def span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}–{last}"


def agents(first: int, last: int, rogues: Container[int]) -> str:
    """An agent or several, with an asterisk where a rogue is among them."""
    return span(first, last) + "*" * any(i in rogues for i in range(first, last + 1))


def nice(value: float) -> float:
    """The least of 1, 2 and 5 times a power of ten that is not below a positive value."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))


def ticks_to(top: float) -> list[float]:
    """From 0 to the first round number that is not below a positive top."""
    step = nice(top / 5)
    return [step * k for k in range(math.ceil(top / step - 1e-9) + 1)]


def ticks_between(first: int, last: int) -> list[int]:
    step = max(1, int(nice(max(1, last - first) / 6)))
    return list(range(-(-first // step) * step, last + 1, step))


def chunks(length: int, most: int) -> list[range]:
    """0..length-1 cut into at most `most` consecutive ranges of equal length, the last one shorter."""
    each = max(1, -(-length // most))
    return [range(start, min(start + each, length)) for start in range(0, length, each)]
