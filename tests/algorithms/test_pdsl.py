"""Algorithm 1 on the engine against its literal reading: same batches, same noise, same permutations, same models."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from pdsl.algorithms import PDSL
from pdsl.auditing.reference import lattice_noise
from pdsl.config import validate
from pdsl.settings import ShapleySettings
from pdsl.shapley.trust import EVIDENCE_FIELDS, shares, update_evidence
from pdsl.training.experiment import Experiment, prepare
from pdsl.training.trainer import CompletedRound, rounds
from tests.oracles import literal

T = 4
TOLERANCE = 1e-5


def experiment(**sections: dict[str, object]) -> Experiment:
    values: dict[str, object] = {
        "rounds": T,
        "seed": 3,
        "model": {"channels": [3, 4]},
        "batch": {"size": 24},
        "algorithm": {"gossip_steps": 1, "learning_rate": 1.0},
        "privacy": {"mode": "noise", "sigma": 0.02},
        "shapley": {
            "estimator": "exact",
            "orders": "independent",
            "value": "accuracy",
            "step_fraction": 1.0,
            "weighting": "minmax",
        },
        "data": {"validation": 60},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section  # type: ignore[dict-item]
    values["algorithm"] = {**values["algorithm"], "shapley": values.pop("shapley")}  # type: ignore[dict-item]
    return prepare(validate(values, "test"))


def shapley_of(e: Experiment) -> ShapleySettings:
    assert isinstance(e.config.algorithm, PDSL)
    return e.config.algorithm.shapley


def literally(e: Experiment) -> literal.Trace:
    c, s = e.config, shapley_of(e)
    estimator = {"montecarlo": s.permutations, "exact": None}[s.estimator]
    hyper = literal.Hyper(
        gammas=e.learning_rates,
        alpha=c.algorithm.momentum,  # type: ignore[attr-defined]
        C=c.privacy.max_grad_norm,
        clipping=c.privacy.clipping,
        R=estimator,
        empty=s.empty_value,
        weighting=s.weighting,
        floor=s.floor,
        probe=s.step_fraction,
        step_scale=c.algorithm.step_scale,  # type: ignore[attr-defined]
    )

    def noise(i: int, j: int, t: int, d: int) -> Tensor:
        sigma = e.sigma[i] * (e.sigma_scale[i][j] if e.sigma_scale and e.sigma_scale[i] else 1.0)
        if sigma == 0:
            return torch.zeros(d)
        steps, exponent = lattice_noise(d, sigma, e.streams, "noise", i, t, j)
        return torch.from_numpy(steps * 2.0**exponent).float()

    def permutation(i: int, t: int, r: int, k: int) -> list[int]:
        orders = e.streams.generator("permutations", i, t).permuted(np.tile(np.arange(k), (s.permutations, 1)), axis=1)
        return [int(j) for j in orders[r - 1]]

    return literal.run(
        template=copy.deepcopy(e.network.module),
        W=e.graph.W,
        data=[(e.data.x[part], e.data.y[part]) for part in e.parts],
        Q=e.validation,
        T=T,
        hyper=hyper,
        batch=e.batches.draw,
        noise=noise,
        permutation=permutation,
        divisor=lambda i, t, size: e.batches.divisor(i),
    )


def compare(e: Experiment) -> list[CompletedRound]:
    trace = literally(e)
    steps = list(rounds(e))
    edges = list(zip(e.graph.receiver.tolist(), e.graph.sender.tolist(), strict=True))
    for step in steps:
        t = step.t
        assert torch.allclose(step.state.x, trace.x[t], rtol=0, atol=TOLERANCE)
        assert torch.allclose(step.state.u, trace.u[t], rtol=0, atol=TOLERANCE * 10)
        if shapley_of(e).weighting != "uniform":
            phi = [float(trace.phi[t - 1][edge]) for edge in edges]
            assert step.row["shapley"]["phi"] == pytest.approx(phi, abs=1e-12)
    return steps


GRAPHS = [{"kind": "full", "agents": 4}, {"kind": "ring", "agents": 5}, {"kind": "bipartite", "agents": 5}]
CLIPPINGS = ["batch", "per-sample"]


@pytest.mark.parametrize(
    ("graph", "clipping"),
    list(itertools.product(GRAPHS, CLIPPINGS)),
    ids=lambda v: v if isinstance(v, str) else v["kind"],
)
def test_agrees_with_the_literal_algorithm(graph: dict[str, object], clipping: str) -> None:
    compare(experiment(graph=graph, privacy={"clipping": clipping}))


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda g: g["kind"])
def test_agrees_in_the_papers_own_settings(graph: dict[str, object]) -> None:
    """Fixed batches, whole-batch clipping, Algorithm 2 with v(∅) = 0, min-max without a floor, weights over ω."""
    compare(
        experiment(
            graph=graph,
            batch={"size": 20, "sampler": "fixed"},
            model={"activation": "relu"},
            privacy={"clipping": "batch"},
            algorithm={"learning_rate": 0.05, "step_scale": "paper"},
            shapley={"estimator": "montecarlo", "permutations": 6, "empty_value": "zero", "floor": 0.0},
        )
    )


@pytest.mark.parametrize("sections", [
    {"shapley": {"weighting": "uniform"}},
    {"shapley": {"step_fraction": 0.25}},
    {"algorithm": {"momentum": 0.0}},
    {"algorithm": {"learning_rate": 0.5, "schedule": {"kind": "cosine", "warmup": 1}}},
    {"model": {"name": "mlp", "hidden": 9}},
    {"model": {"name": "softmax"}},
    {"privacy": {"mode": "none", "sigma": None}},
    {"graph": {"kind": "star"}, "privacy": {"sigma": None, "noise_multiplier": 0.7}, "model": {"name": "mlp"}},
    {"partition": {"kind": "shards"}, "graph": {"kind": "line", "agents": 5}},
], ids=lambda s: next(iter(s)))  # fmt: skip
@pytest.mark.slow
def test_agrees_in_other_settings(sections: dict[str, dict[str, object]]) -> None:
    graph = {"kind": "ring", "agents": 4} | sections.get("graph", {})
    compare(experiment(**{**sections, "graph": graph}))


def test_uniform_weights_are_averaged_cross_gradients() -> None:
    e = experiment(graph={"kind": "ring", "agents": 4}, shapley={"weighting": "uniform"}, algorithm={"momentum": 0.0})
    first = next(iter(rounds(e)))
    trace = literally(e)
    x0, W = trace.x[0], torch.from_numpy(e.graph.W).float()
    gamma = e.learning_rates[0]
    averages = torch.stack(
        [torch.stack([trace.g_hat[0][j, i] for j in e.graph.neighbourhood(i).tolist()]).mean(0) for i in range(4)]
    )
    assert torch.allclose(first.state.x, W @ (x0 - gamma * averages), atol=1e-6)


def test_a_row_does_not_depend_on_how_many_rounds_were_asked_for() -> None:
    short, long = experiment(rounds=2), experiment(rounds=T)  # type: ignore[arg-type]
    for a, b in zip(rounds(short), rounds(long), strict=False):
        assert a.row == b.row
        assert torch.equal(a.state.x, b.state.x)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["exact", "montecarlo", "fast"])
def test_workers_do_not_change_a_bit(estimator: str) -> None:
    one = list(rounds(experiment(shapley={"estimator": estimator}, engine={"workers": 1})))
    three = list(rounds(experiment(shapley={"estimator": estimator}, engine={"workers": 3})))
    assert [s.row for s in one] == [s.row for s in three]
    assert torch.equal(one[-1].state.x, three[-1].state.x)


def test_torch_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    list(rounds(experiment(rounds=1)))  # type: ignore[arg-type]
    assert torch.get_num_threads() == before


def test_another_seed_is_another_run() -> None:
    a, b = (next(iter(rounds(experiment(seed=seed)))) for seed in (1, 2))  # type: ignore[arg-type]
    assert not torch.equal(a.state.x, b.state.x)


def test_evidence_is_gathered_over_rounds() -> None:
    """What was before counts `memory` as much; shares follow from it."""
    e = experiment(shapley={"memory": 0.5, "weighting": "evidence", "value": "loss"}, rounds=5)
    shape = e.graph.agents, int(max(e.graph.degrees))
    known = [np.zeros((shape[1], EVIDENCE_FIELDS)) for _ in range(shape[0])]
    for step in rounds(e):
        phi = np.array(step.row["shapley"]["phi"]).reshape(shape)
        unknown = np.zeros(shape[1])  # values of messages alone are not in the records
        known = [update_evidence(before, values, unknown, 0.5) for before, values in zip(known, phi, strict=True)]
        found = step.state.evidence.numpy()
        assert (found[..., 0] == step.t).all()
        assert found[..., :5] == pytest.approx(np.array(known)[..., :5], abs=1e-12)
        share = np.array(step.row["shapley"]["share"]).reshape(shape)
        for values, its, part in zip(phi, found, share, strict=True):
            assert part == pytest.approx(shares(values, shapley_of(e), its), abs=1e-12)
