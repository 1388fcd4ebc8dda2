"""The report of a run: one self-contained HTML file.

Start with `run_data` (a run directory as values), then `page` (the report) and `figures` (its figures). `line_chart`,
`bar_chart`, `heat_map` and `graph_chart` draw the pictures with `svg`; `document` renders `templates/`. `comparison`
compares runs, `export` and `tables` write files for papers, and `watch` serves the live report of a run.
"""

from pdsl.report.page import write_report

__all__ = ["write_report"]
