"""Starts trained on the public set: the optimum, held-out records, and equal bits everywhere."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from pdsl.models.network import Network
from pdsl.public import start
from pdsl.public.knowledge import hold_out
from pdsl.public.start import train_on_public
from pdsl.tasks import MultiClass, Regression
from tests.helpers.experiments import experiment
from tests.helpers.refusals import refused

FEATURES = {"features": "patches", "patch": 3, "pool": 2, "filters": 20, "components": 20, "start": "labels"}


def records(n: int = 120, features: int = 6, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, features, generator=generator)
    scores = x @ torch.randn(features, classes, generator=generator)
    return x, (scores + torch.randn(n, classes, generator=generator)).argmax(1)


def softmax_regression(features: int = 6, classes: int = 3) -> Network:
    layer = nn.Linear(features, classes, bias=False)
    nn.init.zeros_(layer.weight)
    return Network(layer, task=MultiClass(classes))


def optimum(x: Tensor, y: Tensor, penalty: float) -> Tensor:  # [classes, features]
    """Minimum of mean loss + penalty · ‖W‖², which is scikit-learn's objective over C·n with C = 1/(2·n·penalty)."""
    model = LogisticRegression(C=1 / (2 * len(y) * penalty), fit_intercept=False, tol=1e-10, max_iter=10_000)
    return torch.from_numpy(model.fit(x.double().numpy(), y.numpy()).coef_)


@pytest.mark.parametrize("penalty", [1e-4, 1e-3, 3e-3])
def test_minimise_finds_the_optimum_of_scikit_learn(penalty: float) -> None:
    (x, y), network = records(), softmax_regression()
    found = start._minimise(network, x, y, penalty, network.initial_parameters()).view(3, 6)
    expected = optimum(x, y, penalty)
    assert torch.allclose(found.double(), expected, atol=3e-3 * float(expected.abs().max()))


def test_minimise_penalises_the_distance_from_the_initial_parameters() -> None:
    """With a huge penalty nothing moves."""
    x, y = records()
    torch.manual_seed(0)
    network = Network(nn.Linear(6, 3), task=MultiClass(3))
    x0 = network.initial_parameters()
    assert torch.allclose(start._minimise(network, x, y, 1e6, x0), x0, atol=1e-5)


def test_start_is_the_optimum_for_the_penalty_of_least_cross_validated_loss(empty_cache: Path) -> None:
    (x, y), network = records(60), softmax_regression()
    record = torch.arange(60)
    losses = []
    for penalty in start.PENALTIES:
        total = 0.0
        for k in range(start.FOLDS):
            kept = record % start.FOLDS != k
            logits = x[~kept].double() @ optimum(x[kept], y[kept], penalty).T
            total += float(nn.functional.cross_entropy(logits, y[~kept], reduction="sum"))
        losses.append(total)
    best = start.PENALTIES[int(np.argmin(losses))]
    found = train_on_public(network, x, y, record, False, False, "key").view(3, 6)
    expected = optimum(x, y, best)
    assert torch.allclose(found.double(), expected, atol=3e-3 * float(expected.abs().max()))


def test_variants_of_a_record_are_in_one_fold(empty_cache: Path) -> None:
    """Ten copies of each record with their record numbers give the optimum of the records themselves."""
    (x, y), network = records(60), softmax_regression()
    record = torch.arange(60)
    once = train_on_public(network, x, y, record, False, False, "key")
    copies = train_on_public(network, x.repeat(10, 1), y.repeat(10), record.repeat(10), False, False, "key")
    assert torch.allclose(once, copies, atol=1e-2 * float(once.abs().max()))


@pytest.mark.parametrize(("n", "fraction"), [(4, 0.1), (10, 0.1), (100, 0.25), (4, 0.95), (10, 0.97)])
def test_hold_out_leaves_records_on_both_sides(n: int, fraction: float) -> None:
    trained = hold_out(n, fraction)
    held = int((~trained).sum())
    assert 2 <= held <= n - 1
    assert held == min(n - 1, max(2, round(fraction * n)))
    assert torch.equal(trained, hold_out(n, fraction))


def test_hold_out_of_too_few_records_is_refused() -> None:
    with refused("public.start=labels", "at least 4", "3"):
        hold_out(3, 0.1)


SMALL = {"rounds": 2, "graph": {"kind": "ring", "agents": 3}, "validation": 60, "baselines": "none"}


@pytest.mark.slow
@pytest.mark.parametrize("public", [FEATURES, {"start": "labels"}], ids=["features", "pixels"])
def test_start_does_not_change_with_the_labels_of_held_out_records(
    monkeypatch: pytest.MonkeyPatch, public: dict[str, object]
) -> None:
    module = sys.modules["pdsl.training.experiment"]
    honest, changes = module.split_public, []  # type: ignore[attr-defined]
    trained = hold_out(60, 0.1)

    def split(*of: object) -> object:
        (x, y), test = honest(*of)
        y = y.clone()
        y[changes] = (y[changes] + 1) % 10
        return (x, y), test

    monkeypatch.setattr(module, "split_public", split)
    first = experiment(public=public, **SMALL)
    changes[:] = torch.nonzero(~trained)[:, 0].tolist()
    second = experiment(public=public, **SMALL)
    assert torch.equal(first.network.initial_parameters(), second.network.initial_parameters())
    assert not torch.equal(first.validation[1], second.validation[1])
    assert len(first.validation[1]) == int((~trained).sum())
    changes[:] = torch.nonzero(trained)[:3, 0].tolist()
    third = experiment(public=public, **SMALL)
    assert not torch.equal(first.network.initial_parameters(), third.network.initial_parameters())


def test_start_from_pixels_does_not_change_with_held_out_images(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["pdsl.training.experiment"]
    honest, held = module.split_public, ~hold_out(60, 0.1)  # type: ignore[attr-defined]
    starts = []
    for factor in (1.0, -2.0):

        def split(*of: object, factor: float = factor) -> object:
            (x, y), test = honest(*of)
            x = x.clone()
            x[held] *= factor
            return (x, y), test

        monkeypatch.setattr(module, "split_public", split)
        starts.append(experiment(public={"start": "labels"}, **SMALL).network.initial_parameters())
    assert torch.equal(*starts)


def test_messages_are_valued_on_records_that_the_start_was_not_trained_on() -> None:
    e = experiment(public=FEATURES, **SMALL)
    assert e.public.public is not None
    held = ~hold_out(60, 0.1)
    assert torch.equal(e.validation[1], e.public.public[1][held])
    assert torch.equal(e.validation[0], e.public.public[0][held])  # type: ignore[arg-type, index]


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
def test_start_has_the_same_bits_wherever_the_inputs_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """Tensors that were read from a file are not aligned, and rounding depends on that."""
    monkeypatch.setattr(start, "STEPS", 50)
    x, y = records(203, 21)
    torch.manual_seed(0)
    module = nn.Linear(21, 3) if depth == 1 else nn.Sequential(nn.Linear(21, 5), nn.Tanh(), nn.Linear(5, 3))
    network = Network(module, task=MultiClass(3))
    found = []
    for offset in (0, 1, 3):
        moved = torch.zeros(x.numel() + 16)[offset : offset + x.numel()].view_as(x).copy_(x)
        assert moved.data_ptr() % 64 == 4 * offset
        monkeypatch.setenv("PDSL_CACHE", str(tmp_path / str(offset)))
        found.append(train_on_public(network, moved, y, torch.arange(203), False, False, "key"))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


NETWORK = {"model": {"name": "mlp", "hidden": 8}, "public": {"start": "labels"}}
PROGRAM = """
import sys, torch
from pdsl.public import start
start.STEPS = 100
from tests.helpers.experiments import experiment
from pdsl.utils.inputs import tensors_digest
e = experiment(**{settings})
print(tensors_digest([e.network.initial_parameters()]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("values", [{"public": FEATURES}, NETWORK], ids=["features", "network"])
def test_start_has_the_same_bits_in_another_process_and_with_two_workers(
    tmp_path: Path, values: dict[str, object]
) -> None:
    digests = []
    for workers in (1, 2):
        cache = {"PDSL_CACHE": str(tmp_path / str(workers))}  # nothing is found
        program = PROGRAM.format(settings={**SMALL, **values, "engine": {"workers": workers}})
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            env={**os.environ, **cache, "OMP_NUM_THREADS": str(workers)},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        )
        digests.append(done.stdout)
    assert digests[0] == digests[1] != ""


def test_another_loss_is_not_found_in_the_cache(empty_cache: Path) -> None:
    """Two losses of one name, and one with another constant, which no source file shows."""

    def weighted(factor: float) -> Any:
        def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return factor * nn.functional.cross_entropy(
                outputs, targets, reduction="none", label_smoothing=0.5 / factor
            )

        return loss

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    starts = [
        experiment(model, loss=weighted(factor), public={"start": "labels"}, rounds=2).network.initial_parameters()
        for factor in (1.0, 3.0)
    ]
    assert not torch.equal(*starts)


def test_constants_of_the_task_are_part_of_the_key(empty_cache: Path) -> None:
    """They come from all of Q, also from records that a start is not trained on."""
    torch.manual_seed(0)
    x, y, model = torch.randn(40, 4), torch.randn(40, 1), nn.Linear(4, 1)

    def trained(scale: float) -> Tensor:
        task = Regression(mean=torch.zeros(1), scale=torch.tensor([scale]))
        return train_on_public(Network(model, task=task), x, y, torch.arange(40), False, False, "key")

    assert torch.equal(trained(1.0), trained(1.0))
    assert not torch.equal(trained(1.0), trained(5.0))


def test_a_start_is_better_than_none(empty_cache: Path) -> None:
    x, y = records(400)
    network = softmax_regression()
    found = train_on_public(network, x[:200], y[:200], torch.arange(200), False, False, "key")
    accuracy = float((network.outputs(found, x[200:]).argmax(1) == y[200:]).double().mean())
    expected = float(((x[200:].double() @ optimum(x[:200], y[:200], 1e-3).T).argmax(1) == y[200:]).double().mean())
    assert accuracy > expected - 0.03 > 0.5


@pytest.mark.parametrize("kind", ["regression", "binary", "multilabel"])
def test_start_for_other_tasks_fits_the_public_set(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 5, generator=generator)
    scores = x @ torch.randn(5, 2, generator=generator)
    y = {"regression": 50 + 9 * scores[:, 0], "binary": (scores[:, 0] > 0).long(), "multilabel": (scores > 0).long()}
    e = experiment("softmax", (x, y[kind]), graph="ring", task=kind, public={"start": "labels"}, rounds=1)
    outputs = e.network.outputs(e.network.initial_parameters(), e.test[0])
    score = e.task.score(outputs, e.test[1])
    assert score < 1.0 if kind == "regression" else score > 0.9
