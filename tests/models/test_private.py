"""make_private replaces layers that mix records, and says so."""

import warnings

import pytest
import torch
from torch import nn

import pdsl
from pdsl.gradients.independence import choose_kernel
from pdsl.models.network import Network


def made(model: nn.Module) -> tuple[nn.Module, str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        private = pdsl.make_private(model)
    (warning,) = caught
    return private, str(warning.message)


@pytest.mark.parametrize(("channels", "groups"), [(4, 4), (6, 2), (48, 16), (64, 32), (7, 1)])
def test_batch_norm_becomes_group_norm_and_the_layer_is_named(channels: int, groups: int) -> None:
    model = nn.Sequential(nn.Conv2d(1, channels, 3), nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU()))
    private, message = made(model)
    norm = private.get_submodule("1.0")
    assert isinstance(norm, nn.GroupNorm)
    assert norm.num_groups == groups
    assert "1.0: BatchNorm2d → GroupNorm" in message
    assert isinstance(model.get_submodule("1.0"), nn.BatchNorm2d)  # the original is unchanged
    assert torch.equal(norm.weight, torch.ones(channels))


def test_instance_norm_loses_its_running_statistics() -> None:
    private, message = made(
        nn.Sequential(nn.Conv1d(1, 4, 3), nn.InstanceNorm1d(4, affine=True, track_running_stats=True))
    )
    assert "1: InstanceNorm1d" in message
    assert not list(private.buffers())
    one = torch.randn(1, 1, 9)
    assert torch.allclose(private.eval()(torch.cat([one, torch.randn(3, 1, 9)]))[:1], private(one), atol=1e-6)


def test_nothing_to_change_is_said() -> None:
    private, message = made(nn.Sequential(nn.Linear(3, 2)))
    assert "changed nothing" in message
    assert isinstance(private.get_submodule("0"), nn.Linear)


def test_a_private_model_gets_a_kernel() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    network = Network(made(model)[0])
    kernel = choose_kernel(network, torch.randn(9, 1, 8, 8), torch.arange(9) % 3)
    assert kernel.name.startswith("layers")
    assert not kernel.note


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pairs, self.head = nn.Bilinear(5, 40, 40), nn.Linear(40, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.pairs(x, x.repeat(1, 8))))  # type: ignore[no-any-return]


def test_a_slow_layer_is_named() -> None:
    torch.manual_seed(0)
    kernel = choose_kernel(Network(Bilinear()), torch.randn(9, 5), torch.arange(9) % 3)
    assert kernel.name.startswith("vmapped")
    assert "pairs.weight" in kernel.note
    assert "head" not in kernel.note
