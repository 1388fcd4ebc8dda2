"""`pdsl peer settle`: one account of contributions from the organisations' signed statements."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdsl.cli.common import AsJson, console
from pdsl.cli.contributions import print_account
from pdsl.utils.files import check_file, write_whole
from pdsl.utils.format import format_epsilon

if TYPE_CHECKING:
    from rich.table import Table

    from pdsl.peer.settlement import Settlement


def settle(
    where: Annotated[
        Path,
        typer.Argument(metavar="PLAN-OR-FOLDER", help="Plan file with public.npz beside it, or a member's folder."),
    ],
    statements: Annotated[list[Path], typer.Argument(help="Files statement.json of the members.")],
    out: Annotated[Path | None, typer.Option(help="Also write the account (JSON) to this file.")] = None,
    card: Annotated[
        list[Path], typer.Option(help="New card of a member that has renewed its key. May be repeated.")
    ] = [],  # noqa: B006  typer's empty default
    as_json: AsJson = False,
    pairs: Annotated[bool, typer.Option("--pairs", help="Also print the difference of each two parties.")] = False,
) -> None:
    """Combine the members' signed statements into one account: how much each contributed.

    A forged, altered or invalid statement is refused. Missing statements, and statements that differ by more than
    noise, are named.
    """
    from pdsl.peer.settlement import settle as settle_statements

    if out is not None:
        check_file(out, "--out")
    found = settle_statements(where, statements, card)
    if out is not None:
        write_whole(out, found.account.to_json().encode())
    if as_json:
        print(found.account.to_json(), end="")
        return
    console().print(_statement_table(found))
    print_account(found.account, pairs)


def _statement_table(found: "Settlement") -> "Table":
    from rich.table import Table

    table = Table(
        "statement of", "rounds", "ε", f"{found.account.metric} of its model", "measures", header_style="bold"
    )
    for statement, score in zip(found.statements, found.scores, strict=True):
        parties = ", ".join(m.name for m in statement.measurements if m.name != statement.name)
        spent = format_epsilon(statement.epsilon)
        table.add_row(statement.name, f"{statement.rounds}", spent, f"{score:.4f}", parties)
    for name in found.missing:
        table.add_row(name, "missing", "", "", "")
    return table
