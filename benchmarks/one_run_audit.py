"""Canary attack on correct runs and on runs with planted faults, with handwritten digits.

    python benchmarks/one_run_audit.py [strength|honest|noise|faults|sampled]

Without a name all tables are printed, in about 15 minutes on one core.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from pdsl.algorithms import Round
from pdsl.algorithms.d_psgd import DPSGD
from pdsl.auditing.canaries import CanaryResult, attack
from pdsl.config import validate
from pdsl.data import Batches
from pdsl.gradients.clipping import LocalGradients
from pdsl.privacy import Noise, Release
from pdsl.privacy.metering import Meter
from pdsl.training.experiment import Experiment, prepare
from pdsl.utils.random import RandomBits, Streams

ALL_RECORDS = 1_000_000  # batch size above any number of records: q = 1
Settings = dict[str, Any]


def settings(epsilon: float, rounds: int, **changes: Any) -> Settings:
    """Four agents on a ring with the digits, every record in every batch."""
    values: Settings = {
        "rounds": rounds,
        "graph": {"kind": "ring", "agents": 4},
        "partition": {"kind": "iid"},
        "batch": {"size": ALL_RECORDS},
        "privacy": {"target_epsilon": epsilon},
    }
    for name, change in changes.items():
        values[name] = {**values[name], **change} if isinstance(values.get(name), dict) else change
    return values


def experiment(values: Settings) -> Experiment:
    return prepare(validate(values, "benchmark"))


# Faults


@contextmanager
def altered_noise(change: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Replace each message by `change` of its noisy and clean rows."""
    honest = Noise.add

    def add(self: Noise, t: int, makers: Tensor, peers: Tensor, g: Tensor, *at: int) -> Tensor:
        noisy = honest(self, t, makers, peers, g, *at)
        return change(noisy, g.to(noisy.dtype))

    with patch.object(Noise, "add", add):
        yield


def less_noise(factor: float) -> AbstractContextManager[None]:
    return altered_noise(lambda noisy, g: g + factor * (noisy - g))


def end_without_noise(numbers: int) -> AbstractContextManager[None]:
    """Leave the last parameters of the model without noise."""
    return altered_noise(lambda noisy, g: torch.cat([noisy[:, :-numbers], g[:, -numbers:]], dim=1))


@contextmanager
def same_noise(forgotten: str) -> Iterator[None]:
    """Use the same noise for all peers, or for all rounds."""
    honest = Streams.bits

    def bits(self: Streams, purpose: str, agent: int, round: int, peer: int = -1) -> RandomBits:
        named = {"agent": agent, "round": round, "peer": peer}
        return honest(self, purpose, **(named | ({forgotten: 0} if purpose.startswith("noise") else {})))

    with patch.object(Streams, "bits", bits):
        yield


@contextmanager
def sampled_twice_as_often() -> Iterator[None]:
    def draw(self: Batches, agent: int, round: int, step: int = 0) -> Tensor:
        draws = self.streams.uniforms(self.sizes[agent], f"batch {step}", agent, round)
        return torch.nonzero(torch.from_numpy(draws) < 2 * (self.rate or 1.0))[:, 0]

    with patch.object(Batches, "draw", draw):
        yield


@contextmanager
def divided_by_batch_size() -> Iterator[None]:
    honest = LocalGradients.on

    def on(self: LocalGradients, x: Tensor, inputs: Tensor, labels: Tensor, divisor: float) -> Tensor:
        return honest(self, x, inputs, labels, float(max(1, len(labels))))

    with patch.object(LocalGradients, "on", on):
        yield


class TwoForOne(DPSGD):
    """Release two noisy gradients on one batch, but declare one."""

    def step(self, state: Any, r: Round) -> Any:
        both = r.own_noisy_gradients(state.x) + r.own_noisy_gradients(state.x, nth=1)
        return type(state)(r.engine.mix(state.x - both / 2)), {}

    def releases(self, members: int) -> Release:
        return Release(messages=1)


@contextmanager
def without_a_meter() -> Iterator[None]:
    """Switch off the meter, which would refuse an undeclared message."""
    with patch.object(Meter, "_need", lambda *given: None):
        yield


MLP = {"name": "mlp", "hidden": 12}  # 910 parameters, 130 of them in the last layer
SAMPLED = {"size": 75}  # of about 300 records: q = 0.25
FAULTS: dict[str, tuple[Settings, Callable[[], AbstractContextManager[None]]]] = {
    "noise × 0.5": ({}, lambda: less_noise(0.5)),
    "one noise for all peers": ({}, lambda: same_noise("peer")),
    "one noise for all rounds": ({}, lambda: same_noise("round")),
    "no noise on the last layer": ({"model": MLP}, lambda: end_without_noise(130)),
    "no noise on the last bias": ({"model": MLP}, lambda: end_without_noise(10)),
    "sampler's rate doubled, q = 0.25": ({"batch": SAMPLED}, sampled_twice_as_often),
    "divided by the batch size drawn": ({}, divided_by_batch_size),
    "divided by the batch size drawn, q = 0.25": ({"batch": SAMPLED}, divided_by_batch_size),
    "message not declared": ({"algorithm": TwoForOne()}, without_a_meter),
}


# Tables

HEAD = "| run | canaries | claim | ε ≥ | ratio | ε ≥ at 95 % | expected | unused coins | without noise | CPU s |"


def row(name: str, found: CanaryResult, seconds: float) -> str:
    return (
        f"| {name} | {found.count:,} | {found.claim:.3f} | {found.epsilon:.2f} | {found.ratio:.2f}"
        f" | {found.epsilon_95:.2f} | {found.ideal:.2f} | {found.null:.2f} | {found.positive:.1f} | {seconds:.1f} |"
    )


def measured(name: str, values: Settings, seed: int = 0) -> CanaryResult:
    e = experiment(values)
    start = time.process_time()
    found = attack(e, seed=seed)
    print(row(name, found, time.process_time() - start), flush=True)
    return found


def heading(title: str) -> None:
    print(f"\n{title}\n\n{HEAD}\n|{'---|' * HEAD[1:].count('|')}", flush=True)


def strength() -> None:
    heading("Correct runs of 5 rounds, q = 1")
    for epsilon in (8.0, 4.0, 2.0, 1.0):
        measured(f"ε = {epsilon:g}", settings(epsilon, 5))


def sampled() -> None:
    heading("Correct runs with sampling, and the default run (ring of 10, 100 rounds)")
    for epsilon in (8.0, 2.0):
        measured(f"q = 0.25, 20 rounds, ε = {epsilon:g}", settings(epsilon, 20, batch=SAMPLED))
    measured("default", {})
    measured("default, ε = 2", {"privacy": {"target_epsilon": 2.0}})
    measured("default, fixed-size batches", {"batch": {"sampler": "fixed"}})
    measured("default, digits-cnn", {"model": {"name": "digits-cnn"}})


def honest() -> None:
    heading("50 correct runs")
    kinds = [
        (algorithm, epsilon, size)
        for algorithm in ("pdsl", "d-psgd", "muffliato")
        for epsilon in (8.0, 4.0, 2.0, 1.0)
        for size in (ALL_RECORDS, 75)
    ]
    found = []
    for seed in range(50):
        algorithm, epsilon, size = kinds[seed % len(kinds)]
        values = settings(epsilon, 8, seed=seed, algorithm={"name": algorithm}, batch={"size": size})
        found.append(measured(f"{seed}: {algorithm}, ε = {epsilon:g}, B = {size:,}", values, seed))
    print(f"\n{sum(f.epsilon > f.claim for f in found)} of {len(found)} above the claim,")
    print(f"{sum(f.epsilon_95 > f.claim for f in found)} at 95 %; {sum(f.null > 0 for f in found)} with unused coins")
    print(f"largest ratio {max(f.ratio for f in found):.3f}, mean {sum(f.ratio for f in found) / len(found):.3f}")


def noise() -> None:
    heading("Less noise than claimed: ε = 2, 5 rounds, q = 1, ten seeds each")
    for factor in (0.5, 0.7, 0.8, 0.9):
        with less_noise(factor):
            found = [measured(f"× {factor}, seed {s}", settings(2.0, 5, seed=s), s) for s in range(10)]
        print(f"\n× {factor}: refuted in {sum(f.epsilon > f.claim for f in found)} of {len(found)}\n")


def faults() -> None:
    heading("Faults: claimed ε = 2, 10 rounds, three seeds each")
    for name, (changes, fault) in FAULTS.items():
        for seed in range(3):
            with fault():
                measured(f"{name}, seed {seed}", settings(2.0, 10, seed=seed, **changes), seed)


def main() -> None:
    torch.set_num_threads(1)
    parts = {f.__name__: f for f in (strength, sampled, honest, noise, faults)}
    for name in sys.argv[1:] or parts:
        parts[name]()


if __name__ == "__main__":
    main()
