"""What a round costs, counted and not timed: forward passes, gradients and bytes, so that no gain is lost unnoticed."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.speed import literal
from benchmarks.speed.literal import LiteralRound, plain_mnist_cnn
from benchmarks.speed.measure import mnist
from benchmarks.speed.table import ROWS, table
from pdsl.algorithms import PDSL
from pdsl.config import validate
from pdsl.gradients.clipping import LocalGradients, clip_per_sample
from pdsl.gradients.per_example import LAYERS, Block, PerRecord
from pdsl.models.network import Network
from pdsl.models.zoo import mnist_cnn
from pdsl.settings import ModelSettings, ShapleySettings
from pdsl.shapley.coalitions import exact, members, monte_carlo
from pdsl.shapley.valuation import CHECKED_COALITIONS
from pdsl.training.experiment import prepare
from pdsl.training.records import RoundRecord
from pdsl.training.trainer import build_trainer, initial_state, rounds
from pdsl.utils.workers import Workers
from tests.helpers.real_data import real

Q = 40


class Counted:
    """Forward passes on Q, in records, and gradients, since the last look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.evaluations: list[int] = []
        self.gradients: list[int] = []
        logits, on = Network.outputs, LocalGradients.on

        def counted_logits(network: Network, x: Tensor, inputs: Tensor) -> Tensor:
            self.evaluations.append(len(inputs))
            return logits(network, x, inputs)

        def counted_on(local: LocalGradients, x: Tensor, inputs: Tensor, labels: Tensor, divisor: float) -> Tensor:
            self.gradients += [len(labels)] * (len(x) if x.ndim == 2 else 1)  # one per model
            return on(local, x, inputs, labels, divisor)

        monkeypatch.setattr(Network, "outputs", counted_logits)
        monkeypatch.setattr(LocalGradients, "on", counted_on)

    def look(self) -> tuple[int, int]:
        """(models evaluated on Q, gradients) since the last look."""
        counts = sum(n == Q for n in self.evaluations), len(self.gradients)
        self.evaluations.clear()
        self.gradients.clear()
        return counts


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def steps(kind: str, agents: int, count: int, algorithm: str = "pdsl", **shapley: Any) -> Iterator[RoundRecord]:
    values = {
        "algorithm": {"name": algorithm, **({"shapley": shapley} if algorithm == "pdsl" else {})},
        "rounds": count,
        "evaluate_every": 1000,
        "graph": {"kind": kind, "agents": agents},
        "data": {"validation": Q},
        "engine": {"workers": 1},
    }
    for step in rounds(prepare(validate(values, "test"))):
        yield step.row


def test_fast_evaluates_each_message_once(counted: Counted) -> None:
    for row in steps("full", 6, 3, estimator="fast"):
        evaluated, gradients = counted.look()
        if row["round"] > 1:  # before the first, modules are tried out
            assert evaluated == 6 * 6 + 1  # every agent's candidates, and the model that all of them have
            assert gradients == 6  # all models are equal: one gradient serves all neighbours


@pytest.mark.parametrize("kind", ["full", "ring"])
@pytest.mark.parametrize("name", ["pdsl", "dp-cga"])
def test_a_few_agents_at_a_time_are_no_more_work_and_give_the_same_bits(
    kind: str, name: str, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a dense graph the answers to all agents would not fit: they are taken some agents at a time."""

    def ends(held: int) -> tuple[list[RoundRecord], list[tuple[int, int]]]:
        monkeypatch.setattr("pdsl.engine.base.MAX_BYTES_IN_FLIGHT", held)
        found = [(row, counted.look()) for row in steps(kind, 6, 3, algorithm=name, estimator="fast", check_every=2)]
        rows, counts = zip(*found, strict=True)
        return [{k: v for k, v in row.items() if k != "seconds"} for row in rows], list(counts)

    at_once, counts = ends(2**30)
    in_parts, counts_in_parts = ends(2 * 6 * 650 * 4)  # two agents of the full graph
    assert in_parts == at_once
    parts = 2 if (kind, name) == ("full", "pdsl") else 0  # the model that all of them have is evaluated once in each
    assert counts_in_parts[1:] == [(evaluated + parts, gradients) for evaluated, gradients in counts[1:]]


def test_the_check_of_fast_costs_a_few_evaluations_every_so_many_rounds(counted: Counted) -> None:
    for row in steps("full", 6, 4, estimator="fast", check_every=2):
        evaluated, _ = counted.look()
        if row["round"] == 3:
            assert "fidelity" not in row["shapley"]
        if row["round"] in (2, 4):
            found = row["shapley"]["fidelity"]
            assert 1 <= found["coalitions"] <= CHECKED_COALITIONS
            assert 0 <= found["mean_error"] <= found["max_error"] < 0.5
            assert evaluated == 6 * 6 + 1 + 6 + found["coalitions"]


def test_exact_evaluates_each_coalition_once(counted: Counted) -> None:
    for row in steps("ring", 5, 3, estimator="exact"):
        evaluated, gradients = counted.look()
        if row["round"] > 1:
            assert evaluated == 5 * (2**3 - 1) + 5  # 7 coalitions of 3 members, and v(∅)
            assert gradients == 5 * 3


def test_monte_carlo_evaluates_a_coalition_that_comes_up_again_only_once(counted: Counted) -> None:
    for row in steps("full", 7, 3, estimator="montecarlo", permutations=20):
        evaluated, _ = counted.look()
        if row["round"] > 1:
            assert evaluated == row["shapley"]["coalitions"] - 7 + 1  # v(∅) is the same for all
            assert evaluated < 0.75 * 7 * 7 * 20  # of what Algorithm 2 says


def test_a_plan_holds_each_coalition_once() -> None:
    plan = monte_carlo(torch.stack([torch.randperm(9) for _ in range(50)]).numpy())
    assert len(set(plan.coalitions)) == len(plan.coalitions) <= 50 * 8 + 2


def test_bytes_are_those_of_the_links() -> None:
    for kind, agents, links, sent in (("ring", 6, 12, 7), ("full", 5, 20, 4)):  # x, ĝ, û, and x̂ four times or once
        for row in steps(kind, agents, 2, weighting="uniform"):
            d = 650  # softmax regression on digits
            assert (row["messages"], row["bytes"]) == (sent * links, sent * links * d * 4)


def by_channels(x: Tensor) -> Tensor:
    """Our model for the plain network, whose last layer goes by channels where ours goes by pixels."""
    by_pixels = x[-(15_680 + 10) : -10].view(10, 7, 7, 32)
    return torch.cat([x[: -(15_680 + 10)], by_pixels.permute(0, 3, 1, 2).flatten(), x[-10:]])


@pytest.mark.slow
def test_exact_values_are_those_of_the_literal_algorithm_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast: the values of true coalition models by accuracy are sums of hits."""
    monkeypatch.setenv("PDSL_DATA", str(real("mnist")))
    shapley = ShapleySettings(estimator="exact", value="accuracy", step_fraction=1.0)
    algorithm = PDSL(shapley=shapley)
    e = mnist("ring", 4, data={"name": "mnist", "validation": 400})
    plain, plan = plain_mnist_cnn(), exact(3)
    with Workers(1) as workers:
        parts, state = build_trainer(e, workers), initial_state(e)
        for t in range(1, 3):
            r = parts.round(t)
            (at,) = r.cross_gradients(state.x)
            x_ij = at.split_by_agent(at.own_rows(state.x) - at.values)
            found = parts.validation.contributions(t, at.agents, state.x, x_ij, shapley)
            for x_i, candidates, valued in zip(state.x, x_ij, found, strict=True):
                models = [candidates[members(s)].mean(0) if s else x_i for s in plan.coalitions]
                hits = [round(400 * literal.evaluate(plain, by_channels(x), *e.validation)) for x in models]
                assert valued.phi.tolist() == (plan.phi(np.array(hits, dtype=np.float64), 3) / 400).tolist()
            state, _ = algorithm.step(state, parts.round(t))


def test_the_literal_network_is_ours() -> None:
    ours = Network(mnist_cnn(torch.Size((1, 28, 28)), 10, ModelSettings(norm="none")))
    x = torch.randn(ours.num_parameters, generator=torch.Generator().manual_seed(0)) * 0.1
    images = torch.randn(20, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(20) % 10
    plain = plain_mnist_cnn()
    x_plain = by_channels(x)
    assert literal.evaluate(plain, x_plain, images, labels) == pytest.approx(
        float((ours.outputs(x, images).argmax(-1) == labels).double().mean())
    )
    torch.testing.assert_close(plain(images), ours.outputs(x, images), rtol=1e-4, atol=1e-5)
    assert literal.gradient(plain, x_plain, images, labels).shape == (ours.num_parameters,)


def test_how_often_a_literal_round_evaluates() -> None:
    from pdsl.topology import full, ring

    assert LiteralRound.monte_carlo(full(20), R=20) == LiteralRound(20 * 20 * 20, 400)
    assert LiteralRound.exact(ring(10)) == LiteralRound(10 * 3 * 4 * 2, 30)
    assert LiteralRound(10, 4).seconds(evaluation=0.5, gradient=0.25) == 6.0


@pytest.mark.slow
def test_the_benchs_experiment_is_the_papers_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSL_DATA", str(real("mnist")))
    e = mnist("full", 20)
    assert (e.network.num_parameters, len(e.validation[1]), e.graph.agents) == (20_490, 2000, 20)


def test_every_ratio_has_its_row() -> None:
    measured: dict[str, Any] = {}
    for key in ROWS:
        name, _, inner = key.partition(".")
        if inner:
            measured.setdefault(name, {})[inner] = 1.5
        else:
            measured[name] = 1.5
    assert table(measured).row_count == len(ROWS)


def test_a_record_without_a_finite_gradient_costs_no_second_pass() -> None:
    """Finding D11: a non-finite gradient takes the same operations as any other."""
    network = Network(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)))
    inputs, labels = torch.rand(50, 1, 8, 8), torch.arange(50) % 10
    calls: list[int] = []

    def run(network: Network, x: Tensor, records: Block) -> list[PerRecord]:
        calls.append(len(records.targets))
        return LAYERS.run(network, x, records)

    kernel = replace(LAYERS, run=run)
    for bad in (False, True):
        if bad:
            inputs[7] = torch.nan
        clip_per_sample(network, network.initial_parameters(), inputs, labels, 1.0, 1.0, kernel)
    assert calls == [64, 64]
