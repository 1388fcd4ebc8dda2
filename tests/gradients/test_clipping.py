"""Clipped gradients against autograd on single records in float64; and attempts to break their guarantees."""

import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import log_softmax
from torch.nn.utils import vector_to_parameters

from pdsl.data import Batches
from pdsl.gradients.clipping import LocalGradients, clip_batch, clip_factors, clip_per_sample, row_digests
from pdsl.gradients.independence import choose_kernel
from pdsl.gradients.per_example import LAYERS, RECORDS, VMAPPED, Block, Kernel, PerRecord
from pdsl.models.network import Network
from pdsl.models.zoo import MODELS
from pdsl.settings import BatchSettings, ModelSettings
from pdsl.utils.inputs import channels_last
from pdsl.utils.random import Streams
from pdsl.utils.workers import Workers
from tests.helpers.awkward_models import (
    CASES,
    CLASSES,
    IMAGE,
    VECTOR,
    WAYS,
    Case,
    InPlace,
    LayerNormed,
    Twice,
    Unused,
    cases,
    named,
)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def network_of(make: Callable[[], nn.Module]) -> Network:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Network(make())


def records(shape: tuple[int, ...], n: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    return normal(seed, n, *shape), torch.arange(n) % CLASSES


def somewhere(network: Network) -> Tensor:
    """A model other than the initial one."""
    return network.initial_parameters() + 0.1 * normal(7, network.num_parameters)


def gradient_of(network: Network, x: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
    """∇ of the loss summed over records, by plain autograd in float64: [d]."""
    module = copy.deepcopy(network.module).double()
    vector_to_parameters(x.double(), module.parameters())
    loss = -log_softmax(module(inputs.double()), dim=1)[torch.arange(len(labels)), labels].sum()
    parameters = list(module.parameters())
    by_parameter = torch.autograd.grad(loss, parameters, allow_unused=True)
    pairs = zip(by_parameter, parameters, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in pairs])


def clipped(g: Tensor, C: float) -> Tensor:
    return g / max(1.0, float(g.norm()) / C)


def expected_sum(network: Network, x: Tensor, inputs: Tensor, labels: Tensor, C: float) -> Tensor:
    singles = [slice(n, n + 1) for n in range(len(labels))]
    return torch.stack([clipped(gradient_of(network, x, inputs[n], labels[n]), C) for n in singles]).sum(0)


def clipped_sum(way: Kernel, network: Network, x: Tensor, inputs: Tensor, labels: Tensor, C: float) -> Tensor:
    return clip_per_sample(network, x, inputs, labels, C, 1.0, way)


def assert_close(found: Tensor, right: Tensor) -> None:
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-5 * right.abs().max().item())


# The value


@pytest.mark.slow
@cases
def test_the_chosen_kernel_is_the_fastest_right_one_or_one_that_rounds_every_record_alike(case: Case) -> None:
    """On some machines rounding in narrow layers depends on the position in the batch: a slower kernel is chosen."""
    network = network_of(case.make)
    chosen = choose_kernel(network, *records(case.shape, 9, seed=2))
    assert chosen.name.split(",")[0] in [way.name for way in WAYS[WAYS.index(case.chosen) :]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"),
    [("mnist-cnn", (1, 28, 28)), ("softmax", (1, 8, 8)), ("mlp", (1, 8, 8)), ("cifar10-cnn", (3, 32, 32))],
)
def test_networks_of_usual_width_use_the_kernel_by_layers(name: str, shape: tuple[int, ...]) -> None:
    network = network_of(lambda: MODELS[name](torch.Size(shape), 10, ModelSettings()))
    assert choose_kernel(network, normal(2, 9, *shape), torch.arange(9)).name.startswith("layers")


@pytest.mark.slow
@cases
def test_a_record_has_the_same_gradient_bits_in_any_company(case: Case) -> None:
    """At models and with other records that the choice of the kernel did not try."""
    network, (inputs, labels) = network_of(case.make), records(case.shape, 40, seed=3)
    kernel = choose_kernel(network, *records(case.shape, 9, seed=2))
    x = somewhere(network)
    whole = kernel.gradients(network, x, kernel.pad_block(inputs, labels))
    for part in (
        torch.arange(7, 40),
        torch.tensor([31]),
        torch.randperm(40, generator=torch.Generator().manual_seed(1)),
    ):
        other = kernel.gradients(network, x, kernel.pad_block(inputs[part], labels[part]))
        for place, record in enumerate(part.tolist()):
            ones = torch.eye(40, dtype=torch.float64)[record], torch.eye(len(part), dtype=torch.float64)[place]
            assert torch.equal(whole.weighted_sum(ones[0]), other.weighted_sum(ones[1]))


@cases
def test_per_sample_clipping_is_right_whichever_way(case: Case) -> None:
    """Values of C with which all, some and no records are clipped."""
    network, (inputs, labels) = network_of(case.make), records(case.shape, 7)
    x = somewhere(network)
    norms = [gradient_of(network, x, inputs[n : n + 1], labels[n : n + 1]).norm().item() for n in range(7)]
    for C in (min(norms) / 2, sorted(norms)[3], 2 * max(norms)):
        right = expected_sum(network, x, inputs, labels, C)
        for way in case.ways:
            assert_close(clipped_sum(way, network, x, inputs, labels, C), right)


@pytest.mark.parametrize("case", [c for c in CASES if len(c.shape) == 3][:3], ids=lambda c: c.name)
def test_the_layout_of_images_does_not_matter(case: Case) -> None:
    network, (inputs, labels) = network_of(case.make), records(case.shape, 7)
    x = somewhere(network)
    right = expected_sum(network, x, inputs, labels, 1.0)
    for way in case.ways:
        assert_close(clipped_sum(way, network, x, channels_last(inputs), labels, 1.0), right)


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.name)
@pytest.mark.parametrize("n", [256, 257, 519])
def test_a_batch_is_summed_block_by_block_over_the_divisor(way: Kernel, n: int) -> None:
    network, (inputs, labels) = network_of(named("mlp", IMAGE)), records(IMAGE, n)
    x = somewhere(network)
    found = clip_per_sample(network, x, inputs, labels, 0.5, 16.0, way)
    assert_close(found, expected_sum(network, x, inputs, labels, 0.5) / 16)


@cases
def test_batch_clipping_is_right(case: Case) -> None:
    network, (inputs, labels) = network_of(case.make), records(case.shape, 7)
    x = somewhere(network)
    right = gradient_of(network, x, inputs, labels) / 5
    for C in (right.norm().item() / 3, 3 * right.norm().item()):
        assert_close(clip_batch(network, x, inputs, labels, C, 5.0), clipped(right, C))


@cases
def test_an_empty_batch_gives_zero(case: Case) -> None:
    network, (inputs, labels) = network_of(case.make), records(case.shape, 0)
    zero = torch.zeros(network.num_parameters, dtype=torch.float64)
    for way in case.ways:
        assert torch.equal(clip_per_sample(network, network.initial_parameters(), inputs, labels, 1.0, 8.0, way), zero)
    assert torch.equal(clip_batch(network, network.initial_parameters(), inputs, labels, 1.0, 8.0), zero)


def test_nothing_of_a_gradient_stays_behind() -> None:
    """The replica is unchanged: no hooks, no gradients, parameters that require gradients."""
    network, (inputs, labels) = network_of(named("mlp", IMAGE)), records(IMAGE, 3)
    for way in WAYS:
        clipped_sum(way, network, somewhere(network), inputs, labels, 1.0)
        replica = network.replica()
        assert all(p.requires_grad and p.grad is None for p in replica.parameters)
        assert not any(m._forward_hooks for m in replica.module.modules())
    assert torch.equal(network.initial_parameters(), network_of(named("mlp", IMAGE)).initial_parameters())


def test_layers_that_do_not_tell_the_whole_are_refused() -> None:
    inputs, labels = records(VECTOR, 3)
    for make in (lambda: Twice(zero=True), lambda: InPlace(above=9.0), Unused):
        network = network_of(make)
        with pytest.raises(RuntimeError):
            LAYERS.gradients(network, network.initial_parameters(), LAYERS.pad_block(inputs, labels))


# The guarantee


def guarded() -> list[tuple[Network, tuple[int, ...], Kernel]]:
    """A smooth network for each kernel, so that rounding cannot flip a branch."""
    smooth = nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(2 * 9, CLASSES))
    return [
        (network_of(lambda: nn.Sequential(nn.Linear(5, CLASSES))), VECTOR, LAYERS),
        (network_of(lambda: smooth), IMAGE, LAYERS),
        (network_of(LayerNormed), VECTOR, VMAPPED),
        (network_of(LayerNormed), VECTOR, RECORDS),
    ]


GUARDED = guarded()
scales = st.lists(st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 30.0, 1e20]), min_size=1, max_size=6)
Cs = st.sampled_from([1e-3, 1.0, 50.0])


def scaled(shape: tuple[int, ...], scale: list[float], seed: int) -> tuple[Tensor, Tensor]:
    factor = torch.tensor(scale).reshape(-1, *[1] * len(shape))
    return normal(seed, len(scale), *shape) * factor, torch.arange(len(scale)) % CLASSES


@settings(deadline=None, max_examples=40)
@given(scale=scales, seed=st.integers(0, 2**32 - 1), C=Cs)
def test_no_record_contributes_more_than_the_threshold(scale: list[float], seed: int, C: float) -> None:
    for network, shape, way in GUARDED:
        inputs, labels = scaled(shape, scale, seed)
        x = somewhere(network)
        for n in range(len(labels)):
            g = clipped_sum(way, network, x, inputs[n : n + 1], labels[n : n + 1], C)
            assert torch.isfinite(g).all()
            assert g.double().norm() <= C * (1 + 1e-6)


@settings(deadline=None, max_examples=40)
@given(scale=scales, seed=st.integers(0, 2**32 - 1), C=Cs)
def test_one_record_moves_the_result_by_at_most_its_sensitivity(scale: list[float], seed: int, C: float) -> None:
    divisor = 4.0
    for network, shape, way in GUARDED:
        inputs, labels = scaled(shape, scale, seed)
        x = somewhere(network)
        whole = clip_per_sample(network, x, inputs, labels, C, divisor, way)
        for n in range(len(labels)):
            rest = torch.arange(len(labels)) != n
            without = clip_per_sample(network, x, inputs[rest], labels[rest], C, divisor, way)
            assert (whole.double() - without.double()).norm() <= C / divisor * (1 + 1e-5)


@settings(deadline=None, max_examples=40)
@given(scale=scales, seed=st.integers(0, 2**32 - 1), C=Cs)
def test_a_batch_moves_by_at_most_twice_the_threshold(scale: list[float], seed: int, C: float) -> None:
    """Both norms are at most C, so the distance is at most 2C."""
    for network, shape, _ in GUARDED[:3]:
        inputs, labels = scaled(shape, scale, seed)
        for n in range(len(labels) + 1):
            rest = torch.arange(len(labels)) != n
            g = clip_batch(network, somewhere(network), inputs[rest], labels[rest], C, 4.0)
            assert torch.isfinite(g).all()
            assert g.double().norm() <= C * (1 + 1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("whole", [True, False], ids=["all of it", "one number"])
@cases
def test_a_record_without_a_finite_gradient_counts_as_zero(case: Case, whole: bool, bad: float) -> None:
    """It does not affect other records."""
    network, (inputs, labels) = network_of(case.make), records(case.shape, 5)
    x, good = somewhere(network), [0, 1, 3]
    for n in (2, 4):
        inputs[n].reshape(-1)[: None if whole else 1] = bad
    alone = [gradient_of(network, x, inputs[n : n + 1], labels[n : n + 1]) for n in (2, 4)]
    for way in case.ways:
        found = clip_per_sample(network, x, inputs, labels, 1.0, 2.0, way)
        right = expected_sum(network, x, inputs[good], labels[good], 1.0)
        right += sum(clipped(g, 1.0) for g in alone if torch.isfinite(g).all())  # pooling may ignore the infinite value
        assert_close(found, right / 2)
        everything_bad = torch.full_like(inputs, float("nan"))
        assert not clip_per_sample(network, x, everything_bad, labels, 1.0, 2.0, way).any()
    assert not clip_batch(network, x, torch.full_like(inputs, float("nan")), labels, 1.0, 2.0).any()


def test_clip_factors_at_the_edges() -> None:
    norms = torch.tensor([0.0, 1e-300, 0.5, 1.0, 2.0, 1e150], dtype=torch.float64)
    factors = clip_factors(norms.square(), 1.0)
    assert factors.tolist() == pytest.approx([1, 1, 1, 1, 0.5, 1e-150])
    assert (factors * norms <= 1 + 1e-15).all()


def test_a_clip_factor_below_float32_keeps_the_norm() -> None:
    """Finding D9: the review's network and record, whose factor is a subnormal number in float32."""
    network = network_of(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, CLASSES)))
    x = torch.zeros(network.num_parameters)
    x[20:32] = torch.tensor([1e6, -1e6, 1e6] * 4)
    for pixel in (2.2e37, 1e38, 3e38):
        for C in (1.0, 1e-3, 2e-6):
            for way in WAYS:
                g = clipped_sum(way, network, x, torch.full((1, 4), pixel), torch.tensor([1]), C)
                assert float(g.norm()) <= C * (1 + 2.0**-24)


# Owners


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers(3) as pool:
        yield pool


def local(network: Network, sizes: list[int], workers: Workers, per_sample: Kernel, **more: object) -> LocalGradients:
    held = [records(IMAGE, n, seed=20 + i) for i, n in enumerate(sizes)]
    drawn = Batches(sizes, BatchSettings.model_validate({"size": 4, **more}), Streams(5), sum(sizes) / len(sizes))
    inputs, labels = [x for x, _ in held], [y for _, y in held]
    return LocalGradients(network, inputs, labels, drawn, "per-sample", 0.5, workers, per_sample)


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.name)
@pytest.mark.parametrize("sampler", ["poisson", "fixed"])
def test_owners_answer_each_row_and_equal_models_once(way: Kernel, sampler: str, workers: Workers) -> None:
    network = network_of(named("mlp", IMAGE))
    calls, lock = [], threading.Lock()

    def counting(network: Network, x: Tensor, block: Block) -> list[PerRecord]:
        with lock:
            calls.append(block.n)
        return way.run(network, x, block)

    own = local(network, [9, 14, 12], workers, replace(way, run=counting), sampler=sampler)
    a, b = somewhere(network), network.initial_parameters()
    agents = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    x = torch.stack([a, b, a, a, a, b, a])
    found = own.gradients(6, agents, x)
    drawn = [own.batches.draw(agent, 6) for agent in range(3)]
    assert all(len(batch) for batch in drawn)
    assert len(calls) == 5  # (0, a), (0, b), (1, a), (2, b), (2, a)
    for row, agent in enumerate(agents.tolist()):
        batch = drawn[agent]
        right = expected_sum(network, x[row], own.inputs[agent][batch], own.labels[agent][batch], own.C)
        assert_close(found[row], right / own.batches.divisor(agent))
    assert torch.equal(found[0], found[2])
    assert not torch.equal(own.gradients(7, agents, x), found)  # another round, another batch


def test_owners_clip_the_batch_if_told_to(workers: Workers) -> None:
    network = network_of(named("digits-cnn", IMAGE))
    held = local(network, [9, 14], workers, LAYERS)
    own = LocalGradients(network, held.inputs, held.labels, held.batches, "batch", 0.1, workers, LAYERS)
    x = torch.stack([somewhere(network), network.initial_parameters()])
    found = own.gradients(3, torch.tensor([0, 1]), x)
    for agent in range(2):
        batch = own.batches.draw(agent, 3)
        g = gradient_of(network, x[agent], own.inputs[agent][batch], own.labels[agent][batch])
        assert_close(found[agent], clipped(g / own.batches.divisor(agent), 0.1))


def test_an_owner_whose_batch_is_empty_answers_zero(workers: Workers) -> None:
    network = network_of(named("digits-cnn", IMAGE))
    own = local(network, [6, 6], workers, LAYERS, size=1)
    empty = next(t for t in range(1, 50) if len(own.batches.draw(0, t)) == 0)
    assert not own.gradients(empty, torch.tensor([0]), network.initial_parameters()[None]).any()


def test_equal_digests_mean_equal_rows() -> None:
    x = normal(3, 4, 10)
    x[2] = x[0]
    x[3, 9] += 1e-6
    digests = row_digests(x)
    assert [[a == b for b in digests] for a in digests] == [[torch.equal(a, b) for b in x] for a in x]
    assert row_digests(x.T.contiguous().T) == digests  # for any memory layout
