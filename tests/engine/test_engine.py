"""The local engine against dense matrices: W x for mixing, a table of messages and its transpose for the rest."""

import numpy as np
import pytest
import torch
from torch import Tensor

from pdsl import topology
from pdsl.engine import LocalEngine
from pdsl.engine.base import request_all, weighted_sum, weighted_sums
from pdsl.topology import Graph

D = 7
OWN = topology.from_matrix([[0.5, 0.3, 0.2, 0.0], [0.3, 0.7, 0.0, 0.0], [0.2, 0.0, 0.1, 0.7], [0.0, 0.0, 0.7, 0.3]])
GRAPHS = [
    topology.full(5), topology.ring(6), topology.ring(2), topology.bipartite(7), topology.complete_bipartite(6),
    topology.star(5), topology.line(4), topology.torus(9), topology.erdos_renyi(12, 0.3, seed=1), OWN,
]  # fmt: skip
each_graph = pytest.mark.parametrize("graph", GRAPHS, ids=lambda g: f"{g.name} of {g.agents}")


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def edges(graph: Graph) -> list[tuple[int, int]]:
    """(receiver, sender), sorted."""
    M = graph.agents
    return [(i, j) for i in range(M) for j in range(M) if graph.W[i, j] > 0]


def as_table(graph: Graph, rows: Tensor) -> Tensor:  # [M, M, d]
    """Row e of an edge (i, j) at [i, j], zeros where there is no edge."""
    table = torch.zeros(graph.agents, graph.agents, rows.shape[1], dtype=rows.dtype)
    for (i, j), row in zip(edges(graph), rows, strict=True):
        table[i, j] = row
    return table


@each_graph
def test_edges_are_sorted_by_receiver_and_carry_their_weight(graph: Graph) -> None:
    engine = LocalEngine(graph)
    assert engine.agents == range(graph.agents)
    assert list(zip(engine.receiver.tolist(), engine.sender.tolist(), strict=True)) == edges(graph)
    assert engine.omega.dtype == torch.float64
    assert engine.omega.tolist() == [graph.W[i, j] for i, j in edges(graph)]
    for i in engine.agents:
        assert set(engine.receiver[engine.offsets[i] : engine.offsets[i + 1]].tolist()) == {i}


@each_graph
def test_deliver_brings_each_neighbours_row(graph: Graph) -> None:
    x = normal(1, graph.agents, D)
    linked = torch.from_numpy(graph.W > 0)[:, :, None]
    assert torch.equal(as_table(graph, LocalEngine(graph).deliver(x)), torch.where(linked, x[None], 0.0))


@each_graph
def test_reply_transposes_the_table_of_messages(graph: Graph) -> None:
    """What i made for j, at [i, j], is at j afterwards: at [j, i]."""
    engine = LocalEngine(graph)
    v = normal(2, len(engine.sender), D)
    replied = engine.reply(v)
    assert torch.equal(as_table(graph, replied), as_table(graph, v).transpose(0, 1))
    assert torch.equal(engine.reply(replied), v)


@each_graph
@pytest.mark.parametrize("held", [1, 40 * D * 4, 2**30])  # bytes: one agent at a time, a few, all
def test_ask_is_deliver_and_reply(graph: Graph, held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdsl.engine.base.MAX_BYTES_IN_FLIGHT", held)
    engine, at_once, x = LocalEngine(graph), LocalEngine(graph), normal(3, graph.agents, D)

    def answer(makers: Tensor, peers: Tensor, rows: Tensor) -> Tensor:
        return rows * (1 + makers[:, None]) + peers[:, None]

    (right,) = request_all(at_once, x, answer)
    parts = list(engine.request(x, answer))
    assert torch.equal(torch.cat([part.values for part in parts]), right.values)
    assert [agent for part in parts for agent in part.agents] == list(engine.agents)
    assert (engine.messages, engine.bytes) == (at_once.messages, at_once.bytes)
    for part in parts:
        assert len(part.agents) == 1 or part.values.nbytes <= held
        assert torch.equal(part.own_rows(x), x[engine.receiver[part.edges]])
        for agent, senders in zip(part.agents, part.split_by_agent(engine.sender[part.edges]), strict=True):
            assert senders.tolist() == np.flatnonzero(graph.W[agent]).tolist()
    assert len(parts) == {1: graph.agents, 2**30: 1}.get(held, len(parts))


@each_graph
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mix_is_W_times_x(graph: Graph, dtype: torch.dtype) -> None:  # noqa: N802
    x = normal(3, graph.agents, D).to(dtype)
    mixed = LocalEngine(graph).mix(x)
    assert mixed.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    np.testing.assert_allclose(mixed.numpy(), graph.W @ x.double().numpy(), rtol=0, atol=tolerance)


@each_graph
def test_mixing_agrees_in_the_end_on_the_mean(graph: Graph) -> None:
    """W is doubly stochastic and the graph connected."""
    engine, x = LocalEngine(graph), normal(4, graph.agents, D).double()
    mean = x.mean(0)
    for _ in range(int(40 / graph.spectral_gap)):
        x = engine.mix(x)
    torch.testing.assert_close(x, mean.expand_as(x), rtol=0, atol=1e-9)


@each_graph
def test_mix_has_the_same_bits_as_a_sum_over_what_is_delivered(graph: Graph) -> None:
    """Which is how an engine does it that must send the rows."""
    engine, x = LocalEngine(graph), normal(5, graph.agents, D)
    assert torch.equal(engine.mix(x), weighted_sums(engine.deliver(x), engine.omega, engine.offsets))


@each_graph
def test_messages_and_bytes_are_those_between_different_agents(graph: Graph) -> None:
    engine = LocalEngine(graph)
    links = sum(i != j for i, j in edges(graph))
    assert (engine.messages, engine.bytes) == (0, 0)
    x, v = normal(6, graph.agents, D), normal(7, len(engine.sender), D)
    engine.deliver(x)
    assert (engine.messages, engine.bytes) == (links, links * D * 4)
    engine.reply(v.double())
    assert (engine.messages, engine.bytes) == (2 * links, links * D * (4 + 8))
    engine.mix(x)
    assert (engine.messages, engine.bytes) == (3 * links, links * D * (4 + 8 + 4))


@each_graph
def test_what_is_given_is_not_changed(graph: Graph) -> None:
    engine = LocalEngine(graph)
    x, v = normal(6, graph.agents, D), normal(7, len(engine.sender), D)
    before = x.clone(), v.clone()
    engine.deliver(x).zero_()
    engine.reply(v).zero_()
    engine.mix(x).zero_()
    assert torch.equal(x, before[0])
    assert torch.equal(v, before[1])


@each_graph
def test_weighted_sums_are_a_matrix_product_per_agent(graph: Graph) -> None:
    engine = LocalEngine(graph)
    rows, weights = normal(8, len(engine.sender), D), normal(9, len(engine.sender)).double()
    found = weighted_sums(rows, weights, engine.offsets)
    table, weight = as_table(graph, rows).double(), as_table(graph, weights[:, None])[:, :, 0]
    right = torch.einsum("ij,ijd->id", weight, table)
    torch.testing.assert_close(found.double(), right, rtol=0, atol=1e-5)


def test_weighted_sum_adds_in_order() -> None:
    """1e8 + 1 - 1e8 is 0 in float32 in this order, and 1 in another."""
    rows = torch.tensor([[1e8], [1.0], [-1e8]])
    assert weighted_sum(rows, [1.0, 1.0, 1.0]).item() == 0
    assert weighted_sum(list(rows[[0, 2, 1]]), [1.0, 1.0, 1.0]).item() == 1
    assert rows[0].item() == 1e8
    assert weighted_sum(rows[:1], [0.5]).item() == 5e7
