"""Every kind of partition gives each record to exactly one agent, in the proportions it promises."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdsl.data import label_counts, partition
from pdsl.settings import PartitionSettings
from pdsl.utils.random import Streams
from tests.helpers.refusals import refused

KINDS = ["dirichlet", "iid", "shards", "quantity"]


def dealt(
    y: torch.Tensor, agents: int, kind: str, seed: int = 0, owner: torch.Tensor | None = None, **options: object
) -> list[torch.Tensor]:
    return partition(y, agents, PartitionSettings.model_validate({"kind": kind, **options}), Streams(seed), owner)


def labels(classes: int, each: int) -> torch.Tensor:
    return torch.arange(classes).repeat_interleave(each)


@settings(deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    agents=st.integers(2, 60),
    log_mu=st.floats(-2, 2),
    counts=st.lists(st.integers(0, 80), min_size=1, max_size=12),
    minimum=st.integers(1, 30),
    seed=st.integers(0, 1000),
)
def test_every_record_has_exactly_one_agent(
    kind: str, agents: int, log_mu: float, counts: list[int], minimum: int, seed: int
) -> None:
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    y = torch.cat([y, torch.zeros(max(0, agents - len(y)), dtype=torch.int64)])
    parts = dealt(y, agents, kind, seed, mu=10**log_mu, minimum=minimum, classes=6)
    assert len(parts) == agents
    assert torch.cat(parts).sort().values.tolist() == list(range(len(y)))
    least = min(minimum, len(y) // agents) if kind in ("dirichlet", "quantity") else 1
    assert min(map(len, parts)) >= least
    assert all((part.diff() > 0).all() and part.dtype == torch.int64 for part in parts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_partition_is_a_function_of_the_seed(kind: str) -> None:
    y = labels(10, 50)
    one, same, other = (dealt(y, 7, kind, seed) for seed in (1, 1, 2))
    assert all(map(torch.equal, one, same))
    assert not all(map(torch.equal, one, other))


@pytest.mark.parametrize("mu", [0.1, 0.5, 5.0])
def test_dirichlet_shares_have_the_moments_of_dir_mu(mu: float) -> None:
    agents, classes, each = 5, 1000, 200
    counts = label_counts(dealt(y := labels(classes, each), agents, "dirichlet", mu=mu, minimum=1), y, classes)
    shares = counts.double().numpy() / each  # [M, classes]: each column a draw of Dir(μ·1)
    mean, variance = 1 / agents, (1 / agents) * (1 - 1 / agents) / (agents * mu + 1)
    assert np.abs(shares.mean(axis=1) - mean).max() < 5 * np.sqrt(variance / classes)
    assert shares.var() == pytest.approx(variance, rel=0.1)


def test_smaller_mu_is_more_heterogeneous() -> None:
    y = labels(10, 500)

    def distance_from_iid(mu: float) -> float:
        counts = torch.stack([label_counts(dealt(y, 10, "dirichlet", s, mu=mu), y, 10) for s in range(10)]).double()
        return float((counts / counts.sum(dim=-1, keepdim=True) - 0.1).abs().mean())

    distances = [distance_from_iid(mu) for mu in (0.05, 0.5, 5.0, 500.0)]
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > 5 * distances[-1]


@pytest.mark.parametrize("agents", [10, 30, 100])
@pytest.mark.parametrize("kind", ["dirichlet", "quantity"])
def test_the_smallest_mu_ends_and_keeps_the_minimum(kind: str, agents: int) -> None:
    start = time.monotonic()
    parts = dealt(labels(10, 1000), agents, kind, mu=0.01, minimum=10)
    assert time.monotonic() - start < 5
    assert min(map(len, parts)) >= 10
    assert len(set(torch.cat(parts).tolist())) == 10_000


def test_a_minimum_beyond_reach_gives_equal_parts() -> None:
    assert {len(part) for part in dealt(labels(10, 10), 10, "dirichlet", mu=0.01, minimum=50)} == {10}


def test_iid_parts_are_equal_to_one_record_and_mixed() -> None:
    y = labels(2, 5000)
    parts = dealt(y, 7, "iid")
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for part in parts:
        assert float(y[part].double().mean()) == pytest.approx(0.5, abs=5 * 0.5 / np.sqrt(len(part)))


def test_quantity_has_unequal_sizes_and_equal_labels() -> None:
    y = labels(2, 5000)
    parts = dealt(y, 10, "quantity", mu=0.25)
    assert max(map(len, parts)) > 3 * len(y) / 10
    for part in parts:
        assert float(y[part].double().mean()) == pytest.approx(0.5, abs=5 * 0.5 / np.sqrt(len(part)))


@settings(deadline=None)
@given(agents=st.integers(2, 60), classes=st.integers(1, 10), seed=st.integers(0, 100))
def test_shards_hold_few_classes_and_cover_all(agents: int, classes: int, seed: int) -> None:
    y = torch.repeat_interleave(torch.arange(10), torch.tensor([3, 50, 60, 70, 20, 90, 11, 12, 13, 200]))
    if agents * classes < 10:
        with refused("partition.classes", f"{agents} agents"):
            dealt(y, agents, "shards", seed, classes=classes)
        return
    counts = label_counts(dealt(y, agents, "shards", seed, classes=classes), y, 10)
    assert int((counts > 0).sum(dim=1).max()) <= classes
    assert torch.equal(counts.sum(dim=0), torch.bincount(y))


def test_the_classes_shards_tries_are_enough() -> None:
    y = labels(10, 20)
    with refused("partition.classes=4"):
        dealt(y, 3, "shards", classes=3)
    dealt(y, 3, "shards", classes=4)


@pytest.mark.parametrize("kind", ["natural", *KINDS])
def test_records_stay_with_their_owners(kind: str) -> None:
    owner = torch.tensor([1, 0, 1, 2])
    parts = dealt(torch.zeros(4, dtype=torch.int64), 3, kind, owner=owner)
    assert [part.tolist() for part in parts] == [[1], [0, 2], [3]]


def test_natural_needs_owners_and_as_many_as_agents() -> None:
    y = torch.zeros(4, dtype=torch.int64)
    with refused("partition.kind", "natural"):
        dealt(y, 2, "natural")
    with refused("graph.agents: 2", "3 agents", "graph.agents=3"):
        dealt(y, 2, "natural", owner=torch.tensor([0, 1, 2, 2]))
    with refused("graph.agents: 3"):
        dealt(y, 3, "natural", owner=torch.tensor([0, 1, 3, 3]))


@pytest.mark.parametrize("kind", KINDS)
def test_more_agents_than_records_are_refused(kind: str) -> None:
    with refused("graph.agents", "5 agents", "4 records"):
        dealt(labels(2, 2), 5, kind)


def test_label_counts_counts_labels() -> None:
    parts = [torch.tensor([0, 3]), torch.tensor([1, 2])]
    assert label_counts(parts, torch.tensor([0, 2, 2, 0]), 4).tolist() == [[2, 0, 0, 0], [0, 0, 2, 0]]
