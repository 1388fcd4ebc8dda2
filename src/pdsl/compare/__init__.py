"""Several algorithms on one task under one budget, tuned alike: `pdsl compare`.

Read `plan` first (what is compared, and which runs that takes), then `carry_out` (they are done, by
`pdsl.cells`), `verdict` (what came out) and `page` (the same to look at).
"""

from pdsl.compare.carry_out import carry_out
from pdsl.compare.plan import Plan
from pdsl.compare.verdict import Comparison, compared

__all__ = ["Comparison", "Plan", "carry_out", "compared"]
