"""Planted faults: clipping."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pdsl.algorithms import Round
from pdsl.gradients import clipping as gradients
from pdsl.gradients import plan
from pdsl.gradients.chain import Chain
from pdsl.gradients.clipping import LocalGradients
from pdsl.gradients.per_example import LAYERS, Block, Kernel, PerRecord
from pdsl.privacy import Noise
from tests.faults.base import (
    ANY,
    CLIPPED,
    CLIPPING,
    DATA,
    REFUSED,
    SENSITIVITY,
    TAINT,
    experiment,
    fault,
    substitute,
    trainer,
)
from tests.faults.models import Changed, model

# 6 clipping


def clip_by(monkeypatch: pytest.MonkeyPatch, factors: Callable[[Tensor, float], Tensor]) -> None:
    substitute(monkeypatch, gradients, "clip_factors", factors)


def clip_fault(by: str, **changes: Any) -> Callable[[Callable[[Tensor, float], Tensor]], Any]:
    """Register factors for squared norms that do not clip."""

    def register(factors: Callable[[Tensor, float], Tensor]) -> Any:
        def plant(monkeypatch: pytest.MonkeyPatch) -> None:
            clip_by(monkeypatch, factors)

        plant.__name__, plant.__doc__ = getattr(factors, "__name__", "?"), factors.__doc__
        fault(CLIPPING, by, **changes)(plant)
        return factors

    return register


honest_factors = gradients.clip_factors


@clip_fault(SENSITIVITY)
def clip_at_105_percent(squared_norms: Tensor, C: float) -> Tensor:
    """The clip is 1.05 C."""
    return honest_factors(squared_norms, 1.05 * C)


@clip_fault(SENSITIVITY)
def clip_at_101_percent(squared_norms: Tensor, C: float) -> Tensor:
    """The clip is 1.01 C."""
    return honest_factors(squared_norms, 1.01 * C)


@clip_fault(SENSITIVITY)
def clip_at_1001_per_mille(squared_norms: Tensor, C: float) -> Tensor:
    """The clip is 1.001 C."""
    return honest_factors(squared_norms, 1.001 * C)


@clip_fault(SENSITIVITY)
def clip_a_hundred_thousandth_off(squared_norms: Tensor, C: float) -> Tensor:
    """The clip is 1.00001 C."""
    return honest_factors(squared_norms, 1.00001 * C)


@clip_fault(CLIPPED)
def clip_half_a_millionth_off(squared_norms: Tensor, C: float) -> Tensor:
    """The clip is 1.0000005 C, eight times what Δ allows for rounding."""
    return honest_factors(squared_norms, (1 + 5e-7) * C)


@clip_fault(SENSITIVITY)
def clip_misses_nan(squared_norms: Tensor, C: float) -> Tensor:
    """A gradient that is not a number stays as it is."""
    return torch.where(squared_norms.isnan(), 1.0, honest_factors(squared_norms, C))


@clip_fault(CLIPPED, objects=lambda: model(Changed)(), model={"name": "python"})
def clip_misses_infinity(squared_norms: Tensor, C: float) -> Tensor:
    """A gradient of infinite norm stays as it is."""
    return torch.where(squared_norms.isinf(), 1.0, honest_factors(squared_norms, C))


@clip_fault(CLIPPED)
def clip_misses_the_last_record(squared_norms: Tensor, C: float) -> Tensor:
    """The last record of a batch is not clipped."""
    factors = honest_factors(squared_norms, C)
    if len(factors) > 1:
        factors[-1] = 1.0
    return factors


@clip_fault(CLIPPED, batch={"size": 1, "rate": 0.004}, privacy={"target_epsilon": None, "noise_multiplier": 1.0})
def clip_needs_two_records(squared_norms: Tensor, C: float) -> Tensor:
    """A batch of one record is not clipped."""
    return honest_factors(squared_norms, C) if len(squared_norms) > 1 else torch.ones_like(squared_norms)


@clip_fault(SENSITIVITY)
def clip_by_root_mean_square(squared_norms: Tensor, C: float) -> Tensor:
    """The root of the mean square is taken for the norm."""
    return honest_factors(squared_norms / 900, C)


@clip_fault(SENSITIVITY)
def clip_in_float16(squared_norms: Tensor, C: float) -> Tensor:
    """Norms and factors are in float16."""
    norms = squared_norms.sqrt().half().double()
    return torch.where(norms.isfinite(), (C / norms.clamp(min=C)).half().double(), 0.0)


@clip_fault(CLIPPED)
def clip_factor_in_float32(squared_norms: Tensor, C: float) -> Tensor:
    """Factors are rounded to float32: the least of them have few digits."""
    return honest_factors(squared_norms, C).float().double()


@clip_fault(SENSITIVITY)
def one_factor_for_the_batch(squared_norms: Tensor, C: float) -> Tensor:
    """All records of a batch are scaled by the largest norm among them."""
    return honest_factors(squared_norms, C).min().expand(len(squared_norms)).clone()


@clip_fault(CLIPPED, privacy={"target_epsilon": 2.0, "max_grad_norm": 10.0})
def clip_at_the_median(squared_norms: Tensor, C: float) -> Tensor:
    """The clip is the batch's own median norm, where that is less than C."""
    finite = squared_norms[squared_norms.isfinite()]
    median = float(finite.sqrt().median()) if len(finite) else C
    return honest_factors(squared_norms, min(C, max(median, 1e-6)))


@clip_fault(SENSITIVITY)
def small_gradients_are_made_larger(squared_norms: Tensor, C: float) -> Tensor:
    """Gradients are normalised to C, small ones too, but for an ε that is too small."""
    factors = C / (squared_norms.sqrt() * (1 - 1e-4) + 1e-12)
    return torch.where(squared_norms.isfinite(), factors, 0.0)


@fault(CLIPPING, SENSITIVITY)
def one_agent_is_not_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agent 2 does not clip."""
    honest = LocalGradients.gradients

    def gradients_of(
        self: LocalGradients, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None
    ) -> Tensor:
        g = honest(self, t, agents, x, step, teachers)
        bare = honest(replace(self, C=1e9, repeated={}), t, agents, x, step, teachers)
        return torch.where((agents == 2)[:, None], bare, g)

    monkeypatch.setattr(LocalGradients, "gradients", gradients_of)


def parts_of(change: Callable[[list[PerRecord]], list[PerRecord]]) -> Callable[..., PerRecord]:
    """`Kernel.gradients` with norms of other parts than those that are summed."""

    def gradients_of(self: Kernel, network: Any, x: Tensor, records: Block) -> PerRecord:
        n = records.n
        parts = self.run(network, x, records)
        preprocess = change(parts) if len(parts) > 1 else parts
        squared_norms = torch.stack([part.squared_norms for part in preprocess]).sum(0)

        return PerRecord(squared_norms[:n], lambda f: torch.cat([part.weighted_sum(f) for part in parts]))

    return gradients_of


def other_norms(monkeypatch: pytest.MonkeyPatch, change: Callable[[list[PerRecord]], list[PerRecord]]) -> None:
    """Norms of other parts; without the kernel of chains, whose gradients are one part."""
    monkeypatch.setattr(plan, "chain_of", lambda replica: None)
    monkeypatch.setattr(Kernel, "gradients", parts_of(change))


@fault(CLIPPING, SENSITIVITY)
def norm_without_the_first_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm is taken without the first layer."""
    other_norms(monkeypatch, lambda parts: parts[2:])


@fault(CLIPPING, SENSITIVITY)
def norm_without_the_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm is taken of the weights, without the biases."""
    other_norms(monkeypatch, lambda parts: parts[::2])


@fault(CLIPPING, SENSITIVITY)
def norm_without_the_last_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm is taken without the last bias."""
    other_norms(monkeypatch, lambda parts: parts[:-1])


@fault(CLIPPING, SENSITIVITY)
def norm_of_a_chain_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of chains returns nine tenths of every norm."""
    honest = Chain.gradients

    def smaller(self: Chain, *args: Any) -> PerRecord | None:
        found = honest(self, *args)
        return found and replace(found, squared_norms=0.81 * found.squared_norms)

    monkeypatch.setattr(Chain, "gradients", smaller)


def clipped_sum(
    change: Callable[..., Tensor],
) -> Callable[[Any, Tensor, Tensor, Tensor, float, float, Kernel], Tensor]:
    """`clip_per_sample` by way of every record's own gradient [n, d]."""

    def made(
        network: Any, x: Tensor, inputs: Tensor, labels: Tensor, C: float, divisor: float, kernel: Kernel
    ) -> Tensor:
        if x.ndim == 2:
            return torch.stack([made(network, model, inputs, labels, C, divisor, kernel) for model in x])
        if not len(labels):
            return torch.zeros_like(x, dtype=torch.float64)
        found = kernel.gradients(network, x, kernel.pad_block(inputs, labels))
        rows = torch.stack([found.weighted_sum(row) for row in torch.eye(len(labels), dtype=torch.float64)])
        return change(rows.nan_to_num(0, 0, 0), C) / divisor

    return made


def sum_fault(by: str, **changes: Any) -> Callable[[Callable[[Tensor, float], Tensor]], Any]:
    """Register a clipped sum of gradients [n, d] that is none."""

    def register(change: Callable[[Tensor, float], Tensor]) -> Any:
        def plant(monkeypatch: pytest.MonkeyPatch) -> None:
            substitute(monkeypatch, gradients, "clip_per_sample", clipped_sum(change))

        plant.__name__, plant.__doc__ = getattr(change, "__name__", "?"), change.__doc__
        fault(CLIPPING, by, **changes)(plant)
        return change

    return register


def clipped_rows(rows: Tensor, C: float) -> Tensor:
    return rows * honest_factors(rows.square().sum(1), C)[:, None]


@sum_fault(SENSITIVITY)
def clip_by_layer(rows: Tensor, C: float) -> Tensor:
    """Each layer is clipped to C and the whole is charged as C."""
    layers = torch.split(rows, [780, 130], dim=1)
    return torch.cat([clipped_rows(layer, C) for layer in layers], dim=1).sum(0)


@sum_fault(SENSITIVITY)
def last_layer_not_clipped(rows: Tensor, C: float) -> Tensor:
    """The last layer is left out of the clip, in norm and factor."""
    return torch.cat([clipped_rows(rows[:, :-130], C), rows[:, -130:]], dim=1).sum(0)


@sum_fault(SENSITIVITY)
def batch_clip_charged_per_sample(rows: Tensor, C: float) -> Tensor:
    """The batch's sum is clipped as a whole to C and charged as if each record were clipped."""
    return clipped_rows(rows.sum(0, keepdim=True), 16 * C)[0]


@sum_fault(SENSITIVITY)
def clip_after_summing(rows: Tensor, C: float) -> Tensor:
    """The sum is clipped to C times the number of records."""
    return clipped_rows(rows.sum(0, keepdim=True), len(rows) * C)[0]


@sum_fault(SENSITIVITY)
def every_record_twice(rows: Tensor, C: float) -> Tensor:
    """Every record is counted twice."""
    return 2 * clipped_rows(rows, C).sum(0)


@sum_fault(CLIPPED)
def first_record_twice(rows: Tensor, C: float) -> Tensor:
    """The first record of a batch is counted twice."""
    clipped = clipped_rows(rows, C)
    return clipped.sum(0) + clipped[0]


@sum_fault(SENSITIVITY)
def scaled_after_the_clip(rows: Tensor, C: float) -> Tensor:
    """The clipped sum is multiplied by 1.02."""
    return 1.02 * clipped_rows(rows, C).sum(0)


@sum_fault(ANY, rounds=3, model={"name": "softmax"}, algorithm={"name": "d-psgd"})
def sum_in_float32(rows: Tensor, C: float) -> Tensor:
    """The clipped gradients are added in float32."""
    total = torch.zeros(rows.shape[1])
    for row in clipped_rows(rows, C).float():
        total += row
    return total.double()


@sum_fault(SENSITIVITY)
def signs_after_the_clip(rows: Tensor, C: float) -> Tensor:
    """The sum is normalised to its expected length after clipping."""
    total = clipped_rows(rows, C).sum(0)
    return total / total.norm().clamp(min=1e-9) * 8 * C


@fault(CLIPPING, CLIPPED)
def momentum_inside_the_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient holds a part of the agent's gradient before it."""
    honest = LocalGradients.gradients
    before: dict[int, Tensor] = {}

    def gradients_of(
        self: LocalGradients, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None
    ) -> Tensor:
        g = honest(self, t, agents, x, step, teachers)
        with_momentum = [row + 0.05 * before.get(int(i), row) for i, row in zip(agents, g, strict=True)]
        before.update({int(i): row for i, row in zip(agents, g, strict=True)})
        return torch.stack(with_momentum)

    monkeypatch.setattr(LocalGradients, "gradients", gradients_of)


def dealt(monkeypatch: pytest.MonkeyPatch, change: Callable[[list[Tensor]], list[Tensor]]) -> None:
    honest = experiment.partition
    substitute(monkeypatch, experiment, "partition", lambda *of: change(honest(*of)))


@fault(CLIPPING, ANY)
def a_record_twice_in_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agent 1 has its first record twice, and it moves a message by twice as much."""
    dealt(monkeypatch, lambda parts: [torch.cat([p[:1], p]) if i == 1 else p for i, p in enumerate(parts)])


@fault(CLIPPING, ANY)
def a_record_at_two_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents 0 and 1 have a record in common, which pays twice."""
    dealt(monkeypatch, lambda parts: [torch.cat([parts[1][:1], p]) if i == 0 else p for i, p in enumerate(parts)])


@fault(CLIPPING, CLIPPED, batch={"size": 10_000}, model={"name": "softmax"}, rounds=3, algorithm={"name": "d-psgd"})
def only_the_first_block_is_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records beyond the first 256 of a batch are not clipped."""

    def blocks(
        network: Any, x: Tensor, inputs: Tensor, labels: Tensor, C: float, divisor: float, kernel: Kernel
    ) -> Tensor:
        if x.ndim == 2:
            return torch.stack([blocks(network, model, inputs, labels, C, divisor, kernel) for model in x])
        total = torch.zeros_like(x, dtype=torch.float64)
        for n, (a, b) in enumerate(zip(torch.split(inputs, 256), torch.split(labels, 256), strict=True)):
            found = kernel.gradients(network, x, kernel.pad_block(a, b))
            total += found.weighted_sum(honest_factors(found.squared_norms, C if n == 0 else 1e9))
        return total / divisor

    substitute(monkeypatch, gradients, "clip_per_sample", blocks)


@fault(CLIPPING, CLIPPED)
def padding_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The zero records that pad a batch are counted, as many as are missing to a multiple of 16."""

    def gradients_of(self: Kernel, network: Any, x: Tensor, records: Block) -> PerRecord:
        parts = self.run(network, x, records)
        squared_norms = torch.stack([part.squared_norms for part in parts]).sum(0)
        return PerRecord(squared_norms, lambda f: torch.cat([part.weighted_sum(f) for part in parts]))

    substitute(monkeypatch, trainer, "choose_kernel", lambda *of: LAYERS)
    monkeypatch.setattr(Kernel, "gradients", gradients_of)


@fault(CLIPPING, CLIPPED, privacy={"target_epsilon": None, "clipping": "batch", "max_grad_norm": 0.1, "sigma": 1.0})
def whole_batch_not_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """With whole-batch clipping, the batch's gradient is not clipped."""
    clip_by(monkeypatch, lambda squared_norms, C: torch.ones_like(squared_norms))


@fault(CLIPPING, CLIPPED)
def gradient_of_the_round_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other round the gradients of the round before it are sent again, with new noise."""
    honest = LocalGradients.gradients

    def gradients_of(
        self: LocalGradients, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None
    ) -> Tensor:
        return honest(self, t - 1 + t % 2, agents, x, step, teachers)

    monkeypatch.setattr(LocalGradients, "gradients", gradients_of)


@fault(CLIPPING, SENSITIVITY)
def zero_times_infinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """An infinite gradient is multiplied with its factor of zero."""

    def nan_to_num_(self: Tensor, nan: float | None = None) -> Tensor:
        return self if nan is None else self.copy_(self.nan_to_num(nan=nan))

    monkeypatch.setattr(Tensor, "nan_to_num_", nan_to_num_)


@fault(CLIPPING, SENSITIVITY)
def a_larger_clip_than_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agents clip at 2 C, and the charge is for C."""
    honest = LocalGradients.on

    def on(self: LocalGradients, x: Tensor, inputs: Tensor, labels: Tensor, divisor: float) -> Tensor:
        return honest(replace(self, C=2 * self.C), x, inputs, labels, divisor)

    monkeypatch.setattr(LocalGradients, "on", on)


@fault(CLIPPING, REFUSED)
def changed_between_clip_and_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clipped gradient is doubled before its noise is added."""

    def noisy(self: Round, makers: Tensor, peers: Tensor, x: Tensor) -> Tensor:
        return self.noise.add(self.t, makers, peers, 2 * self.local.gradients(self.t, makers, x))

    monkeypatch.setattr(Round, "_noisy", noisy)


@fault(CLIPPING, REFUSED)
def changed_in_place_between_clip_and_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clipped gradient is doubled in place before its noise is added."""

    def noisy(self: Round, makers: Tensor, peers: Tensor, x: Tensor) -> Tensor:
        return self.noise.add(self.t, makers, peers, self.local.gradients(self.t, makers, x).mul_(2))

    monkeypatch.setattr(Round, "_noisy", noisy)


@fault(CLIPPING, TAINT)
def changed_through_data_between_clip_and_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clipped gradient is doubled through .data, which leaves no trace, before its noise is added."""

    def noisy(self: Round, makers: Tensor, peers: Tensor, x: Tensor) -> Tensor:
        g = self.local.gradients(self.t, makers, x)
        g.data.mul_(2)
        return self.noise.add(self.t, makers, peers, g)

    monkeypatch.setattr(Round, "_noisy", noisy)


@fault(CLIPPING, DATA)
def doubled_with_its_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is doubled where the noise is added."""
    honest = Noise.add
    monkeypatch.setattr(Noise, "add", lambda self, t, makers, peers, g, *at: honest(self, t, makers, peers, 2 * g, *at))
