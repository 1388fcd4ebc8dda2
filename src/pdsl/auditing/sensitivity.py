"""Checks of the gradients: they are correctly clipped sums, and no record moves a message by more than Δ."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from pdsl.auditing import reference
from pdsl.auditing.accounts import divisor
from pdsl.auditing.replay import RecordedGradient, ReplayedRound
from pdsl.auditing.report import Finding, conclude
from pdsl.data import Batches
from pdsl.gradients.clipping import LocalGradients, clip_factors
from pdsl.tasks import Task
from pdsl.training.experiment import Experiment
from pdsl.training.trainer import Trainer
from pdsl.utils.inputs import Inputs, channels_last, concat, map_inputs

T = TypeVar("T")

MAX_RECORDS = 6_000  # gradients computed one record at a time, over all checks
ADDITIVE = 1e-12  # of C, per record: sums are in float64, and records have the same bits in any batch
TOLERANCE = 1e-4  # relative: a batch rounds differently from a single record
MAX_AGENTS = 24  # tested with adversarial records


def check_gradients(e: Experiment, local: LocalGradients, rounds: Sequence[ReplayedRound]) -> Finding:
    """Check gradients of replayed rounds against `reference`, at least one for every agent."""
    problems: list[str] = []
    checked = 0
    left = MAX_RECORDS
    covered: set[int] = set()
    # one gradient of every agent first, from early and late rounds, then further ones
    by_turn = {(n, r.t, g.agent): g for r in rounds for n, g in enumerate(_interleave(r.gradients))}
    for key in sorted(by_turn):
        g = by_turn[key]
        if g.agent in e.attackers:
            continue
        batch = e.batches.draw(g.agent, g.round, g.step)
        if len(batch) > left and covered >= set(e.engine.agents):
            break
        left -= len(batch)
        expected = _expected(e, local, g, batch)
        error, size = float((g.clipped.double() - expected).norm()), float(expected.norm())
        checked += 1
        covered.add(g.agent)
        if not error <= TOLERANCE * size + 1e-5 * local.C / e.batches.divisor(g.agent):
            problems.append(
                f"agent {g.agent}'s gradient in round {g.round} differs from the clipped sum of its batch by"
                f" {error / max(size, 1e-300):.2g} of its norm"
            )
    problems += _check_clip(local.C) + _check_other_clips(e, local) + _check_additive(e, local)
    return conclude("clipped gradients", problems, f"{checked} recomputed one record at a time, {len(covered)} agents")


def _check_clip(C: float) -> list[str]:
    """Check clip factors for extreme norms."""
    norms = torch.tensor([0.0, 1e-300, 1e-40, 0.5, 1.0, 1 + 1e-12, 1 + 1e-7, 3.0, 1e20, 1e39, 1e44, 1e150]).double() * C
    norms = torch.cat([norms, torch.tensor([math.inf, math.nan]).double()])
    factors = clip_factors(norms.square(), C).double()
    finite = norms.square().isfinite()
    wrong = ~factors.isfinite() | (finite & (factors * norms > C * (1 + 1e-14))) | (~finite & (factors != 0))
    wrong |= finite & (factors < 1 - 1e-12) & (norms <= C)
    return [
        f"a gradient of norm {float(n):g} has clip factor {float(f):g}"
        for n, f in zip(norms[wrong], factors[wrong], strict=True)
    ]


def _check_other_clips(e: Experiment, local: LocalGradients) -> list[str]:
    """Check the sums with a larger and a smaller C."""
    if e.config.privacy.clipping != "per-sample":
        return []
    agent = max((i for i in e.engine.agents if i not in e.attackers), key=lambda i: e.batches.sizes[i], default=None)
    if agent is None:
        return []
    t = next((t for t in range(1, 40) if len(e.batches.draw(agent, t)) > 1), 1)
    batch, x, problems = e.batches.draw(agent, t)[:400], e.network.perturbed_parameters(), []
    inputs, labels = channels_last(local.inputs[agent][batch]), local.labels[agent][batch]
    for factor in (1e6, 0.05):
        C = factor * local.C
        found = replace(local, C=C).on(x, inputs, labels, 1.0).double()
        want = reference.clipped_sum(e.network, x, inputs, labels, C)
        if not float((found - want).norm()) <= TOLERANCE * float(want.norm()):
            problems.append(f"with C = {C:g} the sum differs from that of the clipped records")
    return problems


def _check_additive(e: Experiment, local: LocalGradients) -> list[str]:
    """Check that the sum of a batch is the sum over its single records, to the last digits of float64."""
    agent = max((i for i in e.engine.agents), key=lambda i: e.batches.sizes[i])
    some = slice(0, min(100, e.batches.sizes[agent]))
    inputs, labels, x = local.inputs[agent][some], local.labels[agent][some], e.network.perturbed_parameters()
    if e.config.privacy.clipping != "per-sample" or len(labels) < 2:
        return []
    each = [local.on(x, inputs[n : n + 1], labels[n : n + 1], 1.0).double() for n in range(len(labels))]
    whole, parts = local.on(x, inputs, labels, 1.0).double(), torch.stack(each).sum(0)
    error = float((whole - parts).norm()) / (local.C * len(labels))
    if error > ADDITIVE:
        return [f"the sum of a batch differs from the sum over its records by {error:.2g} of C per record"]
    return []


def _interleave(gradients: Sequence[RecordedGradient]) -> list[RecordedGradient]:
    """One gradient of every agent, then a second of every agent, …"""
    by_agent: dict[int, list[RecordedGradient]] = {}
    for g in gradients:
        by_agent.setdefault(g.agent, []).append(g)
    longest = max((len(own) for own in by_agent.values()), default=0)
    return [own[n] for n in range(longest) for own in by_agent.values() if n < len(own)]


def _expected(e: Experiment, local: LocalGradients, recorded: RecordedGradient, batch: Tensor) -> Tensor:
    """Clipped gradient by `reference`."""
    agent = recorded.agent
    inputs = channels_last(local.read(agent, batch, recorded.round, recorded.step))
    targets = local.labels[agent][batch]
    if recorded.teacher is not None and len(batch):
        targets = reference.distillation_targets(e.network, recorded.teacher, inputs, targets)
    C = e.config.privacy.max_grad_norm
    if e.config.privacy.clipping == "per-sample":
        return reference.clipped_sum(e.network, recorded.x, inputs, targets, C) / divisor(e, agent)
    if len(batch) == 0:
        return torch.zeros(e.network.num_parameters, dtype=torch.float64)
    g = reference.gradient(e.network, recorded.x, inputs, targets) / divisor(e, agent)
    norm = float(g.norm())
    return g / max(1.0, norm / C) if math.isfinite(norm) else torch.zeros_like(g)


def check_sensitivity(e: Experiment, trainer: Trainer) -> Finding:
    """Check that adversarial records move a message by at most Δ, computed as in training.

    A record is appended to an agent's data. In a round that draws it, the agent's message moves by at most Δ. In a
    round that does not draw it, the message stays the same, bit for bit.
    """
    assert e.mechanisms is not None
    problems: list[str] = []
    worst, tried = 0.0, 0
    agents = [i for i in e.engine.agents if e.batches.sizes[i]]
    agents = agents[:: max(1, -(-len(agents) // MAX_AGENTS))]
    local, models = trainer.local, _models(e)
    share = 1 if len(agents) <= 4 else 2  # at each agent, one in `share` pairs of record and model is tried
    for place, agent in enumerate(agents):
        delta = e.mechanisms[agent].sensitivity
        records = _adversarial(local.inputs[agent], local.labels[agent], e.task)
        for n, name in enumerate(records):
            for m, (model, x) in enumerate(models.items()):
                if (n + m + place) % share:
                    continue
                for drawn, whole in ((True, False), (False, False), (True, True)):
                    if whole and (n or m):
                        continue
                    moved = _moved(_with_all_records(local) if whole else local, agent, records[name], x, drawn)
                    if moved is None:
                        continue
                    tried += 1
                    limit = delta * (1 + 1e-6) if drawn else 0.0
                    if not moved <= limit:  # also if it is NaN
                        drawn_or_not = "" if drawn else ", although not drawn,"
                        problems.append(
                            f"{name} added to agent {agent} at {model}{drawn_or_not} moves a message by {moved:.4g},"
                            f" but Δ is {delta:.4g}"
                        )
                    elif drawn:
                        worst = max(worst, moved / delta)
    tested = f"{tried} adversarial records at {len(agents)} agents"
    return conclude("sensitivity", problems, f"{tested}; the worst moved a message by {worst:.1%} of Δ")


def _moved(base: LocalGradients, agent: int, record: tuple[Inputs, Tensor], x: Tensor, drawn: bool) -> float | None:
    """Distance by which a record moves the agent's gradient in a round that draws it, or in one that does not."""
    n = base.batches.sizes[agent]
    if base.batches.settings.sampler == "fixed":  # the last record is replaced
        n -= 1
    sizes = list(base.batches.sizes)
    sizes[agent] = n + 1
    batches = replace(base.batches, sizes=sizes)
    joined = replace(
        base,
        inputs=_replace_item(base.inputs, agent, concat([base.inputs[agent][:n], record[0]])),
        labels=_replace_item(base.labels, agent, torch.cat([base.labels[agent][:n], record[1]])),
        batches=batches,
        repeated={},
    )
    t = next((t for t in range(1, 40) if (n in batches.draw(agent, t).tolist()) == drawn), None)
    if t is None:
        return None
    agents = torch.tensor([agent])
    with_record = joined.gradients(t, agents, x[None])[0].double()
    return float((with_record - replace(base, repeated={}).gradients(t, agents, x[None])[0].double()).norm())


def _with_all_records(base: LocalGradients) -> LocalGradients:
    """Copy whose batches contain all records."""
    if base.batches.settings.sampler == "fixed":
        return base
    settings = base.batches.settings.model_copy(update={"rate": 1.0, "records": None})
    return replace(base, batches=_AllRecords(base.batches.sizes, settings, base.batches.streams, base.batches.records))


class _AllRecords(Batches):
    """Batches of all records, with the divisor of the run."""

    def divisor(self, agent: int) -> float:
        return min(float(self.settings.size), self.records)


def _replace_item(values: list[T], at: int, value: T) -> list[T]:
    return [value if n == at else old for n, old in enumerate(values)]


def _models(e: Experiment) -> dict[str, Tensor]:
    other = e.network.perturbed_parameters()
    return {"the initial model": e.network.initial_parameters(), "another model": other, "a large model": 50 * other}


def _adversarial(inputs: Inputs, labels: Tensor, task: Task) -> dict[str, tuple[Inputs, Tensor]]:
    """Extreme records. Integers, for example token ids, stay as they are: only their targets are extreme."""
    one, label = inputs[:1], labels[:1]
    other = _other_target(label, task)

    def floats(change: Callable[[Tensor], Tensor]) -> Inputs:
        return map_inputs(lambda t: change(t) if t.is_floating_point() else t, one)

    def with_infinity(tensor: Tensor) -> Tensor:
        infinite = tensor.clone()
        infinite.view(-1)[0] = math.inf
        return infinite

    return {
        "a record with another label": (one, other),
        "a record 1e4 times as large": (floats(lambda t: t * 1e4), other),
        "a record 1e18 times as large": (floats(lambda t: t * 1e18), label),
        "a record of 1e37": (floats(lambda t: torch.full_like(t, 1e37)), other),
        "a record of 1e-40": (floats(lambda t: torch.full_like(t, 1e-40)), other),
        "a negated record 1e4 times as large": (floats(lambda t: -1e4 * t), other),
        "a record of NaN": (floats(lambda t: torch.full_like(t, math.nan)), label),
        "a record with one infinity": (floats(with_infinity), label),
        "a record of zeros": (floats(torch.zeros_like), label),
    }


def _other_target(target: Tensor, task: Task) -> Tensor:
    """The next class, the opposite labels, or a number far away."""
    if target.is_floating_point():
        return target + 1e6
    if task.kind == "multiclass":
        return torch.remainder(target + 1, task.outputs)
    return 1 - target if task.kind in ("binary", "multilabel") else target
