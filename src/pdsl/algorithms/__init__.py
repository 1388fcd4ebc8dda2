"""One file per algorithm; `ALGORITHMS` is the list of them."""

from pdsl.algorithms.base import Algorithm, Facts, Round
from pdsl.algorithms.pdsl import PDSL

ALGORITHMS: dict[str, type[Algorithm]] = {
    PDSL.name: PDSL,
}

__all__ = ["ALGORITHMS", "PDSL", "Algorithm", "Facts", "Round"]
