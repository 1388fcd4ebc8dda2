"""Many runs, a directory each, side by side: what `pdsl compare` and `pdsl reproduce` are made of.

Read `one` first (a cell: a run started, taken up, or found finished), then `many` (all of them, in processes of one
thread) and `countdown` (what is said meanwhile).
"""

from pdsl.cells.many import carry_out
from pdsl.cells.one import Score, failure, finished, run_cell

__all__ = ["Score", "carry_out", "failure", "finished", "run_cell"]
