"""`pdsl reproduce`: the paper's tables and figures beside ours.

Read first `paper` (the paper's numbers) and `cells` (from its settings, by tasks.toml, to jobs for `pdsl.sweep`). Then
`results` collects finished runs, `archive` keeps them, and `tables`, `figures`, `page` and `export` write them.
"""

from pdsl.reproduce.cells import SweepPlan, Task
from pdsl.reproduce.results import CELLS, Results, collect

__all__ = ["CELLS", "Results", "SweepPlan", "Task", "collect"]
