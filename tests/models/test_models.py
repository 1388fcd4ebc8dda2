"""Models by hand-counted parameters and plain torch; the flat vector; what is refused."""

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from pdsl.config import Config, validate
from pdsl.data import Data
from pdsl.metrics import accuracy
from pdsl.models.network import EVALUATION_BLOCK, Network, Replica
from pdsl.models.zoo import MODELS, Centred, Flatten, MaxPool, RMSNorm, Tanh, build
from pdsl.settings import ModelSettings
from pdsl.tasks import MultiClass
from pdsl.training.experiment import prepare
from pdsl.training.trainer import rounds
from pdsl.utils.inputs import channels_last
from pdsl.utils.random import Streams
from pdsl.utils.workers import Workers
from tests.helpers.refusals import refused

DIGITS, MNIST, CIFAR = torch.Size((1, 8, 8)), torch.Size((1, 28, 28)), torch.Size((3, 32, 32))


def built(
    name: str, shape: torch.Size, classes: int = 10, seed: int = 0, data: str = "npz", **more: object
) -> nn.Module:
    settings = ModelSettings.model_validate({"name": name, **more})
    return build(settings, data, torch.zeros(1, *shape), classes, Streams(seed))


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


# The named models


def convolution(inputs: int, outputs: int, kernel: int) -> int:
    return outputs * (inputs * kernel * kernel + 1)


def dense(inputs: int, outputs: int) -> int:
    return outputs * (inputs + 1)


@pytest.mark.parametrize(("name", "shape", "more", "parameters"), [
    ("mnist-cnn", MNIST, {}, convolution(1, 16, 3) + convolution(16, 32, 3) + dense(32 * 7 * 7, 10)),
    ("mnist-cnn", (1, 29, 31), {}, convolution(1, 16, 3) + convolution(16, 32, 3) + dense(32 * 7 * 7, 10)),
    ("mnist-cnn", CIFAR, {"channels": [4, 5]}, convolution(3, 4, 3) + convolution(4, 5, 3) + dense(5 * 8 * 8, 10)),
    ("cifar10-cnn", CIFAR, {},
        convolution(3, 32, 5) + convolution(32, 64, 5) + dense(64 * 8 * 8, 128) + dense(128, 10)),
    ("cifar10-cnn", CIFAR, {"channels": [2, 3], "hidden": 7},
        convolution(3, 2, 5) + convolution(2, 3, 5) + dense(3 * 8 * 8, 7) + dense(7, 10)),
    ("digits-cnn", DIGITS, {}, convolution(1, 8, 3) + convolution(8, 16, 3) + dense(16 * 2 * 2, 10)),
    ("softmax", MNIST, {}, dense(784, 10)),
    ("softmax", (13,), {}, dense(13, 10)),
    ("mlp", MNIST, {}, dense(784, 64) + dense(64, 10)),
    ("mlp", (4, 3), {"hidden": 9}, dense(12, 9) + dense(9, 10)),
])  # fmt: skip
def test_a_named_model_has_the_parameters_counted_by_hand(
    name: str, shape: torch.Size, more: dict[str, object], parameters: int
) -> None:
    module = built(name, torch.Size(shape), **more)
    assert count(module) == Network(module).num_parameters == parameters
    assert module(normal(1, 5, *shape)).shape == (5, 10)


@pytest.mark.parametrize(("data", "shape", "name"), [
    ("digits", DIGITS, "softmax"), ("mnist", MNIST, "mnist-cnn"), ("fashion-mnist", MNIST, "mnist-cnn"),
    ("cifar10", CIFAR, "cifar10-cnn"), ("npz", (13,), "mlp"), ("python", (2, 3), "mlp"),
])  # fmt: skip
def test_auto_goes_by_the_data(data: str, shape: torch.Size, name: str) -> None:
    auto, chosen = (built(n, torch.Size(shape), data=data) for n in ("auto", name))
    assert torch.equal(parameters_to_vector(auto.parameters()), parameters_to_vector(chosen.parameters()))


class ByPixels(nn.Module):
    """(row, column, channel), the order in which the last layers take their features."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1)


@pytest.mark.parametrize(("activation", "act"), [("relu", nn.ReLU), ("tanh", nn.Tanh)])
@pytest.mark.parametrize(("name", "shape"), [("mnist-cnn", MNIST), ("cifar10-cnn", CIFAR), ("cifar10-cnn", (3, 9, 7))])
def test_a_cnn_is_the_papers(name: str, shape: torch.Size, activation: str, act: type[nn.Module]) -> None:
    """Convolution, activation, pooling, twice, in the paper's order and with torch's own layers; gradients too."""
    module = built(name, torch.Size(shape), activation=activation, norm="none", channels=[3, 4], hidden=5)
    layers = [m for m in module.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    tail = [layers[2]] if name == "mnist-cnn" else [layers[2], act(), layers[3]]
    plain = nn.Sequential(
        layers[0], act(), nn.MaxPool2d(2), layers[1], act(), nn.MaxPool2d(2), ByPixels(), nn.Flatten(), *tail
    )  # fmt: skip
    inputs = normal(2, 6, *shape)
    for images in (inputs, channels_last(inputs)):
        torch.testing.assert_close(module(images), plain(images))
        found, right = (
            torch.autograd.grad(m(images).square().sum(), list(module.parameters())) for m in (module, plain)
        )
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (1, 1, 7, 9), (4, 2, 5, 4), (3, 5, 2, 2), (2, 1, 3, 3)])
def test_max_pool_is_torchs(shape: tuple[int, ...]) -> None:
    x = normal(3, *shape)
    for images in (x, channels_last(x), x.round()):  # rounded: many ties
        a, b = (images.detach().clone().requires_grad_() for _ in range(2))
        mine, torchs = MaxPool()(a), nn.MaxPool2d(2)(b)
        assert torch.equal(mine, torchs)
        mine.square().sum().backward()
        torchs.square().sum().backward()
        assert torch.equal(a.grad, b.grad)


def test_tanh_is_torchs() -> None:
    x = torch.cat([torch.linspace(-20, 20, 4001), torch.tensor([0.0, 1e-30, -1e-4, 300.0, -300.0, torch.inf])])
    a, b = (x.clone().requires_grad_() for _ in range(2))
    mine, torchs = Tanh()(a), torch.tanh(b)
    with torch.no_grad():
        assert torch.equal(Tanh()(x), mine)
    torch.testing.assert_close(mine, torchs, rtol=0, atol=2.4e-7)
    assert mine[x == 0].eq(0).all()  # black stays black
    assert torch.isnan(Tanh()(torch.tensor(torch.nan)))
    mine.sum().backward()
    torchs.sum().backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=5e-7)


@pytest.mark.parametrize("norm", [RMSNorm(), Centred()], ids=lambda norm: type(norm).__name__)
@pytest.mark.parametrize("shape", [(4, 3, 6, 5), (4, 7)])
def test_a_norm_makes_each_record_s_mean_square_one(norm: nn.Module, shape: tuple[int, ...]) -> None:
    x = normal(5, *shape) * 3 + 2
    found = norm(x)
    torch.testing.assert_close(found.square().flatten(1).mean(1), torch.ones(len(x)), rtol=0, atol=1e-4)
    for record, alone in zip(found, x, strict=True):
        torch.testing.assert_close(norm(alone[None])[0], record)  # records do not mix


def test_centred_maps_have_no_mean() -> None:
    maps, features = normal(5, 4, 3, 6, 5) * 3 + 2, normal(6, 4, 7) + 1
    torch.testing.assert_close(Centred()(maps).mean(dim=(2, 3)), torch.zeros(4, 3), rtol=0, atol=1e-5)
    torch.testing.assert_close(Centred()(features).mean(1), torch.zeros(4), rtol=0, atol=1e-6)
    torch.testing.assert_close(Centred()(maps), Centred()(maps * 2 + normal(7, 1, 3, 1, 1)))


@pytest.mark.parametrize("norm", ["rms", "centred"])
def test_a_black_image_has_a_gradient(norm: str) -> None:
    """Its features are all zero, and nothing is divided by their mean square."""
    module = built("mnist-cnn", MNIST, norm=norm)
    module(torch.zeros(2, *MNIST)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in module.parameters())


def test_channels_last_keeps_values() -> None:
    for channels in (1, 3):
        images = normal(4, 5, channels, 6, 7)
        laid_out = channels_last(images)
        assert torch.equal(laid_out, images)
        assert laid_out.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(Flatten()(laid_out), images.permute(0, 2, 3, 1).flatten(1))
    for other in (normal(4, 5, 6), normal(4, 5, 6, 7), normal(4, 5)):
        assert channels_last(other) is other


def test_cnns_need_images() -> None:
    for name, shape in itertools.product(("mnist-cnn", "cifar10-cnn", "digits-cnn"), [(64,), (8, 8), (1, 3, 8)]):
        with refused(f"model.name={name}", str(shape), "mlp"):
            built(name, torch.Size(shape))


def test_widths_must_be_positive() -> None:
    for model in ({"channels": [0, 4]}, {"channels": [3, -1]}, {"hidden": 0}):
        with refused("model."):
            validate({"model": model}, "test")


def test_accuracy_is_the_share_of_right_answers() -> None:
    logits = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])
    assert accuracy(logits.argmax(-1), torch.tensor([1, 1, 1, 0])) == 0.75


# Initialisation


def test_the_last_layer_starts_at_zero() -> None:
    for name in MODELS:
        network = Network(built(name, CIFAR))
        images = torch.randn(3, *CIFAR)
        assert torch.equal(network.outputs(network.initial_parameters(), images), torch.zeros(3, 10))


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"softmax", "linear"}))  # these are one layer of zeros
def test_a_seed_gives_the_same_model_and_another_another(name: str) -> None:
    first, again, other = (parameters_to_vector(built(name, CIFAR, seed=s).parameters()) for s in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_building_neither_reads_nor_moves_torchs_generator() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        first = parameters_to_vector(built("mlp", DIGITS).parameters())
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(2)
        assert torch.equal(parameters_to_vector(built("mlp", DIGITS).parameters()), first)


# A user's own module


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory; what is imported from it is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


def test_a_users_module_is_found_in_the_working_directory(here: Path) -> None:
    (here / "mine.py").write_text(
        "import torch\n"
        "torch.manual_seed(99)  # must not undo the run's seed\n"
        "def network():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))\n"
    )
    before = torch.get_rng_state()
    first, again, other = (
        parameters_to_vector(built("mine:network", torch.Size((4,)), seed=s).parameters()) for s in (5, 5, 6)
    )
    assert len(first) == dense(4, 6) + dense(6, 3)
    assert torch.equal(first, again)  # the first time it was imported, the second time it was there
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("name", "parts"), [
    ("nothing_of_this_name:network", ["model.name=nothing_of_this_name:network", "package.module:name"]),
    ("mine:missing", ["model.name=mine:missing", "missing"]),
    ("mine:", ["model.name=mine:"]),
    (":network", ["model.name=:network"]),
    (".mine:network", ["model.name=.mine:network"]),
    ("mine:needs_arguments", ["model.name=mine:needs_arguments", "without arguments"]),
    ("mine:number", ["returned a int", "torch.nn.Module"]),
    ("resnet", ["no model 'resnet'", "mnist-cnn", "package.module:callable"]),
])  # fmt: skip
def test_a_bad_path_is_refused_in_one_line(here: Path, name: str, parts: list[str]) -> None:
    (here / "mine.py").write_text("def needs_arguments(n): ...\ndef number(): return 3\n")
    with refused(*parts):
        built(name, torch.Size((4,)))


class Lambda(nn.Module):
    def __init__(self, function: Callable[[Tensor], object]):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(4, 3)), function

    def forward(self, x: Tensor) -> object:
        return self.function(x @ self.weight)


@pytest.mark.parametrize(("module", "parts"), [
    (nn.Linear(4, 2), ["(2,)", "3 classes"]),
    (nn.Linear(5, 3), ["records of shape (4,)"]),
    (Lambda(lambda y: y.sum(1)), ["()", "3 classes"]),
    (Lambda(lambda y: y[:, None]), ["(1, 3)", "3 classes"]),
    (Lambda(lambda y: {"scores": y}), ["returns a dict", "logits"]),
    (Lambda(lambda y: y[:1]), ["[1, 3]", "a row per record"]),
    (Lambda(lambda y: y[:, :, :, 0]), ["records of shape (4,)"]),
], ids=["few scores", "other inputs", "a number", "a matrix", "a mapping", "one row", "an index error"])  # fmt: skip
def test_a_model_that_does_not_fit_the_data_is_refused(module: nn.Module, parts: list[str]) -> None:
    with refused(*parts):
        Network(module, task=MultiClass(outputs=3)).check(normal(1, 5, 4), torch.zeros(5, dtype=torch.int64))


def test_a_model_may_have_more_scores_than_classes() -> None:
    Network(nn.Linear(4, 7), task=MultiClass(outputs=3)).check(normal(1, 5, 4), torch.zeros(5, dtype=torch.int64))


def test_parameters_that_cannot_be_trained_are_refused() -> None:
    with refused("float32", "model.float()"):
        Network(nn.Linear(4, 3).double())
    with refused("float32"):
        Network(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3).half()))
    with refused("no parameters"):
        Network(nn.Flatten())
    for lazy in (nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.LazyBatchNorm1d(affine=False)):
        with refused("lazy", "run it once"):
            Network(nn.Sequential(nn.Linear(4, 3), lazy))
    with refused("no parameters", "frozen"):
        Network(nn.Linear(4, 3).requires_grad_(False))


def test_a_frozen_batch_norm_uses_its_running_statistics_and_mixes_no_records() -> None:
    backbone = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU()))
    backbone.train()(normal(3, 50, 4) * 5 + 1)  # statistics of some training before
    backbone.eval().requires_grad_(False)
    module = nn.Sequential(backbone, nn.Linear(6, 3))
    network = Network(module)
    inputs = normal(4, 7, 4)
    assert network.mixes_records is None
    torch.testing.assert_close(network.outputs(network.initial_parameters(), inputs), module(inputs).detach())
    again = network.to_module(network.initial_parameters())
    assert torch.equal(again[0][1].running_mean, backbone[1].running_mean)


def test_frozen_parameters_are_not_in_the_vector() -> None:
    module = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)))
    module[0].requires_grad_(False)
    network = Network(module)
    assert network.num_parameters == 4 * 3 + 3
    assert [name for name, _ in network.shapes()] == ["1.weight", "1.bias"]
    again = network.to_module(torch.zeros(15))
    assert torch.equal(again[0].weight, module[0].weight)
    assert not again[1].weight.any()


@pytest.mark.parametrize("wrap", [lambda y: y, lambda y: (y, None), lambda y: [y], lambda y: {"logits": y},
                                  lambda y: SimpleNamespace(logits=y)])  # fmt: skip
def test_an_output_may_be_a_tensor_or_hold_logits(wrap: Callable[[Tensor], object]) -> None:
    x = torch.arange(12.0)
    inputs = normal(1, 5, 4)
    assert torch.equal(Network(Lambda(wrap)).outputs(x, inputs), inputs @ x.view(4, 3))


# BatchNorm


@pytest.mark.parametrize(("layer", "name"), [
    (nn.BatchNorm1d(4), "BatchNorm1d"), (nn.BatchNorm2d(4), "BatchNorm2d"), (nn.SyncBatchNorm(4), "SyncBatchNorm"),
    (nn.BatchNorm1d(4, affine=False), "BatchNorm1d"), (nn.BatchNorm3d(4), "BatchNorm3d"),
    (nn.GroupNorm(2, 4), None), (nn.LayerNorm(4), None), (nn.InstanceNorm2d(4, affine=True), None),
])  # fmt: skip
def test_layers_that_mix_records_are_known(layer: nn.Module, name: str | None) -> None:
    assert Network(nn.Sequential(nn.Linear(4, 4), nn.Sequential(layer))).mixes_records == name


def normed() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)))


def small() -> Data:
    n = 2 * (EVALUATION_BLOCK + 1)  # one more than fits in a block, for Q and for the test set
    x, y = normal(6, n, 4), torch.arange(n) % 3
    x[:, 0] += 3 * y
    return Data("small", x[:120], y[:120], x, y, 3)


def config(**sections: object) -> Config:
    values = {"rounds": 8, "graph": {"agents": 3}, "partition": {"kind": "iid"}, "batch": {"size": 2}}
    return validate({**values, "data": {"validation": EVALUATION_BLOCK + 1}, **sections}, "test")


@pytest.mark.parametrize("privacy", [
    {"mode": "noise", "sigma": 0.1},
    {"mode": "noise", "sigma": 0.1, "clipping": "batch"},
    {"mode": "none"},
], ids=["noise", "noise, batch", "per-sample"])  # fmt: skip
def test_batch_norm_is_refused_where_records_must_not_mix(privacy: dict[str, object]) -> None:
    with refused("BatchNorm1d", "GroupNorm", "privacy.mode=none"):
        prepare(config(privacy=privacy), model=normed(), data=small())


def test_batch_norm_is_allowed_without_privacy() -> None:
    """Batches of one record and a block of one left over included: torch's BatchNorm takes neither."""
    e = prepare(config(privacy={"mode": "none", "clipping": "batch"}), model=normed(), data=small())
    sizes = {len(e.batches.draw(agent, t)) for agent in range(3) for t in range(1, 9)}
    assert {0, 1} <= sizes
    steps = list(rounds(e))
    assert len(steps) == 8
    assert not torch.equal(steps[-1].state.x[0], e.network.initial_parameters())


def test_batch_norm_takes_the_statistics_of_the_batch_at_hand() -> None:
    module = normed()
    module(normal(8, 9, 4) * 5 + 2)  # moves the running statistics, which must not matter
    inputs = normal(9, 12, 4)
    linear, _, tanh, last = module
    h = linear(inputs)
    h = (h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-5).sqrt()
    network = Network(module)
    torch.testing.assert_close(network.outputs(network.initial_parameters(), inputs), last(tanh(h)).detach())


# The flat vector


def mlp() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3)))


def test_a_replicas_parameters_are_views_of_its_flat_vector() -> None:
    module = mlp()
    replica = Replica(module, torch.device("cpu"))
    assert torch.equal(replica.flat, parameters_to_vector(module.parameters()))
    x = normal(1, len(replica.flat))
    loaded = replica.load(x)
    assert torch.equal(parameters_to_vector(loaded.parameters()), x)
    at = replica.flat.data_ptr()
    for p in loaded.parameters():
        assert p.data_ptr() == at
        at += 4 * p.numel()
    x.zero_()  # a copy: what is loaded does not change with it
    assert replica.flat.any()


def test_a_shared_parameter_is_one_parameter() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    network = Network(module)
    assert network.num_parameters == 16 + 4 + 4
    x = normal(1, network.num_parameters)
    loaded = network.replica().load(x)
    assert loaded[0].weight is loaded[1].weight
    vector_to_parameters(x, module.parameters())
    torch.testing.assert_close(network.outputs(x, normal(2, 3, 4)), module(normal(2, 3, 4)).detach())


def test_the_users_module_is_left_alone() -> None:
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.BatchNorm1d(6), nn.Linear(6, 3))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    network = Network(module)
    network.outputs(normal(1, network.num_parameters), normal(2, 5, 4))
    assert module.training
    assert module[1].inplace
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("n", [1, EVALUATION_BLOCK, EVALUATION_BLOCK + 1, 3 * EVALUATION_BLOCK - 1])
def test_logits_are_the_modules_in_evaluation_mode(n: int) -> None:
    module, inputs = mlp(), normal(3, n, 4)
    network = Network(module)
    x = normal(1, network.num_parameters)
    vector_to_parameters(x, module.parameters())
    logits = network.outputs(x, inputs)
    assert not logits.requires_grad
    torch.testing.assert_close(logits, module.eval()(inputs).detach())


def test_a_module_comes_out_as_it_went_in() -> None:
    network = Network(mlp())
    assert [(name, tuple(shape)) for name, shape in network.shapes()] == [
        ("0.weight", (6, 4)), ("0.bias", (6,)), ("3.weight", (3, 6)), ("3.bias", (3,)),
    ]  # fmt: skip
    x, inputs = normal(1, network.num_parameters), normal(2, 5, 4)
    module = network.to_module(x)
    assert torch.equal(parameters_to_vector(module.parameters()), x)
    torch.testing.assert_close(module(inputs).detach(), network.outputs(x, inputs))
    vector_to_parameters(torch.zeros(network.num_parameters), module.parameters())  # stands alone
    assert network.outputs(x, inputs).any()


def test_logits_from_several_threads_are_those_from_one() -> None:
    network, inputs = Network(built("digits-cnn", DIGITS)), normal(4, 30, *DIGITS)
    x = normal(5, 40, network.num_parameters)
    serial = [network.outputs(row, inputs) for row in x]
    with Workers(4) as workers:
        for _ in range(3):
            parallel = workers.map(lambda row: network.outputs(row, inputs), x)
            assert all(torch.equal(a, b) for a, b in zip(parallel, serial, strict=True))
