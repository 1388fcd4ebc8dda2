"""Planted faults: shape of noise."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pdsl.privacy import discrete_gaussian
from pdsl.privacy import noise as mechanism
from pdsl.utils.random import RandomBits, Streams
from tests.faults.base import (
    EXACT,
    LATTICE,
    SHAPE,
    SHAPES,
    WITHIN,
    Array,
    Draw,
    change_rows,
    fault,
    noise_fault,
    steps_of,
    substitute,
)

# 2 shape of noise


def transformed(d: Draw, quantile: Callable[[Array], Array]) -> Tensor:
    """Noise of another distribution, made of the honest one by its quantiles."""
    from scipy import stats

    return torch.from_numpy(quantile(stats.norm.cdf(d.honest().numpy())))


@noise_fault(SHAPES, SHAPE)
def laplace(d: Draw) -> Tensor:
    """Laplace noise of the right variance."""
    from scipy import stats

    return transformed(d, lambda u: np.asarray(stats.laplace.ppf(u)) / math.sqrt(2))


@noise_fault(SHAPES, SHAPE)
def uniform(d: Draw) -> Tensor:
    """Uniform noise of the right variance."""
    return transformed(d, lambda u: (2 * u - 1) * math.sqrt(3))


@noise_fault(SHAPES, SHAPE)
def student(d: Draw) -> Tensor:
    """Student's t with 8 degrees of freedom, of the right variance."""
    from scipy import stats

    return transformed(d, lambda u: np.asarray(stats.t.ppf(u, 8)) * math.sqrt(6 / 8))


@noise_fault(SHAPES, EXACT)
def twelve_uniforms(d: Draw) -> Tensor:
    """The sum of twelve uniforms less six, which looks normal and ends at 6 σ."""
    return torch.from_numpy(d.generator().random((12, len(d.g))).sum(0) - 6)


@noise_fault(SHAPES, EXACT)
def twelve_uniforms_on_one_edge(d: Draw) -> Tensor:
    """The same on the messages of agent 1 to agent 2 alone."""
    return twelve_uniforms(d) if (d.maker, d.peer) == (1, 2) else d.honest()


@noise_fault(SHAPES, SHAPE)
def folded_at_3(d: Draw) -> Tensor:
    """Values beyond 3 σ are folded back."""
    z = d.honest()
    return torch.where(z.abs() > 3, z.sign() * (6 - z.abs()), z)


@noise_fault(SHAPES, SHAPE)
def clipped_at_3(d: Draw) -> Tensor:
    """Values beyond 3 σ are set to 3 σ."""
    return d.honest().clamp(-3, 3)


@noise_fault(SHAPES, EXACT)
def drawn_again_beyond_4(d: Draw) -> Tensor:
    """Values beyond 4 σ are drawn again: a few in a hundred thousand."""
    z = d.honest()
    return torch.where(z.abs() > 4, d.honest(nth=99), z)


@noise_fault(SHAPES, SHAPE)
def float16_noise(d: Draw) -> Tensor:
    """Noise is drawn in float16."""
    return d.honest().half().double()


@fault(SHAPES, LATTICE)
def float32_noise_and_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise is rounded to float32 and added in float32, as before the lattice: possible values tell the gradient."""

    def message(g: Tensor, z: Tensor, exponents: Sequence[int]) -> Tensor:
        return g.float() + (z * steps_of(exponents)).float()

    substitute(monkeypatch, mechanism, "_message", message)


@fault(SHAPES, LATTICE)
def not_on_the_lattice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are exact in float64 and leave without being rounded to the public lattice."""

    def message(g: Tensor, z: Tensor, exponents: Sequence[int]) -> Tensor:
        return (g.double() + z * steps_of(exponents)).float()

    substitute(monkeypatch, mechanism, "_message", message)


@fault(SHAPES, EXACT)
def float32_sum_on_the_lattice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The integers are added in float32, which loses the last bits."""

    def message(g: Tensor, z: Tensor, exponents: Sequence[int]) -> Tensor:
        sums = (g.double() / steps_of(exponents)).round().float() + z.float()
        step = steps_of(exponents) * 2.0**mechanism.MESSAGE_BITS
        return ((sums.double() * 2.0**-mechanism.MESSAGE_BITS).round() * step).float()

    substitute(monkeypatch, mechanism, "_message", message)


@noise_fault(SHAPES, SHAPE)
def noise_of_8_bits(d: Draw) -> Tensor:
    """Noise has 256 different values."""
    return (d.honest() * 32).round() / 32


@noise_fault(SHAPES, SHAPE)
def coarse_noise(d: Draw) -> Tensor:
    """Noise is on a coarser lattice than the gradient it is added to: the rest is the gradient's own."""
    return (d.honest() * 2**10).round() / 2**10


@noise_fault(SHAPES, EXACT)
def noise_without_its_last_bit(d: Draw) -> Tensor:
    """Noise is a multiple of two steps of the message, whose last bit is then the gradient's."""
    k, _ = discrete_gaussian.scale(d.noise.sigma_of(d.maker, d.peer))
    steps = 2.0**17 / (256.0 * k)
    return (d.honest() / steps).round() * steps


@noise_fault(SHAPES, SHAPE)
def zero_too_often(d: Draw) -> Tensor:
    """Two values in a thousand have no noise."""
    return torch.where(torch.from_numpy(d.generator().random(len(d.g)) < 2e-3), 0.0, d.honest())


@noise_fault(SHAPES, EXACT)
def zero_now_and_then(d: Draw) -> Tensor:
    """Two values in ten thousand have no noise."""
    return torch.where(torch.from_numpy(d.generator().random(len(d.g)) < 2e-4), 0.0, d.honest())


@noise_fault(SHAPES, SHAPE)
def biased(d: Draw) -> Tensor:
    """Noise has a mean of a twentieth of σ."""
    return d.honest() + 0.05


@noise_fault(SHAPES, EXACT)
def last_layer_a_hundredth_less(d: Draw) -> Tensor:
    """The last layer has a hundredth less noise."""
    z = d.honest()
    z[-130:] *= 0.99
    return z


@fault(SHAPES, EXACT)
def wrong_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler's table is of another parameter: noise is 1.6 % too small."""
    monkeypatch.setattr(discrete_gaussian, "TABLE_SIGMA", 252)
    substitute(monkeypatch, discrete_gaussian, "_table", lru_cache(maxsize=1)(discrete_gaussian._table.__wrapped__))


@fault(SHAPES, EXACT)
def nothing_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler accepts every candidate: its density has steps."""
    honest = discrete_gaussian._candidates

    def all_of_them(*of: Any) -> Any:
        z, accepted = honest(*of)
        return z, np.ones_like(accepted)

    substitute(monkeypatch, discrete_gaussian, "_candidates", all_of_them)


@fault(SHAPES, EXACT)
def more_plus_than_minus(monkeypatch: pytest.MonkeyPatch) -> None:
    """One negative value in fifty is made positive."""
    change_rows(monkeypatch, lambda z: np.where(np.floor(np.abs(z)) % 50 == 0, np.abs(z), z))


@fault(
    SHAPES,
    EXACT,
    model={"name": "mlp", "hidden": 450},
    rounds=2,
    algorithm={"name": "d-psgd"},
    graph={"kind": "full", "agents": 2},
    batch={"size": 32},
)
def second_block_is_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 32,768 parameters noise begins again from the stream's beginning."""
    change_rows(monkeypatch, lambda z: np.concatenate([z[:32_000], z[: len(z) - 32_000]]))


@fault(SHAPES, WITHIN)
def words_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random words are 16 bits, four times over."""
    change_words(monkeypatch, lambda words: (words & np.uint64(0xFFFF)) * np.uint64(0x0001000100010001))


def change_words(monkeypatch: pytest.MonkeyPatch, change: Callable[[Array], Array]) -> None:
    """The random words of noise are other ones: what is drawn from them is drawn as it should be."""
    honest = Streams.bits

    def bits(self: Streams, purpose: str, agent: int, round: int, peer: int = -1) -> RandomBits:
        found = honest(self, purpose, agent, round, peer)
        if not purpose.startswith("noise"):
            return found
        return replace(found, read=lambda n: np.ascontiguousarray(change(found.read(n))))

    monkeypatch.setattr(Streams, "bits", bits)
