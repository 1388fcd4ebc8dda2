"""Algorithms against each other and against a few lines of their own: where one is a special case, it gives the same.

On quadratics whose gradients differ in every round and local step, and on digits with a real model and Poisson batches.
"""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pdsl import topology
from pdsl.algorithms import ALGORITHMS, PDSL, Algorithm
from pdsl.algorithms.cga import CGA, DPCGA
from pdsl.algorithms.d_psgd import DPSGD
from pdsl.algorithms.dfedsam import DFedSAM, DFedSAMMGS
from pdsl.algorithms.dmsgd import DMSGD
from pdsl.algorithms.dp_dpsgd import DPDPSGD
from pdsl.algorithms.gradient_tracking import GradientTracking
from pdsl.algorithms.gut import GUT
from pdsl.algorithms.mixing import best_omega
from pdsl.algorithms.momentum_tracking import MomentumTracking
from pdsl.algorithms.mspd import MSPD
from pdsl.algorithms.muffliato import Muffliato
from pdsl.algorithms.net_fleet import DPNetFleet, NetFleet
from pdsl.algorithms.ngc import NGC
from pdsl.algorithms.qg_dsgdm import QGDSGDm
from pdsl.algorithms.soft_dsgd import SoftDSGD
from pdsl.config import validate
from pdsl.models.network import Network
from pdsl.settings import ShapleySettings
from pdsl.shapley.valuation import Validation
from pdsl.training.experiment import Experiment, prepare
from pdsl.training.trainer import rounds
from pdsl.utils.random import Streams
from pdsl.utils.workers import Workers
from tests.oracles.quadratics import Flat, heterogeneous, mixing, polynomial, run, start

M, D, T = 6, 5, 8
GAMMA = 0.3
GRAPH = topology.erdos_renyi(M, 0.5, seed=2)
W = mixing(GRAPH)
PROBLEM = heterogeneous(M, D, seed=2, jitter=0.5)
X0 = start(M, D)
AGENTS = torch.arange(M)


def experiment(algorithm: Algorithm, **sections: object) -> Experiment:
    values: dict[str, object] = {
        "rounds": 3,
        "evaluate_every": 10,
        "algorithm": algorithm,
        "privacy": {"mode": "none"},
        "graph": {"kind": "ring", "agents": 5},
        "batch": {"size": 16},
        "data": {"validation": 40},
        "engine": {"workers": 1},
    }
    return prepare(validate(values | sections, "test"))


def on_digits(algorithm: Algorithm, **sections: object) -> Tensor:  # [T, M, d]
    return torch.stack([step.state.x for step in rounds(experiment(algorithm, **sections))])


def on_quadratics(algorithm: Algorithm) -> Tensor:  # [T + 1, M, d]
    return run(algorithm, PROBLEM, GRAPH, T, X0, tensors=[2, 3]).x


@pytest.mark.parametrize(
    ("special", "plain"),
    [
        (DMSGD(learning_rate=GAMMA, momentum=0), DPSGD(learning_rate=GAMMA)),
        (QGDSGDm(learning_rate=GAMMA, momentum=0), DPSGD(learning_rate=GAMMA)),
        (GUT(learning_rate=GAMMA, scaling=0, averaging=1), DPSGD(learning_rate=GAMMA)),
        (DPDPSGD(learning_rate=GAMMA, staleness=0), DPSGD(learning_rate=GAMMA)),
        (SoftDSGD(learning_rate=GAMMA, reliability=1, packet=3), DPSGD(learning_rate=GAMMA)),
        (Muffliato(learning_rate=GAMMA, gossip_steps=1), DPSGD(learning_rate=GAMMA)),
        (DFedSAM(learning_rate=GAMMA, radius=0, local_steps=1), DPSGD(learning_rate=GAMMA)),
        (MomentumTracking(learning_rate=GAMMA, momentum=0), GradientTracking(learning_rate=GAMMA)),
        (NetFleet(learning_rate=GAMMA, local_steps=1), GradientTracking(learning_rate=GAMMA)),
        (DFedSAMMGS(learning_rate=GAMMA, gossip_steps=1), DFedSAM(learning_rate=GAMMA)),
        (DFedSAM(learning_rate=GAMMA, gossip_steps=4), DFedSAMMGS(learning_rate=GAMMA)),
        (DPCGA(learning_rate=GAMMA), CGA(learning_rate=GAMMA)),
        (DPNetFleet(learning_rate=GAMMA), NetFleet(learning_rate=GAMMA)),
    ],
    ids=lambda algorithm: algorithm.name,
)
def test_a_special_case_is_the_plain_algorithm(special: Algorithm, plain: Algorithm) -> None:
    torch.testing.assert_close(on_quadratics(special), on_quadratics(plain), rtol=0, atol=1e-12)
    torch.testing.assert_close(on_digits(special), on_digits(plain), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "algorithm",
    [
        DMSGD(learning_rate=GAMMA),
        QGDSGDm(learning_rate=GAMMA),
        GUT(learning_rate=GAMMA),
        DPDPSGD(learning_rate=GAMMA, staleness=1),
        SoftDSGD(learning_rate=GAMMA, packet=3),
        Muffliato(learning_rate=GAMMA),
        DFedSAM(learning_rate=GAMMA, local_steps=1),
        DFedSAM(learning_rate=GAMMA, radius=0),
        GradientTracking(learning_rate=GAMMA),
    ],
    ids=lambda algorithm: algorithm.name,
)
def test_in_general_it_is_another_algorithm(algorithm: Algorithm) -> None:
    """Or the comparisons above would show nothing."""
    assert not torch.allclose(on_quadratics(algorithm), on_quadratics(DPSGD(learning_rate=GAMMA)), atol=1e-3)


@pytest.mark.parametrize("K", [1, 4])
@pytest.mark.parametrize("step_scale", ["graph", "mean", "paper"])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_pdsl_with_uniform_weights_takes_the_mean_of_cross_gradients(step_scale: str, alpha: float, K: int) -> None:
    """û_i = α u_i + Σ_j π_ij ∇f_j(x_i), written out; π_ij is ω_ij, or 1/|M_i|, or in the paper's scale that over ω_ij.

    Momenta are mixed once, models K times.
    """
    gamma = 0.05 if step_scale == "paper" else GAMMA
    algorithm = PDSL.model_validate(
        {
            "learning_rate": gamma,
            "momentum": alpha,
            "step_scale": step_scale,
            "gossip_steps": K,
            "shapley": ShapleySettings(weighting="uniform"),
        }
    )
    with Workers(1) as workers:
        nobody_asks = Validation(Network(nn.Linear(1, 1)), torch.zeros(0, 1), torch.zeros(0), Streams(0), workers)
        found = run(algorithm, PROBLEM, GRAPH, T, X0, validation=nobody_asks)

    x, u = X0, torch.zeros_like(X0)
    P_K = torch.from_numpy(polynomial(GRAPH.W, K, best_omega(GRAPH, K)))
    for t in range(1, T + 1):
        u_hat = alpha * u
        for i in range(M):
            members = GRAPH.neighbourhood(i).tolist()
            for j in members:
                omega, k = GRAPH.W[i, j], len(members)
                pi = {"graph": omega, "mean": 1 / k, "paper": 1 / k / omega}[step_scale]
                u_hat[i] += pi * PROBLEM.gradient(j, x[i], t)
        x, u = P_K @ (x - gamma * u_hat), W @ u_hat
        torch.testing.assert_close(found.states[t].x, x, rtol=0, atol=1e-10)
        torch.testing.assert_close(found.states[t].u, u, rtol=0, atol=1e-10)


@pytest.mark.parametrize("data_variant", [0.0, 0.5, 1.0])
def test_ngc_on_a_full_graph_of_equal_models_is_nesterov_s_momentum_on_the_mean_gradient(data_variant: float) -> None:
    beta = 0.5
    algorithm = NGC(learning_rate=0.1, momentum=beta, data_variant=data_variant)
    found = run(algorithm, PROBLEM, topology.full(M), T, X0[:1].repeat(M, 1)).x
    x, u = X0[0], torch.zeros(D, dtype=torch.float64)
    for t in range(1, T + 1):
        g = PROBLEM.gradients(t, AGENTS, x.expand(M, D)).mean(0)
        u = beta * u + g
        x = x - 0.1 * (g + beta * u)
        torch.testing.assert_close(found[t], x.expand(M, D), rtol=0, atol=1e-12)


@pytest.mark.parametrize("K", [1, 2, 4])
def test_dfedsam_without_a_radius_is_local_sgd(K: int) -> None:
    found = on_quadratics(DFedSAM(learning_rate=0.1, local_steps=K, radius=0, gossip_steps=2))
    x = X0
    for t in range(1, T + 1):
        for k in range(K):
            x = x - 0.1 * PROBLEM.gradients(t, AGENTS, x, step=k)
        x = W @ (W @ x)
        torch.testing.assert_close(found[t], x, rtol=0, atol=1e-12)


def test_dfedsam_climbs_by_its_radius_on_the_batch_of_the_step() -> None:
    K, rho = 2, 0.3
    found = on_quadratics(DFedSAM(learning_rate=0.1, local_steps=K, radius=rho))
    x = X0
    for t in range(1, T + 1):
        for k in range(K):
            up = torch.stack([nn.functional.normalize(PROBLEM.gradient(i, x[i], t, k), dim=0) for i in range(M)])
            x = x - 0.1 * PROBLEM.gradients(t, AGENTS, x + rho * up, step=k)
        x = W @ x
        torch.testing.assert_close(found[t], x, rtol=0, atol=1e-12)


class Asked(Flat):
    """Keeps the (round, local step) of each gradient it is asked for."""

    def __init__(self) -> None:
        self.batches: set[tuple[int, int]] = set()

    def gradients(self, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None) -> Tensor:
        self.batches.add((t, step))
        return super().gradients(t, agents, x, step, teachers)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != PDSL.name])
def test_each_local_step_has_a_batch_of_its_own(name: str) -> None:
    several = {"local_steps": 3} if "local_steps" in ALGORITHMS[name].model_fields else {}
    asked = Asked()
    run(ALGORITHMS[name].model_validate(several), asked, GRAPH, 2, X0)
    assert asked.batches == {(t, k) for t in (1, 2) for k in range(several.get("local_steps", 1))}


def test_d_psgd_on_the_full_graph_is_centralised_sgd_on_the_joint_batch() -> None:
    """Nothing is clipped; the joint batch is that of all agents, its loss divided by what they divide theirs by."""
    gamma, agents = 0.5, 5
    e = experiment(
        DPSGD(learning_rate=gamma),
        rounds=6,
        graph={"kind": "full", "agents": agents},
        model={"name": "softmax"},
        privacy={"mode": "none", "clipping": "batch", "max_grad_norm": 1e9},
    )
    module = copy.deepcopy(e.network.module)
    parameters = list(module.parameters())
    for step in rounds(e):
        batch = torch.cat([part[e.batches.draw(i, step.t)] for i, part in enumerate(e.parts)])
        divisor = sum(e.batches.divisor(i) for i in range(agents))
        loss = cross_entropy(module(e.data.x[batch]), e.data.y[batch], reduction="sum") / divisor
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for p, g in zip(parameters, gradients, strict=True):
                p.sub_(gamma * g)
        centralised = nn.utils.parameters_to_vector(parameters).detach()
        torch.testing.assert_close(step.state.x, centralised.expand(agents, -1), rtol=0, atol=1e-6)


class Tagged:
    """Gradients with which x − ∇f(x) is no model but a tag: 1 at the place of (agent, round), 0 elsewhere."""

    def __init__(self, agents: int, T: int):
        self.agents, self.rounds = agents, T + 1

    def tag(self, agent: int, t: int) -> Tensor:  # [agents · (T + 1)]
        return nn.functional.one_hot(torch.tensor(agent * self.rounds + t), self.agents * self.rounds).double()

    def gradients(self, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None) -> Tensor:
        return x - torch.stack([self.tag(int(agent), t) for agent in agents])


def test_late_models_are_late_by_at_most_the_staleness_and_one_s_own_never() -> None:
    """With step size 1 agents send tags, and weights in the mixture of tags say whose of which round was used."""
    tau, T = 3, 40
    tagged = Tagged(M, T)
    x0 = torch.stack([tagged.tag(i, 0) for i in range(M)])
    found = run(DPDPSGD(learning_rate=1.0, staleness=tau), tagged, GRAPH, T, x0)
    seen: list[int] = []
    for t in range(1, T + 1):
        used = found.x[t].reshape(M, M, T + 1)  # [receiver, sender, round of sending]
        np.testing.assert_allclose(used.sum(2).numpy(), GRAPH.W, rtol=0, atol=1e-15)
        lateness = {(i, j): t - s for i, j, s in used.nonzero().tolist()}
        assert len(lateness) == len(GRAPH.sender) == len(used.nonzero())  # one model of each member, and no mixtures
        assert all(lateness[i, i] == 0 for i in range(M))
        assert all(0 <= late <= min(t, tau) for late in lateness.values())
        assert found.metadata[t - 1]["late"] <= tau
        if t > tau:
            seen += [late for (i, j), late in lateness.items() if i != j]
    shares = np.bincount(seen, minlength=tau + 1) / len(seen)
    assert shares == pytest.approx([1 / (tau + 1)] * (tau + 1), abs=4 * np.sqrt(3 / 16 / len(seen)))


@pytest.mark.parametrize("staleness", [1, 3])
def test_with_late_models_the_limit_is_still_d_psgd_s(staleness: int) -> None:
    """Where nothing moves any more, late models are the same as new ones."""
    problem = heterogeneous(M, D, seed=2)
    x = run(DPDPSGD(learning_rate=GAMMA, staleness=staleness), problem, GRAPH, 300, X0).x[-1]
    torch.testing.assert_close(x, problem.stalled(W, GAMMA), rtol=0, atol=1e-8)


EVERY = [kind() for kind in ALGORITHMS.values()]
OTHERS = [DPDPSGD(staleness=3), Muffliato(gossip_steps=7), DFedSAM(gossip_steps=3), MSPD(gossip_steps=5)]
SPARSE = {"kind": "ring", "agents": 6}
DENSE = {"kind": "full", "agents": 5}


@pytest.mark.slow
@pytest.mark.parametrize("graph", [SPARSE, DENSE], ids=lambda g: g["kind"])
@pytest.mark.parametrize("algorithm", EVERY + OTHERS, ids=lambda a: a.name)
def test_as_many_vectors_cross_each_link_as_the_algorithm_says(algorithm: Algorithm, graph: dict[str, object]) -> None:
    e = experiment(algorithm, graph=graph, rounds=2)
    links = int((e.graph.W > 0).sum()) - e.graph.agents
    for step in rounds(e):
        assert step.row["messages"] == links * algorithm.sends(e.graph, 0.0)
        assert step.row["bytes"] == step.row["messages"] * e.network.num_parameters * 4


def test_with_noise_muffliato_s_gossip_goes_by_the_least_noise() -> None:
    privacy = {"mode": "noise", "noise_multiplier": 0.2}
    e = experiment(Muffliato(), graph=SPARSE, privacy=privacy, rounds=2)
    K = Muffliato().sends(e.graph, 0.2)
    assert Muffliato().sends(e.graph, 0.0) < K
    assert [step.row["messages"] for step in rounds(e)] == [12 * K] * 2
