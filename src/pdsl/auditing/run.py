"""The audit of a run directory, and of a result in memory."""

import json
from pathlib import Path
from typing import Any

from pdsl.auditing.conformance import audit_experiment
from pdsl.auditing.files import check_files
from pdsl.auditing.replay import Start
from pdsl.auditing.report import Finding, Report
from pdsl.errors import PdslError
from pdsl.privacy.statement import statement
from pdsl.results import Result
from pdsl.runner import read_ledger, take_up
from pdsl.runs import RunDirectory
from pdsl.train import Experiment, state_from


def audit(result: Result, canaries: int | None = None, rounds: int | None = None) -> Report:
    """Try to refute the privacy statement of a result: any algorithm, model, data and graph.

    canaries: how many to train with; 0 leaves that part out, None takes as many as the model has room for.
    rounds: how many rounds to train with canaries; None takes all that the claim covers.
    """
    e, ledger = result.experiment, result.ledger
    starts = [Start(len(result.rows), result.state)]
    findings = audit_experiment(e, ledger, result.rows, starts=starts)
    if ledger is not None and canaries != 0:
        findings += attack(e, canaries, rounds)
    return Report(statement(e.config.privacy, ledger, e.mechanisms), findings)


def audit_run(path: Path, canaries: int | None = None, rounds: int | None = None, **objects: Any) -> Report:
    """Audit the run in a directory. `objects`: model, data, graph or algorithm that its config cannot name."""
    e, run = take_up(path, [], **objects)
    ledger = read_ledger(run)
    checkpoints, _ = run.kept()
    starts = [Start(checkpoint.round, state_from(e.config, checkpoint.tensors)) for checkpoint in checkpoints]
    findings = audit_experiment(e, ledger, run.rows(), stated_epsilons(run), starts)
    if ledger is not None and e.mechanisms is not None:
        last = next((start.state.x for start in starts if start.after == ledger.rounds), None)
        findings.append(check_files(e, path, last))
        if canaries != 0:
            findings += attack(e, canaries, rounds)
    return Report(statement(e.config.privacy, ledger, e.mechanisms), findings)


def attack(e: Experiment, count: int | None, rounds: int | None) -> list[Finding]:
    """The findings of the attack with canaries."""
    from pdsl.auditing.canaries import canaries, canary_finding

    try:
        found = canaries(e, count=count, rounds=rounds)
    except PdslError as error:
        from pdsl.auditing.report import Verdict

        return [Finding("canaries", Verdict.INCONCLUSIVE, str(error))]
    return [canary_finding(found, found.claim)]


def stated_epsilons(run: RunDirectory) -> list[float | None]:
    """The ε of each agent as it stands in the ledger's file; [] for a run that has not finished."""
    stored = json.loads(run.read("ledger.json") or b'{"agents": []}')
    return [agent["epsilon"] for agent in stored["agents"] if "epsilon" in agent]
