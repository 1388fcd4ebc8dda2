"""Black-box tests of the noise on a message, from samples at two neighbouring inputs only."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdsl.privacy import Noise
from pdsl.utils.random import SecretStreams, Streams
from pdsl.utils.workers import Workers
from tests.oracles.testers import Verdict, gaussian_delta, gaussian_renyi, hockey_stick, renyi

pytestmark = pytest.mark.slow

D = 4
SIGMA = 0.7  # claimed
SENSITIVITY = 0.7
EPSILON = 0.5
SAMPLES = 10_000
SEED = 5

Floats = NDArray[np.float64]
Mechanism = Callable[[int, Tensor], Tensor]  # (round, [samples, d]) → [samples, d]
ALONG = torch.ones(D) / D**0.5  # direction in which the record moves the message
FIRST = torch.eye(D)[0]


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(1) as workers:
        yield workers


def private(sigma: float, streams: Streams, workers: Workers) -> Mechanism:
    """`Noise.add` unchanged: row e is the message of agent 0 to peer e."""

    def mechanism(t: int, g: Tensor) -> Tensor:
        rows = torch.arange(len(g))
        return Noise([sigma], streams, workers).add(t, torch.zeros_like(rows), rows, g)

    return mechanism


def verdicts(mechanism: Mechanism, direction: Tensor = ALONG, samples: int = SAMPLES) -> dict[str, Verdict]:
    """Results of the testers at inputs at distance SENSITIVITY; rounds 1 and 2 draw independently."""
    g = torch.linspace(-1, 1, D).expand(samples, D)
    one = mechanism(1, g).double().numpy()
    other = mechanism(2, g + SENSITIVITY * direction).double().numpy()
    return judged(one, other, SENSITIVITY)


def judged(one: Floats, other: Floats, sensitivity: float) -> dict[str, Verdict]:
    return {
        "hockey-stick": hockey_stick(one, other, EPSILON, gaussian_delta(SIGMA, sensitivity, EPSILON)),
        "Rényi 1.5": renyi(one, other, 1.5, gaussian_renyi(SIGMA, sensitivity, 1.5)),
        "Rényi 2": renyi(one, other, 2, gaussian_renyi(SIGMA, sensitivity, 2)),
    }


def caught(found: dict[str, Verdict]) -> set[str]:
    return {name for name, verdict in found.items() if not verdict.passed}


@pytest.mark.parametrize("streams", [Streams(SEED), SecretStreams(SEED)], ids=["seeded", "secret"])
def test_noise_of_the_claimed_size_passes_and_the_bounds_are_not_empty(streams: Streams, workers: Workers) -> None:
    found = verdicts(private(SIGMA, streams, workers))
    assert caught(found) == set()
    for verdict in found.values():
        assert verdict.at_least > 0.3 * verdict.claimed


def test_half_the_claimed_noise_is_caught_by_every_tester(workers: Workers) -> None:
    assert len(caught(verdicts(private(0.5 * SIGMA, Streams(SEED), workers)))) == 3


def test_four_fifths_of_the_claimed_noise_are_caught_with_more_samples(workers: Workers) -> None:
    assert {"hockey-stick", "Rényi 1.5"} <= caught(
        verdicts(private(0.8 * SIGMA, Streams(SEED), workers), samples=32_000)
    )


def test_a_coordinate_without_noise_is_caught_by_every_tester(workers: Workers) -> None:
    honest = private(SIGMA, Streams(SEED), workers)

    def mechanism(t: int, g: Tensor) -> Tensor:
        out = honest(t, g)
        out[:, 2] = g[:, 2]
        return out

    assert len(caught(verdicts(mechanism))) == 3


def test_laplace_noise_of_the_same_variance_is_caught() -> None:
    generator = np.random.default_rng(SEED)

    def mechanism(t: int, g: Tensor) -> Tensor:
        return g + torch.from_numpy(generator.laplace(0, SIGMA / 2**0.5, g.shape)).float()

    assert "hockey-stick" in caught(verdicts(mechanism, FIRST))


@pytest.mark.parametrize("reused", [False, True], ids=["a draw each", "one draw for both"])
def test_two_messages_pass_with_a_draw_each_and_one_draw_for_both_is_caught(reused: bool, workers: Workers) -> None:
    """The record moves two messages in opposite directions, and their difference has no noise."""
    rows = torch.arange(SAMPLES)
    peers = torch.cat([rows, rows if reused else rows + SAMPLES])
    way = torch.cat([ALONG.expand(SAMPLES, D), -ALONG.expand(SAMPLES, D)])
    g = torch.linspace(-1, 1, D).expand(2 * SAMPLES, D)
    noise = Noise([SIGMA], Streams(SEED), workers)

    def both_messages(t: int, g: Tensor) -> Floats:
        sent = noise.add(t, torch.zeros_like(peers), peers, g)
        return torch.cat(sent.chunk(2), dim=1).double().numpy()

    found = judged(both_messages(1, g), both_messages(2, g + SENSITIVITY * way), SENSITIVITY * 2**0.5)
    assert len(caught(found)) == (3 if reused else 0)


def test_testers_blame_an_honest_mechanism_no_more_often_than_asked_for() -> None:
    generator = np.random.default_rng(SEED)
    asked, tries, blamed = 0.2, 200, 0
    for _ in range(tries):
        one, other = generator.normal(0, 1, (200, 1)), generator.normal(1, 1, (200, 1))
        found = hockey_stick(one, other, EPSILON, gaussian_delta(1, 1, EPSILON), asked)
        blamed += not found.passed
        blamed += not renyi(one, other, 2, gaussian_renyi(1, 1, 2), asked).passed
    assert blamed <= 2 * asked * tries
