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
    from pdsl.peer.membership import load_plan

    if listen is not None:
        check_address(listen, "--listen")
    own = Identity.load(folder)
    findings = examine(own, load_plan(own), listen)
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings]))
    else:
        for finding in findings:
            print(f"{'ok' if finding.ok else 'ATTENTION':9} {finding.text}")
    if not all(finding.ok for finding in findings):
        raise SystemExit(ATTENTION)


def health(folder: Folder, as_json: AsJson = False) -> None:
    """Report whether the peer of a folder works, for containers and service managers.

    It reads the status file only. The exit code is 0 if the peer runs or has completed all rounds, and 1 otherwise.
    """
    from pdsl.peer.health import check_health

    found = check_health(folder)
    print(json.dumps(found._asdict()) if as_json else found.text)
    if not found.healthy:
        raise SystemExit(ATTENTION)
