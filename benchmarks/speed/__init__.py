"""Speed as ratios, measured alternately in one run; medians of several: `make bench`.

`literal` is the paper's round without any of our shortcuts; `measure` holds the measurements; `table` prints them.
"""

from benchmarks.speed.measure import measure

__all__ = ["measure"]
