"""The audit: does a run do what its ledger says, and can the claim be broken?

Conformance first: what the run's own parts (records, clip, noise, sampler, algorithm) really do is measured, and what
the ledger claims is computed again from those measurements, with formulas of the audit's own. Then canaries.

A check that fails is evidence against the claim at a false-alarm rate of about one in a million per check.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from pdsl.data.batches import Batches
from pdsl.gradients import Owners
from pdsl.parallel import Workers
from pdsl.privacy.accounting import Mechanism
from pdsl.privacy.canaries import Canaries, canaries
from pdsl.privacy.ledger import Ledger
from pdsl.privacy.mechanism import Noise, sensitivity
from pdsl.privacy.statement import statement
from pdsl.privacy.transcript import Asked, Message, Recorder
from pdsl.runner import older_evidence, read_ledger, take_up
from pdsl.runs import Row, RunDirectory
from pdsl.train import Apparatus, Experiment, advanced, apparatus, distances, first_state

ALARM = 1e-6  # probability of a false alarm, per check
REPEATED = "rounds run again"
ROUNDS = 4  # rounds run again to look at messages
BATCHES = 400  # batches drawn to look at the sampler


class Verdict(IntEnum):
    """Also the exit code."""

    PASS = 0
    FAIL = 1
    INCONCLUSIVE = 2


@dataclass(frozen=True)
class Finding:
    check: str
    verdict: Verdict
    detail: str


@dataclass(frozen=True)
class Report:
    """All findings, and what they come to."""

    claim: str
    findings: list[Finding]

    @property
    def verdict(self) -> Verdict:
        """One failure is a failure; with none, one check that could not be made leaves it open."""
        found = {finding.verdict for finding in self.findings}
        return next(v for v in (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS) if v in found)

    def as_dict(self) -> dict[str, Any]:
        findings = [{"check": f.check, "verdict": f.verdict.name.lower(), "detail": f.detail} for f in self.findings]
        return {"verdict": self.verdict.name.lower(), "claim": self.claim, "findings": findings}


def audit_run(path: Path, count: int, rounds: int | None = None) -> Report:
    """Audit the run in a directory, with `count` canaries over `rounds` rounds (None: as many as it takes)."""
    e, run = take_up(path, [])
    ledger = read_ledger(run)
    findings = audit(e, ledger, run.rows(), written_epsilons(run))
    if older_evidence(run):
        findings = [_cannot_be_repeated(finding) for finding in findings]
    if ledger is not None and e.mechanisms is not None and count:
        findings.append(canary_finding(canaries(e, 0, count, rounds), ledger.epsilon))
    return Report(statement(e.config.privacy, ledger, e.mechanisms), findings)


def _cannot_be_repeated(finding: Finding) -> Finding:
    if finding.check != REPEATED or finding.verdict is Verdict.PASS:
        return finding
    return Finding(REPEATED, Verdict.INCONCLUSIVE, "the run was made by a version that weighed by another rule")


def canary_finding(found: Canaries, claimed: float) -> Finding:
    """The bound must not pass the claim; the controls show whether the test could have told."""
    detail = (
        f"{found.count} canaries at agent {found.agent}: ε ≥ {found.epsilon:.2f} (claimed {claimed:.4g});"
        f" unused coins {found.null:.2f}, noise off {found.positive:.2f}"
    )
    if found.epsilon > claimed or found.null > 1:
        return Finding("canaries", Verdict.FAIL, detail)
    if found.positive < 1:
        return Finding("canaries", Verdict.INCONCLUSIVE, f"{detail}: too weak to tell, try more canaries or rounds")
    return Finding("canaries", Verdict.PASS, detail)


def written_epsilons(run: RunDirectory) -> list[float | None]:
    """The ε of each agent as it stands in the ledger's file; [] for a run that has not finished."""
    stored = json.loads(run.read("ledger.json") or b'{"agents": []}')
    return [agent["epsilon"] for agent in stored["agents"] if "epsilon" in agent]


def audit(e: Experiment, ledger: Ledger | None, rows: Sequence[Row], claimed: Sequence[float | None]) -> list[Finding]:
    """All conformance checks of a run with these rows; `claimed` is the ε written down for each agent."""
    if e.mechanisms is None or ledger is None:
        return [Finding("claim", Verdict.INCONCLUSIVE, "the run has no noise and makes no claim")]
    with Workers(e.config.engine.workers) as workers:
        parts = apparatus(e, workers)
        replayed = _replay(e, parts)
        return [
            _ledger_matches(e, ledger, rows),
            _rows_match(replayed, rows),
            _counted(ledger, replayed.messages),
            _all_noisy(replayed),
            _epsilon_matches(e, parts.noise, replayed.messages, len(rows), claimed or ledger.epsilon_per_agent, ledger),
            *_noise(parts.noise, replayed.messages),
            _sampler(e.batches, e.mechanisms),
            _sensitivity(e, parts.owners),
        ]


@dataclass(frozen=True)
class _Replay:
    """The first rounds, run again from the start by the run's own parts."""

    messages: list[Message]
    gradients: list[tuple[int, int, int]]  # (round, local step, agent) of each gradient that was asked for
    consensus: list[float]  # per round


def _replay(e: Experiment, parts: Apparatus) -> _Replay:
    seen: list[Message] = []
    consensus = []
    noise = Recorder.watching(parts.noise, seen)
    owners = Asked(parts.owners, [])
    state = first_state(e)
    for t in range(1, ROUNDS + 1):
        state, _ = advanced(e.config, state, parts.round(t, noise, owners))
        consensus.append(fmean(distances(state.x, e.engine.mean(state.x))))
    return _Replay(seen, owners.seen, consensus)


# Conformance


def _ledger_matches(e: Experiment, ledger: Ledger, rows: Sequence[Row]) -> Finding:
    """Every round of every agent is in the ledger once, with what the settings, data and graph say about it."""
    wrong = []
    for i, account in enumerate(ledger.accounts):
        charged = [t for entry in account for t in range(entry.first, entry.last + 1)]
        members = e.graph.neighbourhood(i).tolist()
        release = e.config.algorithm.releases_in(e.graph, i)
        counted = (release.messages, release.steps, e.batches.rate, release.seen)
        derived = (sensitivity(e.config.privacy, e.batches, i), counted)
        if charged != list(range(1, len(charged) + 1)) or len(charged) < len(rows):
            wrong.append(f"agent {i}: {len(charged)} rounds charged, {len(rows)} run")
        elif any(not _alike(entry.mechanism, derived) for entry in account):
            wrong.append(f"agent {i}: charged with another sensitivity, number of messages or rate than the run's")
        elif list(ledger.peers[i]) != members:
            wrong.append(f"agent {i}: other peers than the graph's")
    return _finding("ledger holds every round and peer", wrong, f"{len(ledger.accounts)} agents, {len(rows)} rounds")


def _alike(m: Mechanism, derived: tuple[float, tuple[int, int, float | None, int]]) -> bool:
    close = math.isclose(m.sensitivity, derived[0], rel_tol=1e-9)
    return close and (m.messages, m.steps, m.rate, m.seen) == derived[1]


def _rows_match(replayed: _Replay, rows: Sequence[Row]) -> Finding:
    """With the ledger's σ the first rounds come out as they did: the run used that noise and no other."""
    pairs = zip(replayed.consensus, rows, strict=False)
    wrong = [
        f"round {row['round']} comes out differently with the ledger's noise: {again:.6g}, not {row['consensus']:.6g}"
        for again, row in pairs
        if not math.isclose(again, row["consensus"], rel_tol=1e-3, abs_tol=1e-9)
    ]
    return _finding(REPEATED, wrong, f"{min(len(rows), ROUNDS)} rounds come out as they did")


def _counted(ledger: Ledger, messages: list[Message]) -> Finding:
    """k and K, counted: noisy vectors an agent really made on each batch, its own to itself included."""
    made = Counter((m.maker, m.round, m.step) for m in messages)
    wrong = []
    for i, account in enumerate(ledger.accounts):
        claimed = {(entry.mechanism.messages,) * entry.mechanism.steps for entry in account}
        for t in range(1, ROUNDS + 1):
            counts = tuple(n for (maker, round_, _), n in made.items() if (maker, round_) == (i, t))
            if claimed != {counts}:
                wrong.append(
                    f"agent {i} made {_per_batch(counts)} noisy messages in round {t}, the ledger counts"
                    f" {' or '.join(_per_batch(c) for c in sorted(claimed)) or 'none'}"
                )
    return _finding("messages counted", wrong, f"{len(messages)} messages in {ROUNDS} rounds")


def _per_batch(counts: Sequence[int]) -> str:
    """Messages on each batch of a round, like 3 or 2 + 2."""
    return " + ".join(map(str, counts)) or "no"


def _all_noisy(replayed: _Replay) -> Finding:
    """No gradient is computed that does not get its noise: what is not noisy must not enter an update."""
    asked = Counter(replayed.gradients)
    noisy = Counter((m.round, m.step, m.maker) for m in replayed.messages)
    wrong = [
        f"agent {agent} computed {n} gradients in round {t}, {noisy[t, step, agent]} of them got noise"
        for (t, step, agent), n in asked.items()
        if n != noisy[t, step, agent]
    ]
    return _finding("every gradient gets noise", wrong, f"{sum(asked.values())} gradients")


def _epsilon_matches(
    e: Experiment,
    noise: Noise,
    messages: list[Message],
    rounds: int,
    claimed: Sequence[float | None],
    ledger: Ledger,
) -> Finding:
    """ε, once more, from the measured σ, the counted messages and the sampler that was really used."""
    assert e.mechanisms is not None
    wrong, worst = [], 0.0
    for i, said in enumerate(claimed):
        on_batch: dict[tuple[int, int], list[float]] = {}
        for message in messages:
            if message.maker == i:
                on_batch.setdefault((message.round, message.step), []).append(noise.sigma_of(i, message.peer))
        sigmas = max(on_batch.values(), key=_precision, default=[e.sigma[i]])
        steps = max(1, len(on_batch) // ROUNDS)
        delta_2 = sensitivity(e.config.privacy, e.batches, i)
        true = _epsilon_again(sigmas, delta_2, steps * rounds, e.batches.rate, ledger.delta)
        worst = max(worst, true)
        if said is None or not math.isclose(said, true, rel_tol=0.01):
            wrong.append(f"agent {i}: ε = {said} is written down, {true:.4g} is what was spent")
        elif ledger.budget is not None and true > ledger.budget * 1.001:
            wrong.append(f"agent {i}: ε = {true:.4g} passes the budget of {ledger.budget:g}")
    return _finding("ε computed again", wrong, f"worst agent {worst:.4g} at δ = {ledger.delta:g}")


def _precision(sigmas: Sequence[float]) -> float:
    return math.fsum(1 / sigma**2 if sigma else math.inf for sigma in sigmas)


def _epsilon_again(sigmas: Sequence[float], delta_2: float, rounds: int, rate: float | None, delta: float) -> float:
    """The audit's own account, from dp-accounting's events.

    The vectors on one batch, each over its own σ, have noise of deviation 1 and sensitivity Δ·√(Σ 1/σ²).
    """
    if not all(sigmas):
        return math.inf
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    round_: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(1 / (math.sqrt(_precision(sigmas)) * delta_2))
    if rate is not None and rate < 1:
        round_ = dp_accounting.PoissonSampledDpEvent(rate, round_)
    return float(PLDAccountant().compose(round_, rounds).get_epsilon(delta))


def _noise(noise: Noise, messages: list[Message]) -> Iterator[Finding]:
    """σ by χ², the shape by Kolmogorov and Smirnov, and no two messages with noise in common."""
    from scipy import stats

    if not all(noise.sigma):
        yield Finding("σ of the noise", Verdict.FAIL, "an agent's σ is 0")
        return
    of: dict[str, list[Message]] = {"all agents": messages}
    for m in messages:
        of.setdefault(f"agent {m.maker}", []).append(m)
        if noise.stretch and noise.stretch[m.maker]:
            of.setdefault(f"agent {m.maker} to {m.peer}", []).append(m)
    wrong = []
    for who, own in of.items():
        unit = torch.cat([m.noise / noise.sigma_of(m.maker, m.peer) for m in own])
        chi2 = float(unit.square().sum())
        p = 2 * min(stats.chi2.cdf(chi2, len(unit)), stats.chi2.sf(chi2, len(unit)))
        if p < ALARM:
            wrong.append(f"{who}: the noise has {math.sqrt(chi2 / len(unit)):.4f} times the σ that is claimed")
    yield _finding(
        "σ of the noise", wrong, f"{len(messages)} messages, χ² per agent, where they differ per edge, and for all"
    )

    scale = torch.tensor([noise.sigma_of(m.maker, m.peer) for m in messages], dtype=torch.float64)
    unit = torch.stack([m.noise for m in messages]) / scale[:, None]  # [messages, d]
    values = unit.flatten().numpy()
    p = float(stats.kstest(values[:: max(1, len(values) // 200_000)], "norm").pvalue)
    shape = [f"not a normal distribution: p = {p:.1e}"] if p < ALARM else []
    yield _finding("noise is Gaussian", shape, f"p = {p:.2g}")

    d = unit.shape[1]
    correlation = (unit @ unit.T) / d
    pairs = len(messages) * (len(messages) - 1) / 2
    limit = stats.norm.isf(ALARM / max(1.0, pairs) / 2) / math.sqrt(d)
    alike = [
        f"messages of agents {a.maker} and {b.maker} (to {a.peer} and {b.peer}, rounds {a.round} and {b.round})"
        f" have noise in common: correlation {float(correlation[n, m]):.2f}"
        for (n, a), (m, b) in combinations(enumerate(messages), 2)
        if abs(correlation[n, m]) > limit
    ]
    yield _finding("noise is never shared", alike, f"{pairs:,.0f} pairs, none correlated")


def _sampler(batches: Batches, mechanisms: Sequence[Mechanism]) -> Finding:
    """The rate that the accountant was told is the rate at which records are drawn, each by itself."""
    from scipy import stats

    claimed = mechanisms[0].rate
    if claimed is None:
        return Finding("sampler", Verdict.PASS, "fixed-size batches: no amplification claimed")
    wrong = []
    for i, n in enumerate(batches.sizes):
        member = torch.zeros(BATCHES, n)
        for b in range(BATCHES):  # in the order in which the run draws them: round by round, step by step
            member[b, batches.draw(i, 1 + b // mechanisms[i].steps, b % mechanisms[i].steps)] = 1
        drawn, draws = int(member.sum()), BATCHES * n
        p = float(stats.binomtest(drawn, draws, claimed).pvalue)
        if p < ALARM:
            wrong.append(f"agent {i}: records are drawn at rate {drawn / draws:.4f}, claimed {claimed:.4f}")
        if 0 < claimed < 1:
            spread = float(member.sum(1).var())
            ratio = spread / (n * claimed * (1 - claimed)) * (BATCHES - 1)
            p = 2 * min(stats.chi2.cdf(ratio, BATCHES - 1), stats.chi2.sf(ratio, BATCHES - 1))
            if n >= 8 and p < ALARM:
                expected = n * claimed * (1 - claimed)
                wrong.append(f"agent {i}: batch sizes have variance {spread:.3g}, Poisson sampling's {expected:.3g}")
            again = float((member[1:] * member[:-1]).sum())
            p = float(stats.binomtest(int(again), (BATCHES - 1) * n, claimed**2).pvalue)
            if p < ALARM / 10:
                wrong.append(f"agent {i}: successive batches are not independent")
    return _finding("sampler", wrong, f"rate {claimed:.4g}, {BATCHES} batches per agent")


def _sensitivity(e: Experiment, owners: Owners) -> Finding:
    """Neighbouring batches made to break the clip: no record may move a message by more than Δ."""
    assert e.mechanisms is not None
    x0 = e.network.start()
    other = e.network.elsewhere()
    models = {"the first model": x0, "another model": other, "a wild model": 50 * other, "the zero model": 0 * x0}
    inputs, labels = owners.inputs[0][:6], owners.labels[0][:6]
    m, divisor = e.mechanisms[0], owners.batches.divisor(0)
    worst, wrong = 0.0, []
    for model, x in models.items():
        for name, (record, label) in _adversaries(inputs, labels, e.data.classes).items():
            for base_name, base in {"others": slice(0, 6), "nobody": slice(0, 0)}.items():
                a, b = inputs[base], labels[base]
                with_it = owners.on(x, torch.cat([a, record]), torch.cat([b, label]), divisor)
                moved = float((with_it.double() - owners.on(x, a, b, divisor).double()).norm())
                if not moved <= m.sensitivity * (1 + 1e-4):  # NaN is not
                    how = f"{name} joining {base_name} at {model}"
                    wrong.append(f"{how} moves a message by {moved:.4g}, Δ is {m.sensitivity:.4g}")
                else:
                    worst = max(worst, moved / m.sensitivity)
    return _finding("sensitivity", wrong, f"the worst of the adversaries reached {worst:.1%} of Δ")


def _adversaries(inputs: Tensor, labels: Tensor, classes: int) -> dict[str, tuple[Tensor, Tensor]]:
    one, label = inputs[:1], labels[:1]
    other = (label + 1) % classes
    return {
        "a record with another label": (one, other),
        "a record 1e4 times as large": (one * 1e4, other),
        "a record 1e18 times as large": (one * 1e18, label),
        "its negative, 1e4 times": (-1e4 * one, other),
        "a record of NaN": (torch.full_like(one, math.nan), label),
        "a record with one infinity": (_with_infinity(one), label),
        "a record of zeros": (torch.zeros_like(one), label),
    }


def _with_infinity(record: Tensor) -> Tensor:
    record = record.clone()
    record.view(-1)[0] = math.inf
    return record


def _finding(check: str, wrong: Sequence[str], right: str) -> Finding:
    if not wrong:
        return Finding(check, Verdict.PASS, right)
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return Finding(check, Verdict.FAIL, wrong[0] + more)
