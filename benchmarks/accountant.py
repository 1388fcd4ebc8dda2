"""Is the ε we state an upper bound, and how far above the truth? 500 random spendings, two other accountants.

    python benchmarks/accountant.py [points] [seed]

The independent bounds are those of tests/oracles/losses.py; the other accountant is Opacus's PRV, where it is installed
(it is a dev extra). A point where our ε lies below the independent lower bound makes the exit code 1.
"""

import sys
import time
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pdsl.privacy.accounting import epsilon, epsilon_rdp
from tests.oracles.losses import epsilon_bounds
from tests.oracles.spendings import draw, opacus_epsilon


class Compared:
    """Our ε against another's, over the points where it has one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.points, self.above, self.below, self.short, self.seconds = 0, 0.0, 0.0, 0, 0.0

    def add(self, ours: float, other: float | None, seconds: float) -> None:
        self.seconds += seconds
        if other is None:
            return
        self.points += 1
        self.short += ours < other
        if other > 0:
            self.above = max(self.above, ours / other - 1)
            self.below = max(self.below, 1 - ours / other)

    def row(self) -> str:
        shares = f"{self.above:.1e} | {self.below:.1e}"
        return f"| {self.name} | {self.points} | {shares} | {self.short} | {self.seconds:.0f} |"


def main() -> int:
    count, seed = (int(sys.argv[i]) if len(sys.argv) > i else default for i, default in ((1, 500), (2, 0)))
    lower, upper = Compared("independent lower bound (must be 0 below)"), Compared("independent upper bound")
    rdp = Compared("independent lower bound, ours by RDP (must be 0 below)")
    opacus = Compared("Opacus PRV")
    own = 0.0
    for point in draw(count, seed):
        start = time.perf_counter()
        ours = epsilon(point.spent, point.delta)
        own += time.perf_counter() - start
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
    print(f"{count} points, seed {seed}; ours took {own:.0f} seconds")
    print("| against | points | most above | most below | points below | seconds |\n|---|---|---|---|---|---|")
    print("\n".join(row.row() for row in (lower, upper, rdp, opacus)))
    return int(lower.short + rdp.short > 0)


if __name__ == "__main__":
    sys.exit(main())
