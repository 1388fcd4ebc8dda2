"""Models that mix records or keep state are refused or made safe (findings D6 and D7)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pdsl
from pdsl.gradients.clipping import clip_per_sample
from pdsl.gradients.independence import choose_kernel, is_vetted
from pdsl.gradients.per_example import LAYERS, RECORDS, VMAPPED
from pdsl.models.network import Network
from pdsl.models.residual import Residual
from pdsl.tasks import MultiClass
from tests.helpers.refusals import refused

pytestmark = pytest.mark.slow


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 8), nn.Linear(8, 10)
        self.register_buffer("mean", torch.zeros(64))
        self.calls = 0
        self.before: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(self.changed(x.flatten(1)))))

    def changed(self, x: Tensor) -> Tensor:
        return x


class Centred(Base):
    def changed(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class CentredIfMany(Base):
    def changed(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if len(x) >= 8 else x


class FunctionalBatchNorm(Base):
    def changed(self, x: Tensor) -> Tensor:
        return functional.batch_norm(x, None, None, training=True) if len(x) > 1 else x


class Distances(Base):
    def changed(self, x: Tensor) -> Tensor:
        return x * (1 + torch.cdist(x, x).mean(1, keepdim=True))


class OverflowGuard(Base):
    def changed(self, x: Tensor) -> Tensor:
        return x / 10 if bool(x.abs().max() > 100) else x


class OrderDependent(Base):
    def changed(self, x: Tensor) -> Tensor:
        return x + x.cumsum(0) / 100


class RunningMean(Base):
    def changed(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class RunningMeanInPlace(Base):
    def changed(self, x: Tensor) -> Tensor:
        self.mean += 0.1 * x.detach().mean(0)
        return x - self.mean


class Counting(Base):
    def changed(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class Remembering(Base):
    def changed(self, x: Tensor) -> Tensor:
        before, self.before = self.before, x.detach()
        return x if before is None else x + before.mean()


class Dropping(Base):
    def changed(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5, training=True)


MIXES: list[type[Base]] = [
    Centred, CentredIfMany, FunctionalBatchNorm, Distances, OverflowGuard, OrderDependent,
]  # fmt: skip
STATEFUL: list[type[Base]] = [RunningMean, RunningMeanInPlace, Counting, Remembering]


def train(model: nn.Module, **more: Any) -> pdsl.Result:
    return pdsl.train(model, "digits", graph=pdsl.ring(4), rounds=1, **more)


@pytest.mark.parametrize("kind", MIXES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("algorithm", ["d-psgd", "def-kt"])
def test_a_model_that_mixes_records_is_refused(kind: type[Base], algorithm: str) -> None:
    with refused("mixes records", "GroupNorm"):
        train(kind(), algorithm=pdsl.ALGORITHMS[algorithm]())


@pytest.mark.parametrize("kind", STATEFUL, ids=lambda kind: kind.__name__)
def test_a_model_that_keeps_state_is_refused(kind: type[Base]) -> None:
    with refused("keeps state", "make forward stateless"):
        train(kind())


def test_a_model_that_draws_random_numbers_is_refused() -> None:
    with refused("another gradient the second time", "random numbers"):
        train(Dropping())


class CountingLater(Base):
    """Keeps state from its thousandth call on, after the trial."""

    seen = 0

    def changed(self, x: Tensor) -> Tensor:
        type(self).seen += 1
        if type(self).seen > 1000:
            self.before = x.detach()
        return x


def test_state_that_begins_after_the_trial_ends_the_run() -> None:
    CountingLater.seen = 0
    with refused("keeps state", "before"):
        pdsl.train(CountingLater(), "digits", graph=pdsl.ring(4), rounds=60, algorithm=pdsl.ALGORITHMS["d-psgd"]())


class MixesLater(Base):
    """Mixes records only for values that no trial contains, so that detection must miss it."""

    def changed(self, x: Tensor) -> Tensor:
        return torch.where(((x - 7.25).abs() < 1e-3).any(), x + x.mean(0), x)


@pytest.mark.parametrize("algorithm", ["d-psgd", "def-kt"])
def test_mixing_that_passes_detection_does_not_mix_since_records_are_given_one_at_a_time(algorithm: str) -> None:
    torch.manual_seed(0)
    network = Network(MixesLater())
    inputs, labels = torch.rand(40, 64, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 10
    kernel = choose_kernel(network, inputs, labels)
    assert kernel.name.split(",")[0] in (VMAPPED.name, RECORDS.name)
    x, strange = network.perturbed_parameters(), torch.full((1, 64), 7.25)
    without = clip_per_sample(network, x, inputs, labels, 1.0, 1.0, kernel)
    joined = torch.cat([inputs, strange]), torch.cat([labels, labels[:1]])
    with_it = clip_per_sample(network, x, *joined, 1.0, 1.0, kernel)
    assert (with_it - without).norm() <= 1 + 1e-9
    alone = kernel.outputs(network, x, joined[0])
    assert torch.allclose(alone[:40], kernel.outputs(network, x, inputs))


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    module[1].register_forward_hook(lambda layer, args, out: out - out.mean(0))
    return module


@pytest.mark.parametrize(
    ("make", "vetted"),
    [
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), True),
        (lambda: nn.Sequential(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU()), nn.Flatten(), nn.Linear(144, 10)), True),
        (lambda: nn.Sequential(Residual(nn.Linear(4, 4)), Residual(nn.Linear(4, 2), shortcut=nn.Linear(4, 2))), True),
        (lambda: nn.Sequential(nn.BatchNorm1d(4).requires_grad_(False), nn.Linear(4, 2)).eval(), True),
        (lambda: nn.Sequential(nn.BatchNorm1d(4).requires_grad_(False), nn.Linear(4, 2)), False),
        (lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)).eval(), False),
        (lambda: nn.Sequential(nn.Flatten(0), nn.Linear(64, 10)), False),
        (lambda: nn.Sequential(nn.Flatten(), nn.Softmax(dim=0), nn.Linear(64, 10)), False),
        (Base, False),
        (hooked, False),
    ],
)
def test_only_vetted_layers_in_a_row_are_proven(make: Callable[[], nn.Module], vetted: bool) -> None:
    assert is_vetted(make()) is vetted


def test_a_residual_block_after_frozen_normalisation_has_the_gradients_that_each_record_has_alone() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4).requires_grad_(False)
    norm.running_mean = torch.randn(4)
    body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU())
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        norm,
        Residual(*body),
        Residual(nn.Conv2d(4, 6, 1), shortcut=nn.Conv2d(4, 6, 1)),
        nn.Flatten(),
    )
    network = Network(module, task=MultiClass(outputs=10))
    inputs, labels = torch.randn(20, 1, 5, 5), torch.arange(20) % 10
    assert choose_kernel(network, inputs, labels).name == LAYERS.name  # `choose_kernel` compares with each record alone
    x = network.perturbed_parameters()
    once = clip_per_sample(network, x, inputs, labels, 1.0, 1.0, LAYERS)
    again = clip_per_sample(network, x, inputs, labels, 1.0, 1.0, RECORDS)
    assert torch.allclose(once, again, rtol=1e-4, atol=1e-6)


def test_a_hook_that_mixes_records_is_refused() -> None:
    with refused("mixes records"):
        train(hooked())


def test_an_honest_module_with_code_of_its_own_is_trained_record_by_record() -> None:
    torch.manual_seed(0)
    result = train(Base())
    assert len(result.rows) == 1
    assert LAYERS.name == "layers"
