"""Checks of the ledger and the rows: every message is charged, ε is correct, and the rows match replayed rounds."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import fmean
from typing import Any

from torch import Tensor

from pdsl.algorithms.base import charged_release
from pdsl.auditing.replay import Message, Replay
from pdsl.auditing.report import Finding, Verdict, conclude
from pdsl.privacy import Ledger, Mechanism, Noise
from pdsl.runs.callbacks import stopping_round
from pdsl.topology import Schedule
from pdsl.training.experiment import Experiment, make_calendar
from pdsl.training.records import RoundRecord
from pdsl.training.trainer import initial_models
from pdsl.utils.format import format_epsilon

MAX_BELOW = 0.003  # share by which a stated ε may lie below the audit's, which uses a coarser grid
KNOWN_FIELDS = {  # of a row, besides the algorithm's metrics
    "round", "consensus", "messages", "bytes", "bytes_between_processes", "epsilon", "per_agent", "seconds", "waited",
    "present", "shortened", "implausible", "lost", "absent",
}  # fmt: skip


def check_ledger(e: Experiment, ledger: Ledger, noise: Noise, rows: Sequence[RoundRecord]) -> Finding:
    """Check that every round of every agent is charged once, as settings, data, noise and graph require."""
    problems = []
    for i in e.engine.agents:
        for entry in ledger.accounts[i][-1:]:
            charged_sigmas = entry.mechanism.sigmas
            peers = ledger.peers[i] if len(ledger.peers[i]) == len(charged_sigmas) else (i,) * len(charged_sigmas)
            used = [noise.sigma_of(i, j) for j in peers]
            if any(not sigma >= charged * (1 - 1e-12) for sigma, charged in zip(used, charged_sigmas, strict=True)):
                problems.append(f"agent {i}: charged with σ = {max(charged_sigmas):.8g}, uses {min(used):.8g}")
    for i, account in enumerate(ledger.accounts):
        charged = [t for entry in account for t in range(entry.first, entry.last + 1)]
        members = e.graph.neighbourhood(i).tolist()
        if charged != list(range(1, len(charged) + 1)) or len(charged) < len(rows):
            problems.append(f"agent {i}: {len(charged)} rounds charged, {len(rows)} run")
        elif list(ledger.peers[i]) != members:
            problems.append(f"agent {i}: the receivers differ from the graph's")
        elif ledger.calendar != make_calendar(e.graph):
            problems.append(f"agent {i}: the rounds of its receivers differ from the graph's")
        else:
            problems += [f"agent {i}: {p}" for entry in account for p in _wrong_charges(e, i, entry.mechanism)][:1]
    if not math.isclose(ledger.delta, e.config.privacy.delta):
        problems.append(f"δ is {ledger.delta:g} in the ledger, {e.config.privacy.delta:g} in the settings")
    return conclude("ledger holds every round and peer", problems, f"{len(ledger.accounts)} agents, {len(rows)} rounds")


def _wrong_charges(e: Experiment, agent: int, m: Mechanism) -> list[str]:
    """Differences between a charged mechanism and the one that settings, data and algorithm require."""
    release = charged_release(e.config.algorithm, e.graph, agent)
    exact = sensitivity(e, agent)
    rounded = exact * (1 + 2.0**-24) + math.sqrt(e.network.num_parameters) * max(m.sigmas) * 2.0**-32
    problems = []
    if m.sensitivity < rounded * (1 - 1e-12):
        problems.append(f"charged with Δ = {m.sensitivity:.12g}, but a record can move a message by {rounded:.12g}")
    if m.sensitivity > 1.01 * rounded:
        problems.append(f"charged with Δ = {m.sensitivity:.6g}, far above {exact:.6g}")
    if (m.messages, m.steps) != (release.messages, release.steps):
        problems.append(f"charged {m.messages} × {m.steps} messages, declared {release.messages} × {release.steps}")
    if e.mechanisms is not None and m != e.mechanisms[agent]:
        problems.append("charged with a mechanism that is not the run's")
    if m.dimension != e.network.num_parameters:
        problems.append(f"charged {m.dimension} numbers per message, but a message has {e.network.num_parameters}")
    return problems


def sensitivity(e: Experiment, agent: int) -> float:
    """Δ before rounding, from the settings."""
    C = e.config.privacy.max_grad_norm
    if e.config.privacy.clipping == "batch":
        return 2 * C
    return (2 * C if e.config.batch.sampler == "fixed" else C) / divisor(e, agent)


def divisor(e: Experiment, agent: int) -> float:
    """Public constant that sums of gradients are divided by, from the settings."""
    size = float(e.config.batch.size)
    if e.config.batch.sampler == "fixed":
        return min(size, float(e.batches.sizes[agent]))
    return size if e.config.batch.rate else min(size, e.batches.records)


def check_counts(e: Experiment, ledger: Ledger, replayed: Replay) -> Finding:
    """Check the number of noisy messages on each batch, including an agent's to itself, against the charged number."""
    problems = []
    for r in replayed.rounds:
        made = Counter((m.maker, m.step) for m in r.messages)
        gradients = Counter((g.agent, g.step) for g in r.gradients)
        for i in e.engine.agents:
            charged = {(entry.mechanism.messages,) * entry.mechanism.steps for entry in ledger.accounts[i]}
            if isinstance(e.graph, Schedule):  # a round may have fewer messages than are charged
                release = e.declared_release(r.t, i)
                if all(release.messages <= k for of in charged for k in of) and all(
                    release.steps <= len(of) for of in charged
                ):
                    charged = {(release.messages,) * release.steps}
            counts = tuple(n for (maker, _), n in sorted(made.items()) if maker == i)
            if charged != {counts}:
                problems.append(
                    f"agent {i} made {_plus(counts)} noisy messages in round {r.t}, charged {_plus(*charged)}"
                )
            computed = tuple(n for (agent, _), n in sorted(gradients.items()) if agent == i)
            if computed != counts:
                problems.append(
                    f"agent {i} computed {_plus(computed)} gradients in round {r.t}, added noise to {_plus(counts)}"
                )
    return conclude("messages counted", problems, f"{len(replayed.messages)} messages in {replayed.covered}")


def _plus(counts: Sequence[int] = (), *others: Sequence[int]) -> str:
    """Number of messages on each batch of a round, like 3 or 2 + 2."""
    return " or ".join(" + ".join(map(str, of)) or "no" for of in (counts, *others))


def check_epsilon(
    e: Experiment,
    noise: Noise,
    messages: Sequence[Message],
    rounds: int,
    stated: Sequence[float | None],
    ledger: Ledger,
    rows: Sequence[RoundRecord],
) -> Finding:
    """Check the stated ε against one recomputed from the σ in use, the counted messages, and the settings."""
    assert e.mechanisms is not None
    problems, worst = [], 0.0
    known: dict[tuple[object, ...], float] = {}
    for i, claimed in enumerate(stated):
        on_batch: dict[tuple[int, int], list[float]] = {}
        for m in messages:
            if m.maker == i:
                on_batch.setdefault((m.round, m.step), []).append(noise.sigma_of(i, m.peer))
        sigmas = max(on_batch.values(), key=_precision, default=[e.sigma[i]])
        batches = len(on_batch) / max(1, len({t for t, _ in on_batch}))
        z = 1 / (math.sqrt(_precision(sigmas)) * sensitivity(e, i)) if all(sigmas) else 0.0
        key = (f"{z:.6g}", batches, e.mechanisms[i].rate)
        if key not in known:
            known[key] = account_again(z, math.ceil(batches * rounds), e.mechanisms[i].rate, ledger.delta)
        true = known[key]
        worst = max(worst, true)
        if claimed is None or claimed < true * (1 - MAX_BELOW):
            problems.append(f"agent {i}: ε = {claimed} is stated, {format_epsilon(true)} was spent")
        elif claimed > true * 1.02 and not isinstance(e.graph, Schedule):  # which is charged for its largest round
            problems.append(f"agent {i}: ε = {claimed} is stated, far above {format_epsilon(true)}")
        elif ledger.budget is not None and true > ledger.budget * 1.001:
            problems.append(f"agent {i}: ε = {format_epsilon(true)} exceeds the budget of {ledger.budget:g}")
    last = next((row["epsilon"] for row in reversed(rows) if row.get("epsilon") is not None), None)
    if last is not None and len(rows) == rounds and last < worst * (1 - MAX_BELOW):
        problems.append(f"the last row states ε = {last:.6g}, {format_epsilon(worst)} was spent")
    if float(format_epsilon(worst).replace(",", "")) < worst:
        problems.append("displayed ε is rounded down")
    return conclude("ε recomputed", problems, f"worst agent {format_epsilon(worst)} at δ = {ledger.delta:g}")


def _precision(sigmas: Sequence[float]) -> float:
    return math.fsum(1 / sigma**2 if sigma else math.inf for sigma in sigmas)


@lru_cache(maxsize=256)
def account_again(z: float, rounds: int, rate: float | None, delta: float) -> float:
    """ε by dp-accounting's events and accountant."""
    if not z:
        return math.inf
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    event: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(z)
    if rate is not None and rate < 1:
        event = dp_accounting.PoissonSampledDpEvent(rate, event)
    return float(PLDAccountant().compose(event, rounds).get_epsilon(delta))


def check_rows(e: Experiment, replayed: Replay, rows: Sequence[RoundRecord]) -> Finding:
    """Check that replayed rounds reproduce the rows, so the run used this noise, and that all fields are known."""
    problems = list(replayed.problems)
    metrics = {name for r in replayed.rounds for name in r.metrics}
    measured = set(evaluate_models(e, initial_models(e)))
    unknown = {name for row in rows for name in row} - KNOWN_FIELDS - metrics - measured
    if unknown:
        problems.append(f"rows have an unknown field {min(unknown)}, which may be computed from private records")
    compared = 0
    for r in replayed.rounds:
        row = next((row for row in rows if row["round"] == r.t), None)
        if not r.in_place or row is None or "consensus" not in row:
            continue
        compared += 1
        if not math.isclose(r.consensus, row["consensus"], rel_tol=1e-3, abs_tol=1e-9):
            problems.append(f"round {r.t} replayed has consensus {r.consensus:.6g}, its row {row['consensus']:.6g}")
        problems += wrong_metrics(e, r.after.x, row, f"the row of round {r.t}")
    return conclude(
        "replayed rounds", problems, f"{compared} rounds reproduce their rows, {len(replayed.rounds)} examined"
    )


def evaluate_models(e: Experiment, x: Tensor) -> dict[str, float]:
    """Headline metric and losses of the agents' models and of their mean on the test set."""
    (inputs, targets), task, m = e.test, e.task, e.task.metric
    models = [*x, x.double().mean(0).to(x.dtype)]
    outputs = [e.network.outputs(row, inputs.to(row.device)).double().cpu() for row in models]
    scores = [task.score(out, targets) for out in outputs]
    losses = [float(task.losses(out, targets).mean()) for out in outputs[:-1]]
    extra = [task.extra_metrics(out, targets) for out in outputs[:-1]]
    own = scores[:-1]
    return {
        **{name: fmean(values[name] for values in extra) for name in extra[0]},
        **{f"{m}_per_agent.{n}": score for n, score in enumerate(own)},
        m: fmean(own),
        f"{m}_min": min(own),
        f"{m}_max": max(own),
        f"{m}_of_mean": scores[-1],
        "loss": fmean(losses),
        "loss_min": min(losses),
        "loss_max": max(losses),
    }


def wrong_metrics(e: Experiment, x: Tensor, stated: Mapping[str, Any], where: str) -> list[str]:
    """Differences between stated and recomputed accuracies and losses on the test set."""
    each = stated.get("per_agent") or stated.get(f"{e.task.metric}_per_agent") or []
    flat = {**stated, **{f"{e.task.metric}_per_agent.{n}": value for n, value in enumerate(each)}}
    return [
        f"{where} states {name} = {flat[name]:.6g}, on the test set it is {value:.6g}"
        for name, value in evaluate_models(e, x).items()
        if flat.get(name) is not None
        and math.isfinite(value)
        and not math.isclose(value, flat[name], rel_tol=1e-3, abs_tol=2e-3)
    ]


def check_end(
    e: Experiment, ledger: Ledger, rows: Sequence[RoundRecord], rule: Mapping[str, Any] | None = None
) -> Finding:
    """Check that the run ended with its last round, at the budget, or by a `rule` over public records."""
    if len(rows) >= e.config.rounds or e.mechanisms is None:
        return Finding("end of the run", Verdict.PASS, f"all {e.config.rounds} rounds were run")
    if not ledger.charge(ledger.rounds + 1, e.mechanisms).within_budget:
        return Finding("end of the run", Verdict.PASS, f"ended after {len(rows)} rounds, at the budget")
    if rule is not None and ledger.rounds == len(rows) == stopping_round(rows, dict(rule)):
        text = f"ended after {len(rows)} rounds by a rule over the rows, which are public: {rule['monitor']}"
        return Finding("end of the run", Verdict.PASS, text)
    return Finding(
        "end of the run",
        Verdict.INCONCLUSIVE,
        f"ended after {len(rows)} of {e.config.rounds} rounds, below the budget: no ε covers a stop that depends on"
        " records",
    )
