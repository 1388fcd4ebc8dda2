"""Planted faults: how one is planted, run and examined."""

import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdsl.auditing import Finding, Verdict, audit_experiment, audit_run
from pdsl.auditing.replay import Start
from pdsl.config import validate
from pdsl.privacy import Noise, accounting, discrete_gaussian
from pdsl.privacy import noise as mechanism
from pdsl.runs.runner import execute, start
from pdsl.utils import random as randomness
from pdsl.utils.errors import PdslError

experiment: Any = sys.modules["pdsl.training.experiment"]
trainer: Any = sys.modules["pdsl.training.trainer"]
datasets: Any = sys.modules["pdsl.data.datasets"]
conformance: Any = sys.modules["pdsl.auditing.run"]
Experiment: Any = experiment.Experiment

Values = dict[str, Any]
Plant = Callable[[pytest.MonkeyPatch], None]
Array = NDArray[Any]

# the audit's checks
LEDGER = "ledger holds every round and peer"
ROWS = "replayed rounds"
COUNTS = "messages counted"
EPSILON = "ε recomputed"
SIGMA = "σ of the noise"
SHAPE = "noise is Gaussian"
WITHIN = "noise within a message"
BETWEEN = "noise is never shared"
DATA = "noise is independent of the data"
LATTICE = "messages are on the lattice"
EXACT = "noise is the documented sampler's"
SAMPLER = "sampler"
KEYS = "noise and batches depend on the key"
CLIPPED = "clipped gradients"
SENSITIVITY = "sensitivity"
TAINT = "only noisy messages are used"
RECORDS_APART = "public records"
FILES = "files readable by others"
PUBLIC_PARTS = "public values"
END = "end of the run"
# and what else may catch a fault
REFUSED = "refused"
ANY = "any check"
CHARGED_FIRST = "unit: a round is charged before its noise is drawn"
ONE_USE = "unit: one noise goes with one gradient"
NEIGHBOURS = "unit: a record more changes no other record"
NO_RESET = "unit: a ledger cannot be reset"
PAYS_AGAIN = "unit: a new incarnation pays again"
NOT_PRIVATE = "unit: seeded noise is not called private"

# classes of faults
SIZE, SHAPES, INDEPENDENCE, KEY = "1 size of noise", "2 shape of noise", "3 independence", "4 keys"
SAMPLING, CLIPPING, BARE = "5 sampler", "6 clipping", "7 un-noised data"
ACCOUNTING, MODELS, IN_FILES = "8 accounting", "9 models", "10 files"
WITH_GRADIENTS = (SAMPLING, CLIPPING, BARE, MODELS)


# running


def settings(**changes: Any) -> Values:
    """A run that takes a second: four agents on a ring, digits, a small network."""
    values: Values = {
        "rounds": 6,
        "graph": {"kind": "ring", "agents": 4},
        "model": {"name": "mlp", "hidden": 12},
        "partition": {"kind": "iid"},
        "data": {"validation": 40},
        "batch": {"size": 16},
        "shapley": {"weighting": "uniform"},  # [algorithm.shapley] of PDSL
        "privacy": {"target_epsilon": 2.0},
        "engine": {"workers": 1},
    }
    for name, change in changes.items():
        values[name] = {**values[name], **change} if isinstance(values.get(name), dict) else change
    shapley, algorithm = values.pop("shapley"), values.get("algorithm", {})
    if algorithm.get("name", "pdsl") == "pdsl":
        values["algorithm"] = {**algorithm, "shapley": shapley}
    return values


def failed(findings: Sequence[Finding]) -> list[str]:
    """The checks that fail. An end that cannot be explained is left open by the audit, which counts here."""
    open_ends = [f.check for f in findings if f.check == END and f.verdict is Verdict.INCONCLUSIVE]
    return [finding.check for finding in findings if finding.verdict is Verdict.FAIL] + open_ends


LEFT_OUT = Finding("left out", Verdict.PASS, "the test does not need this check")
ABOUT_GRADIENTS = ("check_gradients", "check_sensitivity")
CHECKS = {  # functions of the audit, and the names of their findings
    "check_ledger": (LEDGER,),
    "check_rows": (ROWS,),
    "check_end": (END,),
    "check_counts": (COUNTS,),
    "check_epsilon": (EPSILON,),
    "check_noise": (SIGMA, SHAPE, WITHIN, BETWEEN, DATA, LATTICE, EXACT),
    "check_every_round": (),
    "check_sampler": (SAMPLER,),
    "check_keys": (KEYS,),
    "check_gradients": (CLIPPED,),
    "check_sensitivity": (SENSITIVITY,),
    "check_taint": (TAINT,),
    "check_public": (RECORDS_APART,),
    "check_public_parts": (PUBLIC_PARTS,),
}
NAMED = {FILES, *(name for names in CHECKS.values() for name in names)}


def needless(fault: "Fault") -> list[str]:
    """Functions of the audit whose findings do not decide whether the fault is caught by the check that it names."""
    if fault.by in NAMED:
        return [function for function, names in CHECKS.items() if fault.by not in names]
    return [] if fault.kind in WITH_GRADIENTS else list(ABOUT_GRADIENTS)


@contextmanager
def quick_audit(left_out: Sequence[str]) -> Iterator[None]:
    """An audit without some of its checks."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for function in left_out:
            monkeypatch.setattr(conformance, function, lambda *of: [LEFT_OUT])
        yield


def findings_of(values: Values, **objects: Any) -> list[Finding]:
    """Run, and audit with the same code, faults and all."""
    e = experiment.prepare(validate(values, "test"), **objects)
    steps = list(trainer.rounds(e))
    ledger = steps[-1].ledger
    rows = [step.row for step in steps]
    return audit_experiment(e, ledger, rows, starts=[Start(len(rows), steps[-1].state)])


def audited(values: Values, **objects: Any) -> list[str]:
    """The checks that fail."""
    return failed(findings_of(values, **objects))


def audited_in_directory(values: Values) -> list[str]:
    """The checks that fail, of a run with a directory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        execute(*start(validate(values, "test"), path))
        return failed(audit_run(path, canaries=0).findings)


Examine = Callable[..., list[str]]


@dataclass(frozen=True)
class Fault:
    name: str
    kind: str
    what: str
    by: str  # the check that must fail, or REFUSED, or a unit test's name
    plant: Plant
    settings: Values
    examine: Examine = audited
    objects: Callable[[], Values] = dict  # for `prepare`


FAULTS: list[Fault] = []


def fault(
    kind: str, by: str, examine: Examine = audited, objects: Callable[[], Values] = dict, **changes: Any
) -> Callable[[Plant], Plant]:
    """Register a function that plants a fault; its docstring says which."""

    def register(plant: Plant) -> Plant:
        name = getattr(plant, "__name__", "?")
        what = (plant.__doc__ or "").strip().rstrip(".")
        FAULTS.append(Fault(name, kind, what, by, plant, settings(**changes), examine, objects))
        return plant

    return register


def examined(fault: Fault, whole: bool = False) -> list[str]:
    """What catches the fault; empty where nothing does.

    Only the check that the fault names is made, unless by a `whole` audit: the others decide nothing.
    """
    with quick_audit([] if whole else needless(fault)), pytest.MonkeyPatch.context() as monkeypatch:
        if fault.kind == ACCOUNTING:
            forget_costs(monkeypatch)
        fault.plant(monkeypatch)
        try:
            return fault.examine(fault.settings, **fault.objects())
        except PdslError as error:
            return [f"{REFUSED}: {error}"]


def substitute(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, new: Any) -> None:
    """Another function in the place of one of ours, wherever it was imported: as if it were written so."""
    original = getattr(module, name)
    ours = [m for m in list(sys.modules.values()) if getattr(m, "__name__", "").partition(".")[0] == "pdsl"]
    for loaded in ours:
        for attribute, value in list(vars(loaded).items()):
            if value is original:
                monkeypatch.setattr(loaded, attribute, new)


def forget_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of the accountant, new and empty: the honest ones are kept from what a fault computes."""
    for name in ("_total", "_rdp", "_walk", "calibrate"):
        cached = getattr(accounting, name)
        substitute(monkeypatch, accounting, name, lru_cache(maxsize=1024)(cached.__wrapped__))


def caught_by(fault: Fault, caught: Sequence[str]) -> bool:
    """Whether it is caught by the check that it names."""
    if fault.by in (ANY, REFUSED):
        return any(fault.by == ANY or name.startswith(REFUSED) for name in caught)
    return fault.by in caught


# noise, as it is made


@dataclass(frozen=True)
class Draw:
    """One message that noise is asked for."""

    noise: Noise
    t: int
    maker: int
    peer: int
    step: int
    nth: int
    g: Tensor  # [d]

    def honest(self, **other: int) -> Tensor:
        """The noise that belongs to this message, or to another one, in units of σ: [d] float64."""
        at = {"t": self.t, "maker": self.maker, "peer": self.peer, "step": self.step, "nth": self.nth} | other
        purpose = randomness.purpose("noise", at["step"], at["nth"])
        bits = self.noise.streams.bits(purpose, at["maker"], at["t"], at["peer"])
        k, _ = discrete_gaussian.scale(self.noise.sigma_of(self.maker, self.peer))
        return torch.from_numpy(discrete_gaussian.sample(len(self.g), k, bits)) / (256.0 * k)

    def generator(self) -> np.random.Generator:
        return np.random.default_rng([7, self.maker, self.peer, self.t, self.step, self.nth])


Made = Callable[[Draw], Tensor]


def steps_of(exponents: Sequence[int]) -> Tensor:
    """The lattice's step of each row: [rows, 1]."""
    return torch.tensor([[math.ldexp(1.0, exponent)] for exponent in exponents], dtype=torch.float64)


def change_rows(monkeypatch: pytest.MonkeyPatch, change: Callable[[Array], Array]) -> None:
    """Noise values of each message as `change` makes them."""
    honest = discrete_gaussian.sample_rows

    def sample_rows(n: int, scales: Any, sources: Any) -> list[Array]:
        return [change(z) for z in honest(n, scales, sources)]

    substitute(monkeypatch, discrete_gaussian, "sample_rows", sample_rows)


def make_noise(monkeypatch: pytest.MonkeyPatch, made: Made) -> None:
    """Noise is what `made` says, in units of σ; it is still added on the lattice."""

    def add(self: Noise, t: int, makers: Tensor, peers: Tensor, g: Tensor, step: int = 0, nth: int = 0) -> Tensor:
        rows = []
        for e in range(len(g)):
            draw = Draw(self, t, int(makers[e]), int(peers[e]), step, nth, g[e])
            k, exponent = discrete_gaussian.scale(self.sigma_of(draw.maker, draw.peer))
            z = (made(draw) * (256.0 * k)).round()
            rows.append(mechanism._message(g[e][None], z[None], [exponent])[0])
        return torch.stack(rows)

    monkeypatch.setattr(Noise, "add", add)


def noise_fault(kind: str, by: str, **changes: Any) -> Callable[[Made], Made]:
    """Register a function that makes the noise of a message, wrongly."""

    def register(made: Made) -> Made:
        def plant(monkeypatch: pytest.MonkeyPatch) -> None:
            make_noise(monkeypatch, made)

        plant.__name__, plant.__doc__ = getattr(made, "__name__", "?"), made.__doc__
        fault(kind, by, **changes)(plant)
        return made

    return register


LOCAL_STEPS: Values = {"algorithm": {"name": "dp-net-fleet"}}
TWO_ON_A_BATCH: Values = {"algorithm": {"name": "def-kt"}}
OWN_ONLY: Values = {"algorithm": {"name": "d-psgd"}}
SYSTEM: Values = {"privacy": {"randomness": "system"}}
SPARSE: Values = {
    "batch": {"size": 1, "rate": 0.004},
    "privacy": {"target_epsilon": None, "noise_multiplier": 1.0},
}
STAR: Values = {"graph": {"kind": "star"}}
