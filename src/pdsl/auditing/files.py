"""Checks of a run directory: it holds no function of private records that everybody can read."""

import base64
import hashlib
import hmac
import json
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdsl.auditing.accounts import compare_measured
from pdsl.auditing.report import Finding, conclude
from pdsl.checkpoints import NAME
from pdsl.data.records import row_bytes
from pdsl.privacy.bond import tensors_digest
from pdsl.train import Experiment, first_state, state_tensors

FOR_THE_OWNER = ("owner.json", "secret.key", "report-owner.html")
KNOWN: dict[str, set[str]] = {  # every name in a file for others; another one may be made of records
    "setup.json": {
        "agents", "edges", "parameters", "spectral_gap", "graph", "data", "validation", "test", "sigma", "rogues",
        "name", "agent", "names", "plan",
    },
    "ledger.json": {
        "delta", "budget", "tied_to", "seal", "agents", "agent", "epsilon", "entries", "edges", "to", "messages",
        "first", "last", "sigma", "sensitivity", "steps", "rate", "stretch", "dimension", "secret", "settings",
        "records", "graph", "model", "noise", "device", "software",
    },
    "summary.json": {
        "accuracy", "accuracy_of_mean", "loss", "rounds", "agents", "algorithm", "seconds", "run", "accuracy_per_agent",
        "bytes", "bytes_between_processes", "graph", "data", "epsilon", "delta", "epsilon_per_agent", "adversaries",
        "sigma", "privacy", "stopped", "models_sha256", "notes", "one intercepted message", "one curious neighbour",
        "all neighbours colluding", "the final models",
    },
}  # fmt: skip
MIN_CLASSES = 3  # with records: fewer numbers in a row may come about by chance
WHOLE_NUMBER = re.compile(r"(?<![\w.])([0-9]+)(?:\.0+)?(?![\w.])")  # digits within a digest or a fraction are none
MAX_BYTES = 50_000_000  # of a file that is searched


def check_files(e: Experiment, folder: Path, x: Tensor | None = None) -> Finding:
    """Secrets and exact counts are the owner's alone; no other file has counts, digests or copies of records.

    x: the models after the last round, if they are kept, from which the summary's accuracies are measured again.
    """
    problems = []
    for name in FOR_THE_OWNER:
        file = folder / name
        if file.exists() and stat.S_IMODE(file.stat().st_mode) & 0o077:
            problems.append(f"{name} can be read by others")
    problems += [problem for name, known in KNOWN.items() for problem in _unknown(folder / name, known)]
    problems += _in_checkpoints(e, folder / "checkpoint") + _in_setup(e, folder / "setup.json")
    if x is not None and (folder / "summary.json").exists():
        problems += compare_measured(e, x, json.loads((folder / "summary.json").read_bytes()), "summary.json")
    if e.streams.secret:
        problems += _keyed(e)
        traces = dict(_traces(e))
        for file in sorted(folder.rglob("*")):
            if file.is_file() and file.name not in FOR_THE_OWNER and file.stat().st_size < MAX_BYTES:
                content = file.read_bytes()
                if file.suffix in (".json", ".jsonl", ".html", ".toml") and _has_counts(e, content):
                    problems.append(f"{file.name} has the label counts of an agent")
                squeezed = content.replace(b" ", b"").replace(b"\n", b"")
                problems += [
                    f"{file.name} has {what}" for trace, what in traces.items() if trace in content + squeezed
                ][:1]
    return conclude("files for others", problems, f"{folder.name}: no counts, digests or copies of records")


def _in_setup(e: Experiment, file: Path) -> list[str]:
    """The words and numbers of setup.json are those of graph, model and noise."""
    if not file.exists():
        return []
    stored, sigma = json.loads(file.read_bytes()), [max(m.sigmas) for m in e.mechanisms or ()]
    known = {"graph": e.graph.describe(), "data": e.data.name, "parameters": e.network.d, "agents": e.graph.agents}
    known |= {"validation": len(e.validation[1]), "test": len(e.test[1]), "sigma": sigma}
    return [f"setup.json has another {name} than the run" for name, value in known.items() if stored.get(name) != value]


def _has_counts(e: Experiment, content: bytes) -> bool:
    """Whether the numbers of a text have an agent's label counts one after another."""
    text = re.sub(r"<[^>]*>", " ", content.decode(errors="ignore"))
    numbers = f" {' '.join(WHOLE_NUMBER.findall(text))} "
    counts = [of_agent for of_agent in e.labels.tolist() if len([n for n in of_agent if n]) >= MIN_CLASSES]
    return any(f" {' '.join(map(str, of_agent))} " in numbers for of_agent in counts)


def _unknown(file: Path, known: set[str]) -> Iterator[str]:
    if file.exists():
        unknown = set(_names(json.loads(file.read_bytes()))) - known
        if unknown:
            yield f"{file.name} has {min(unknown)}, of which nothing is known: it may be made of private records"


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _names(item)


def _in_checkpoints(e: Experiment, folder: Path) -> list[str]:
    """Checkpoints hold the state, which is made of noisy messages, and nothing else."""
    state = set(state_tensors(first_state(e)))
    problems = []
    for file in sorted(folder.glob("*")):
        if not NAME.fullmatch(file.name):
            problems.append(f"{file.name} among the checkpoints is none")
            continue
        try:
            with safe_open(file, framework="pt") as stored:
                unknown = set(stored.keys()) - state
        except (SafetensorError, OSError):
            continue  # damaged: a resumed run passes it over
        problems += [f"{file.name} has a tensor {min(unknown)} that is no part of the state"] if unknown else []
    return problems


def _keyed(e: Experiment) -> list[str]:
    """The records' digest is a code under the run's secret."""
    records = (e.data.x, e.data.y, *e.parts, *e.validation)
    code = hmac.digest(e.bond.secret, tensors_digest(records).encode(), "sha256").hex()
    known = e.bond.digests.get("records") == code
    return [] if known else ["ledger.json has a digest of the records that is no code under the secret"]


def _traces(e: Experiment) -> Iterator[tuple[bytes, str]]:
    """Bytes that no file for others may have, and what they are."""
    yield str(e.labels.tolist()).replace(" ", "").encode(), "the exact label counts of every agent"
    key = e.bond.secret
    for form in (key, key.hex().encode(), base64.b64encode(key)):
        yield form, "the secret key"
    digest = "a digest of records without a key"
    for tensors in ((e.data.x, e.data.y), (e.data.x, e.data.y, *e.parts, *e.validation), (e.data.x,), (e.data.y,)):
        yield tensors_digest(tensors).encode(), digest
    for part in e.parts:
        if len(part):
            x, y = e.data.x[part], e.data.y[part]
            yield tensors_digest([x, y]).encode(), digest
            rows = row_bytes(x, y)
            yield from ((hashlib.sha256(row).hexdigest().encode(), digest) for row in rows[:200])
            yield row_bytes(x[:1], y[:1])[0][: x[0].numel() * 4], "a copy of a record"
