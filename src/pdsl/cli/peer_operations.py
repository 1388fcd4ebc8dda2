"""Commands for operators of a peer: pdsl peer doctor | health | recover."""

import json
from pathlib import Path
from typing import Annotated

import typer

from pdsl.cli.common import AsJson

ATTENTION = 1  # exit code if something needs attention

Folder = Annotated[Path, typer.Argument(help="Folder of this organisation.")]
Listen = Annotated[str | None, typer.Option(help="host:port to listen on, as for pdsl peer run.")]


def doctor(folder: Folder, listen: Listen = None, as_json: AsJson = False) -> None:
    """Check data, disk, certificates, port and all neighbours: one line each, with what to do.

    It works before a run and during one. The exit code is 0 if all is fine, and 1 if something needs attention.
    """
    from pdsl.peer.doctor import examine
    from pdsl.peer.identity import Identity, check_address
    from pdsl.peer.membership import load_current_stage

    if listen is not None:
        check_address(listen, "--listen")
    own = Identity.load(folder)
    findings = examine(own, load_current_stage(own), listen)
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings]))
    else:
        for finding in findings:
            print(f"{'ok' if finding.ok else 'ATTENTION':9} {finding.text}")
    if not all(finding.ok for finding in findings):
        raise SystemExit(ATTENTION)


def recover(folder: Folder, listen: Listen = None) -> None:
    """Charge messages that the ledger of an older copy of a folder lacks, so that the copy can be used.

    All neighbours must be online, because their receipts prove what was sent.
    """
    from pdsl.peer.identity import Identity
    from pdsl.peer.membership import load_chain
    from pdsl.peer.recovery import recover as recover_ledger
    from pdsl.peer.transport import Loop
    from pdsl.utils.format import format_epsilon

    own, loop = Identity.load(folder), Loop()
    try:
        found = recover_ledger(own, load_chain(own), loop, listen)
    finally:
        loop.close()
    if found.added == 0:
        print(f"The neighbours know of no message that the ledger lacks. Continue with: pdsl peer run {folder}")
        return
    spent, budget = format_epsilon(found.after.epsilon), found.after.budget
    print(f"The neighbours' last receipt is of round {found.proven_round}; {found.added} charges were added.")
    print(f"Spent ε {spent} of {budget:g}. Continue with: pdsl peer run {folder}")


def health(folder: Folder, as_json: AsJson = False) -> None:
    """Report whether the peer of a folder works, for containers and service managers.

    It reads the status file only. The exit code is 0 if the peer runs or has completed all rounds, and 1 otherwise.
    """
    from pdsl.peer.health import check_health

    found = check_health(folder)
    print(json.dumps(found._asdict()) if as_json else found.text)
    if not found.healthy:
        raise SystemExit(ATTENTION)
