"""Data sets with random transforms: drawn anew in every round, and the same in every repetition."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

import pdsl
from pdsl.auditing import audit
from pdsl.config import validate
from pdsl.data import from_python
from pdsl.gradients.clipping import LocalGradients
from pdsl.training.experiment import Experiment, prepare
from pdsl.training.trainer import build_trainer
from pdsl.utils.inputs import AugmentedFields, concat, negated
from pdsl.utils.random import Streams
from pdsl.utils.workers import Workers
from tests.helpers.refusals import refused

N = 60
Y = torch.arange(N) % 2
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(0)) + 2 * Y[:, None]


class Noisy(Dataset[Any]):
    """Records with noise from the three global generators."""

    classes = ("cat", "dog")

    def __init__(self, label_noise: bool = False):
        self.label_noise = label_noise

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        noise = torch.rand(()) + np.random.random() + random.random()
        return X[i] + 0.1 * noise, int(Y[i] ^ (self.label_noise and random.random() < 0.5))


def experiment(data: Any = None, **settings: Any) -> Experiment:
    given = from_python(((Noisy() if data is None else data), (X, Y)), Streams(0))
    values = {"graph": {"agents": 3}, "rounds": 4, "model": {"name": "softmax"}}
    return prepare(validate({**values, "data": {"name": "python", **settings}}, "settings"), data=given)


def local(e: Experiment, workers: Workers) -> LocalGradients:
    return build_trainer(e, workers).local


def test_random_transforms_are_found_and_class_names_taken() -> None:
    data = from_python(Noisy(), Streams(0))
    assert isinstance(data.x, AugmentedFields)
    assert isinstance(data.test_x, Tensor)
    assert data.class_names == ("cat", "dog")
    fixed = from_python(Subset(Noisy(), range(40)), Streams(0))
    assert isinstance(fixed.x, AugmentedFields)
    assert fixed.class_names == ("cat", "dog")
    assert isinstance(from_python(list_of_records(), Streams(0)).x, Tensor)


def list_of_records() -> Dataset[Any]:
    return torch.utils.data.TensorDataset(X, Y)


def test_reading_leaves_the_global_generators_alone() -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    expected = float(torch.rand(())), np.random.random(), random.random()
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    from_python(Noisy(), Streams(0))
    assert (float(torch.rand(())), np.random.random(), random.random()) == expected


def test_a_record_is_transformed_anew_in_every_round_and_step_but_not_in_a_repetition() -> None:
    with Workers(1) as workers:
        own = local(experiment(), workers)
        again = local(experiment(), workers)
        batch = torch.arange(5)
        first = own.read(0, batch, 1)
        assert torch.equal(first, again.read(0, batch, 1))
        for t, step in ((2, 0), (1, 1)):
            assert not torch.equal(first, own.read(0, batch, t, step))
        offsets = (own.read(0, batch, 1) - own.inputs[0].tensors[0][batch]) / 0.1
        assert offsets.std(dim=1).max() < 1e-4  # one offset per record ...
        assert offsets[:, 0].unique().numel() == 5  # ... of its own


def test_the_transform_of_a_record_does_not_depend_on_the_other_records() -> None:
    with Workers(1) as workers:
        own = local(experiment(), workers)
        whole = own.read(0, torch.arange(6), 1)
        assert torch.equal(own.read(0, torch.tensor([0, 2, 5]), 1), whole[[0, 2, 5]])


def test_augmented_records_join_plain_ones() -> None:
    data = from_python([Noisy(), (X, Y), Noisy()], Streams(0))
    assert isinstance(data.x, AugmentedFields)
    seeds = np.arange(len(data.y), dtype=np.uint64)
    everything = data.x.at(torch.arange(len(data.y)), seeds)
    assert isinstance(everything, Tensor)
    assert data.owner is not None
    changed = (everything != data.x.tensors[0]).any(dim=1)
    assert changed.tolist() == [
        bool(o != 1) and s != 0 for o, s in zip(data.owner.tolist(), range(len(seeds)), strict=True)
    ]
    assert isinstance(negated(data.x), Tensor)
    assert len(concat([data.x, data.x])) == 2 * len(data.y)


@pytest.mark.parametrize("workers", [1, 3])
def test_runs_are_the_same_on_any_number_of_workers(workers: int) -> None:
    def run(count: int) -> str:
        result = pdsl.train(nn.Linear(4, 2), (Noisy(), (X, Y)), graph=pdsl.full(3), rounds=3, engine={"workers": count})
        return str(result.summary["models_sha256"])

    torch.manual_seed(0)
    model_seed = torch.get_rng_state()
    first = run(1)
    torch.set_rng_state(model_seed)
    assert run(workers) == first


def test_an_audit_replays_the_transforms() -> None:
    torch.manual_seed(0)
    result = pdsl.train(nn.Linear(4, 2), (Noisy(), (X, Y + 0)), graph=pdsl.full(3), rounds=3)
    report = audit(result, canaries=0)
    wrong = [finding for finding in report.findings if finding.verdict.name != "PASS"]
    assert not wrong, wrong


class Own(Noisy):
    """Noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return X[i] + self.generator.random(), int(Y[i])


class Resized(Noisy):
    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return X[i, : 2 + (random.random() > 0.3)], 0


class Broken(Noisy):
    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        raise KeyError("no such file")


def test_transforms_that_cannot_be_repeated_are_refused() -> None:
    with refused("item 0 changes whenever it is read", "global"):
        from_python(Own(), Streams(0))
    with refused("label of item", "random"):
        from_python(Noisy(label_noise=True), Streams(0))
    with refused("item 0 cannot be read", "no such file"):
        from_python(Broken(), Streams(0))
    with refused("data.scale=public", "transforms"):
        experiment(data=Noisy(), scale="public")


def test_images_in_a_dataset_are_pixels() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (N, 5, 4, 3), dtype=np.uint8)

    class Pictures(Noisy):
        def __getitem__(self, i: int) -> Any:
            return Image.fromarray(pixels[i]), int(Y[i])

    data = from_python((Pictures(), Pictures()), Streams(0))
    assert torch.equal(data.x, torch.tensor(pixels).permute(0, 3, 1, 2).float() / 255)
    assert data.scaling is not None
