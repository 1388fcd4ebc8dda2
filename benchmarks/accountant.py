"""Compare the stated ε with independent bounds and with Opacus, at random points.

    python benchmarks/accountant.py [points] [seed]

The independent lower and upper bounds are from tests/oracles/losses.py. Opacus's PRV accountant is used if it is
installed (a dev extra). The exit code is 1 if an ε lies below its independent lower bound.
"""

import sys
import time
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pdsl.privacy.accounting import epsilon, epsilon_rdp
from tests.oracles.losses import epsilon_bounds
from tests.oracles.spendings import draw, opacus_epsilon


class Comparison:
    """Stated ε against another value, over the points where that exists."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.points, self.max_above, self.max_below, self.points_below, self.seconds = 0, 0.0, 0.0, 0, 0.0

    def add(self, ours: float, other: float | None, seconds: float) -> None:
        self.seconds += seconds
        if other is None:
            return
        self.points += 1
        self.points_below += ours < other
        if other > 0:
            self.max_above = max(self.max_above, ours / other - 1)
            self.max_below = max(self.max_below, 1 - ours / other)

    def row(self) -> str:
        shares = f"{self.max_above:.1e} | {self.max_below:.1e}"
        return f"| {self.name} | {self.points} | {shares} | {self.points_below} | {self.seconds:.0f} |"


def main() -> int:
    count, seed = (int(sys.argv[i]) if len(sys.argv) > i else default for i, default in ((1, 500), (2, 0)))
    lower, upper = Comparison("independent lower bound (must be 0 below)"), Comparison("independent upper bound")
    rdp = Comparison("independent lower bound, ours by RDP (must be 0 below)")
    opacus = Comparison("Opacus PRV")
    our_seconds = 0.0
    for point in draw(count, seed):
        start = time.perf_counter()
        ours = epsilon(point.spent, point.delta)
        our_seconds += time.perf_counter() - start
        start = time.perf_counter()
        bounds = epsilon_bounds(point.rounds, point.delta)
        seconds = time.perf_counter() - start
        by_rdp = ours > 0 and ours == epsilon_rdp(point.spent, point.delta)
        (rdp if by_rdp else lower).add(ours, bounds.lower, seconds)
        if not by_rdp:
            upper.add(ours, bounds.upper, 0.0)
        if ours < bounds.lower:
            print(f"below: {point.rounds}, δ = {point.delta:.3g}: ours {ours}, at least {bounds.lower}", flush=True)
        if find_spec("opacus"):
            start = time.perf_counter()
            other = opacus_epsilon(point.rounds, point.delta, ours)
            opacus.add(ours, other, time.perf_counter() - start)
    print(f"{count} points, seed {seed}; ours took {our_seconds:.0f} seconds")
    print("| against | points | most above | most below | points below | seconds |\n|---|---|---|---|---|---|")
    print("\n".join(row.row() for row in (lower, upper, rdp, opacus)))
    return int(lower.points_below + rdp.points_below > 0)


if __name__ == "__main__":
    sys.exit(main())
