"""Many runs, a directory each, side by side: what `pdsl compare` and `pdsl reproduce` are made of.

Read `one` first (a cell: a run started, taken up, or found finished), then `many` (all of them, in processes of one
thread), `countdown` (what is said meanwhile) and `data` (what all of them need).
"""

from pdsl.cells.data import check_data
from pdsl.cells.many import carry_out
from pdsl.cells.one import Measured, Score, best_rate, failure, finished, measured, run_cell

__all__ = ["Measured", "Score", "best_rate", "carry_out", "check_data", "failure", "finished", "measured", "run_cell"]
