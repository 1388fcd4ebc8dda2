"""The paper's tables and figures beside ours: `pdsl reproduce`.

Read `paper` first (what the paper reports), then `tasks` (from one of its settings to a run's configuration; the
settings themselves are in tasks.toml), `plan` (which runs a command takes; `pdsl.cells` does them), `results` (what
they came to; with `kept`, those of other days), `layout`, `tables` and `figures` (the same as the paper shows it), and
`page`, `shown` and `written`.
"""

from pdsl.reproduce.plan import Plan
from pdsl.reproduce.results import CELLS, Results, collected
from pdsl.reproduce.tasks import Task

__all__ = ["CELLS", "Plan", "Results", "Task", "collected"]
