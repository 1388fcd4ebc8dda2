"""Masses of records from noisy messages, against the true numbers of records."""

import numpy as np
import pytest
import torch

from pdsl.shapley.masses import BLOCKS, Basis, add_round, empty_sums, estimate_masses, estimate_totals, is_anchor
from pdsl.shapley.trust import MIN_MASS, mass_trust

GROUPS, D, SENDERS = 4, 200, 3
TRUE = np.array([[1.0, 0.0, 0.5, 0.0], [0.2, 0.2, 0.2, 0.2], [0.0, 0.0, 0.0, 0.0]])  # the last is a free rider


def observe(rounds: int, sigma: float) -> torch.Tensor:
    """Sums of one receiver of messages TRUE @ B + noise, with a new B in every round."""
    generator = torch.Generator().manual_seed(0)
    sums = empty_sums(1, SENDERS, GROUPS)
    for t in range(1, rounds + 1):
        b = torch.randn(GROUPS, D, generator=generator)
        basis = Basis(b, (b.double() @ b.double().T).numpy())
        noise = sigma * torch.randn(SENDERS, D, generator=generator)
        add_round(sums[0], t, basis, torch.from_numpy(TRUE).float() @ b + noise, np.arange(SENDERS))
    return sums[0]


def test_masses_without_noise_are_the_true_ones() -> None:
    found = estimate_masses(observe(20, 0.0).numpy())
    assert np.abs(found.masses - TRUE).max() < 2e-3  # the ridge
    assert found.errors.max() < 1e-4


def test_masses_with_noise_are_within_four_standard_errors() -> None:
    found = estimate_masses(observe(40, 2.0).numpy())
    expected = 2.0 / np.sqrt(40 * D)  # σ / √(rounds · ‖B_a‖²)
    assert (np.abs(found.masses - TRUE) < 4 * expected).all()
    assert 0.5 * expected < found.errors.mean() < 2 * expected


def test_a_free_rider_loses_trust_and_a_small_party_keeps_it() -> None:
    totals, errors = estimate_totals(observe(40, 2.0).numpy())
    trust = mass_trust(totals, errors)
    assert trust[0] == trust[1] == 1.0
    assert trust[2] == 0.0


def test_errors_are_infinite_before_two_blocks_have_a_round_and_all_are_trusted() -> None:
    totals, errors = estimate_totals(observe(1, 0.0).numpy())
    assert np.isinf(errors).all()
    assert (mass_trust(totals, errors) == 1).all()


def test_a_message_that_is_not_finite_counts_as_zero() -> None:
    sums = empty_sums(1, SENDERS, GROUPS)
    b = torch.eye(GROUPS, D)
    messages = torch.ones(SENDERS, D)
    messages[1] = float("nan")
    add_round(sums[0], 1, Basis(b, np.eye(GROUPS)), messages, np.arange(SENDERS))
    assert sums[0, 1, 0, -1].tolist() == [1.0] * GROUPS
    assert sums[0, 1, 1, -1].tolist() == [0.0] * GROUPS


def test_an_absent_member_keeps_its_sums() -> None:
    sums = empty_sums(1, SENDERS, GROUPS)
    b = torch.eye(GROUPS, D)
    add_round(sums[0], 1, Basis(b, np.eye(GROUPS)), torch.ones(2, D), np.array([0, 2]))
    assert sums[0, :, 1].abs().sum() == 0
    assert sums[0, 1 % BLOCKS, 2, :-1].diagonal().sum() > 0


@pytest.mark.parametrize(("mass", "trusted"), [(1.0, 1.0), (MIN_MASS, 1.0), (0.0, 0.0), (-0.5, 0.0)])
def test_trust_by_mass_with_small_errors(mass: float, trusted: float) -> None:
    assert mass_trust(np.array([mass]), np.array([0.01]))[0] == trusted


def test_anchors_are_dense_at_first_and_then_sparse() -> None:
    anchors = [t for t in range(1, 101) if is_anchor(t)]
    assert anchors[:5] == [1, 2, 3, 4, 5]
    assert len(anchors) <= 20
