"""Checks of the gradients: they are the claimed clipped sums, and no record moves a message further than Δ."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pdsl.auditing import reference
from pdsl.auditing.recorders import Asked
from pdsl.auditing.replay import ReplayedRound
from pdsl.auditing.report import Finding, conclude
from pdsl.data import Batches
from pdsl.gradients import Owners, clip_factors
from pdsl.models import channels_last
from pdsl.train import Apparatus, Experiment

MAX_RECORDS = 6_000  # gradients taken one record at a time, in all
ADDITIVE = 1e-12  # of C, per record: float64, and the same bits in any batch
TOLERANCE = 1e-4  # relative: a batch rounds otherwise than a record alone
MAX_AGENTS = 24  # tried with hostile records; each kind of record at some of them


def check_gradients(e: Experiment, owners: Owners, rounds: Sequence[ReplayedRound]) -> Finding:
    """Gradients of replayed rounds against those of `reference`: every agent at least once, as far as there is time."""
    problems: list[str] = []
    checked = 0
    left = MAX_RECORDS
    covered: set[int] = set()
    # each agent's gradients in turn: first one of every agent, from early and late rounds, then further ones
    order = sorted((n, r.t, a.agent) for r in rounds for n, a in enumerate(_turns(r.asked)))
    by_turn = {(n, r.t, a.agent): a for r in rounds for n, a in enumerate(_turns(r.asked))}
    for key in order:
        asked = by_turn[key]
        if asked.agent in e.rogues:
            continue
        batch = e.batches.draw(asked.agent, asked.round, asked.step)
        if len(batch) > left and covered >= set(e.engine.agents):
            break
        left -= len(batch)
        want = _expected(e, owners, asked, batch)
        off, size = float((asked.clipped.double() - want).norm()), float(want.norm())
        checked += 1
        covered.add(asked.agent)
        if not off <= TOLERANCE * size + 1e-5 * owners.C / e.batches.divisor(asked.agent):
            problems.append(
                f"agent {asked.agent}'s gradient in round {asked.round} is {off / max(size, 1e-300):.2g} of its size"
                " away from the clipped sum of its batch"
            )
    problems += _check_clip(owners.C) + _check_other_clips(e, owners) + _check_additive(e, owners)
    return conclude(
        "clipped gradients", problems, f"{checked} computed again one record at a time, {len(covered)} agents"
    )


def _check_clip(C: float) -> list[str]:
    """The contract of a clip factor, for norms that no record here has."""
    norms = torch.tensor([0.0, 1e-300, 1e-40, 0.5, 1.0, 1 + 1e-12, 1 + 1e-7, 3.0, 1e20, 1e39, 1e44, 1e150]).double() * C
    norms = torch.cat([norms, torch.tensor([math.inf, math.nan]).double()])
    factors = clip_factors(norms.square(), C).double()
    finite = norms.square().isfinite()
    wrong = ~factors.isfinite() | (finite & (factors * norms > C * (1 + 1e-14))) | (~finite & (factors != 0))
    wrong |= finite & (factors < 1 - 1e-12) & (norms <= C)
    return [
        f"a gradient of norm {float(n):g} is clipped by {float(f):g}"
        for n, f in zip(norms[wrong], factors[wrong], strict=True)
    ]


def _check_other_clips(e: Experiment, owners: Owners) -> list[str]:
    """With a larger and a smaller C the same path gives the sums of that C."""
    if e.config.privacy.clipping != "per-sample":
        return []
    agent = max((i for i in e.engine.agents if i not in e.rogues), key=lambda i: e.batches.sizes[i], default=None)
    if agent is None:
        return []
    t = next((t for t in range(1, 40) if len(e.batches.draw(agent, t)) > 1), 1)
    batch, x, problems = e.batches.draw(agent, t)[:400], e.network.elsewhere(), []
    inputs, labels = channels_last(owners.inputs[agent][batch]), owners.labels[agent][batch]
    for factor in (1e6, 0.05):
        C = factor * owners.C
        found = replace(owners, C=C).on(x, inputs, labels, 1.0).double()
        want = reference.clipped_sum(e.network, x, inputs, labels, C)
        if not float((found - want).norm()) <= TOLERANCE * float(want.norm()):
            problems.append(f"with a clip of {C:g} the sum is another than the clipped records'")
    return problems


def _check_additive(e: Experiment, owners: Owners) -> list[str]:
    """A batch's sum is that of its records' own sums to the last digits of float64: records do not round each other."""
    agent = max((i for i in e.engine.agents), key=lambda i: e.batches.sizes[i])
    some = slice(0, min(100, e.batches.sizes[agent]))
    inputs, labels, x = owners.inputs[agent][some], owners.labels[agent][some], e.network.elsewhere()
    if e.config.privacy.clipping != "per-sample" or len(labels) < 2:
        return []
    each = [owners.on(x, inputs[n : n + 1], labels[n : n + 1], 1.0).double() for n in range(len(labels))]
    whole, parts = owners.on(x, inputs, labels, 1.0).double(), torch.stack(each).sum(0)
    off = float((whole - parts).norm()) / (owners.C * len(labels))
    return [f"a batch's sum is off by {off:.2g} of C per record from the sum of its records'"] if off > ADDITIVE else []


def _turns(asked: Sequence[Asked]) -> list[Asked]:
    """One gradient of every agent, then a second of every agent, …"""
    by_agent: dict[int, list[Asked]] = {}
    for a in asked:
        by_agent.setdefault(a.agent, []).append(a)
    longest = max((len(of) for of in by_agent.values()), default=0)
    return [of[n] for n in range(longest) for of in by_agent.values() if n < len(of)]


def _expected(e: Experiment, owners: Owners, asked: Asked, batch: Tensor) -> Tensor:
    inputs, targets = channels_last(owners.inputs[asked.agent][batch]), owners.labels[asked.agent][batch]
    divisor = _divisor(e, asked.agent)
    if asked.teacher is not None and len(batch):
        targets = reference.distilled(e.network, asked.teacher, inputs, targets)
    C = e.config.privacy.max_grad_norm
    if e.config.privacy.clipping == "per-sample":
        return reference.clipped_sum(e.network, asked.x, inputs, targets, C) / divisor
    if len(batch) == 0:
        return torch.zeros(e.network.d, dtype=torch.float64)
    g = reference.gradient(e.network, asked.x, inputs, targets) / divisor
    norm = float(g.norm())
    return g / max(1.0, norm / C) if math.isfinite(norm) else torch.zeros_like(g)


def _divisor(e: Experiment, agent: int) -> float:
    size = float(e.config.batch.size)
    if e.config.batch.sampler == "fixed":
        return min(size, float(e.batches.sizes[agent]))
    return size if e.config.batch.rate else min(size, e.batches.records)


def check_sensitivity(e: Experiment, parts: Apparatus) -> Finding:
    """Hostile records through the very path that training uses: full batches, every agent, several models.

    A record joins an agent's data as its last one. In a round that draws it the agent's message moves by at most Δ, and
    in a round that does not it stays the same, bit for bit.
    """
    assert e.mechanisms is not None
    problems: list[str] = []
    worst, tried = 0.0, 0
    agents = [i for i in e.engine.agents if e.batches.sizes[i]]
    agents = agents[:: max(1, -(-len(agents) // MAX_AGENTS))]
    for place, agent in enumerate(agents):
        base = parts.owners
        delta = e.mechanisms[agent].sensitivity
        hostile = _hostile(base.inputs[agent], base.labels[agent], e.data.classes)
        models = _models(e)
        names = list(hostile)
        share = 1 if len(agents) <= 4 else 2  # of the pairs of model and record, at each agent
        for n, name in enumerate(names):
            for m, (model, x) in enumerate(models.items()):
                if (n + m + place) % share:
                    continue
                for drawn, whole in ((True, False), (False, False), (True, True)):
                    if whole and (n or m):
                        continue
                    moved = _moved(_with_all_records(base) if whole else base, agent, hostile[name], x, drawn)
                    if moved is None:
                        continue
                    tried += 1
                    limit = delta * (1 + 1e-6) if drawn else 0.0
                    if not moved <= limit:  # NaN is not
                        how = f"{name} joining agent {agent} at {model}" + (
                            "" if drawn else ", though it is not drawn,"
                        )
                        problems.append(f"{how} moves a message by {moved:.4g}, Δ is {delta:.4g}")
                    elif drawn:
                        worst = max(worst, moved / delta)
    return conclude(
        "sensitivity", problems, f"{tried} hostile records at {len(agents)} agents, the worst reached {worst:.1%} of Δ"
    )


def _moved(base: Owners, agent: int, record: tuple[Tensor, Tensor], x: Tensor, drawn: bool) -> float | None:
    """How far a joining record moves the agent's gradient in a round that draws it, or in one that does not."""
    n = base.batches.sizes[agent]
    sizes = list(base.batches.sizes)
    sizes[agent] = n + 1
    larger = replace(base.batches, sizes=sizes)
    fixed = base.batches.settings.sampler == "fixed"
    joined = replace(
        base,
        inputs=_replaced(base.inputs, agent, torch.cat([base.inputs[agent], record[0]])),
        labels=_replaced(base.labels, agent, torch.cat([base.labels[agent], record[1]])),
        batches=larger,
        repeated={},
    )
    alone = replace(base, repeated={})
    if fixed:  # a record is replaced: the last one, in both
        joined = replace(
            base,
            inputs=_replaced(base.inputs, agent, torch.cat([base.inputs[agent][:-1], record[0]])),
            labels=_replaced(base.labels, agent, torch.cat([base.labels[agent][:-1], record[1]])),
            repeated={},
        )
        larger, n = base.batches, n - 1
    t = next((t for t in range(1, 40) if (n in larger.draw(agent, t).tolist()) == drawn), None)
    if t is None:
        return None
    who = torch.tensor([agent])
    with_it = joined.gradients(t, who, x[None])[0].double()
    return float((with_it - alone.gradients(t, who, x[None])[0].double()).norm())


def _with_all_records(base: Owners) -> Owners:
    """The same with batches of all records."""
    if base.batches.settings.sampler == "fixed":
        return base
    settings = base.batches.settings.model_copy(update={"rate": 1.0, "records": None})
    return replace(base, batches=_AllRecords(base.batches.sizes, settings, base.batches.streams, base.batches.records))


class _AllRecords(Batches):
    """Every record in every batch, over the divisor of the run."""

    def divisor(self, agent: int) -> float:
        return min(float(self.settings.size), self.records)


def _replaced(values: list[Tensor], at: int, value: Tensor) -> list[Tensor]:
    return [value if n == at else old for n, old in enumerate(values)]


def _models(e: Experiment) -> dict[str, Tensor]:
    other = e.network.elsewhere()
    return {"the first model": e.network.start(), "another model": other, "a wild model": 50 * other}


def _hostile(inputs: Tensor, labels: Tensor, classes: int) -> dict[str, tuple[Tensor, Tensor]]:
    one, label = inputs[:1], labels[:1]
    other = (label + 1) % classes
    infinite = one.clone()
    infinite.view(-1)[0] = math.inf
    return {
        "a record with another label": (one, other),
        "a record 1e4 times as large": (one * 1e4, other),
        "a record 1e18 times as large": (one * 1e18, label),
        "a record of 1e37": (torch.full_like(one, 1e37), other),
        "a record of 1e-40": (torch.full_like(one, 1e-40), other),
        "its negative, 1e4 times": (-1e4 * one, other),
        "a record of NaN": (torch.full_like(one, math.nan), label),
        "a record with one infinity": (infinite, label),
        "a record of zeros": (torch.zeros_like(one), label),
    }
