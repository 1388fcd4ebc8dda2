"""The report of a run: one HTML file that needs nothing else, no network and no library.

Read `reading` first (a run directory as values), then `page` (what it says, in its order). `curves`, `graph`,
`holdings` and `heat` draw the figures, with `markup` (elements as strings) and `numbers` (as people read them).
"""

from pdsl.report.page import write_report

__all__ = ["write_report"]
