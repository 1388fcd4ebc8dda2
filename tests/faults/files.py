"""Planted faults: files."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from pdsl.config import validate
from pdsl.privacy import seal as seal
from pdsl.privacy.seal import RunSeal
from pdsl.runs import directory as runs
from pdsl.runs import runner
from pdsl.runs.directory import KEY, OWNER
from pdsl.utils.files import PUBLIC
from pdsl.utils.random import Streams
from tests.faults.base import (
    FILES,
    IN_FILES,
    REFUSED,
    SPARSE,
    STAR,
    SYSTEM,
    Experiment,
    Plant,
    Values,
    audited_in_directory,
    datasets,
    fault,
    settings,
    substitute,
)

# 10 files

PRIVATE_RUN: Values = {**SYSTEM, "rounds": 3, "algorithm": {"name": "d-psgd"}, "model": {"name": "softmax"}}


def file_fault(by: str = FILES) -> Callable[[Plant], Plant]:
    return fault(IN_FILES, by, examine=audited_in_directory, **PRIVATE_RUN)


def more_facts(monkeypatch: pytest.MonkeyPatch, more: Callable[[Any], Values]) -> None:
    honest = Experiment.metadata
    monkeypatch.setattr(Experiment, "metadata", lambda e: honest(e) | more(e))


def _open_to_everybody(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    """Write this file of a run directory so that everybody can read it."""
    honest = runs.RunDirectory.write

    def write(self: Any, name: str, content: bytes, mode: int = PUBLIC) -> None:
        honest(self, name, content, PUBLIC if name == file else mode)

    monkeypatch.setattr(runs.RunDirectory, "write", write)


@file_fault()
def label_counts_in_the_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    """setup.json has the label counts of every agent."""
    more_facts(monkeypatch, lambda e: {"labels": e.labels.tolist()})


@file_fault()
def label_counts_by_agent_in_the_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    """setup.json has the label counts of every agent, each under its number."""
    more_facts(monkeypatch, lambda e: {"labels": {str(i): row for i, row in enumerate(e.labels.tolist())}})


@file_fault()
def sizes_in_the_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    """setup.json has the number of records of every agent."""
    more_facts(monkeypatch, lambda e: {"records": [len(part) for part in e.parts]})


@file_fault()
def sizes_under_a_known_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """setup.json has the number of records of every agent in the words on the graph."""
    more_facts(monkeypatch, lambda e: {"graph": f"{e.graph.describe()} {[len(part) for part in e.parts]}"})


@file_fault()
def key_in_the_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    """setup.json has the secret key."""
    more_facts(monkeypatch, lambda e: {"run": e.seal.secret.hex()})


@file_fault()
def owners_file_for_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """owner.json can be read by everybody."""
    _open_to_everybody(monkeypatch, OWNER)


@file_fault(REFUSED)
def secret_key_for_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """secret.key can be read by everybody."""
    _open_to_everybody(monkeypatch, KEY)


@file_fault()
def plain_digest_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """ledger.json has the plain SHA-256 of the records: whoever guesses them can tell."""
    honest = RunSeal.of.__func__  # type: ignore[attr-defined]

    def of(secret: bytes, **digests: str) -> RunSeal:
        made: RunSeal = honest(RunSeal, secret, **digests)
        return replace(made, digests={**made.digests, "records": digests["records"]})

    monkeypatch.setattr(RunSeal, "of", of)


@file_fault()
def digest_under_a_public_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest of the records in ledger.json is keyed with a word that everybody knows."""
    honest = seal._code
    substitute(monkeypatch, seal, "_code", lambda secret, text: honest(b"", text))


@file_fault()
def records_beside_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agents' records lie beside the checkpoints."""
    honest = runs.RunDirectory.save

    def save(self: Any, *of: Any, **also: Any) -> None:
        honest(self, *of, **also)
        public = datasets.load(validate(settings(), "test").data, Streams(0))
        self.write("checkpoint/cache.npy", public.x.numpy().tobytes())

    monkeypatch.setattr(runs.RunDirectory, "save", save)


@file_fault()
def label_counts_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """report.html has a table of label counts."""
    results: Any = sys.modules["pdsl.runs.result"]
    honest = results.finish

    def finish(run: Any, result: Any) -> Values:
        summary: Values = honest(run, result)
        rows = result.experiment.labels.tolist()
        table = "".join("<tr>" + "".join(f"<td>{n}</td>" for n in row) + "</tr>" for row in rows)
        page = (run.path / "report.html").read_text()
        run.write("report.html", page.replace("</body>", f"<table>{table}</table></body>").encode())
        return summary

    substitute(monkeypatch, runner, "finish", finish)


@file_fault()
def copy_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the secret key lies beside the checkpoints, for everybody to read."""
    honest = runs.RunDirectory.write

    def write(self: Any, name: str, content: bytes, mode: int = PUBLIC) -> None:
        honest(self, name, content, mode)
        if name == KEY:
            honest(self, f"checkpoint/{name}", content)

    monkeypatch.setattr(runs.RunDirectory, "write", write)


@file_fault()
def training_loss_as_the_summarys_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """summary.json has the loss on the agents' own records, called loss."""
    results: Any = sys.modules["pdsl.runs.result"]
    honest = results.summarise

    def summarise(result: Any) -> Values:
        e = result.experiment
        loss = nn.functional.cross_entropy(e.network.outputs(result.state.x[0], e.data.x), e.data.y)
        return honest(result) | {"loss": float(loss)}

    substitute(monkeypatch, results, "summarise", summarise)


@file_fault()
def training_loss_in_the_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    """summary.json has the loss on the agents' own records."""
    results: Any = sys.modules["pdsl.runs.result"]
    honest = results.summarise

    def summarise(result: Any) -> Values:
        e = result.experiment
        loss = nn.functional.cross_entropy(e.network.outputs(result.state.x[0], e.data.x), e.data.y)
        return honest(result) | {"training_loss": float(loss)}

    substitute(monkeypatch, results, "summarise", summarise)


# honest runs

ALGORITHMS = (
    "pdsl", "d-psgd", "muffliato", "dp-cga", "dp-net-fleet", "def-kt", "dfedsam", "gut", "gradient-tracking", "ngc",
    "mspd",
)  # fmt: skip
VARIANTS: tuple[Mapping[str, Any], ...] = (
    {},
    {"privacy": {"randomness": "system"}, "graph": {"kind": "star"}},
    {"graph": {"kind": "full"}, "model": {"name": "softmax"}, "partition": {"kind": "dirichlet"}, "rounds": 8},
    {"privacy": {"randomness": "system"}, "graph": {"kind": "line", "agents": 5}, "shapley": {"weighting": "evidence"}},
    {"privacy": {"randomness": "system"}, "graph": {"kind": "erdos-renyi", "agents": 6}, "batch": {"size": 8}},
)


def honest_runs() -> list[Values]:
    """Fifty runs and more: each algorithm, seeded and with the system's entropy, on several graphs."""
    return [
        settings(**{**variant, "algorithm": {"name": name}, "seed": 11 * n + m})
        for n, name in enumerate(ALGORITHMS)
        for m, variant in enumerate(VARIANTS)
    ]


OTHER_HONEST: list[Values] = [
    settings(**SPARSE),
    settings(batch={"sampler": "fixed"}),
    settings(privacy={"clipping": "batch", "noise_multiplier": 3.0}),
    settings(**STAR, privacy={"target_epsilon": None, "sigma": 0.3}),
    settings(batch={"size": 10_000}, model={"name": "softmax"}, rounds=3, algorithm={"name": "d-psgd"}),
]
"""The settings of some faults, without the fault."""
