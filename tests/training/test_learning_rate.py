"""`learning_rate = "auto"`: the rule against numbers by hand, and the same number wherever it is resolved."""

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pdsl
from pdsl import topology
from pdsl.algorithms import ALGORITHMS
from pdsl.api import configure
from pdsl.config import load, validate
from pdsl.engine import LocalEngine
from pdsl.engine.launch import SingleProcess
from pdsl.models.network import Network
from pdsl.peer.experiment import agreed_mechanisms, build_experiment, build_network
from pdsl.peer.identity import Identity
from pdsl.privacy import Mechanism
from pdsl.runs.runner import open_run
from pdsl.tasks import Binary, MultiClass, Regression
from pdsl.training.experiment import Experiment, prepare
from pdsl.training.learning_rate import (
    MAX_LOGIT_SHIFT,
    MAX_REGRESSION_SHIFT,
    MAX_SHIFT,
    auto_learning_rate,
    curvature,
    model_scale,
    noise_per_step,
    noiseless_rate,
    remaining_loss,
)
from pdsl.utils.random import KEY_BYTES
from tests.helpers.commands import pdsl as command
from tests.helpers.commands import result_of, settings
from tests.helpers.organisations import make_organisations, make_plan, write_digits
from tests.helpers.ranks import outcomes

SMALL = ["graph.agents=4", "model.name=softmax", "data.validation=40", "batch.size=16"]


def test_with_much_noise_the_noise_of_the_run_is_the_models_scale() -> None:
    for walk in (0.5, 5.0, 50.0):
        assert auto_learning_rate(0.25, walk, 2.0) * walk == pytest.approx(0.25, rel=0.05)


def test_without_noise_the_base_rate_and_the_clipping_norm_count() -> None:
    assert noiseless_rate(0.25, 1.0, max_grad_norm=1.0) == 2.0
    assert noiseless_rate(0.25, 0.5, max_grad_norm=1.0) == 1.0
    assert noiseless_rate(0.25, 1.0, max_grad_norm=0.1) == pytest.approx(20.0)
    assert noiseless_rate(0.25, 1.0, max_grad_norm=100.0) == 2.0  # gradients are rarely that long
    assert auto_learning_rate(0.25, 0.0, 2.0) == 2.0


def test_noise_of_a_step_is_that_of_the_mean_message() -> None:
    """z·C/B of each agent, averaged over the agents, whatever the number of messages."""
    for messages in (1, 4):
        mechanisms = [Mechanism.from_noise_multiplier(3.0, 1 / 64, messages, steps=2)] * 9
        assert noise_per_step(mechanisms) == (pytest.approx(3 / 64 / 3), 2)
    assert noise_per_step(None) == (0.0, 1)


@pytest.mark.parametrize(("outputs", "task", "limit"), [
    (10, MultiClass(outputs=10), MAX_SHIFT / math.sqrt(2)),  # the difference of two independent scores
    (1, Binary(), MAX_LOGIT_SHIFT),
    (1, Regression(scale=torch.ones(1), mean=torch.zeros(1)), MAX_REGRESSION_SHIFT),
    (1, Regression(), 3.0 * MAX_REGRESSION_SHIFT),  # targets of deviation 3 that are not standardised
])  # fmt: skip
def test_scale_of_a_linear_model(outputs: int, task: Any, limit: float) -> None:
    """N(0, s²) moves an output by s·‖(x, 1)‖."""
    torch.manual_seed(1)
    x = torch.randn(200, 300)
    targets = torch.randn(200, 1)
    targets = 3.0 * targets / targets.std()
    size = (x.square().sum(1) + 1).mean().sqrt()
    network = Network(nn.Linear(300, outputs), task=task)
    assert model_scale(network, (x, targets)) == pytest.approx(limit / float(size), rel=0.1)


def test_scale_does_not_depend_on_units_of_the_records() -> None:
    """A thousand times the records: a thousandth of the scale, because weights must be a thousandth too."""
    x, network = torch.randn(200, 20), Network(nn.Linear(20, 2, bias=False))
    public = torch.zeros(200, dtype=torch.int64)
    ratio = model_scale(network, (x, public)) / model_scale(network, (1000 * x, public))
    assert ratio == pytest.approx(1000, rel=0.01)


def test_curvature_of_a_linear_model() -> None:
    """Squared errors have the Hessian 2·XᵀX/n. A parameter without effect adds nothing."""
    torch.manual_seed(1)
    x = torch.randn(200, 30) * torch.linspace(0.1, 3, 30)
    model = nn.Linear(30, 1, bias=False)
    model.unused = nn.Parameter(torch.ones(3))
    largest = torch.linalg.eigvalsh(2 * x.T @ x / len(x))[-1]
    found = curvature(Network(model, task=Regression()), (x, torch.randn(200, 1)))
    assert found == pytest.approx(float(largest), rel=0.05)


@pytest.mark.parametrize(("records", "remaining"), [(2, 1.0), (10, 0.3), (300, 0.01)])
def test_few_records_do_not_show_that_a_start_is_perfect(records: int, remaining: float) -> None:
    targets = torch.arange(records) % 2
    perfect = nn.Linear(2, 2, bias=False)
    perfect.weight.data = 100 * torch.eye(2)
    public = nn.functional.one_hot(targets).float(), targets
    assert remaining_loss(Network(perfect), public) == pytest.approx(remaining)


def test_the_loss_that_remains_is_relative_to_constant_outputs() -> None:
    targets = torch.arange(1000) % 2
    model = nn.Linear(2, 2, bias=False)
    model.weight.data = torch.eye(2)
    public = nn.functional.one_hot(targets).float(), targets
    expected = math.log(1 + math.exp(-1)) / math.log(2)
    assert remaining_loss(Network(model), public) == pytest.approx(expected, rel=1e-5)


def test_a_loss_without_second_derivative_has_a_rate() -> None:
    e = prepare(validate({"rounds": 2, "model": {"name": "linear"}}, "test"), loss=absolute_error)
    assert 0 < e.learning_rates[0] < 100


def absolute_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.mean(1) - targets).abs()


def rate(**changed: Any) -> float:
    values = {"rounds": 100, "model": {"name": "softmax"}, "graph": {"kind": "ring", "agents": 10}}
    values["privacy"] = {"mode": "noise", "noise_multiplier": 5.0}
    return prepare(validate(values | changed, "test")).learning_rates[0]


def test_the_rate_follows_noise_rounds_batch_momentum_and_schedule() -> None:
    usual = rate()
    assert rate(privacy={"mode": "noise", "noise_multiplier": 10.0}) == pytest.approx(usual / 2, rel=0.1)
    assert rate(rounds=400) == pytest.approx(usual / 2, rel=0.1)
    assert rate(batch={"size": 16}) == pytest.approx(usual / 4, rel=0.1)
    assert rate(algorithm={"momentum": 0.0}) == pytest.approx(usual * 2, rel=0.1)
    assert rate(algorithm={"name": "d-psgd"}) == pytest.approx(usual * 2, rel=0.1)
    assert rate(algorithm={"schedule": {"kind": "cosine"}}) == pytest.approx(usual * math.sqrt(8 / 3), rel=0.1)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_a_rate_with_and_without_noise(name: str) -> None:
    graph = topology.ring(10)
    algorithm = ALGORITHMS[name]()
    assert algorithm.learning_rate == "auto"
    assert 0.25 <= algorithm.base_rate <= 1
    assert 0.5 <= algorithm.noise_gain(graph) <= 10


def test_the_config_of_an_experiment_has_the_number() -> None:
    def experiment(**settings: Any) -> Experiment:
        config, objects = configure("softmax", "digits", graph=pdsl.ring(4), rounds=5, **settings)
        return prepare(config, **objects)

    e = experiment()
    number = e.config.algorithm.learning_rate
    assert e.learning_rates == (number,) * 5
    assert e.metadata()["given"] == {"algorithm.learning_rate": "auto"}
    given = experiment(algorithm=pdsl.PDSL(learning_rate=0.5))
    assert given.metadata()["given"] == {}


def test_the_same_command_resumes_and_another_rate_is_refused(tmp_path: Path) -> None:
    asked = settings("rounds=4", "privacy.randomness=system", *SMALL)
    run = tmp_path / "run"
    assert command("run", "--json", "--out", run, *asked).code == 0
    whole = result_of(run)
    number = tomllib.loads((run / "config.toml").read_text())["algorithm"]["learning_rate"]
    assert isinstance(number, float)
    assert json.loads((run / "summary.json").read_text())["learning_rate"] == number
    (run / "summary.json").unlink()
    next((run / "checkpoint").glob("*4*")).unlink()
    assert command("run", "--json", "--out", run, *asked).code == 0
    again = result_of(run)
    assert whole["rows.jsonl"] == again["rows.jsonl"]
    assert json.loads((run / "setup.json").read_text())["given"] == {"algorithm.learning_rate": "auto"}
    assert command("run", "--json", "--out", run, *asked, "--set", f"algorithm.learning_rate={number}").code == 0
    other = ["--set", f"algorithm.learning_rate={2 * number}"]
    command("run", "--out", run, *asked, *other).refused("already holds a run with another algorithm.learning_rate")


def test_a_run_with_a_given_rate_is_not_one_with_auto(tmp_path: Path) -> None:
    chosen = open_run(load(None, [*SMALL, "rounds=2"]), tmp_path / "a", SingleProcess())[0].learning_rates[0]
    open_run(load(None, [*SMALL, "rounds=2", f"algorithm.learning_rate={chosen}"]), tmp_path / "b", SingleProcess())
    with pytest.raises(pdsl.PdslError, match=r"another algorithm\.learning_rate"):
        open_run(load(None, [*SMALL, "rounds=2"]), tmp_path / "b", SingleProcess())


def test_an_extended_run_keeps_its_rate(tmp_path: Path) -> None:
    asked = settings("rounds=2", "privacy.mode=noise", "privacy.sigma=0.5", *SMALL)
    assert command("run", "--json", "--out", tmp_path / "run", *asked).code == 0
    before = tomllib.loads((tmp_path / "run/config.toml").read_text())["algorithm"]
    assert command("run", "--json", "--resume", tmp_path / "run", "--set", "rounds=6").code == 0
    assert tomllib.loads((tmp_path / "run/config.toml").read_text())["algorithm"] == before


@pytest.mark.slow
def test_two_ranks_choose_the_same_rate_as_one_process(tmp_path: Path) -> None:
    values = {"rounds": 3, "graph": {"kind": "ring", "agents": 4}, "model": {"name": "softmax"}}
    values |= {"data": {"validation": 40}, "engine": {"workers": 1, "exact": True}}
    (alone,), (together,) = outcomes(0, [values], tmp_path), outcomes(2, [values], tmp_path)
    assert alone["sha256"] == together["sha256"]


def test_all_peers_choose_the_same_rate_from_the_plan(tmp_path: Path) -> None:
    members = make_organisations(tmp_path, 3)
    _, task = write_digits(members)
    plan = make_plan(members, task, rounds=30)

    planned = agreed_mechanisms(plan)

    def resolve(member: Identity, mechanism: Mechanism) -> object:
        network = build_network(plan)
        e = build_experiment(member, plan, network, bytes(KEY_BYTES), 1, mechanism, LocalEngine)
        return e.config.algorithm.learning_rate

    rates = [resolve(member, mechanism) for member, mechanism in zip(members, planned, strict=True)]
    assert len(set(rates)) == 1
    assert isinstance(rates[0], float)


def test_a_plan_with_a_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pdsl.PdslError, match="a function would let a plan run code"):
        make_plan(make_organisations(tmp_path, 3), algorithm={"learning_rate": "os:system"})
