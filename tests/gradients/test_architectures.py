"""Clipped sums of random architectures against a naive loop: one record at a time, plain autograd."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils import vector_to_parameters

from pdsl.gradients.clipping import clip_per_sample
from pdsl.gradients.per_example import LAYERS, VMAPPED
from pdsl.gradients.vetted import is_vetted
from pdsl.models.network import trainable
from tests.helpers.architectures import Example, example

pytestmark = pytest.mark.slow


def naive_gradients(case: Example, x: Tensor) -> Tensor:
    """Gradient of each record [n, d], in float64, by plain autograd."""
    module = copy.deepcopy(case.network.module).double()
    vector_to_parameters(x.double(), trainable(module))
    inputs = case.inputs
    rows = []
    for n in range(len(case.targets)):
        one = inputs[n : n + 1]
        one = one.double() if isinstance(one, Tensor) and one.is_floating_point() else one
        if not isinstance(one, Tensor):
            one = one.map(lambda t: t.double() if t.is_floating_point() else t)
        loss = case.network.losses(module, one, case.targets[n : n + 1]).sum()
        parts = torch.autograd.grad(loss, trainable(module), materialize_grads=True)
        rows.append(torch.cat([p.reshape(-1) for p in parts]))
    return torch.stack(rows)


def check(seed: int) -> None:
    case = example(seed)
    x = case.network.initial_parameters()
    g = naive_gradients(case, x)
    norms = g.norm(dim=1)
    C = float(norms.median())
    right = (g / (norms / C).clamp(min=1)[:, None]).sum(0)
    for kernel in (LAYERS, VMAPPED) if is_vetted(case.network.module) else (VMAPPED,):
        found = clip_per_sample(case.network, x, case.inputs, case.targets, C, 1.0, kernel)
        assert float((found - right).norm()) <= 1e-5 * float(right.norm()), (case.name, kernel.name)
        for n in (0, len(norms) - 1):
            rest = torch.arange(len(norms)) != n
            without = clip_per_sample(case.network, x, case.inputs[rest], case.targets[rest], C, 1.0, kernel)
            assert float((found - without).norm()) <= C * (1 + 1e-6), (case.name, kernel.name)


@settings(deadline=None, max_examples=320, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_clipped_sums_of_random_architectures_equal_a_naive_loop(seed: int) -> None:
    check(seed)
