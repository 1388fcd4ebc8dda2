"""Disagreement between receivers: rare among honest ones, found if one is false."""

import numpy as np
import pytest
from scipy.stats import binom

from pdsl.shapley.agreement import FALSE_ALARMS, find_disagreements
from pdsl.shapley.coalitions import Values
from pdsl.shapley.masses import BLOCKS

GROUPS, DIMENSION, ROUNDS, SIGMA = 5, 40, 24, 0.1
Measured = dict[int, dict[int, Values]]


def measure(generator: np.random.Generator, parties: int = 4, varies: bool = True) -> Measured:
    """Sums of random messages m·B + noise, with the same bases and batches for all receivers of a sender."""
    bases = generator.normal(size=(ROUNDS, GROUPS, DIMENSION)) / np.sqrt(DIMENSION)
    found: Measured = {}
    for sender in range(parties):
        masses = generator.uniform(0.05, 0.3, size=(ROUNDS, GROUPS))  # a batch differs from round to round
        masses = masses if varies else np.tile(masses[0], (ROUNDS, 1))
        found[sender] = {}
        for receiver in range(parties):
            if receiver == sender:
                continue
            sums = np.zeros((BLOCKS, GROUPS + 1, GROUPS))
            for t, b in enumerate(bases):
                message = masses[t] @ b + SIGMA * generator.normal(size=DIMENSION)
                weight = np.trace(b @ b.T) / GROUPS
                sums[t % BLOCKS] += weight * np.vstack([b @ b.T, b @ message])
            found[sender][receiver] = sums
    return found


@pytest.mark.parametrize("varies", [False, True])
def test_honest_receivers_are_rarely_named(varies: bool) -> None:
    """More alarms than allowed here would have a chance of 1 in 1000 at the stated rate."""
    generator, settlements = np.random.default_rng(0), 150
    alarms = sum(bool(find_disagreements(measure(generator, varies=varies))) for _ in range(settlements))
    assert alarms <= binom.ppf(0.999, settlements, FALSE_ALARMS)


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_a_false_receiver_is_named_with_its_sender(factor: float) -> None:
    measured = measure(np.random.default_rng(2))
    measured[1][3][:, -1] *= factor
    (found,) = find_disagreements(measured)
    assert (found.sender, found.receivers) == (1, (3,))
    assert found.chance < FALSE_ALARMS


def test_noise_of_its_own_does_not_hide_a_false_receiver() -> None:
    generator = np.random.default_rng(3)
    measured = measure(generator)
    measured[1][3][:, -1] = 0.3 * measured[1][3][:, -1] + 5 * generator.normal(size=(BLOCKS, GROUPS))
    (found,) = find_disagreements(measured)
    assert (found.sender, found.receivers) == (1, (3,))


def test_two_false_receivers_of_one_sender_are_both_named() -> None:
    measured = measure(np.random.default_rng(4), parties=7)
    measured[1][3][:, -1] *= 0.2
    measured[1][5][:, -1] *= 4
    assert {found.receivers for found in find_disagreements(measured)} == {(3,), (5,)}


def test_of_two_receivers_both_are_named() -> None:
    measured = measure(np.random.default_rng(5), parties=3)
    measured[0][2][:, -1] *= 0.2
    (found,) = find_disagreements(measured)
    assert (found.sender, found.receivers) == (0, (1, 2))


def test_one_receiver_alone_is_not_compared() -> None:
    measured = measure(np.random.default_rng(6), parties=2)
    assert find_disagreements(measured) == []


def test_a_receiver_without_two_blocks_of_rounds_is_not_compared() -> None:
    measured = measure(np.random.default_rng(7), parties=3)
    measured[0][2][1:] = 0
    assert find_disagreements(measured) == []
