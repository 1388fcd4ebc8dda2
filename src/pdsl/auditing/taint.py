"""Check that nothing but noisy messages and public knowledge is sent or kept."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from pdsl.auditing.recorders import digest
from pdsl.auditing.replay import (
    ReplayedRound,
    run_on_other_records,
    run_replaced,
    run_with_other_noise,
    state_digest,
)
from pdsl.auditing.report import Finding, conclude
from pdsl.data.records import row_bytes
from pdsl.train import Apparatus, Experiment, state_tensors

MAX_OTHER = 6  # rounds that are run on other records
MIN_MOVED = 0.9  # share of the numbers of all models
NEAR = 0.02  # of a record's length: nearer than that, two records are one and the same
LOOKED_AT = 300  # public records whose nearest private record is looked for
MAX_SHARED = 0.002  # share of a published data set's public records that are training records too


def check_taint(e: Experiment, parts: Apparatus, rounds: Sequence[ReplayedRound]) -> Finding:
    """With the noisy messages as they were and other clean gradients, state, facts and messages are the same bits."""
    problems = []
    for r in rounds:
        for name, scale in (("zeros", 0.0), ("wild numbers", 1e3)):
            state, facts, sent = run_replaced(e, parts, r, scale)
            before = {key: digest(tensor) for key, tensor in state_tensors(r.after).items()}
            after = {key: digest(tensor) for key, tensor in state.items()}
            changed = [key for key in before if after.get(key) != before[key]]
            if changed:
                problems.append(f"round {r.t}: state {changed[0]} contains gradients without noise ({name})")
            elif facts != r.facts:
                problems.append(f"round {r.t}: the row contains something made of gradients without noise ({name})")
            elif sent != r.sent:
                problems.append(f"round {r.t}: a message contains gradients without noise ({name})")
    problems += [problem for r in rounds for problem in _unchanged(r)] + _noiseless(e, parts, rounds)
    problems += _with_other_records(e, parts, rounds)
    return conclude("only noisy messages are used", problems, f"{len(rounds)} rounds with other gradients, same bits")


def _with_other_records(e: Experiment, parts: Apparatus, rounds: Sequence[ReplayedRound]) -> list[str]:
    """With the same noisy messages and the negated records, one round after another, every state is the same."""
    other = replace(parts, owners=replace(parts.owners, inputs=[-x for x in parts.owners.inputs], repeated={}))
    for r in rounds[:MAX_OTHER]:
        state, facts = run_on_other_records(e, other, r)
        if state_digest(state) != state_digest(r.after) or facts != r.facts:
            return [f"round {r.t}: with other records and the same noisy messages the state is another"]
    return []


def _unchanged(r: ReplayedRound) -> list[str]:
    """Noise was added to the very gradients that were computed."""
    computed = {(a.agent, a.step, digest(a.clipped.double())) for a in r.asked}
    return [
        f"round {r.t}: agent {m.maker}'s gradient was changed between the clip and the noise"
        for m in r.messages
        if (m.maker, m.step, digest(m.clipped)) not in computed
    ][:1]


def _noiseless(e: Experiment, parts: Apparatus, rounds: Sequence[ReplayedRound]) -> list[str]:
    """With other noise every number of every model changes: it was not taken off again."""
    problems = []
    for r in rounds[:3]:
        other = run_with_other_noise(e, parts, r)
        moved = (other.x != r.after.x) | ~r.after.x.isfinite()
        if float(moved.double().mean()) < MIN_MOVED and not torch.equal(r.before.x, r.after.x):
            problems.append(
                f"round {r.t}: with other noise {1 - float(moved.double().mean()):.1%} of the models stay the same"
            )
    return problems


def check_public(e: Experiment) -> Finding:
    """The public set and the test set are not made of the agents' records."""
    own = {row for i in e.engine.agents for row in row_bytes(e.data.x[e.parts[i]], e.data.y[e.parts[i]])}
    problems = []
    for name, (x, y) in (("public set", e.validation), ("test set", e.test)):
        shared = Counter(row in own for row in row_bytes(x, y))[True]
        allowed = MAX_SHARED * len(y) if e.data.published else 0
        if shared > allowed:
            problems.append(f"{shared} of {len(y)} records of the {name} are agents' own: using it is not free")
    near = _near(e)
    if near > max(1, 0.01 * LOOKED_AT):
        problems.append(f"{near} of {LOOKED_AT} records of Q are agents' own but for small changes")
    return conclude(
        "public records", problems, f"{len(e.validation[1])} records of Q and {len(e.test[1])} of the test set"
    )


def _near(e: Experiment) -> int:
    """Records of Q that lie next to a training record."""
    some = e.validation[0][:LOOKED_AT].flatten(1).double()
    own = torch.cat([e.data.x[e.parts[i]] for i in e.engine.agents]).flatten(1).double()
    nearest = torch.stack([torch.cdist(row[None], own).min() for row in some])
    return int((nearest <= NEAR * some.norm(dim=1)).sum() - (nearest == 0).sum())
