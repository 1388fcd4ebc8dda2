"""Batches have the distribution their sampler promises, and depend on (seed, agent, round) alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdsl.data import Batches
from pdsl.settings import BatchSettings
from pdsl.utils.random import Streams

ROUNDS = 2000
SIZES = [100, 300, 200]  # mean 200


def batches(sampler: str, size: int, sizes: list[int] | None = None, seed: int = 0) -> Batches:
    return Batches(
        sizes or SIZES,
        BatchSettings.model_validate({"sampler": sampler, "size": size}),
        Streams(seed),
        sum(sizes or SIZES) / len(sizes or SIZES),
    )


def included(drawn: Batches, agent: int) -> np.ndarray:  # [rounds, n_i] 0 or 1
    indicators = np.zeros((ROUNDS, drawn.sizes[agent]))
    for t in range(ROUNDS):
        indicators[t, drawn.draw(agent, t).numpy()] = 1
    return indicators


@pytest.mark.parametrize("agent", range(3))
def test_poisson_sizes_have_mean_and_variance_of_a_binomial(agent: int) -> None:
    q, n = 20 / 200, SIZES[agent]
    sizes = included(batches("poisson", 20), agent).sum(axis=1)
    variance = n * q * (1 - q)
    assert sizes.mean() == pytest.approx(n * q, abs=5 * np.sqrt(variance / ROUNDS))
    assert sizes.var() == pytest.approx(variance, abs=5 * variance * np.sqrt(2 / ROUNDS))


def test_poisson_takes_every_record_at_the_same_rate_and_rounds_independently() -> None:
    q = 0.1
    indicators = included(batches("poisson", 20), 1)
    assert np.abs(indicators.mean(axis=0) - q).max() < 5 * np.sqrt(q * (1 - q) / ROUNDS)
    both = indicators[1:] * indicators[:-1]  # expected q² if a round says nothing about the next
    assert both.mean() == pytest.approx(q**2, abs=5 * np.sqrt(q**2 / both.size))


def test_agents_draw_independently() -> None:
    drawn = batches("poisson", 20, [200, 200])
    a, b = (included(drawn, agent).sum(axis=1) for agent in range(2))
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(ROUNDS)


@pytest.mark.parametrize("agent", range(3))
def test_fixed_takes_distinct_records_uniformly(agent: int) -> None:
    n = SIZES[agent]
    indicators = included(batches("fixed", 20), agent)
    assert (indicators.sum(axis=1) == 20).all()
    q = 20 / n
    assert np.abs(indicators.mean(axis=0) - q).max() < 5 * np.sqrt(q * (1 - q) / ROUNDS)


@settings(deadline=None)
@given(
    sampler=st.sampled_from(["poisson", "fixed"]),
    size=st.integers(1, 50),
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    round=st.integers(0, 10**9),
)
def test_a_batch_is_ascending_and_within_the_agents_part(sampler: str, size: int, sizes: list[int], round: int) -> None:
    drawn = batches(sampler, size, sizes)
    for agent, n in enumerate(sizes):
        batch = drawn.draw(agent, round)
        assert batch.dtype == torch.int64
        assert (batch.diff() > 0).all()
        assert ((batch >= 0) & (batch < n)).all()
        if sampler == "fixed":
            assert len(batch) == drawn.divisor(agent) == min(size, n)


@pytest.mark.parametrize("sampler", ["poisson", "fixed"])
def test_a_batch_is_a_pure_function_of_seed_agent_and_round(sampler: str) -> None:
    one, other = batches(sampler, 20), batches(sampler, 20)
    other.draw(0, 3)  # leaves no trace
    assert torch.equal(one.draw(1, 7), other.draw(1, 7))
    equal = [one.draw(2, 7).tolist() == batches(sampler, 20, seed=seed).draw(2, 7).tolist() for seed in (0, 1)]
    assert equal == [True, False]


def test_poisson_divisor_is_the_batch_expected_of_an_average_agent() -> None:
    drawn = batches("poisson", 20)
    assert drawn.rate == pytest.approx(0.1)
    assert {drawn.divisor(agent) for agent in range(3)} == {20.0}


def test_a_batch_larger_than_the_average_part_is_the_whole_part() -> None:
    drawn = batches("poisson", 500)
    assert drawn.rate == 1
    assert drawn.divisor(0) == 200
    assert drawn.draw(1, 0).tolist() == list(range(300))


def test_fixed_has_no_common_rate() -> None:
    assert batches("fixed", 20).rate is None
