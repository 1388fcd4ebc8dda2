"""`pdsl audit`: try to refute the privacy statement of a run."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from pdsl.cli.common import AsJson, console


def audit(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    canaries: Annotated[
        int | None, typer.Option(min=0, help="Canaries to train with; 0: none; default: as many as fit.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds to train with canaries; default: all.")] = None,
    algorithm: Annotated[str | None, typer.Option(help="Own algorithm, package.module:Class.")] = None,
    model: Annotated[str | None, typer.Option(help="Own model given in Python, package.module:name.")] = None,
    data: Annotated[str | None, typer.Option(help="Own data given in Python, package.module:name.")] = None,
    graph: Annotated[str | None, typer.Option(help="Own graph given in Python, package.module:name.")] = None,
    as_json: AsJson = False,
) -> None:
    """Try to refute a run's privacy statement. Exit code 0: not refuted; 1: refuted; 2: inconclusive."""
    from pdsl.auditing.run import audit_run, import_objects

    objects = import_objects(run, algorithm=algorithm, model=model, data=data, graph=graph)
    report = audit_run(run, canaries, rounds, **objects)
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        table = Table("check", "verdict", "finding", header_style="bold")
        for finding in report.findings:
            table.add_row(finding.check, finding.verdict.name.lower(), finding.detail)
        console().print(table)
        print(f"{report.verdict.name.lower()}: {report.claim}")
    raise SystemExit(int(report.verdict))
