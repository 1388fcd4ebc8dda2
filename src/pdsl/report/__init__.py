"""The report of a run: one self-contained HTML file.

Start with `run_data` (a run directory as values, checked by `run_schema`), then `page` (the report) and `figures` (its
figures). `line_chart`, `bar_chart`, `heat_map`, `graph_chart` and `confusion_chart` draw the pictures with `svg`, for a
`metric` and with `names`. `conclusions` says what follows from Shapley values, `glossary` explains terms, `document`
renders `templates/`. `comparison` compares runs, `export` and `tables` write files for papers, and `watch` serves the
live report of a run.
"""

from pdsl.report.page import write_report

__all__ = ["write_report"]
