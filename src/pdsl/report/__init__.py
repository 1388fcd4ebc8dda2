"""The report of a run: one HTML file that needs nothing else, no network and no library.

Read `reading` first (a run directory as values), then `page` (what it says, in its order) and `figures` (what it
draws). `curves`, `graph`, `holdings`, `weights`, `heard` and `heat` each draw a `picture`, with `markup` (elements as
strings) and `numbers` (as people read them). `comparison` puts runs beside each other, `files` and `tables` write for
papers, and `watch` serves the page of a run that goes on.
"""

from pdsl.report.page import write_report

__all__ = ["write_report"]
