"""`pdsl bench`: what speed is claimed, as ratios measured in one run, taken in turns, medians of several.

`literal` is the paper's round without any of our shortcuts; `measure` holds the measurements; `table` prints them.
"""

from pdsl.bench.measure import measure

__all__ = ["measure"]
