"""Agents that spoil what they send: who they are, what they send, and what the weights make of them."""

import pytest
import torch

from pdsl.config import load
from pdsl.errors import PdslError
from pdsl.parallel import Workers
from pdsl.randomness import Streams
from pdsl.rogues import drawn, flipped
from pdsl.settings import RogueSettings
from pdsl.train import apparatus, prepare, rounds

SMALL = ["data.name=digits", "graph.kind=full", "graph.agents=8", "batch.size=64", "privacy.mode=none", "rounds=10"]


def test_they_are_drawn_by_the_seed() -> None:
    settings = RogueSettings(flipped=3, noise=1, idle=2)
    rogues = drawn(settings, 10, Streams(4))
    assert sorted(rogues.values()) == ["flipped"] * 3 + ["idle"] * 2 + ["noise"]
    assert set(rogues) <= set(range(10))
    assert drawn(settings, 10, Streams(4)) == rogues != drawn(settings, 10, Streams(5))
    assert drawn(RogueSettings(), 10, Streams(4)) == {}


def test_more_than_there_are_agents() -> None:
    with pytest.raises(PdslError, match="asks for 9 agents, but the graph has 8"):
        prepare(load(None, [*SMALL, "rogue.flipped=9"]))


def test_labels_are_turned_around() -> None:
    assert flipped(torch.tensor([0, 1, 9, 4]), 10).tolist() == [9, 8, 0, 5]
    e = prepare(load(None, [*SMALL, "rogue.flipped=2"]))
    with Workers(1) as workers:
        owners = apparatus(e, workers).owners
    for agent, part in enumerate(e.parts):
        right = 9 - e.data.y[part] if agent in e.rogues else e.data.y[part]
        assert torch.equal(owners.labels[agent], right)


def test_what_they_send() -> None:
    e = prepare(load(None, [*SMALL, "rogue.noise=1", "rogue.idle=1"]))
    (noisy,) = (agent for agent, kind in e.rogues.items() if kind == "noise")
    (idle,) = (agent for agent, kind in e.rogues.items() if kind == "idle")
    with Workers(1) as workers:
        parts = apparatus(e, workers)
        x = e.network.start().repeat(8, 1)
        agents = torch.arange(8)
        honest = parts.owners.gradients(1, agents, x)
        sent = parts.round(1).owners.gradients(1, agents, x)
        again = parts.round(1).owners.gradients(1, agents, x)
        later = parts.round(2).owners.gradients(2, agents, x)
    assert torch.equal(sent, again)
    assert sent[noisy].norm().item() == pytest.approx(e.config.privacy.max_grad_norm, rel=1e-5)
    assert abs(torch.cosine_similarity(sent[noisy], honest[noisy], dim=0)) < 0.2
    assert not torch.equal(sent[noisy], later[noisy])
    assert sent[idle].eq(0).all()
    others = [agent for agent in range(8) if agent not in e.rogues]
    assert torch.equal(sent[others], honest[others])


@pytest.mark.parametrize("kind", ["flipped", "noise"])
def test_weights_find_them(kind: str) -> None:
    e = prepare(load(None, [*SMALL, f"rogue.{kind}=2", "shapley.floor=0.1", "partition.kind=iid"]))
    shares = torch.zeros(8)
    for step in rounds(e):
        shares += torch.tensor(step.row["shapley"]["share"]).view(8, 8).sum(0)
    shares /= shares.sum()
    assert max(shares[agent] for agent in e.rogues) < min(shares[a] for a in range(8) if a not in e.rogues)
    assert e.facts()["rogues"] == [[agent, kind] for agent in sorted(e.rogues)]
