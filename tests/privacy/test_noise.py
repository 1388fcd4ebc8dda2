"""Noise against its claimed distribution, Δ and σ against their definitions, Theorem 1 against its formula."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from pdsl import topology
from pdsl.data import Batches
from pdsl.gradients.clipping import clip_batch, clip_per_sample
from pdsl.gradients.per_example import LAYERS
from pdsl.models.network import Network
from pdsl.privacy import Noise, Release, mechanisms, sensitivity, theorem1_sigma
from pdsl.settings import BatchSettings, PrivacySettings
from pdsl.topology import Graph
from pdsl.utils.random import Streams
from pdsl.utils.workers import Workers
from tests.helpers.refusals import refused

D = 3000
AGENTS, ROUNDS = 4, 3
KEYS = list(itertools.product(range(AGENTS), range(AGENTS), range(1, ROUNDS + 1)))  # maker, peer, round


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers(2) as pool:
        yield pool


def drawn(noise: Noise, keys: list[tuple[int, int, int]], d: int = D) -> Tensor:  # [keys, d]
    """Noise added to zeros."""
    rows = [noise.add(t, torch.tensor([i]), torch.tensor([j]), torch.zeros(1, d)) for i, j, t in keys]
    return torch.cat(rows)


# Noise


def test_noise_has_the_standard_deviation_of_its_maker(workers: Workers) -> None:
    """Σ n²/σ² has a χ² distribution and n/σ a normal one; each is tested per maker at one in 10,000."""
    sigma = [0.01, 1.0, 7.5, 4213.0]
    noise = Noise(sigma, Streams(3), workers)
    for maker in range(AGENTS):
        n = drawn(noise, [key for key in KEYS if key[0] == maker]).double().numpy().ravel() / sigma[maker]
        assert 1e-4 < stats.chi2.cdf((n**2).sum(), df=n.size) < 1 - 1e-4
        assert stats.kstest(n, "norm").pvalue > 1e-4


def test_noise_is_independent_between_makers_peers_and_rounds(workers: Workers) -> None:
    """Also when one vector is shifted against another, as it would be if streams overlapped."""
    n = drawn(Noise([1.0] * AGENTS, Streams(3), workers), KEYS).double().numpy()
    spectra = np.fft.rfft(n, n=2 * D)
    for a, b in itertools.combinations(range(len(KEYS)), 2):
        correlation = np.fft.irfft(spectra[a] * spectra[b].conj()) / D
        assert np.abs(correlation).max() < 7 / math.sqrt(D), (KEYS[a], KEYS[b])  # 7 σ, in 7 million comparisons


def test_no_two_messages_share_a_draw(workers: Workers) -> None:
    n = drawn(Noise([1.0] * AGENTS, Streams(3), workers), KEYS)
    assert len({row.numpy().tobytes() for row in n}) == len(KEYS)
    starts = {tuple(row[:3].tolist()) for row in n}
    assert len(starts) == len(KEYS)


def test_noise_is_a_pure_function_of_its_key(workers: Workers) -> None:
    """Not of other draws, their order, the workers, or the message."""
    noise = Noise([1.0] * AGENTS, Streams(3), workers)
    all_of_it = drawn(noise, KEYS, d=50)
    assert torch.equal(drawn(noise, KEYS[::-1], d=50).flip(0), all_of_it)
    assert torch.equal(drawn(noise, KEYS[5:6], d=50)[0], all_of_it[5])
    in_one_call = [e for e, key in enumerate(KEYS) if key[2] == 2]
    makers, peers, _ = torch.tensor([KEYS[e] for e in in_one_call]).T
    g = torch.arange(len(in_one_call) * 50.0).reshape(-1, 50)
    for count in (1, 3):
        with Workers(count) as some:
            found = Noise([1.0] * AGENTS, Streams(3), some).add(2, makers, peers, g)
        assert torch.equal(found, g + all_of_it[in_one_call])
    assert not torch.equal(drawn(Noise([1.0] * AGENTS, Streams(4), workers), KEYS[5:6], d=50)[0], all_of_it[5])


def test_without_noise_messages_are_untouched(workers: Workers) -> None:
    g = torch.tensor([[1e-30, -0.0, 3.0, 1e30]]).repeat(3, 1)
    agents = torch.arange(3)
    assert Noise([0.0] * 3, Streams(3), workers).add(1, agents, agents, g) is g
    mixed = Noise([0.0, 0.0, 2.0], Streams(3), workers).add(1, agents, agents, g)
    assert torch.equal(mixed[:2], g[:2])
    assert not torch.equal(mixed[2], g[2])


# Sensitivity


def batches(sampler: str, size: int = 10, sizes: tuple[int, ...] = (6, 40, 80)) -> Batches:
    return Batches(
        sizes, BatchSettings.model_validate({"sampler": sampler, "size": size}), Streams(0), sum(sizes) / len(sizes)
    )


def noisy(**more: object) -> PrivacySettings:
    return PrivacySettings.model_validate({"mode": "noise", "noise_multiplier": 1.0, "max_grad_norm": 3.0, **more})


@pytest.mark.parametrize(("clipping", "sampler", "expected"), [
    ("per-sample", "poisson", [3 / 10, 3 / 10, 3 / 10]),  # C / B
    ("per-sample", "fixed", [6 / 6, 6 / 10, 6 / 10]),  # 2C / min(B, n)
    ("batch", "poisson", [6.0, 6.0, 6.0]),  # 2C
    ("batch", "fixed", [6.0, 6.0, 6.0]),
])  # fmt: skip
def test_sensitivity_is_the_tables(clipping: str, sampler: str, expected: list[float]) -> None:
    found = [sensitivity(noisy(clipping=clipping), batches(sampler), agent) for agent in range(3)]
    assert found == pytest.approx(expected)


def test_with_batches_as_large_as_the_data_the_divisor_is_the_average_part() -> None:
    assert sensitivity(noisy(), batches("poisson", size=500), 0) == pytest.approx(3 / 42)


@pytest.mark.parametrize(
    ("clipping", "sampler"), list(itertools.product(["per-sample", "batch"], ["poisson", "fixed"]))
)
def test_one_record_can_move_a_message_that_far_and_no_further(clipping: str, sampler: str) -> None:
    """At a model of zeros two classes are equally likely, and the other label negates a record's gradient."""
    network, x, C = Network(torch.nn.Linear(2, 2, bias=False)), torch.zeros(4), 3.0
    one = clipping == "batch"  # only a batch of one record is negated by it
    drawn = batches(sampler, sizes=(1,) if one else (40,))
    inputs, labels = torch.tensor([[1e4, 0.0]]).repeat(1 if one else 10, 1), torch.zeros(1 if one else 10).long()

    def message(inputs: Tensor, labels: Tensor) -> Tensor:
        if clipping == "batch":
            return clip_batch(network, x, inputs, labels, C, drawn.divisor(0)).double()
        way = LAYERS
        return clip_per_sample(network, x, inputs, labels, C, drawn.divisor(0), way).double()

    turned = labels.clone()
    turned[0] = 1
    replaced = (message(inputs, labels) - message(inputs, turned)).norm().item()
    removed = (message(inputs, labels) - message(inputs[1:], labels[1:])).norm().item()
    moved = replaced if sampler == "fixed" or clipping == "batch" else removed
    assert moved == pytest.approx(sensitivity(noisy(clipping=clipping), drawn, 0), rel=1e-6)


# σ


def sigmas(settings: PrivacySettings, graph: Graph, drawn: Batches, messages: list[int], floor: float) -> list[float]:
    found = mechanisms(settings, graph, drawn, [Release(k) for k in messages], rounds=1, floor=floor, d=100)
    return [0.0] * graph.agents if found is None else [m.sigma for m in found]


def test_sigmas_by_multiplier_grow_with_the_root_of_what_is_released() -> None:
    """On a star the hub computes M vectors on its batch and the others 2: z·√k·Δ."""
    M, z = 6, 0.7
    graph, drawn, settings = topology.star(M), batches("poisson", sizes=(40,) * M), noisy(noise_multiplier=z)
    found = sigmas(settings, graph, drawn, [int(k) for k in graph.degrees], 0.5)
    delta = 3.0 / 10
    assert found == pytest.approx([z * math.sqrt(M) * delta] + [z * math.sqrt(2) * delta] * (M - 1))


def test_sigmas_take_each_agents_own_sensitivity() -> None:
    graph, drawn = topology.ring(3), batches("fixed")
    found = sigmas(noisy(noise_multiplier=2.0), graph, drawn, [1, 1, 1], 0.5)
    assert found == pytest.approx([2 * 6 / 6, 2 * 6 / 10, 2 * 6 / 10])


def test_sigmas_given_or_without_noise() -> None:
    graph, drawn = topology.ring(3), batches("fixed")
    given = noisy(noise_multiplier=None, sigma=0.25)
    assert sigmas(given, graph, drawn, [3, 3, 3], 0.5) == [0.25] * 3
    assert sigmas(PrivacySettings(mode="none"), graph, drawn, [3, 3, 3], 0.5) == [0.0] * 3


# Theorem 1


def literally(graph: Graph, epsilon: float, delta: float, C: float, phi_min: float) -> float:
    """Theorem 1, computed per agent."""
    W, M = graph.W, graph.agents
    omega_min = min(W[i, j] for i in range(M) for j in range(M) if W[i, j] > 0)
    bounds = []
    for i in range(M):
        omega = [W[i, j] for j in range(M) if W[i, j] > 0]
        above = 2 * C * (1 / omega_min + sum(1 / w for w in omega)) * math.sqrt(2 * math.log(1.25 / delta))
        bounds.append(above / (phi_min * epsilon * math.sqrt(sum(w**-2 for w in omega))))
    return max(bounds)


def test_theorem_1_asks_for_what_the_findings_say() -> None:
    """By hand, on a full graph: 2 (10 + 100) √(2 ln 125000) / (1/10 · 0.08 · √1000); on a ring 2 (3 + 9) … √27."""
    root = math.sqrt(2 * math.log(125_000))
    full = theorem1_sigma(topology.full(10), 0.08, 1e-5, 1.0, 1 / 10)
    ring = theorem1_sigma(topology.ring(10), 0.08, 1e-5, 1.0, 1 / 3)
    assert full == pytest.approx(220 * root / (0.008 * math.sqrt(1000)))
    assert ring == pytest.approx(24 * root / (0.08 / 3 * math.sqrt(27)))
    assert full == pytest.approx(4213, rel=0.005)
    assert ring == pytest.approx(839, rel=0.005)


@pytest.mark.parametrize("graph", [
    topology.full(3), topology.ring(7), topology.bipartite(10), topology.star(6), topology.line(5), topology.grid(6),
], ids=lambda g: g.name)  # fmt: skip
def test_theorem_1_is_its_formula(graph: Graph) -> None:
    found = theorem1_sigma(graph, 0.3, 1e-4, 2.0, 0.05)
    assert found == pytest.approx(literally(graph, 0.3, 1e-4, 2.0, 0.05))


def test_theorem_1_without_a_least_share_is_refused() -> None:
    for phi_min in (0.0, -0.1, 1.5):
        with refused("Theorem 1", "algorithm.shapley.floor", "privacy.share_floor", "privacy.phi_min"):
            theorem1_sigma(topology.ring(5), 0.08, 1e-5, 1.0, phi_min)


def test_sigmas_by_theorem_1_take_the_floors_share_unless_told() -> None:
    graph, drawn = topology.star(5), batches("poisson", sizes=(40,) * 5)
    settings = noisy(noise_multiplier=None, epsilon_per_round=0.2)
    floor = sigmas(settings, graph, drawn, [5, 2, 2, 2, 2], 0.4)
    assert floor == pytest.approx([literally(graph, 0.2, 1e-5, 3.0, 0.4 / 5)] * 5)
    told = sigmas(settings.model_copy(update={"phi_min": 0.3}), graph, drawn, [5, 2, 2, 2, 2], 0.0)
    assert told == pytest.approx([literally(graph, 0.2, 1e-5, 3.0, 0.3)] * 5)
    with refused("Theorem 1", "algorithm.shapley.floor"):
        sigmas(settings, graph, drawn, [5, 2, 2, 2, 2], 0.0)
