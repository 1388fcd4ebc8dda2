"""Planted faults: sampler."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pdsl.config import validate
from pdsl.data import Batches, Data
from pdsl.gradients import clipping as gradients
from pdsl.gradients.per_example import Kernel
from pdsl.utils import random as randomness
from pdsl.utils.random import Streams
from tests.faults.base import (
    CLIPPED,
    LOCAL_STEPS,
    PUBLIC_PARTS,
    SAMPLER,
    SAMPLING,
    SPARSE,
    SYSTEM,
    Array,
    Values,
    datasets,
    experiment,
    fault,
    settings,
    substitute,
)

# 5 sampler


@dataclass(frozen=True)
class Drawn:
    """A batch that is asked for."""

    batches: Batches
    agent: int
    t: int
    step: int

    @property
    def n(self) -> int:
        return self.batches.sizes[self.agent]

    @property
    def rate(self) -> float:
        assert self.batches.rate is not None
        return self.batches.rate

    def uniforms(self, n: int | None = None, **other: int) -> Array:
        at = {"agent": self.agent, "round": self.t} | {k: v for k, v in other.items() if k != "step"}
        purpose = randomness.purpose("batch", other.get("step", self.step))
        return self.batches.streams.uniforms(self.n if n is None else n, purpose, **at)

    def honest(self, **other: int) -> Array:
        return np.flatnonzero(self.uniforms(**other) < self.rate)


Drawing = Callable[[Drawn], Array]


def sampler_fault(by: str = SAMPLER, **changes: Any) -> Callable[[Drawing], Drawing]:
    """Register a function that draws a batch, wrongly."""

    def register(drawing: Drawing) -> Drawing:
        def draw(self: Batches, agent: int, round: int, step: int = 0) -> Tensor:
            return torch.from_numpy(np.asarray(drawing(Drawn(self, agent, round, step)), dtype=np.int64))

        def plant(monkeypatch: pytest.MonkeyPatch) -> None:
            monkeypatch.setattr(Batches, "draw", draw)

        plant.__name__, plant.__doc__ = getattr(drawing, "__name__", "?"), drawing.__doc__
        fault(SAMPLING, by, **changes)(plant)
        return drawing

    return register


@sampler_fault()
def rate_a_tenth_too_high(d: Drawn) -> Array:
    """Records are drawn a tenth more often than is charged."""
    return np.flatnonzero(d.uniforms() < 1.1 * d.rate)


@sampler_fault()
def rate_two_percent_too_high(d: Drawn) -> Array:
    """Records are drawn 2 % more often than is charged."""
    return np.flatnonzero(d.uniforms() < 1.02 * d.rate)


@sampler_fault()
def a_tenth_always(d: Drawn) -> Array:
    """A tenth of the records is in every batch."""
    return np.flatnonzero((d.uniforms() < d.rate) | (np.arange(d.n) % 10 == 0))


@sampler_fault()
def in_pairs(d: Drawn) -> Array:
    """Neighbouring records are drawn together."""
    return np.flatnonzero(d.uniforms()[np.arange(d.n) // 2] < d.rate)


@sampler_fault()
def in_far_pairs(d: Drawn) -> Array:
    """Records are drawn together with those half the data away."""
    return np.flatnonzero(d.uniforms()[np.arange(d.n) % (d.n // 2)] < d.rate)


@sampler_fault()
def shuffled_epochs(d: Drawn) -> Array:
    """All records in a random order are cut into batches, epoch by epoch."""
    per_epoch = max(1, round(1 / d.rate))
    epoch, part = divmod(d.t - 1, per_epoch)
    order = np.argsort(d.uniforms(round=epoch))
    return np.sort(np.array_split(order, per_epoch)[part])


@sampler_fault()
def balls_into_bins(d: Drawn) -> Array:
    """In each epoch every record is in exactly one batch, at random."""
    per_epoch = max(1, round(1 / d.rate))
    epoch, part = divmod(d.t - 1, per_epoch)
    return np.flatnonzero((d.uniforms(round=epoch) * per_epoch).astype(int) == part)


@sampler_fault()
def fixed_accounted_as_poisson(d: Drawn) -> Array:
    """Batches have a fixed size and are charged as Poisson ones."""
    return np.sort(np.argsort(d.uniforms())[: d.batches.settings.size])


@sampler_fault()
def each_batch_twice(d: Drawn) -> Array:
    """Each batch is used in two rounds."""
    return d.honest(round=(d.t + 1) // 2)


@sampler_fault()
def five_batches_in_turn(d: Drawn) -> Array:
    """The same five batches come again and again."""
    return d.honest(round=d.t % 5)


@sampler_fault(**LOCAL_STEPS)
def one_batch_for_all_steps(d: Drawn) -> Array:
    """All local steps are charged for a batch each, and share one."""
    return d.honest(step=0)


@sampler_fault()
def same_places_everywhere(d: Drawn) -> Array:
    """All agents draw the same places."""
    return d.honest(agent=0)


@sampler_fault()
def same_places_at_two_agents(d: Drawn) -> Array:
    """Agents 0 and 2 draw the same places."""
    return d.honest(agent=d.agent & ~2)


@sampler_fault()
def first_records_preferred(d: Drawn) -> Array:
    """The first half of the records is drawn more often than the second."""
    return np.flatnonzero(d.uniforms() < d.rate * np.where(np.arange(d.n) < d.n / 2, 1.2, 0.8))


@sampler_fault()
def last_record_preferred(d: Drawn) -> Array:
    """The last record is drawn half as often again as the others."""
    return np.flatnonzero(d.uniforms() < d.rate * np.where(np.arange(d.n) == d.n - 1, 1.5, 1.0))


@sampler_fault()
def rate_grows(d: Drawn) -> Array:
    """The rate grows from round to round."""
    return np.flatnonzero(d.uniforms() < d.rate * (0.5 + min(1.0, d.t / 100)))


@sampler_fault()
def cut_off_at_one_and_a_half(d: Drawn) -> Array:
    """A batch ends with its 24th record of 16 expected ones, so that memory is enough."""
    return d.honest()[: int(1.5 * d.batches.settings.size)]


@sampler_fault(**SPARSE)
def never_empty(d: Drawn) -> Array:
    """An empty batch is drawn again."""
    return next(found for n in range(100) if len(found := d.honest(step=n)))


@sampler_fault(partition={"kind": "dirichlet"})
def rate_from_the_own_size(d: Drawn) -> Array:
    """Each agent draws B of its own number of records."""
    return np.flatnonzero(d.uniforms() < d.batches.settings.size / d.n)


def own_records(**changes: Any) -> Values:
    """Records of four organisations, whose numbers are not public."""
    public = datasets.load(validate(settings(), "test").data, Streams(0))
    n = 1000
    owner = torch.arange(n) % 4
    owner[:300] = 0
    data = Data("own", public.x[:n], public.y[:n], public.test_x, public.test_y, 10, owner)
    return {"data": replace(data, **changes)}


@fault(SAMPLING, SAMPLER, objects=own_records, **SYSTEM, batch={"size": 16, "records": 300})
def rate_from_private_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate is computed from the true number of records, though a public one is given."""
    substitute(
        monkeypatch, experiment, "public_records", lambda settings, published, sizes, private: sum(sizes) / len(sizes)
    )


@fault(SAMPLING, PUBLIC_PARTS, objects=own_records, **SYSTEM, batch={"size": 16})
def rate_from_private_sizes_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate is computed from the true number of records, because nobody gave a public one."""
    substitute(
        monkeypatch, experiment, "public_records", lambda settings, published, sizes, private: sum(sizes) / len(sizes)
    )


@fault(SAMPLING, SAMPLER, batch={"sampler": "fixed"})
def amplified_fixed_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed batches are charged at the rate B/n."""
    honest = Batches.draw
    monkeypatch.setattr(Batches, "rate", property(lambda b: b.settings.size / b.records))

    def draw(self: Batches, agent: int, round: int, step: int = 0) -> Tensor:
        draws = self.streams.uniforms(self.sizes[agent], randomness.purpose("batch", step), agent, round)
        return torch.from_numpy(np.sort(np.argsort(draws, kind="stable")[: self.settings.size]))

    assert honest is not draw
    monkeypatch.setattr(Batches, "draw", draw)


@fault(SAMPLING, SAMPLER, batch={"sampler": "fixed"})
def fixed_with_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed batches are drawn with replacement: a record may count several times."""

    def draw(self: Batches, agent: int, round: int, step: int = 0) -> Tensor:
        draws = self.streams.uniforms(self.settings.size, randomness.purpose("batch", step), agent, round)
        return torch.from_numpy(np.sort((draws * self.sizes[agent]).astype(np.int64)))

    monkeypatch.setattr(Batches, "draw", draw)


@fault(SAMPLING, SAMPLER)
def charged_at_a_lower_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger is charged for nine tenths of the rate."""
    honest = experiment.mechanisms

    def lower(*of: Any) -> Any:
        return [replace(m, rate=0.9 * m.rate) for m in honest(*of)]

    substitute(monkeypatch, experiment, "mechanisms", lower)


@fault(SAMPLING, CLIPPED)
def divided_by_the_size_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum is divided by the number of records drawn."""
    honest = gradients.clip_per_sample

    def by_size(network: Any, x: Tensor, inputs: Tensor, labels: Tensor, C: float, divisor: float, k: Kernel) -> Tensor:
        return honest(network, x, inputs, labels, C, float(max(1, len(labels))), k)

    substitute(monkeypatch, gradients, "clip_per_sample", by_size)


@fault(SAMPLING, SAMPLER, partition={"kind": "dirichlet"})
def divided_by_the_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum is divided by the batch that the agent's own number of records lets one expect."""
    monkeypatch.setattr(Batches, "divisor", lambda self, agent: self.rate * self.sizes[agent])
