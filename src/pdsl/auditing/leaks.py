"""Checks for leaks: private data in messages, states, public values or files."""

import base64
import hashlib
import hmac
import json
import math
import re
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdsl.auditing.accounts import wrong_metrics
from pdsl.auditing.replay import (
    ReplayedRound,
    digest,
    replay_with_gradients,
    replay_with_noise,
    replay_with_records,
    state_digest,
)
from pdsl.auditing.report import Finding, Verdict, conclude
from pdsl.data.validation import row_bytes
from pdsl.metrics import BASELINES
from pdsl.public.cache import without_cache
from pdsl.runs.checkpoints import NAME
from pdsl.training.experiment import Experiment, prepare
from pdsl.training.trainer import Trainer, initial_models, initial_state, state_tensors
from pdsl.utils.errors import PdslError
from pdsl.utils.inputs import Inputs, concat, negated, same, tensors_digest, tensors_of

MAX_OTHER = 6  # rounds replayed with other records
MIN_MOVED = 0.9  # share of all model parameters that other noise must change
NEAR = 0.02  # of a record's norm; closer records count as copies
COMPARED = 300  # public records compared with all private records
MAX_SHARED = 0.002  # share of a published dataset's public records that may be training records too

OWNER_FILES = ("owner.json", "secret.key", "report-owner.html")
KNOWN_FIELDS: dict[str, set[str]] = {  # of files that others may read; an unknown field may depend on records
    "setup.json": {
        "agents", "edges", "parameters", "spectral_gap", "graph", "data", "validation", "test", "sigma", "attackers",
        "name", "agent", "names", "plan", "classes", "task", "kind", "metric", "higher_is_better", "graph_name",
        "schedule", "graphs", "order", "cyclic",
        "versions", "pdsl", "torch", "python", "date", "given", "algorithm.learning_rate",
        "public", "uses", "digests", "features", "start",
    },
    "ledger.json": {
        "delta", "budget", "tied_to", "seal", "agents", "agent", "epsilon", "entries", "edges", "to", "messages",
        "first", "last", "sigma", "sensitivity", "steps", "rate", "sigma_scale", "dimension", "secret", "settings",
        "records", "graph", "model", "noise", "device", "software", "period", "rounds", "stopped",
    },
    "summary.json": {
        "metric", "metrics", "loss", "loss_of_mean", "loss_per_agent", "names", "rounds", "agents", "algorithm",
        "accuracy", "accuracy_of_mean", "accuracy_per_agent", "balanced_accuracy", "macro_f1", "auc", "recall",
        "confusion", "rmse", "rmse_of_mean", "rmse_per_agent", "mae", "r2", "residuals", "bins", "counts",
        "seconds", "run", "bytes", "bytes_between_processes", "graph", "data", "epsilon", "delta", "epsilon_per_agent",
        "adversaries", "sigma", "privacy", "stopped", "models_sha256", "notes",
        "learning_rate", "parameters", "stop_rule", "monitor", "patience", "min_delta", "higher_is_better",
        "one intercepted message", "one curious neighbour", "all neighbours colluding", "the final models",
        "baselines", "gain", *BASELINES,
    },
    "contributions.json": {
        "format", "metric", "start", "end", "confidence", "method", "coalitions", "notes", "parties", "pairs",
        "name", "value", "low", "high", "part", "first", "second", "difference", "decided",
    },
}  # fmt: skip
MIN_CLASSES = 3  # nonempty classes of an agent; shorter sequences of counts can occur by chance
WHOLE_NUMBER = re.compile(r"(?<![\w.])([0-9]+)(?:\.0+)?(?![\w.])")  # not within a digest or a fraction
MAX_BYTES = 50_000_000  # size of a file that is searched


# Messages and states


def check_taint(e: Experiment, trainer: Trainer, rounds: Sequence[ReplayedRound]) -> Finding:
    """Check that state, metrics and messages depend on gradients only through the noisy messages.

    A round is replayed with the same noisy messages and other clean gradients. All results must be the same bits.
    """
    problems = []
    for r in rounds:
        for name, scale in (("zeros", 0.0), ("large numbers", 1e3)):
            state, metrics, sent = replay_with_gradients(e, trainer, r, scale)
            before, after = state_digest(r.after), state_digest(state)
            changed = [key for key in before if after.get(key) != before[key]]
            if changed:
                problems.append(f"round {r.t}: state {changed[0]} contains gradients without noise ({name})")
            elif metrics != r.metrics:
                problems.append(f"round {r.t}: the row depends on gradients without noise ({name})")
            elif sent != r.sent:
                problems.append(f"round {r.t}: a message contains gradients without noise ({name})")
    problems += [problem for r in rounds for problem in _changed_gradients(r)] + _noiseless(e, trainer, rounds)
    problems += _with_other_records(e, trainer, rounds)
    return conclude("only noisy messages are used", problems, f"{len(rounds)} rounds with other gradients, same bits")


def _with_other_records(e: Experiment, trainer: Trainer, rounds: Sequence[ReplayedRound]) -> list[str]:
    """Check that states and metrics stay the same with negated records and the same noisy messages."""
    other = replace(
        trainer, local=replace(trainer.local, inputs=[negated(x) for x in trainer.local.inputs], repeated={})
    )
    for r in rounds[:MAX_OTHER]:
        state, metrics = replay_with_records(e, other, r)
        if state_digest(state) != state_digest(r.after) or metrics != r.metrics:
            return [f"round {r.t}: the state changes with other records and the same noisy messages"]
    return []


def _changed_gradients(r: ReplayedRound) -> list[str]:
    """Check that noise is added to exactly the gradients that were computed."""
    computed = {(g.agent, g.step, digest(g.clipped.double())) for g in r.gradients}
    return [
        f"round {r.t}: agent {m.maker}'s gradient was changed between clipping and noise"
        for m in r.messages
        if (m.maker, m.step, digest(m.clipped)) not in computed
    ][:1]


def _noiseless(e: Experiment, trainer: Trainer, rounds: Sequence[ReplayedRound]) -> list[str]:
    """Check that other noise changes nearly every parameter of every model, so noise is not removed again."""
    problems = []
    for r in rounds[:3]:
        other = replay_with_noise(e, trainer, r)
        moved = float(((other.x != r.after.x) | ~r.after.x.isfinite()).double().mean())
        if moved < MIN_MOVED and not torch.equal(r.before.x, r.after.x):
            problems.append(f"round {r.t}: with other noise {1 - moved:.1%} of the models stay the same")
    return problems


# Public values


def check_public(e: Experiment) -> Finding:
    """Check that the public set and the test set contain no records of the agents."""
    own = {row for i in e.engine.agents for row in row_bytes(e.data.x[e.parts[i]], e.data.y[e.parts[i]])}
    problems = []
    sets = {"public set": e.public_set, "set that values messages": e.validation, "test set": e.test}
    for name, (x, y) in sets.items():
        shared = Counter(row in own for row in row_bytes(x, y))[True]
        allowed = MAX_SHARED * len(y) if e.data.published else 0
        if shared > allowed:
            problems.append(f"{shared} of {len(y)} records of the {name} are agents' records, so its use costs privacy")
    near, allowed_near = _count_near(e)
    if near > allowed_near:
        problems.append(f"{near} of {COMPARED} public records are agents' records with small changes")
    return conclude("public records", problems, f"{len(e.public_set[1])} public and {len(e.test[1])} test records")


def _count_near(e: Experiment) -> tuple[int, float]:
    """Number of public records that are close, but not equal, to a training record; and the number allowed.

    In a table with few columns records are close by chance. The rate among test records, which are public, says how
    often: as many are allowed for the training records, with three more in the test set for its uncertainty.
    """
    some = _as_rows(e.public_set[0][:COMPARED])
    own = _as_rows(concat([e.data.x[e.parts[i]] for i in e.engine.agents]))
    test = _as_rows(e.test[0])

    def count(others: Tensor) -> int:
        nearest = torch.stack([torch.cdist(row[None], others).min() for row in some])
        return int((nearest <= NEAR * some.norm(dim=1)).sum() - (nearest == 0).sum())

    chance = min((count(test) + 3) * len(own) / len(test), 0.5 * len(some))
    return count(own), max(1, 0.01 * len(some), chance)


def _as_rows(inputs: Inputs) -> Tensor:
    """All numbers of each record in a row: [n, numbers]."""
    return torch.cat([tensor.flatten(1).double() for tensor in tensors_of(inputs)], dim=1)


def check_public_parts(e: Experiment) -> Finding:
    """Check that feature map, initial model, public set, test set, rate and noise do not depend on private records.

    The run is prepared again with negated records, and with one record fewer. In a simulation the latter may change
    the rate, which is not secret there.
    """
    check = "public values"
    if len(e.engine.agents) != e.graph.agents:
        return Finding(check, Verdict.PASS, "not checked, because other processes hold records")
    model = None if e.config.model.name != "python" else e.public.model
    loss = e.task.loss
    key = getattr(e.streams, "key", None)
    private = e.data.published is None and e.streams.secret
    raw = e.public.raw or e.data  # before normalisation and feature map
    kept = torch.arange(len(raw.y)) < len(raw.y) - 1
    owner = raw.owner
    fewer = replace(raw, x=raw.x[kept], y=raw.y[kept], owner=None if owner is None else owner[kept])
    others = {"negated records": replace(raw, x=negated(raw.x))}
    if private or e.data.published is not None:
        others["one record fewer"] = fewer
    problems = []
    for name, data in others.items():
        try:
            objects = partial(prepare, loss=loss, metric=e.task.custom_metric)
            with without_cache():
                other = objects(e.config, model=model, data=data, graph=e.graph, key=key)
        except PdslError as error:
            problems.append(f"with {name} the run is refused: {error}")
            continue
        problems += [f"{part} changes with {name}" for part in _public_differences(e, other)]
    return conclude(check, problems, f"the same with {' and with '.join(others)}")


def _public_differences(e: Experiment, other: Experiment) -> list[str]:
    maps = [None if x.public.features is None else x.public.features.digest for x in (e, other)]
    equal_parts = {
        "the feature map": maps[0] == maps[1],
        "the initial model": torch.equal(initial_models(e), initial_models(other)),
        "the public set": all(same(a, b) for a, b in zip(e.public_set, other.public_set, strict=True)),
        "the test set": all(same(a, b) for a, b in zip(e.test, other.test, strict=True)),
        "the sampling rate": e.batches.rate == other.batches.rate,
        "the noise": all(
            math.isclose(a.sigma, b.sigma, rel_tol=1e-3)
            for a, b in zip(e.mechanisms or (), other.mechanisms or (), strict=True)
        )
        or e.config.batch.sampler == "fixed",
    }
    return [name for name, equal in equal_parts.items() if not equal]


# Files


def check_files(e: Experiment, folder: Path, x: Tensor | None = None) -> Finding:
    """Check that files readable by others have no secrets, and no counts, digests or copies of records.

    x: the models after the last round, if saved, to recompute the accuracies in summary.json.
    """
    problems = []
    for name in OWNER_FILES:
        file = folder / name
        if file.exists() and stat.S_IMODE(file.stat().st_mode) & 0o077:
            problems.append(f"{name} is readable by others")
    own = {getattr(e.task.custom_metric, "__name__", "metric"), *e.class_names}  # metrics on the public test set
    for name, known in KNOWN_FIELDS.items():
        problems += _unknown_fields(folder / name, known | own)
    problems += _in_checkpoints(e, folder / "checkpoint") + _in_setup(e, folder / "setup.json")
    if x is not None and (folder / "summary.json").exists():
        problems += wrong_metrics(e, x, json.loads((folder / "summary.json").read_bytes()), "summary.json")
    if e.streams.secret:
        problems += _unkeyed_digest(e)
        traces = dict(_traces(e))
        for file in sorted(folder.rglob("*")):
            if file.is_file() and file.name not in OWNER_FILES and file.stat().st_size < MAX_BYTES:
                content = file.read_bytes()
                if file.suffix in (".json", ".jsonl", ".html", ".toml", ".md") and _has_counts(e, content):
                    problems.append(f"{file.name} has the label counts of an agent")
                compact = content.replace(b" ", b"").replace(b"\n", b"")
                found = [name for trace, name in traces.items() if trace in content + compact]
                problems += [f"{file.name} has {name}" for name in found[:1]]
    return conclude("files readable by others", problems, f"{folder.name}: no counts, digests or copies of records")


def _in_setup(e: Experiment, file: Path) -> list[str]:
    """Check the values in setup.json against graph, model and noise."""
    if not file.exists():
        return []
    expected = {
        "graph": e.graph.describe(),
        "data": e.data.name,
        "parameters": e.network.num_parameters,
        "agents": e.graph.agents,
        "validation": len(e.validation[1]),
        "test": len(e.test[1]),
        "sigma": [max(m.sigmas) for m in e.mechanisms or ()],
    }
    stored = json.loads(file.read_bytes())
    return [f"setup.json has a wrong value of {name}" for name, value in expected.items() if stored.get(name) != value]


def _has_counts(e: Experiment, content: bytes) -> bool:
    """Whether a text has the label counts of an agent as consecutive numbers."""
    text = re.sub(r"<[^>]*>", " ", content.decode(errors="ignore"))
    numbers = f" {' '.join(WHOLE_NUMBER.findall(text))} "
    counts = [of_agent for of_agent in e.labels.tolist() if len([n for n in of_agent if n]) >= MIN_CLASSES]
    return any(f" {' '.join(map(str, of_agent))} " in numbers for of_agent in counts)


def _unknown_fields(file: Path, known: set[str]) -> Iterator[str]:
    if file.exists():
        unknown = set(_field_names(json.loads(file.read_bytes()))) - known
        if unknown:
            yield f"{file.name} has an unknown field {min(unknown)}, which may be computed from private records"


def _field_names(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _field_names(item)


def _in_checkpoints(e: Experiment, folder: Path) -> list[str]:
    """Check that checkpoints contain only the state, which depends on noisy messages only."""
    state = set(state_tensors(initial_state(e)))
    problems = []
    for file in sorted(folder.glob("*")):
        if not NAME.fullmatch(file.name):
            problems.append(f"{file.name} in the checkpoint folder is not a checkpoint")
            continue
        try:
            with safe_open(file, framework="pt") as stored:
                unknown = set(stored.keys()) - state
        except (SafetensorError, OSError):
            continue  # damaged: a resumed run skips it
        problems += [f"{file.name} has a tensor {min(unknown)} that is not part of the state"] if unknown else []
    return problems


def _unkeyed_digest(e: Experiment) -> list[str]:
    """Check that the digest of the records is keyed with the run's secret."""
    records = (e.data.x, e.data.y, *e.parts, *e.validation)
    code = hmac.digest(e.seal.secret, tensors_digest(records).encode(), "sha256").hex()
    keyed = e.seal.digests.get("records") == code
    return [] if keyed else ["ledger.json has a digest of the records that is not keyed with the secret"]


def _traces(e: Experiment) -> Iterator[tuple[bytes, str]]:
    """Bytes that no file readable by others may contain, and their meaning."""
    yield str(e.labels.tolist()).replace(" ", "").encode(), "the exact label counts of every agent"
    key = e.seal.secret
    for form in (key, key.hex().encode(), base64.b64encode(key)):
        yield form, "the secret key"
    name = "an unkeyed digest of records"
    for tensors in ((e.data.x, e.data.y), (e.data.x, e.data.y, *e.parts, *e.validation), (e.data.x,), (e.data.y,)):
        yield tensors_digest(tensors).encode(), name
    for part in e.parts:
        if len(part):
            x, y = e.data.x[part], e.data.y[part]
            yield tensors_digest([x, y]).encode(), name
            rows = row_bytes(x, y)
            yield from ((hashlib.sha256(row).hexdigest().encode(), name) for row in rows[:200])
            yield row_bytes(x[:1], y[:1])[0][: sum(t[0].nbytes for t in tensors_of(x))], "a copy of a record"
