"""Two thousand attempts to move a message by more than Δ with one record. None may succeed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pdsl.gradients.clipping import clip_batch, clip_per_sample
from pdsl.gradients.per_example import LAYERS
from pdsl.models.network import Network

pytestmark = pytest.mark.slow

C, B, CLASSES = 1.0, 4.0, 3
numbers = st.floats(width=32, allow_nan=True, allow_infinity=True)
record = st.tuples(st.lists(numbers, min_size=16, max_size=16), st.integers(0, CLASSES - 1))
attack = settings(max_examples=1000, deadline=None)


def network() -> Network:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Network(
            nn.Sequential(
                nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, CLASSES)
            )
        )


NETWORK = network()


def tensors(records: list[tuple[list[float], int]]) -> tuple[Tensor, Tensor]:
    inputs = torch.tensor([values for values, _ in records], dtype=torch.float32).reshape(-1, 1, 4, 4)
    return inputs, torch.tensor([label for _, label in records], dtype=torch.int64)


@attack
@given(others=st.lists(record, max_size=5), one=record, sigma_scale=st.sampled_from([0.0, 1.0, 30.0]))
def test_adding_a_record_moves_a_message_by_at_most_delta(
    others: list[tuple[list[float], int]], one: tuple[list[float], int], sigma_scale: float
) -> None:
    x = sigma_scale * NETWORK.initial_parameters()
    without = clip_per_sample(NETWORK, x, *tensors(others), C, B, LAYERS)
    with_it = clip_per_sample(NETWORK, x, *tensors([*others, one]), C, B, LAYERS)
    assert (with_it.double() - without.double()).norm() <= C / B * (1 + 1e-9)


@attack
@given(others=st.lists(record, max_size=5), one=record, other=record, sigma_scale=st.sampled_from([0.0, 1.0, 30.0]))
def test_replacing_a_record_moves_a_message_by_at_most_twice_delta(
    others: list[tuple[list[float], int]],
    one: tuple[list[float], int],
    other: tuple[list[float], int],
    sigma_scale: float,
) -> None:
    x = sigma_scale * NETWORK.initial_parameters()
    a, b = tensors([*others, one]), tensors([*others, other])
    per_sample = [clip_per_sample(NETWORK, x, *records, C, B, LAYERS).double() for records in (a, b)]
    assert (per_sample[0] - per_sample[1]).norm() <= 2 * C / B * (1 + 1e-9)
    whole = [clip_batch(NETWORK, x, *records, C, B).double() for records in (a, b)]
    assert (whole[0] - whole[1]).norm() <= 2 * C * (1 + 1e-9)
