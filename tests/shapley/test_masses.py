"""Masses of records from noisy messages, against the true numbers of records."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pdsl.gradients.clipping import clip_per_sample
from pdsl.gradients.per_example import LAYERS
from pdsl.models.network import Network
from pdsl.shapley.last_layer import LastLayer, find_last_layer
from pdsl.shapley.masses import (
    BLOCKS,
    ISOTROPIC,
    Basis,
    PublicGradients,
    PublicGroups,
    add_round,
    empty_sums,
    estimate_masses,
    estimate_signals,
    is_anchor,
    make_basis,
)
from pdsl.shapley.trust import MIN_SIGNAL, signal_trust
from pdsl.utils.workers import Workers

GROUPS, D, SENDERS = 4, 200, 3
INPUTS = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(40) % 3


def last_layer(module: nn.Module, inputs: Tensor) -> LastLayer:
    layer = find_last_layer(Network(module), inputs)
    assert layer is not None
    return layer


LAYER = last_layer(nn.Linear(D // GROUPS, GROUPS, bias=False), torch.zeros(1, D // GROUPS))


def basis_of(b: Tensor) -> Basis:
    return Basis(LAYER, b.double(), (b.double() @ b.double().T).numpy())


TRUE = np.array([[1.0, 0.0, 0.5, 0.0], [0.2, 0.2, 0.2, 0.2], [0.0, 0.0, 0.0, 0.0]])  # the last is a free rider


def observe(rounds: int, sigma: float) -> torch.Tensor:
    """Sums of one receiver of messages TRUE @ B + noise, with a new B in every round."""
    generator = torch.Generator().manual_seed(0)
    sums = empty_sums(1, SENDERS, GROUPS)
    for t in range(1, rounds + 1):
        b = torch.randn(GROUPS, D, generator=generator)
        noise = sigma * torch.randn(SENDERS, D, generator=generator)
        add_round(sums[0], t, basis_of(b), torch.from_numpy(TRUE).float() @ b + noise, np.arange(SENDERS))
    return sums[0]


def test_masses_without_noise_are_the_true_ones() -> None:
    found = estimate_masses(observe(20, 0.0).numpy())
    assert np.abs(found.masses - TRUE).max() < 2e-3  # the ridge
    assert found.errors.max() < 2e-3


def test_masses_with_noise_are_within_four_standard_errors() -> None:
    found = estimate_masses(observe(40, 2.0).numpy())
    expected = 2.0 / np.sqrt(40 * D)  # σ / √(rounds · ‖B_a‖²)
    assert (np.abs(found.masses - TRUE) < 4 * expected).all()
    assert 0.5 * expected < found.errors.mean() < 2 * expected


def test_a_free_rider_loses_trust_and_a_small_party_keeps_it() -> None:
    trust = signal_trust(*estimate_signals(observe(40, 2.0).numpy()))
    assert trust[0] == trust[1] == 1.0
    assert trust[2] == 0.0


def test_all_are_trusted_before_every_block_has_a_round() -> None:
    signals, errors = estimate_signals(observe(BLOCKS - 1, 0.0).numpy())
    assert np.isinf(errors).all()
    assert (signal_trust(signals, errors) == 1).all()


def test_signals_are_those_of_the_true_masses_and_zero_on_average_for_a_free_rider() -> None:
    sums = observe(40, 2.0).numpy()
    gram = sums[:, 0, :-1].sum(0)
    signals, errors = estimate_signals(sums)
    expected = np.einsum("na,ab,nb->n", TRUE, gram, TRUE) / (np.trace(gram) / GROUPS**2)
    assert (np.abs(signals - expected * (1 - 1 / BLOCKS)) < 4 * errors).all()  # products of different blocks only
    assert errors[2] < MIN_SIGNAL


def test_a_message_that_is_not_finite_counts_as_zero() -> None:
    sums = empty_sums(1, SENDERS, GROUPS)
    b = torch.eye(GROUPS, D)
    messages = torch.ones(SENDERS, D)
    messages[1] = float("nan")
    add_round(sums[0], 1, basis_of(b), messages, np.arange(SENDERS))
    assert sums[0, 1, 0, -1].tolist() == [1.0] * GROUPS
    assert sums[0, 1, 1, -1].tolist() == [0.0] * GROUPS


def test_an_absent_member_keeps_its_sums() -> None:
    sums = empty_sums(1, SENDERS, GROUPS)
    b = torch.eye(GROUPS, D)
    add_round(sums[0], 1, basis_of(b), torch.ones(2, D), np.array([0, 2]))
    assert sums[0, :, 1].abs().sum() == 0
    assert sums[0, 1 % BLOCKS, 2, :-1].diagonal().sum() > 0


@pytest.mark.parametrize(("signal", "trusted"), [(1.0, 1.0), (MIN_SIGNAL, 1.0), (0.0, 0.0), (-0.5, 0.0)])
def test_trust_by_signal_with_small_errors(signal: float, trusted: float) -> None:
    assert signal_trust(np.array([signal]), np.array([0.01]))[0] == trusted


def test_anchors_are_dense_at_first_and_then_sparse() -> None:
    anchors = [t for t in range(1, 101) if is_anchor(t)]
    assert anchors[:5] == [1, 2, 3, 4, 6]
    assert len(anchors) <= 12


@pytest.mark.parametrize("variance", [0.0, 0.3])
def test_a_basis_is_relative_to_the_covariance_within_groups(variance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    r, h = torch.randn(40, 3, generator=generator).double(), torch.randn(40, 5, generator=generator).double()
    gradients = torch.einsum("nc,nf->ncf", r, h).flatten(1)
    means = torch.stack([gradients[group == LABELS].mean(0) for group in range(3)])
    deviations = gradients - means[LABELS]
    isotropic = variance + 0.07 * ISOTROPIC * float(gradients.square().sum()) / (40 * 15)
    covariance = 0.07 * deviations.T @ deviations / 37 + isotropic * torch.eye(15).double()
    basis = make_basis(r, h, LABELS, 0.07, variance, LAYER)
    expected = torch.linalg.solve(covariance, means.T).T
    assert torch.allclose(basis.b, expected, rtol=1e-9)
    assert np.allclose(basis.gram, (expected @ means.T).numpy(), rtol=1e-9)


@pytest.mark.parametrize(
    "module",
    [nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), nn.Linear(6, 3, bias=False)],
    ids=["whole", "two layers", "without bias"],
)
def test_public_gradients_are_clipped_as_those_of_private_records(module: nn.Module) -> None:
    """A message that is a sum of public groups has these groups as its masses."""
    layer = last_layer(module, INPUTS[:1])
    public = PublicGradients(PublicGroups(layer, INPUTS, LABELS, LABELS), 0.3, 40.0, 0.0, LAYERS, Workers(1))
    x = layer.network.initial_parameters()
    (basis,) = public.at(x[None])
    groups = [group == LABELS for group in range(3)]
    means = [clip_per_sample(layer.network, x, INPUTS[g], LABELS[g], 0.3, int(g.sum()), LAYERS) for g in groups]
    message = 0.5 * means[0] + 2.0 * means[2]
    products = basis.products(message[None].float())[0].numpy()
    assert np.linalg.solve(basis.gram, products) == pytest.approx([0.5, 0.0, 2.0], abs=1e-4)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x).tanh())
        return out


@pytest.mark.parametrize(
    "module", [nn.Sequential(nn.Linear(6, 3), nn.Tanh()), Tied(), nn.Linear(6, 3).requires_grad_(requires_grad=False)]
)
def test_a_model_without_a_linear_layer_of_its_own_at_the_end_has_none(module: nn.Module) -> None:
    full = nn.Sequential(nn.Linear(6, 6), module)  # something is trained in any case
    assert find_last_layer(Network(full), INPUTS[:1]) is None
