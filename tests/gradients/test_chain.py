"""Chains of linear layers against the same network on a tape; and networks that are no chains."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pdsl.gradients.chain import chain_of
from pdsl.gradients.clipping import clip_per_sample
from pdsl.gradients.per_example import LAYERS, Block
from pdsl.gradients.plan import Plan, plan_of
from pdsl.models import zoo
from pdsl.models.network import Network
from pdsl.tasks import MultiClass, Regression, Task

SHAPE, CLASSES = (3, 4, 5), 10
SHARED = nn.Linear(60, 60)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def perceptron(activation: type[nn.Module], bias: bool = True) -> nn.Module:
    inner = nn.Sequential(nn.Linear(60, 33, bias), activation(), nn.Linear(33, 16))
    return nn.Sequential(zoo.Flatten(), inner, activation(), activation(), nn.Linear(16, CLASSES, bias))


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(60, 16), nn.Linear(16, CLASSES))
    module[1].bias.requires_grad_(False)
    return module


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "softmax": lambda: nn.Sequential(nn.Flatten(), nn.Linear(60, CLASSES)),
    "relu": lambda: perceptron(nn.ReLU),
    "relu, no bias": lambda: perceptron(nn.ReLU, bias=False),
    "sigmoid": lambda: perceptron(nn.Sigmoid),
    "tanh": lambda: perceptron(nn.Tanh),
    "fast tanh": lambda: perceptron(zoo.Tanh),
}
TASKS: dict[str, Task] = {
    "plain": MultiClass(),
    "smooth": MultiClass(label_smoothing=0.1),
    "weighted": MultiClass(weights=torch.linspace(0.1, 1.0, CLASSES)),
    "custom": MultiClass(loss=lambda out, y: (out.logsumexp(1) - out[:, 0]) * (1 + y)),
    "regression": Regression(outputs=CLASSES),
}


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
@pytest.mark.parametrize("soft", [False, True])
def test_a_chain_has_the_gradients_of_a_tape(make: Callable[[], nn.Module], task: Task, soft: bool) -> None:
    if isinstance(task, Regression):
        targets = normal(2, 21, CLASSES)
    else:
        targets = normal(2, 21, CLASSES).softmax(1) if soft and task.loss is None else torch.arange(21) % CLASSES
    torch.manual_seed(0)
    network, inputs = Network(make(), task=task), 3 * normal(1, 21, *SHAPE)
    x, replica = network.perturbed_parameters(), network.replica()
    plan = plan_of(replica, one_record_at_a_time=False)
    assert plan.chain is not None
    found = LAYERS.gradients(network, x, LAYERS.pad_block(inputs, targets))
    replica.plans = {key: replace(p, chain=None) for key, p in replica.plans.items() if isinstance(p, Plan)}
    right = LAYERS.gradients(network, x, LAYERS.pad_block(inputs, targets))
    factors = torch.linspace(0.0, 1.0, 21, dtype=torch.float64)
    torch.testing.assert_close(found.squared_norms, right.squared_norms, rtol=1e-5, atol=0)
    expected = right.weighted_sum(factors)
    error = found.weighted_sum(factors) - expected
    assert float(error.norm()) <= 1e-6 * float(expected.norm())


@pytest.mark.parametrize("offset", range(4))
def test_the_alignment_of_the_parameters_changes_no_bit(offset: int) -> None:
    network, inputs, labels = Network(perceptron(nn.ReLU)), normal(1, 250, *SHAPE), torch.arange(250) % CLASSES
    x = network.initial_parameters()
    moved = torch.cat([x.new_zeros(offset), x])[offset:]
    ones = torch.ones(250, dtype=torch.float64)
    sums = [
        LAYERS.gradients(network, point, LAYERS.pad_block(inputs, labels)).weighted_sum(ones) for point in (x, moved)
    ]
    assert torch.equal(*sums)


def test_a_sum_can_be_computed_twice_and_leaves_the_parameters_alone() -> None:
    network, inputs, labels = Network(perceptron(nn.ReLU)), normal(1, 20, *SHAPE), torch.arange(20) % CLASSES
    x = network.initial_parameters()
    gradients, factors = (
        LAYERS.gradients(network, x, LAYERS.pad_block(inputs, labels)),
        torch.ones(20, dtype=torch.float64),
    )
    assert torch.equal(gradients.weighted_sum(factors), gradients.weighted_sum(factors))
    assert torch.equal(x, network.initial_parameters())


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(60, CLASSES),
        lambda: nn.Sequential(nn.Flatten(), SHARED, nn.ReLU(), SHARED),
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(60, 16), nn.GELU(), nn.Linear(16, CLASSES)),
        lambda: nn.Sequential(nn.LayerNorm(5), nn.Flatten(), nn.Linear(60, CLASSES)),
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(60, 16), nn.LayerNorm(16), nn.Linear(16, CLASSES)),
        frozen,
    ],
)
def test_other_networks_are_no_chains(make: Callable[[], nn.Module]) -> None:
    assert chain_of(Network(make()).replica()) is None


def test_a_layer_over_several_positions_is_left_to_the_tape() -> None:
    network = Network(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1)), task=Regression(outputs=12))
    replica = network.replica()
    chain = plan_of(replica, one_record_at_a_time=False).chain
    assert chain is not None
    x, inputs, targets = network.initial_parameters(), normal(1, 16, 12, 5), normal(2, 16, 12)
    assert chain.gradients(network.task, x, Block(inputs, targets, 16)) is None
    assert LAYERS.gradients(network, x, LAYERS.pad_block(inputs, targets)).squared_norms.shape == (16,)


@pytest.mark.parametrize("name", ["softmax", "relu"])
def test_several_models_have_the_bits_of_one(name: str) -> None:
    network, inputs, labels = Network(NETWORKS[name]()), 3 * normal(1, 300, *SHAPE), torch.arange(300) % CLASSES
    models = torch.stack([network.initial_parameters(), network.perturbed_parameters(), network.initial_parameters()])
    found = clip_per_sample(network, models, inputs, labels, 0.5, 7.0, LAYERS)
    for model, of_model in zip(models, found, strict=True):
        assert torch.equal(clip_per_sample(network, model, inputs, labels, 0.5, 7.0, LAYERS), of_model)
