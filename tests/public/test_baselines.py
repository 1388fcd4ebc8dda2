"""Baselines against literal loops, and the sentence about the gain."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdsl
from pdsl.metrics import BASELINES
from pdsl.public.start import PENALTIES, fit_without_privacy, train_on_public, with_start
from pdsl.training import baselines
from pdsl.training.baselines import MOMENTUM, compute_baselines, describe_gain, train_on_q
from pdsl.training.experiment import Experiment
from pdsl.training.learning_rate import rate_for_walk
from pdsl.training.trainer import build_trainer
from pdsl.utils.workers import Workers
from tests.helpers.experiments import experiment

Values = dict[str, Any]
SMALL: Values = {"rounds": 4, "graph": {"kind": "ring", "agents": 3}, "validation": 60, "partition": "iid"}
PUBLIC: Values = {"features": "patches", "patch": 3, "pool": 2, "filters": 20, "components": 20}


@pytest.mark.slow
def test_a_seeded_simulation_has_all_five_baselines() -> None:
    found = compute_baselines(experiment("linear", **SMALL))
    assert set(found) == set(BASELINES) and len(found) == 5
    assert all(value is not None and 0 <= value <= 1 for value in found.values())


def test_a_private_run_has_the_baseline_of_the_public_set_alone() -> None:
    assert set(compute_baselines(experiment("linear", privacy={"randomness": "system"}, **SMALL))) == {"public"}


def test_without_noise_there_are_no_noisy_baselines() -> None:
    assert set(compute_baselines(experiment("linear", privacy={"mode": "none"}, **SMALL))) == {
        "public",
        "alone",
        "pooled",
    }


@pytest.mark.parametrize(("setting", "names"), [("none", set()), ("public", {"public"})])
def test_the_setting_limits_the_baselines(setting: str, names: set[str]) -> None:
    assert set(compute_baselines(experiment("linear", baselines=setting, **SMALL))) == names


def test_summary_and_report_of_a_run_have_the_baselines() -> None:
    result = pdsl.train("linear", "digits", **SMALL)
    assert result.summary["baselines"] == result.baselines
    assert result.summary["gain"].startswith("Collaboration was worth")


@pytest.mark.slow
@pytest.mark.parametrize("public", [{}, {"start": "labels"}, {**PUBLIC, "start": "labels"}], ids=str)
def test_the_public_baseline_is_training_on_all_of_the_public_set(public: Values, empty_cache: object) -> None:
    e = experiment("linear", public=public, **SMALL)
    found = train_on_q(e)
    cold = experiment("linear", public={**public, "start": "none"}, **SMALL)
    assert len(cold.validation[1]) == 60
    inputs, record = cold.validation[0], torch.arange(60)
    if cold.public.features is not None and cold.public.features.variants is not None:
        inputs, record = cold.public.features.variants
        assert torch.equal(record[:60], torch.arange(60)) and len(record) > 60
    by_hand = train_on_public(cold.network, inputs, cold.validation[1][record], record, False, False, "by hand")
    assert torch.allclose(found, by_hand, atol=1e-4 * float(by_hand.abs().max()))
    outputs = cold.network.outputs(by_hand, e.test[0])
    score = float((outputs.argmax(1) == e.test[1]).double().mean())
    assert compute_baselines(e)["public"] == pytest.approx(score, abs=0.004)


def test_the_public_baseline_does_not_depend_on_private_records() -> None:
    (x, y), test = (torch.randn(90, 4), torch.arange(90) % 3), (torch.randn(80, 4), torch.arange(80) % 3)
    values = {"graph": "ring", "rounds": 1, "baselines": "public", "validation": 40}
    found = [train_on_q(experiment("linear", ((sign * x, y), test), **values)) for sign in (1, -1)]
    assert torch.equal(*found)


def whole_batches() -> Experiment:
    """Every record in every round, and agents of nearly equal size."""
    return experiment("linear", batch={"rate": 1.0, "size": 390}, **SMALL)


@pytest.fixture
def no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "_noise", lambda e, pooled: 0.0)


def train_with(e: Experiment, pooled: bool) -> Tensor:
    with Workers(1) as workers:
        return baselines._train(e, build_trainer(e, workers).local, pooled)


def clipped_mean(e: Experiment, x: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    """Sum of the records' gradients, each of norm at most C, over the public batch size; one record at a time."""
    C, total = e.config.privacy.max_grad_norm, torch.zeros(len(x), dtype=torch.float64)
    for record, target in zip(inputs, targets, strict=True):
        module = e.network.to_module(x)
        nn.functional.cross_entropy(module(record[None]), target[None]).backward()
        g = torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None]).double()
        total += g * min(1.0, C / float(g.norm()))
    return total / 390


@pytest.mark.slow
def test_central_without_noise_is_clipped_gradient_descent_with_momentum_on_all_records(no_noise: None) -> None:
    e = whole_batches()
    gamma = rate_for_walk(e.config, e.network, e.validation, 0.0, 1.0)
    x = e.network.initial_parameters()
    u = torch.zeros_like(x)
    everything = torch.cat(e.parts)
    for _ in range(e.config.rounds):
        g = clipped_mean(e, x, e.data.x[everything], e.data.y[everything]) / 3  # type: ignore[arg-type]
        u = MOMENTUM * u + g.float()
        x = x - gamma * u
    (found,) = train_with(e, pooled=True)
    assert torch.allclose(found, x, atol=1e-4 * float(x.abs().max()))


@pytest.mark.slow
def test_alone_without_noise_is_clipped_gradient_descent_on_each_agents_own_records(no_noise: None) -> None:
    e = whole_batches()
    gamma = rate_for_walk(e.config, e.network, e.validation, 0.0, 1.0)
    found = train_with(e, pooled=False)
    assert found.shape == (3, e.network.num_parameters)
    for agent in (0, 2):
        x = e.network.initial_parameters()
        u = torch.zeros_like(x)
        for _ in range(e.config.rounds):
            own = e.parts[agent]
            u = MOMENTUM * u + clipped_mean(e, x, e.data.x[own], e.data.y[own]).float()  # type: ignore[arg-type]
            x = x - gamma * u
        assert torch.allclose(found[agent], x, atol=1e-4 * float(x.abs().max()))


def test_noise_of_alone_and_central_is_that_of_the_budget() -> None:
    """One message per step needs z·Δ; the mean over M agents has a sensitivity of Δ/M."""
    e = experiment("linear", privacy={"target_epsilon": 3.0}, **SMALL)
    assert e.mechanisms is not None
    m = e.mechanisms[0]
    assert baselines._noise(e, pooled=False) == pytest.approx(m.noise_multiplier * m.sensitivity)
    assert baselines._noise(e, pooled=True) == pytest.approx(m.noise_multiplier * m.sensitivity / 3)
    assert m.sigma == pytest.approx(m.noise_multiplier * m.sensitivity * m.messages**0.5)


def test_training_without_privacy_ends_at_the_optimum_of_one_layer() -> None:
    e = experiment("linear", privacy={"mode": "none"}, **SMALL)
    x = fit_without_privacy(e.network, e.data.x, e.data.y)
    module = e.network.to_module(x)
    loss = nn.functional.cross_entropy(module(e.data.x), e.data.y)
    moved = nn.utils.parameters_to_vector(module.parameters()) - e.network.initial_parameters()
    (loss + PENALTIES[0] * moved.square().sum()).backward()
    gradient = torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None])
    assert float(gradient.norm()) < 0.01
    assert float(loss) < 0.1


def test_baselines_start_from_the_start_of_the_run(no_noise: None) -> None:
    e = experiment("linear", public={"start": "labels"}, **{**SMALL, "rounds": 1})
    other = with_start(e.network, 0 * e.network.initial_parameters())
    assert not torch.equal(e.network.initial_parameters(), other.initial_parameters())
    (x,) = train_with(e, pooled=True)
    with Workers(1) as workers:
        local = build_trainer(e, workers).local
        g = local.gradients(1, torch.arange(3), e.network.initial_parameters().expand(3, -1)).mean(0).float()
    gamma = rate_for_walk(e.config, e.network, e.validation, 0.0, 1.0)
    assert torch.allclose(x, e.network.initial_parameters() - gamma * g, atol=1e-6)


def test_a_baseline_that_diverges_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    e = experiment("linear", **SMALL)
    monkeypatch.setattr(
        baselines, "fit_without_privacy", lambda network, *of, **steps: torch.full_like(of[0][0].flatten(), math.nan)
    )
    found = compute_baselines(e)
    assert found["pooled"] is None and found["public"] is not None
    text = describe_gain(0.9, found, "accuracy", True)
    assert "pooled" not in text and "over the public set alone" in text


def test_baselines_of_a_run_that_stopped_early_have_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    honest = baselines._train

    def counted(e: Any, *of: Any, **named: Any) -> torch.Tensor:
        lengths.append(e.config.rounds)
        return honest(e, *of, **named)

    monkeypatch.setattr(baselines, "_train", counted)
    budget = {"noise_multiplier": 1.0, "target_epsilon": 3.0}
    result = pdsl.train("linear", "digits", privacy=budget, **{**SMALL, "rounds": 60})
    assert len(result.rows) < 20
    assert set(result.baselines) > {"alone_private", "central"}
    assert set(lengths) == {len(result.rows)}


def test_a_run_with_an_unusable_cache_keeps_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PDSL_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot use the cache"):
        result = pdsl.train("linear", "digits", out=tmp_path / "run", baselines="public", **SMALL)
    assert result.baselines["public"] == pytest.approx(result.summary["baselines"]["public"])
    assert (tmp_path / "run/report.html").exists()


@pytest.mark.parametrize(
    ("score", "found", "metric", "higher", "text"),
    [
        (
            0.9,
            {"public": 0.8, "alone": 0.7, "alone_private": 0.85, "pooled": 0.95, "central": 0.92},
            "accuracy",
            True,
            "Collaboration was worth: +10.0 points over the public set alone, +5.0 over training alone,"
            " 5.0 below pooled data without privacy.",
        ),
        (
            0.8,
            {"public": 0.85, "alone_private": 0.7, "pooled": 0.75},
            "accuracy",
            True,
            "Collaboration was worth nothing here: −5.0 points over the public set alone, +10.0 over training alone,"
            " 5.0 above pooled data without privacy.",
        ),
        (
            2.0,
            {"public": 4.0, "alone_private": 2.5, "pooled": 1.6},
            "rmse",
            False,
            "Collaboration was worth: +50.0 % of rmse over the public set alone, +20.0 over training alone,"
            " 25.0 below pooled data without privacy.",
        ),
        (5.0, {"public": 4.0}, "rmse", False, "Collaboration was worth nothing here: −25.0 % of rmse over the public"
                                              " set alone."),
        (-48.0, {"public": -50.0}, "loss", False, "Collaboration was worth nothing here: −4.0 % of loss over the public"
                                                  " set alone."),
        (0.9, {}, "accuracy", True, ""),
        (0.9, {"public": None, "alone": 0.5}, "accuracy", True, ""),
        (float("nan"), {"public": 0.5}, "accuracy", True, ""),
        (0.9, {"public": 0.9}, "accuracy", True, "Collaboration was worth nothing here: +0.0 points over the public set"
                                                 " alone."),
    ],
)  # fmt: skip
def test_describe_gain(score: float, found: dict[str, float | None], metric: str, higher: bool, text: str) -> None:
    assert describe_gain(score, found, metric, higher) == text
