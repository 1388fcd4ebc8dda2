"""The report of a run: one self-contained HTML file.

Start with `run_data` (a run directory as values, checked by `run_schema`), then `page` (the report) and `figures` (its
figures). `line_chart`, `bar_chart`, `contribution_chart`, `heat_map`, `graph_chart` and `confusion_chart` draw the
pictures with `svg`, for a `metric` and with `names`. `conclusions` says what follows from the values of messages,
`account_text` what each party contributed. `glossary` explains terms, `document` renders `templates/`. `comparison`
compares runs, `export` and `tables` write files for papers, and `watch` serves the live report of a run.

`write_report` is imported when it is first used, because `reading` and `account_text` do not need torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdsl.report.page import write_report

__all__ = ["write_report"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'pdsl.report' has no attribute '{name}'")
    from pdsl.report.page import write_report

    return write_report
