"""Checks of the ledger: every round is charged with what was sent, and ε is what the measurements come to."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from pdsl.auditing.recorders import Message
from pdsl.auditing.replay import Replay
from pdsl.auditing.report import Finding, Verdict, conclude
from pdsl.privacy import Ledger, Mechanism, Noise
from pdsl.rounded import rounded_up
from pdsl.runs import Row
from pdsl.train import Experiment

MAX_BELOW = 0.003  # share by which a stated ε may lie below the audit's own, which is computed on a coarser grid


def check_ledger(e: Experiment, ledger: Ledger, noise: Noise, rows: Sequence[Row]) -> Finding:
    """Every round of every agent is in the ledger once, with what the settings, data, noise and graph say about it."""
    problems = []
    for i in e.engine.agents:
        for entry in ledger.accounts[i][-1:]:
            charged_for = entry.mechanism.sigmas
            peers = ledger.peers[i] if len(ledger.peers[i]) == len(charged_for) else (i,) * len(charged_for)
            used = [noise.sigma_of(i, j) for j in peers]
            if any(not sigma >= charged * (1 - 1e-12) for sigma, charged in zip(used, charged_for, strict=True)):
                problems.append(f"agent {i}: charged for σ = {max(charged_for):.8g}, uses {min(used):.8g}")
    for i, account in enumerate(ledger.accounts):
        charged = [t for entry in account for t in range(entry.first, entry.last + 1)]
        members = e.graph.neighbourhood(i).tolist()
        if charged != list(range(1, len(charged) + 1)) or len(charged) < len(rows):
            problems.append(f"agent {i}: {len(charged)} rounds charged, {len(rows)} run")
        elif list(ledger.peers[i]) != members:
            problems.append(f"agent {i}: other peers than the graph's")
        else:
            problems += [f"agent {i}: {said}" for entry in account for said in _differences(e, i, entry.mechanism)][:1]
    if not math.isclose(ledger.delta, e.config.privacy.delta):
        problems.append(f"the ledger's δ is {ledger.delta:g}, the settings' {e.config.privacy.delta:g}")
    return conclude("ledger holds every round and peer", problems, f"{len(ledger.accounts)} agents, {len(rows)} rounds")


def _differences(e: Experiment, agent: int, m: Mechanism) -> list[str]:
    release = e.config.algorithm.releases_in(e.graph, agent)
    least = sensitivity(e, agent)
    rounded = least * (1 + 2.0**-24) + math.sqrt(e.network.d) * max(m.sigmas) * 2.0**-32
    problems = []
    if m.sensitivity < rounded * (1 - 1e-12):
        problems.append(f"charged with Δ = {m.sensitivity:.12g}, but a record moves a message by up to {rounded:.12g}")
    if m.sensitivity > 1.01 * rounded:
        problems.append(f"charged with Δ = {m.sensitivity:.6g}, far above {least:.6g}")
    if (m.messages, m.steps) != (release.messages, release.steps):
        problems.append(f"charged for {m.messages} × {m.steps} messages, declared {release.messages} × {release.steps}")
    if e.mechanisms is not None and m != e.mechanisms[agent]:
        problems.append("charged with another mechanism than the run's")
    if m.dimension != e.network.d:
        problems.append(f"charged for {m.dimension} numbers in a message, which has {e.network.d}")
    return problems


def sensitivity(e: Experiment, agent: int) -> float:
    """Δ before rounding, from the settings."""
    p, batch = e.config.privacy, e.config.batch
    if p.clipping == "batch":
        return 2 * p.max_grad_norm
    if batch.sampler == "fixed":
        return 2 * p.max_grad_norm / min(batch.size, e.batches.sizes[agent])
    return p.max_grad_norm / (batch.size if batch.rate else min(float(batch.size), e.batches.records))


def check_counts(e: Experiment, ledger: Ledger, replayed: Replay) -> Finding:
    """k and K, counted: noisy vectors an agent really made on each batch, its own to itself included."""
    problems = []
    for r in replayed.rounds:
        made = Counter((m.maker, m.step) for m in r.messages)
        asked = Counter((a.agent, a.step) for a in r.asked)
        for i in e.engine.agents:
            charged = {(entry.mechanism.messages,) * entry.mechanism.steps for entry in ledger.accounts[i]}
            counts = tuple(n for (maker, _), n in sorted(made.items()) if maker == i)
            if charged != {counts}:
                problems.append(
                    f"agent {i} made {_plus(counts)} noisy messages in round {r.t}, charged {_plus(*charged)}"
                )
            computed = tuple(n for (agent, _), n in sorted(asked.items()) if agent == i)
            if computed != counts:
                problems.append(
                    f"agent {i} computed {_plus(computed)} gradients in round {r.t}, {_plus(counts)} got noise"
                )
    return conclude("messages counted", problems, f"{len(replayed.messages)} messages in {replayed.covered}")


def _plus(counts: Sequence[int] = (), *others: Sequence[int]) -> str:
    """Messages on each batch of a round, like 3 or 2 + 2."""
    return " or ".join(" + ".join(map(str, of)) or "no" for of in (counts, *others))


def check_epsilon(
    e: Experiment,
    noise: Noise,
    messages: Sequence[Message],
    rounds: int,
    stated: Sequence[float | None],
    ledger: Ledger,
    rows: Sequence[Row],
) -> Finding:
    """ε, once more, from the σ in use, the counted messages and the settings' sampler and sensitivity."""
    assert e.mechanisms is not None
    problems, worst = [], 0.0
    known: dict[tuple[object, ...], float] = {}
    for i, said in enumerate(stated):
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
        if said is None or said < true * (1 - MAX_BELOW):
            problems.append(f"agent {i}: ε = {said} is stated, {rounded_up(true)} was spent")
        elif said > true * 1.02:
            problems.append(f"agent {i}: ε = {said} is stated, far above {rounded_up(true)}")
        elif ledger.budget is not None and true > ledger.budget * 1.001:
            problems.append(f"agent {i}: ε = {rounded_up(true)} passes the budget of {ledger.budget:g}")
    last = next((row["epsilon"] for row in reversed(rows) if row.get("epsilon") is not None), None)
    if last is not None and len(rows) == rounds and last < worst * (1 - MAX_BELOW):
        problems.append(f"the last row states ε = {last:.6g}, {rounded_up(worst)} was spent")
    if float(rounded_up(worst).replace(",", "")) < worst:
        problems.append("ε is rounded down where it is shown")
    return conclude("ε computed again", problems, f"worst agent {rounded_up(worst)} at δ = {ledger.delta:g}")


def _precision(sigmas: Sequence[float]) -> float:
    return math.fsum(1 / sigma**2 if sigma else math.inf for sigma in sigmas)


def account_again(z: float, rounds: int, rate: float | None, delta: float) -> float:
    """ε by dp-accounting's own events and accountant."""
    if not z:
        return math.inf
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    event: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(z)
    if rate is not None and rate < 1:
        event = dp_accounting.PoissonSampledDpEvent(rate, event)
    return float(PLDAccountant().compose(event, rounds).get_epsilon(delta))


KNOWN = {
    "round", "consensus", "messages", "bytes", "bytes_between_processes", "epsilon", "accuracy", "accuracy_min",
    "accuracy_max", "accuracy_of_mean", "loss", "loss_min", "loss_max", "seconds", "waited", "present", "shortened",
    "lost", "absent",
}  # fmt: skip


def check_rows(e: Experiment, replayed: Replay, rows: Sequence[Row]) -> Finding:
    """The replayed rounds come out as the rows say: the run used this noise and no other, and rows have no more."""
    problems = list(replayed.problems)
    facts = {name for r in replayed.rounds for name in r.facts}
    unknown = {name for row in rows for name in row} - KNOWN - facts
    if unknown:
        problems.append(f"rows have {min(unknown)}, of which nothing is known: it may be made of private records")
    compared = 0
    for r in replayed.rounds:
        row = next((row for row in rows if row["round"] == r.t), None)
        if not r.in_place or row is None or "consensus" not in row:
            continue
        compared += 1
        if not math.isclose(r.consensus, row["consensus"], rel_tol=1e-3, abs_tol=1e-9):
            problems.append(f"round {r.t} comes out as {r.consensus:.6g}, not {row['consensus']:.6g}")
        problems += compare_measured(e, r.after.x, row, f"the row of round {r.t}")
    return conclude(
        "rounds run again", problems, f"{compared} rounds come out as they did, {len(replayed.rounds)} examined"
    )


def measured_again(e: Experiment, x: Tensor) -> dict[str, float]:
    """Accuracies and losses of the agents' models and of their mean on the public test set."""
    inputs, labels = e.test
    models = [*x, x.double().mean(0).to(x.dtype)]
    outputs = [e.network.logits(row, inputs.to(row.device)).double().cpu() for row in models]
    right = [float((out.argmax(1) == labels).double().mean()) for out in outputs]
    losses = [float(cross_entropy(out, labels)) for out in outputs[:-1]]
    if not math.isfinite(math.fsum(losses)):
        return {}
    own = right[:-1]
    return {
        "accuracy": fmean(own),
        "accuracy_min": min(own),
        "accuracy_max": max(own),
        "accuracy_of_mean": right[-1],
        "loss": fmean(losses),
        "loss_min": min(losses),
        "loss_max": max(losses),
    }


def compare_measured(e: Experiment, x: Tensor, stated: Mapping[str, Any], where: str) -> list[str]:
    """Stated accuracies and losses that are not those on the public test set."""
    return [
        f"{where} states {name} = {stated[name]:.6g}, on the test set it is {value:.6g}"
        for name, value in measured_again(e, x).items()
        if stated.get(name) is not None and not math.isclose(value, stated[name], rel_tol=1e-3, abs_tol=2e-3)
    ]


def check_end(e: Experiment, ledger: Ledger, rows: Sequence[Row]) -> Finding:
    """The run ended with its last round, or because another would have passed the budget."""
    if len(rows) >= e.config.rounds or e.mechanisms is None:
        return Finding("end of the run", Verdict.PASS, f"all of {e.config.rounds} rounds")
    if not ledger.charged(ledger.rounds + 1, e.mechanisms).within_budget:
        return Finding("end of the run", Verdict.PASS, f"after {len(rows)} rounds, at the budget")
    return Finding(
        "end of the run",
        Verdict.INCONCLUSIVE,
        f"it ended after {len(rows)} of {e.config.rounds} rounds, and not for its budget: if records decided that, no ε"
        " covers it",
    )
