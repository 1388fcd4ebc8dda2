"""`pdsl contributions`: each party's contribution to a finished run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdsl.cli.common import AsJson, console
from pdsl.utils.errors import PdslError
from pdsl.utils.files import check_file, write_whole

if TYPE_CHECKING:
    from rich.table import Table

    from pdsl.shapley.account import Account


def contributions(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    csv: Annotated[Path | None, typer.Option(help="Also write the table to this CSV file, with all digits.")] = None,
    as_json: AsJson = False,
    pairs: Annotated[bool, typer.Option("--pairs", help="Also print the difference of each two parties.")] = False,
) -> None:
    """Print how much each party contributed to a run, with intervals and a conclusion."""
    from pdsl.report.reading import CONTRIBUTIONS, read_account

    if not run.is_dir():
        raise PdslError(f"there is no run directory {str(run)!r}; see the folders in runs/")
    account = read_account(run)
    if account is None:
        raise PdslError(
            f"{run} has no {CONTRIBUTIONS}: the run is not finished, or its algorithm does not measure contributions;"
            " finish it, or run with --set algorithm.name=pdsl"
        )
    if csv is not None:
        check_file(csv, "--csv")
        write_whole(csv, account.to_csv().encode())
    if as_json:
        print(account.to_json(), end="")
        return
    print_account(account, pairs)


def print_account(account: "Account", pairs: bool) -> None:
    """Print an account as a table with its conclusion and notes; `pairs`: also the differences of each two parties."""
    from pdsl.report.account_text import conclude_account, describe_gain

    out = console()
    out.print(_party_table(account))
    if pairs:
        out.print(_pair_table(account))
    for text in (describe_gain(account), conclude_account(account), *account.notes):
        out.print(text)


def _party_table(account: "Account") -> "Table":
    from rich.table import Table

    from pdsl.report.account_text import INTERVAL, Unit, describe_parties

    table = Table("party", header_style="bold")
    for heading in (Unit.of(account).label, INTERVAL, "part of the gain"):
        table.add_column(heading, justify="right")
    for party in describe_parties(account):
        table.add_row(party.name, party.value, party.interval, party.part)
    return table


def _pair_table(account: "Account") -> "Table":
    from rich.table import Table

    from pdsl.report.account_text import INTERVAL, Unit

    unit = Unit.of(account)
    table = Table("party", "compared with", header_style="bold")
    for heading in ("difference", INTERVAL):
        table.add_column(heading, justify="right")
    table.add_column("order")
    for pair in account.pairs():
        order = "decided" if pair.decided else "not decided"
        table.add_row(pair.first, pair.second, unit.form(pair.difference), unit.interval(pair.low, pair.high), order)
    return table
