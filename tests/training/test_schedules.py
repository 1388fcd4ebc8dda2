"""Runs on graphs that change from round to round: the right neighbours, bytes, charges, evidence and files."""

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch

import pdsl
from pdsl.algorithms import ALGORITHMS
from pdsl.algorithms.base import Algorithm, Metrics, Models, Round
from pdsl.auditing.report import Verdict
from pdsl.config import validate
from pdsl.engine import LocalEngine
from pdsl.privacy import Ledger, Release
from pdsl.report.run_data import read_run
from pdsl.runs.runner import execute, resume
from pdsl.topology import Graph, Schedule
from pdsl.training.experiment import Experiment, prepare
from tests.helpers.commands import pdsl as command
from tests.helpers.refusals import refused as one_line

SMALL: dict[str, Any] = {
    "model": "softmax",
    "rounds": 6,
    "batch": {"size": 16},
    "engine": {"workers": 1},
    "evaluate_every": 6,
}
NOISY: dict[str, Any] = {**SMALL, "privacy": {"mode": "noise", "sigma": 0.01}}
D = 650  # parameters of softmax on digits


def refused(call: Callable[[], object], *parts: str) -> None:
    with one_line(*parts):
        call()


def pairs(*edges: tuple[int, int], agents: int = 4) -> Graph:
    W = np.eye(agents)
    for i, j in edges:
        W[i, i] = W[j, j] = W[i, j] = W[j, i] = 0.5
    return pdsl.from_matrix(W, connected=False)


UNEVEN = [pairs((0, 1)), pairs((0, 1), (2, 3)), pairs((1, 2)), pdsl.ring(4)]  # neighbourhoods of one to three members


# Engine


def test_the_engine_mixes_delivers_and_replies_on_the_graph_of_the_round() -> None:
    schedule = pdsl.base_k(7, 2)
    engine, x = LocalEngine(schedule), torch.randn(7, 5, dtype=torch.float64)
    for t in (1, 2, 3, 4, 9, 2):
        engine.enter_round(t)
        graph = schedule.at(t)
        np.testing.assert_allclose(engine.mix(x).numpy(), graph.W @ x.numpy(), atol=1e-12)
        alone = LocalEngine(graph)
        v = torch.randn(len(graph.receiver), 3)
        assert torch.equal(engine.deliver(x), alone.deliver(x))
        assert torch.equal(engine.reply(v), alone.reply(v))
    whole = x
    for t in range(1, schedule.period + 1):
        engine.enter_round(t)
        whole = engine.mix(whole)
    assert (whole - x.mean(0)).abs().max() < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_algorithm_runs_and_counts_the_bytes_of_each_round(name: str) -> None:
    """Also in rounds in which an agent has no neighbour."""
    graph = pdsl.base_k(5)
    result = pdsl.train(graph=graph, algorithm=name, **NOISY)
    for row in result.rows:
        links = len(graph.at(row["round"]).receiver) - 5
        vectors = result.experiment.config.algorithm.sends(result.experiment.graph, 1.0)
        assert row["bytes"] == links * vectors * D * 4


@pytest.mark.slow
def test_a_schedule_of_one_graph_has_the_bits_of_the_graph() -> None:
    settings = {**NOISY, "algorithm": pdsl.PDSL(gossip_steps=1)}
    fixed, repeated = (pdsl.train(graph=graph, **settings) for graph in (pdsl.ring(5), [pdsl.ring(5)]))
    assert torch.equal(fixed.state.x, repeated.state.x)
    assert fixed.rows == repeated.rows
    assert fixed.epsilon == repeated.epsilon


def test_gossip_on_a_schedule_is_one_plain_step_unless_set() -> None:
    schedule = pdsl.one_peer_exponential(8)
    assert pdsl.PDSL().sends(schedule, 1.0) == 3 + 1
    assert pdsl.Muffliato().sends(schedule, 1.0) == 1
    assert pdsl.PDSL(gossip_steps=4).sends(schedule, 1.0) == 3 + 4


# Privacy


@pytest.mark.slow
def test_each_round_is_charged_for_the_largest_and_edges_count_their_own_rounds() -> None:
    result = pdsl.train(graph=UNEVEN, **NOISY)
    e, ledger = result.experiment, result.ledger
    assert ledger is not None
    assert e.mechanisms is not None
    sizes = [[int(of_round.degrees[i]) for of_round in UNEVEN] for i in range(4)]
    assert [m.messages for m in e.mechanisms] == [max(of_agent) for of_agent in sizes] == [3] * 4
    for t in range(1, 7):
        assert [e.declared_release(t, i).messages for i in range(4)] == [s[(t - 1) % 4] for s in sizes]
    stored = json.loads(ledger.to_json())
    assert stored["period"] == 4
    for agent in stored["agents"]:
        i = agent["agent"]
        for edge in agent["edges"]:
            met = [t for t in range(1, 7) if UNEVEN[(t - 1) % 4].W[i, edge["to"]] > 0]
            assert edge["messages"] == len(met)
    assert Ledger.from_json(ledger.to_json(), "here") == ledger
    assert ledger.up_to(2).to_json() == Ledger.from_json(ledger.up_to(2).to_json(), "here").to_json()
    assert "charged for the most messages of any round" in result.summary["privacy"]
    assert "charged for" not in pdsl.train(graph=pdsl.one_peer_exponential(4), **NOISY).summary["privacy"]


@pytest.mark.slow
def test_charging_the_largest_round_covers_each_round() -> None:
    """σ is that of the largest neighbourhood, so ε equals the ε of a fixed graph of that size."""
    settings = {**SMALL, "privacy": {"target_epsilon": 4.0}}
    changing = pdsl.train(graph=[pdsl.full(4), pairs((0, 1), (2, 3))], **settings)
    fixed = pdsl.train(graph=pdsl.full(4), **settings)
    assert changing.summary["sigma"] == pytest.approx(fixed.summary["sigma"], rel=1e-12)
    assert changing.epsilon == pytest.approx(fixed.epsilon, rel=1e-9)


class Chatty(Algorithm[Models]):
    """Sends one noisy gradient per member, but declares that of a pair in every round."""

    name = "chatty"

    def init(self, x0: torch.Tensor) -> Models:
        return Models(x0)

    def step(self, state: Models, r: Round) -> tuple[Models, Metrics]:
        for _ in r.cross_gradients(state.x):
            pass
        return state, {}

    def releases(self, members: int) -> Release:
        return Release(messages=min(members, 2))


def test_a_round_with_more_messages_than_declared_is_stopped() -> None:
    """The trial sees round 1 only; the meter stops the round with the larger neighbourhoods."""
    refused(
        lambda: pdsl.train(graph=[pairs((0, 1), (2, 3)), pdsl.ring(4)], algorithm=Chatty(), **NOISY),
        "chatty", "round 2", "declares 2",
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["pdsl", "def-kt", "muffliato"])
def test_an_audit_confirms_runs_on_changing_graphs(algorithm: str) -> None:
    settings = {**SMALL, "privacy": {"target_epsilon": 4.0}, "algorithm": algorithm}
    report = pdsl.audit(pdsl.train(graph=UNEVEN, **settings), canaries=0)
    assert report.verdict is Verdict.PASS, str(report)


# Evidence and Shapley values


def test_evidence_persists_while_a_member_is_away() -> None:
    """Agent 0 meets agent 1 in rounds 1, 3, … and agent 2 in rounds 2, 4, …"""
    graphs = [pairs((0, 1), (2, 3)), pairs((0, 2), (1, 3))]
    states = [step.state for step in pdsl.rounds(graph=graphs, **SMALL, privacy={"mode": "none"})]
    members = Schedule.of("own", graphs).neighbourhood(0).tolist()
    assert members == [0, 1, 2]
    counts = [state.evidence[0, :, 0].tolist() for state in states]
    assert counts == [[1, 1, 0], [2, 1, 1], [3, 2, 1], [4, 2, 2], [5, 3, 2], [6, 3, 3]]
    for before, after, away in zip(states, states[1:], (1, 2, 1, 2, 1), strict=False):
        assert torch.equal(before.evidence[0, away], after.evidence[0, away])


def test_values_are_of_the_edges_of_all_rounds_with_gaps(tmp_path: Path) -> None:
    result = pdsl.train(graph=UNEVEN, **NOISY)
    union = result.experiment.graph
    assert result.edges == list(zip(union.receiver.tolist(), union.sender.tolist(), strict=True))
    there = np.array([[UNEVEN[(t - 1) % 4].W[i, j] > 0 for i, j in result.edges] for t in range(1, 7)])
    assert (np.isfinite(result.message_values) == there).all()
    for row in result.rows:
        share = row["shapley"]["share"]
        for i in range(4):
            own = [s for s, (receiver, _) in zip(share, result.edges, strict=True) if receiver == i and s is not None]
            assert sum(own) == pytest.approx(1)

    result.save(tmp_path / "run")
    run = read_run(tmp_path / "run")
    shares = np.array([row["shapley"]["share"] for row in result.rows], dtype=float)
    assert run.mean_share() == pytest.approx(np.nanmean(shares, axis=0).tolist())
    members = np.stack([[np.isfinite(row)[[i == r for r, _ in result.edges]].sum() for i, _ in result.edges]
                        for row in shares])  # fmt: skip
    assert run.relative_share() == pytest.approx(np.nanmean(shares * members, axis=0).tolist())
    page = (tmp_path / "run" / "report.html").read_text()
    words = re.sub(r"<[^>]*>", "", page)
    assert "own schedule of 4 agents" in words.replace("Own", "own")
    assert "the graph of the round does not have the edge" in words
    assert "NaN" not in page
    assert "None" not in page


# Names of graphs and algorithms


@pytest.mark.slow
def test_python_and_configs_use_the_same_names() -> None:
    by_name = pdsl.train(graph="ring", algorithm="muffliato", **NOISY)
    assert by_name.experiment.graph.describe().startswith("ring of 10 agents")
    made = pdsl.train(graph=pdsl.ring(10), algorithm=pdsl.Muffliato(), **NOISY)
    assert by_name.experiment.config == made.experiment.config
    assert torch.equal(by_name.state.x, made.state.x)
    torus = pdsl.train(
        graph={"kind": "torus", "agents": 12}, algorithm={"name": "d-psgd", "learning_rate": 2.0}, **NOISY
    ).experiment
    assert torus.graph.describe().startswith("torus of 12 agents")
    assert torus.config.algorithm == pdsl.DPSGD(learning_rate=2.0)
    for kind in ALGORITHMS.values():
        assert getattr(pdsl, kind.__name__) is kind
    refused(lambda: pdsl.train(graph="rink", **NOISY), "rink", "'ring'")
    refused(lambda: pdsl.train(graph={"kind": "ring", "agent": 5}, **NOISY), "graph.agent")
    refused(lambda: pdsl.train(algorithm="pdls", **NOISY), "pdls", "muffliato")


@pytest.mark.slow
def test_agents_are_those_of_the_data_unless_they_are_set() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [(torch.randn(30, 4, generator=generator), torch.arange(30) % 2) for _ in range(3)]
    settings = {**SMALL, "model": torch.nn.Linear(4, 2), "data": parts}
    for graph in (None, "ring", {"kind": "base-k"}):
        e = pdsl.train(graph=graph, **settings).experiment
        assert e.graph.agents == e.config.graph.agents == 3
    refused(lambda: pdsl.train(graph={"kind": "ring", "agents": 4}, **settings), "agents", "3")


def test_names_of_graph_and_data_must_be_the_same_and_the_graph_orders_them() -> None:
    cities = nx.Graph([("bonn", "aachen"), ("bonn", "trier")])
    names, sizes = ("trier", "aachen", "bonn"), (12, 20, 28)
    y = torch.arange(60) % 2
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    data = pdsl.Data("own", x, y, x, y, 2, owner=owner, agent_names=names)
    config = validate({"graph": {"kind": "python", "agents": 3}, "batch": {"size": 8}, "rounds": 1}, "test")
    graph = pdsl.from_networkx(cities)

    def experiment(given: pdsl.Data) -> Experiment:
        return prepare(config, model=torch.nn.Linear(4, 2), data=given, graph=graph)

    e = experiment(data)
    assert e.agent_names == ("aachen", "bonn", "trier")
    assert [len(part) for part in e.parts] == [20, 28, 12]
    assert e.metadata()["names"] == ["aachen", "bonn", "trier"]
    other = replace(data, agent_names=("trier", "aachen", "köln"))
    refused(lambda: experiment(other), "different agents", "same names")
    assert experiment(replace(data, owner=None, agent_names=())).agent_names[0] == "aachen"


# Run directories

GRAPHS: dict[str, Any] = {
    "ring": pdsl.ring(4),
    "k-regular": pdsl.k_regular(6, 3, seed=2),
    "base-k": pdsl.base_k(5, 2),
    "matrix": pdsl.from_matrix(pdsl.star(4).W),
    "cities": nx.Graph([("bonn", "aachen"), ("bonn", "trier"), ("trier", "köln")]),
    "sequence": UNEVEN,
    "function": lambda t: pdsl.erdos_renyi(5, 0.6, seed=t),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(GRAPHS))
def test_a_saved_run_can_be_audited_and_resumed_whatever_its_graph(name: str, tmp_path: Path) -> None:
    settings = {**SMALL, "privacy": {"target_epsilon": 8.0}}
    result = pdsl.train(graph=GRAPHS[name], **settings)
    run = result.save(tmp_path / "run")
    stored = tomllib.loads((run / "config.toml").read_text())["graph"]
    assert stored["kind"] == (name if name in ("ring", "k-regular", "base-k") else "python")
    assert stored["agents"] == result.experiment.graph.agents
    e, _ = resume(run)
    assert e.graph.describe() == result.experiment.graph.describe()
    assert e.graph.names == result.experiment.graph.names
    assert [e.graph.at(t).W.tobytes() for t in range(1, 7)] == [
        result.experiment.graph.at(t).W.tobytes() for t in range(1, 7)
    ]
    audited = command("audit", run, "--canaries", "0")
    assert audited.code == 0, audited.out + audited.err


@pytest.mark.slow
def test_a_longer_run_on_stored_graphs_continues_with_the_same_bits(tmp_path: Path) -> None:
    settings = {**SMALL, "privacy": {"mode": "noise", "sigma": 0.01}}
    run = pdsl.train(graph=UNEVEN, **settings).save(tmp_path / "run")
    continued = execute(*resume(run, ["rounds=10"]))
    whole = pdsl.train(graph=UNEVEN, **{**settings, "rounds": 10})
    assert continued is not None
    assert continued["models_sha256"] == whole.summary["models_sha256"]


@pytest.mark.slow
def test_a_function_of_the_round_cannot_be_extended(tmp_path: Path) -> None:
    run = pdsl.train(graph=GRAPHS["function"], **NOISY).save(tmp_path / "run")
    refused(lambda: resume(run, ["rounds=10"]), "function of the round", "known for 6 rounds")


def test_a_damaged_setup_is_one_line(tmp_path: Path) -> None:
    run = pdsl.train(graph=UNEVEN, **NOISY).save(tmp_path / "run")
    (run / "setup.json").write_text("{}")
    refused(lambda: resume(run), "setup.json", "damaged")


@pytest.mark.slow
def test_theory_is_about_one_graph(tmp_path: Path) -> None:
    run = pdsl.train(graph="base-k", **NOISY).save(tmp_path / "run")
    shown = command("theory", "--run", run)
    assert shown.code == 2
    assert "one graph" in shown.err
    fixed = pdsl.train(graph=pdsl.ring(4), **NOISY).save(tmp_path / "fixed")
    assert command("theory", "--run", fixed).code == 0


def test_the_planner_knows_schedules() -> None:
    shown = command("privacy", "--graph", "one-peer-exponential", "--agents", "16", "--rounds", "100", "--batch", "64",
                    "--samples", "600", "--target-epsilon", "8")  # fmt: skip
    assert shown.code == 0, shown.err
    assert "2 (one-peer-exponential schedule" in " ".join(shown.out.split())
