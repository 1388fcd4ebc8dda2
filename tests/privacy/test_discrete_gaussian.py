"""The noise sampler against its definition: every value, its distribution, its edges, and its independence of data."""

import decimal
import math

import numpy as np
import pytest
import torch
from scipy import stats

from pdsl.auditing import reference
from pdsl.privacy import Noise
from pdsl.privacy import discrete_gaussian as dg
from pdsl.privacy.noise import message_step
from pdsl.utils.random import RandomBits, SecretStreams, Streams
from pdsl.utils.workers import Workers

K = 20_000_001


@pytest.mark.parametrize("sigma", [1.0, 0.7, 3.3, 1e-5, 1.9999999, 123.4, 2.0**-20, 1e-30, 1e20])
def test_the_lattice_has_at_least_the_sigma_that_is_asked_for(sigma: float) -> None:
    k, e = dg.scale(sigma)
    assert 2**24 <= k <= 2**25
    assert 0 <= 256 * k * 2.0**e / sigma - 1 < 2.0**-23
    assert 2**32 <= sigma / 2.0**e < 2**33


@pytest.mark.parametrize("streams", [Streams(5), SecretStreams(5, bytes(range(32)), b"here")], ids=["seeded", "secret"])
@pytest.mark.parametrize("n", [1, 2, 31, 650, 40_000])
def test_every_value_is_that_of_the_definition(streams: Streams, n: int) -> None:
    sigma = 0.37
    k, e = dg.scale(sigma)
    found = dg.sample(n, k, streams.bits("noise.1.2", 3, 4, 5))
    right, exponent = reference.lattice_noise(n, sigma, streams, "noise.1.2", 3, 4, 5)
    assert exponent == e
    assert np.array_equal(found, right)


def test_rows_drawn_together_are_those_drawn_alone() -> None:
    scales, places = [2**24, K, 2**25], [("noise", 0, 1, 2), ("noise", 3, 1, 2), ("noise.1.0", 0, 5, 2)]
    together = dg.sample_rows(700, scales, [Streams(4).bits(*place) for place in places])
    for row, k, place in zip(together, scales, places, strict=True):
        assert np.array_equal(row, dg.sample(700, k, Streams(4).bits(*place)))


def test_values_do_not_depend_on_how_many_were_drawn_before() -> None:
    bits = [Streams(0).bits("noise", 1, 1, 1) for _ in range(2)]
    assert np.array_equal(dg.sample(500, K, bits[0]), dg.sample(500, K, bits[1]))


def test_the_distribution_is_a_discrete_gaussian() -> None:
    z = dg.sample(2_000_000, K, Streams(1).bits("noise", 0, 1, 2)) / (256 * K)
    assert stats.kstest(z, "norm").pvalue > 1e-3
    assert abs(z.mean()) * math.sqrt(len(z)) < 4
    assert abs(z.var() - 1) * math.sqrt(len(z) / 2) < 4
    for limit in (1.0, 2.0, 3.0, 4.0):
        assert stats.binomtest(int((abs(z) > limit).sum()), len(z), 2 * stats.norm.sf(limit)).pvalue > 1e-4


def test_the_table_has_the_masses_of_exact_exponentials() -> None:
    table = dg._table()
    cell = 2**dg.CELL_BITS
    mass = [0] * 4096
    for own, (threshold, alias) in enumerate(zip(table.thresholds, table.alias.tolist(), strict=True)):
        mass[own] += threshold
        mass[alias] += cell - threshold
    assert sum(mass) == 4096 * cell
    with decimal.localcontext() as context:
        context.prec = 120
        weights = [(decimal.Decimal(-h * h) / 131072).exp() for h in range(4096)]
        total = sum(weights)
        for h in (0, 1, 255, 256, 1000, 2560, 4095):
            relative = decimal.Decimal(mass[h]) / decimal.Decimal(4096 * cell) / (weights[h] / total) - 1
            assert abs(relative) < decimal.Decimal(2) ** -60


class Crafted:
    """A stream of given words."""

    def __init__(self, words: list[tuple[int, int, int]]):
        first, second, third = zip(*words, strict=True)
        halves = np.array([*first, *second, *third], dtype="<u4")
        self.words = halves.view("<u8")

    def bits(self) -> RandomBits:
        return RandomBits(lambda n: self.words, bytes(32))


def candidates(words: list[tuple[int, int, int]]) -> tuple[list[float], list[bool]]:
    block = Crafted(words).words.view("<u4").reshape(3, 1, -1)
    z, accepted = dg._candidates(block, np.array([K], dtype=np.uint64), [Crafted(words).bits()], 0)
    return z[0].tolist(), accepted[0].tolist()


def test_ties_with_a_threshold_are_decided_by_further_bits() -> None:
    table = dg._table()
    tied = next(c for c in range(4096) if 0 < table.first[c] < 2**20)
    word = tied << 20 | int(table.first[tied])
    z, accepted = candidates([(word, 2**31, 0)] * 2)
    right = reference._value(word, 2**31, 0, K, RandomBits(lambda n: np.zeros(n, np.uint64), bytes(32)).extension(0))
    assert (z[0] if accepted[0] else None) == right


def test_the_largest_uniform_number_is_rejected_and_nothing_is_infinite() -> None:
    """Finding D12: the largest random word gives no infinity."""
    z, accepted = candidates([(2**32 - 1, 2**32 - 1, 2**31 - 1), (2**32 - 1, 2**32 - 1, 0)])
    assert all(math.isfinite(value) for value in z)
    assert not accepted[0]


def test_minus_zero_is_rejected() -> None:
    table = dg._table()
    cell = int(np.flatnonzero(table.first > 0)[0])
    if cell != 0 and table.alias[cell] != 0:
        pytest.skip("the first cell is not the one of zero")
    low = next(w for w in range(1, 400) if w * K >> 32 == 0 and (w * K) % 2**32 >= 2**32 % K)
    z, accepted = candidates([(0, low, 0), (0, low, 2**31)])
    assert z == [0, 0]
    assert accepted == [True, False]


@pytest.mark.parametrize("streams", [Streams(3), SecretStreams(3)], ids=["seeded", "secret"])
def test_messages_are_multiples_of_a_public_power_of_two_whatever_the_gradient(streams: Streams) -> None:
    ends, sigma = torch.tensor([0, 0, 0, 0]), 0.0123
    g = torch.zeros(4, 500, dtype=torch.float64)
    g[1], g[2], g[3] = 1 / 3, 1e-300, torch.linspace(-1, 1, 500)
    with Workers(1) as workers:
        noisy = Noise([sigma], streams, workers).add(1, ends, ends, g)
    steps = noisy.double() / message_step(sigma)
    assert torch.equal(steps, steps.round())
    assert math.frexp(message_step(sigma))[0] == 0.5
    assert torch.equal(noisy[0], noisy[2])  # the same draw for the same maker and peer; 1e-300 rounds to zero
    assert noisy.dtype == torch.float32


def test_noise_on_a_gradient_is_the_gradient_plus_the_noise_on_zero() -> None:
    """Up to the step of the message: the arithmetic does not depend on the data."""
    ends, sigma = torch.tensor([0]), 0.5
    g = torch.randn(1, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with Workers(1) as workers:
        noise = Noise([sigma], SecretStreams(0), workers)
        zero, noisy = noise.add(1, ends, ends, torch.zeros_like(g)), noise.add(1, ends, ends, g)
    assert (noisy.double() - zero.double() - g).abs().max() <= 1.01 * message_step(sigma)
