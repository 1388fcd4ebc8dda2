"""A table on the terminal: the paper's columns, a graph below the other so that they fit."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from pdsl.errors import PdslError
from pdsl.reproduce.layout import NAMES, Shown, blocks, label
from pdsl.reproduce.paper import GRAPHS, METHODS
from pdsl.reproduce.results import Results


def tables(results: Results) -> Iterator[Table]:
    """What was asked for, and nothing that was not."""
    asked = results.plan.asked
    methods = [method for method in METHODS if any(s.method == method for s in asked)]
    for graph in GRAPHS:
        columns = [(graph, m) for m in sorted({s.agents for s in asked if s.graph == graph})]
        if not columns:
            continue
        heads = [f"M = {agents}\npaper ours   diff" for _, agents in columns]
        title = f"{results.title}\n{NAMES[graph]} graph"
        shown = Table(label("methods"), *heads, box=None, header_style="bold", title=title, title_justify="left")
        for block in blocks(results, columns, methods):
            if any(cell.ours != "—" for row in block.rows.values() for cell in row):
                shown.add_row(block.title)
                for method, row in block.rows.items():
                    shown.add_row(f"  {label(method)}", *map(_text, row))
        yield shown


def failures(results: Sequence[Results]) -> list[str]:
    """What went wrong, cell by cell; refused where nothing of what was asked for has ended."""
    failed = list(dict.fromkeys(reason for result in results for reason in result.failed))
    entries = (result.entries.get(setting) for result in results for setting in result.plan.asked)
    if failed and all(entry is None or entry.ours is None for entry in entries):
        raise PdslError(f"no cell has a result; first of {len(failed)} that failed: {failed[0]}")
    return failed


def _text(cell: Shown) -> str:
    return f"{cell.paper:5} {cell.ours:6} {cell.difference}".rstrip()
