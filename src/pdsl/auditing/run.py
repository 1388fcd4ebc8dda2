"""Audit of a result in memory or of a run directory: all checks, in order."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from pdsl import topology
from pdsl.algorithms import Algorithm
from pdsl.auditing.accounts import check_counts, check_end, check_epsilon, check_ledger, check_rows
from pdsl.auditing.canaries import attack, canary_finding
from pdsl.auditing.leaks import check_files, check_public, check_public_parts, check_taint
from pdsl.auditing.noise import check_every_round, check_noise
from pdsl.auditing.replay import Start, replay
from pdsl.auditing.report import AuditReport, Finding, Verdict
from pdsl.auditing.sampling import check_keys, check_sampler
from pdsl.auditing.sensitivity import check_gradients, check_sensitivity
from pdsl.data import from_python
from pdsl.privacy import Ledger
from pdsl.privacy.statement import statement
from pdsl.runs.directory import RunDirectory
from pdsl.runs.result import Result
from pdsl.runs.runner import resume
from pdsl.topology import Graph
from pdsl.training.experiment import Experiment
from pdsl.training.records import RoundRecord
from pdsl.training.trainer import build_trainer, restore_state
from pdsl.utils.errors import PdslError
from pdsl.utils.imports import import_object
from pdsl.utils.random import Streams
from pdsl.utils.types import JsonDict
from pdsl.utils.workers import Workers

Check = Callable[[], Finding | list[Finding]]


def audit(result: Result, canaries: int | None = None, rounds: int | None = None) -> AuditReport:
    """Try to refute the privacy statement of a result, for any algorithm, model, data and graph.

    canaries: number of canaries to train with; 0 skips the attack, None takes as many as the model has room for.
    rounds: number of rounds to train with canaries; None takes all rounds that the claim covers.
    """
    e, ledger = result.experiment, result.ledger
    rule = None if result.stop is None else result.stop.rule
    findings = audit_experiment(e, ledger, result.rows, starts=[Start(len(result.rows), result.state)], rule=rule)
    if ledger is not None:
        findings += _attack(e, canaries, rounds)
    return AuditReport(statement(e.config.privacy, ledger, e.mechanisms, e.public.uses), findings)


def audit_run(path: Path, canaries: int | None = None, rounds: int | None = None, **objects: Any) -> AuditReport:
    """Audit a run directory. `objects`: the model, data, graph or algorithm if its config cannot name them."""
    e, run = resume(path, **objects)
    ledger = run.ledger()
    checkpoints, _ = run.kept()
    starts = [Start(checkpoint.round, restore_state(e.config, checkpoint.tensors)) for checkpoint in checkpoints]
    findings = audit_experiment(e, ledger, run.rows(), _stated_epsilons(run), starts, _stop_rule(run))
    if ledger is not None and e.mechanisms is not None:
        last = next((start.state.x for start in starts if start.after == ledger.rounds), None)
        findings += [check_files(e, path, last), *_attack(e, canaries, rounds)]
    return AuditReport(statement(e.config.privacy, ledger, e.mechanisms, e.public.uses), findings)


def audit_experiment(
    e: Experiment,
    ledger: Ledger | None,
    rows: Sequence[RoundRecord],
    stated: Sequence[float | None] = (),
    starts: Sequence[Start] = (),
    rule: JsonDict | None = None,
) -> list[Finding]:
    """Run every check that needs no files.

    `stated`: the ε written for each agent; `starts`: saved states; `rule`: the rule that stopped the run early.
    """
    if e.mechanisms is None or ledger is None:
        return [Finding("claim", Verdict.INCONCLUSIVE, "the run has no noise and makes no claim")]
    with Workers(e.config.engine.workers) as workers:
        trainer = build_trainer(e, workers)
        try:
            replayed = replay(e, trainer, max(1, ledger.rounds), starts)
        except Exception as error:  # a user's algorithm may raise any exception
            return [Finding("replayed rounds", Verdict.FAIL, f"a round cannot be replayed: {error}")]
        tensors = [shape.numel() for _, shape in e.network.shapes()]
        per_agent = list(stated) or ledger.epsilon_per_agent
        noise, messages = trainer.noise, replayed.messages
        checks: dict[str, Check] = {
            "ledger": lambda: check_ledger(e, ledger, noise, rows),
            "replayed rounds": lambda: check_rows(e, replayed, rows),
            "end of the run": lambda: check_end(e, ledger, rows, rule),
            "messages counted": lambda: check_counts(e, ledger, replayed),
            "ε recomputed": lambda: check_epsilon(e, noise, messages, ledger.rounds, per_agent, ledger, rows),
            "noise": lambda: list(check_noise(noise, messages, tensors, replayed.covered)),
            "noise of every round": lambda: check_every_round(e, noise, messages, ledger.rounds),
            "sampler": lambda: check_sampler(e),
            "noise and batches depend on the key": lambda: check_keys(e),
            "clipped gradients": lambda: check_gradients(e, trainer.local, replayed.rounds),
            "sensitivity": lambda: check_sensitivity(e, trainer),
            "only noisy messages are used": lambda: check_taint(e, trainer, replayed.rounds),
            "public records": lambda: check_public(e),
            "public values": lambda: check_public_parts(e),
        }
        return [finding for name, check in checks.items() for finding in _run_check(name, check)]


def _run_check(name: str, check: Check) -> list[Finding]:
    """Findings of a check; inconclusive if it raises an exception."""
    try:
        found = check()
    except Exception as error:  # the code under audit may fail in any way
        return [Finding(name, Verdict.INCONCLUSIVE, f"the check failed to run: {type(error).__name__}: {error}")]
    return found if isinstance(found, list) else [found]


def _attack(e: Experiment, count: int | None, rounds: int | None) -> list[Finding]:
    """Findings of the attack with canaries; none if `count` is 0."""
    if count == 0:
        return []
    try:
        found = attack(e, count=count, rounds=rounds)
    except PdslError as error:
        return [Finding("canaries", Verdict.INCONCLUSIVE, str(error))]
    return [canary_finding(found, found.claim)]


def _stated_epsilons(run: RunDirectory) -> list[float | None]:
    """ε of each agent as written in ledger.json; [] for an unfinished run."""
    stored = json.loads(run.read("ledger.json") or b'{"agents": []}')
    return [agent["epsilon"] for agent in stored["agents"] if "epsilon" in agent]


def _stop_rule(run: RunDirectory) -> JsonDict | None:
    """Rule that stopped the run, as written in summary.json; None without one."""
    stored: JsonDict = json.loads(run.read("summary.json") or b"{}")
    return stored.get("stop_rule")


def import_objects(
    run: Path, *, algorithm: str | None, model: str | None, data: str | None, graph: str | None
) -> JsonDict:
    """Import a user's objects by their paths, as keyword arguments of `audit_run`; functions are called."""
    stored = RunDirectory.open(run).config()
    found: JsonDict = {}
    if algorithm is not None:
        kind = import_object(algorithm, "--algorithm")
        if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
            raise PdslError(f"--algorithm {algorithm} is not a subclass of pdsl.Algorithm; give a class that is")
        found["algorithm"] = kind
    if model is not None:
        module = _import_instance(model, "--model", nn.Module)
        if not isinstance(module, nn.Module):
            raise PdslError(f"--model {model} is a {type(module).__name__}; give a torch.nn.Module")
        found["model"] = module
    if graph is not None:
        given = _import_instance(graph, "--graph", Graph)
        found["graph"] = topology.as_graph(given, int(stored.get("rounds", 1)))
    if data is not None:
        given = _import_instance(data, "--data")
        settings = {**stored.get("data", {})}
        found["data"] = from_python(
            given, Streams(stored.get("seed", 0)), task=stored.get("task", {}).get("kind", "auto"), **settings
        )
    return found


def _import_instance(path: str, option: str, *kinds: type) -> Any:
    """Import an object; call it if it is callable and not an instance of `kinds`."""
    given = import_object(path, option)
    return given() if callable(given) and not isinstance(given, kinds) else given
