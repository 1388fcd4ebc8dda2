"""Planted faults: models."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdsl.gradients import independence, per_example
from pdsl.gradients.per_example import RECORDS, Block, Kernel, PerRecord
from pdsl.models.network import Network
from pdsl.models.zoo import Flatten
from tests.faults.base import (
    CLIPPED,
    MODELS,
    OWN_ONLY,
    REFUSED,
    TWO_ON_A_BATCH,
    Values,
    fault,
    substitute,
    trainer,
)

# 9 models


def model(make: Callable[[], nn.Module]) -> Callable[[], Values]:
    def made() -> Values:
        torch.manual_seed(0)
        return {"model": make()}

    return made


class Changed(nn.Module):
    """A small network whose hidden features go through something."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 12), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.up_to(torch.tanh(self.first(x.flatten(1)))))

    def up_to(self, h: Tensor) -> Tensor:
        return h


class Centring(Changed):
    def up_to(self, h: Tensor) -> Tensor:
        return h - h.mean(0)


class CentringFromEight(Changed):
    def up_to(self, h: Tensor) -> Tensor:
        return h - h.mean(0) if len(h) >= 8 else h


class Sorting(Changed):
    """Each record looks at how far the others are, a little."""

    def up_to(self, h: Tensor) -> Tensor:
        return h + 0.05 * torch.cdist(h, h).mean(1, keepdim=True)


class WithBuffer(Changed):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(12))

    def up_to(self, h: Tensor) -> Tensor:
        self.seen.mul_(0.9).add_(0.1 * h.detach().mean(0))
        return h - self.seen


class WithMemory(Changed):
    last_seen: Tensor | None = None

    def up_to(self, h: Tensor) -> Tensor:
        before, self.last_seen = self.last_seen, h.detach().mean(0)
        return h if before is None else h - 0.1 * before


MEMORY: list[Tensor] = []


class WithGlobalMemory(Changed):
    def up_to(self, h: Tensor) -> Tensor:
        MEMORY.append(h.detach().mean(0))
        return h - 0.1 * torch.stack(MEMORY[-5:]).mean(0)


class WithGuard(Changed):
    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return super().forward(x / max(1.0, float(x.detach().abs().max()) / 5))


class WithDropout(Changed):
    def up_to(self, h: Tensor) -> Tensor:
        return nn.functional.dropout(h, 0.2, training=True)


def model_fault(make: Callable[[], nn.Module], name: str, what: str, by: str = REFUSED, **changes: Any) -> None:
    """Register a user's module through which records mix."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        MEMORY.clear()

    plant.__name__, plant.__doc__ = name, what
    fault(MODELS, by, objects=model(make), model={"name": "python"}, **changes)(plant)


model_fault(Centring, "mean_of_the_batch", "The mean of the batch is taken off every record.")
model_fault(CentringFromEight, "mean_of_a_larger_batch", "The mean of the batch is taken off, from 8 records on.")
model_fault(Sorting, "distances_in_the_batch", "Each record looks at how far the others are.")
model_fault(WithBuffer, "buffer_in_forward", "A buffer is updated in forward.")
model_fault(WithMemory, "memory_in_forward", "An attribute remembers the last record.")
model_fault(WithGlobalMemory, "global_memory_in_forward", "A list outside the module remembers the last records.")
model_fault(WithGuard, "guard_over_the_batch", "The whole batch is scaled down where one record is large.")
model_fault(WithDropout, "random_numbers_in_forward", "Forward draws random numbers.")


@fault(
    MODELS,
    REFUSED,
    model={"name": "python"},
    objects=model(lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))),
)
def batch_norm_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule against BatchNorm is forgotten."""
    monkeypatch.setattr(Network, "mixes_records", property(lambda self: None))


@fault(MODELS, REFUSED)
def vetted_layer_that_mixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of our own that is taken for harmless mixes records."""
    honest = Flatten.forward
    monkeypatch.setattr(Flatten, "forward", lambda self, x: honest(self, x - 0.1 * x.mean(0)))


def mixing(of_rows: Callable[[Tensor], Tensor], least: int = 0) -> Kernel:
    """The kernel `records`, with gradients [n, d] changed by each other."""

    def run(network: Any, x: Tensor, records: Block) -> list[PerRecord]:
        (found,) = RECORDS.run(network, x, records)
        rows = torch.stack([found.weighted_sum(row) for row in torch.eye(len(records.targets), dtype=torch.float64)])
        return [per_example._rows(of_rows(rows) if len(rows) >= least else rows)]

    return replace(RECORDS, run=run, block=256)


@fault(MODELS, CLIPPED, **OWN_ONLY, rounds=3)
def kernel_that_mixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes the batch's mean gradient off every record's before clipping."""
    kernel = mixing(lambda rows: rows - 0.5 * rows.mean(0))
    substitute(monkeypatch, trainer, "choose_kernel", lambda *of: kernel)


@fault(MODELS, CLIPPED, **OWN_ONLY, rounds=3)
def kernel_that_mixes_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives each record a little of the record before it."""
    kernel = mixing(lambda rows: rows + 0.01 * rows.roll(1, 0))
    substitute(monkeypatch, trainer, "choose_kernel", lambda *of: kernel)


@fault(
    MODELS,
    CLIPPED,
    batch={"size": 60},
    rounds=2,
    algorithm={"name": "d-psgd"},
    model={"name": "softmax"},
    graph={"kind": "full", "agents": 2},
)
def kernel_that_mixes_beyond_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel mixes records of batches that are larger than the trial's."""
    kernel = mixing(lambda rows: rows - 0.5 * rows.mean(0), least=independence.TRIAL + 1)
    monkeypatch.setattr(independence, "RECORDS", kernel)
    monkeypatch.setattr(independence, "VMAPPED", kernel)
    monkeypatch.setattr(independence, "LAYERS", kernel)


@fault(MODELS, CLIPPED, objects=model(Centring), model={"name": "python"}, **TWO_ON_A_BATCH)
def teacher_that_sees_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A teacher through which records mix is given the whole batch."""
    substitute(monkeypatch, independence, "_check_mixing", lambda *of: None)
    honest = independence.choose_kernel

    def choose(*of: Any) -> Kernel:
        return replace(honest(*of), outputs=per_example._outputs_of_batch)

    substitute(monkeypatch, trainer, "choose_kernel", choose)
