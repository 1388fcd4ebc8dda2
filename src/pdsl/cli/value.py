"""`pdsl value`: what each party's records are worth at a total ε, without a model."""

from pathlib import Path
from typing import Annotated

import typer

from pdsl.cli.common import AsJson, Assignments, console, shown_computations
from pdsl.cli.contributions import print_account
from pdsl.utils.errors import PdslError
from pdsl.utils.files import check_file, write_whole
from pdsl.utils.format import format_epsilon


def value(
    config: Annotated[Path | None, typer.Argument(help="Settings as TOML; default: the built-in defaults.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Total ε; default: privacy.target_epsilon.")] = None,
    assignments: Assignments = [],  # noqa: B006  typer's way to say none
    out: Annotated[Path, typer.Option(help="File for the account, which must not exist.")] = Path("contributions.json"),
    as_json: AsJson = False,
    pairs: Annotated[bool, typer.Option("--pairs", help="Also print the difference of each two parties.")] = False,
) -> None:
    """Value each party's records at a total ε. The account is written, and no model.

    PDSL on a full graph, with all records in every round and equal weights; graph, batch and algorithm of the settings
    are not used. Every call spends its own ε.
    """
    from pdsl.config import load
    from pdsl.runs.listeners import Progress
    from pdsl.runs.valuation import plan_valuation, value_records

    if out.exists():
        raise PdslError(f"{out} exists, and a valuation spends privacy; keep it, and choose another --out")
    check_file(out, "--out")
    given = load(config, assignments)
    total = epsilon if epsilon is not None else given.privacy.budget
    if total is None:
        raise PdslError("a valuation needs a total ε; give --epsilon, for example --epsilon 2")
    planned = plan_valuation(given, total)
    if not as_json:
        console().print(f"{planned.rounds} rounds of PDSL on a full graph with all records, total ε = {total:g}")
    with shown_computations(), Progress(console(stderr=True), planned.rounds, visible=not as_json) as progress:
        found = value_records(planned, progress)
    write_whole(out, found.account.to_json().encode())
    if as_json:
        print(found.account.to_json(), end="")
        return
    print_account(found.account, pairs)
    console().print(f"Total ε = {format_epsilon(found.epsilon)} spent. The account is in {out}.")
