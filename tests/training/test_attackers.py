"""Agents that spoil what they send: who they are, what they send, and what the weights make of them."""

import pytest
import torch

from pdsl.attacks import draw_attackers
from pdsl.config import load
from pdsl.settings import AttackSettings
from pdsl.tasks import MultiClass
from pdsl.training.experiment import prepare
from pdsl.training.trainer import build_trainer, rounds
from pdsl.utils.errors import PdslError
from pdsl.utils.random import Streams
from pdsl.utils.workers import Workers

SMALL = ["data.name=digits", "graph.kind=full", "graph.agents=8", "batch.size=64", "privacy.mode=none", "rounds=10"]


def test_they_are_drawn_by_the_seed() -> None:
    settings = AttackSettings(label_flip=3, gaussian=1, free_rider=2)
    attackers = draw_attackers(settings, 10, Streams(4))
    assert sorted(attackers.values()) == ["free-rider"] * 2 + ["gaussian"] + ["label-flip"] * 3
    assert set(attackers) <= set(range(10))
    assert draw_attackers(settings, 10, Streams(4)) == attackers != draw_attackers(settings, 10, Streams(5))
    assert draw_attackers(AttackSettings(), 10, Streams(4)) == {}


def test_more_than_there_are_agents() -> None:
    with pytest.raises(PdslError, match="asks for 9 agents, but the graph has 8"):
        prepare(load(None, [*SMALL, "attack.label_flip=9"]))


def test_labels_are_turned_around() -> None:
    assert MultiClass(outputs=10).flip(torch.tensor([0, 1, 9, 4])).tolist() == [9, 8, 0, 5]
    e = prepare(load(None, [*SMALL, "attack.label_flip=2"]))
    with Workers(1) as workers:
        local = build_trainer(e, workers).local
    for agent, part in enumerate(e.parts):
        right = 9 - e.data.y[part] if agent in e.attackers else e.data.y[part]
        assert torch.equal(local.labels[agent], right)


def test_what_they_send() -> None:
    e = prepare(load(None, [*SMALL, "attack.gaussian=1", "attack.free_rider=1"]))
    (noisy,) = (agent for agent, kind in e.attackers.items() if kind == "gaussian")
    (idle,) = (agent for agent, kind in e.attackers.items() if kind == "free-rider")
    with Workers(1) as workers:
        parts = build_trainer(e, workers)
        x = e.network.initial_parameters().repeat(8, 1)
        agents = torch.arange(8)
        honest = parts.local.gradients(1, agents, x)
        sent = parts.round(1).local.gradients(1, agents, x)
        again = parts.round(1).local.gradients(1, agents, x)
        later = parts.round(2).local.gradients(2, agents, x)
    assert torch.equal(sent, again)
    assert sent[noisy].norm().item() == pytest.approx(e.config.privacy.max_grad_norm, rel=1e-5)
    assert abs(torch.cosine_similarity(sent[noisy], honest[noisy], dim=0)) < 0.2
    assert not torch.equal(sent[noisy], later[noisy])
    assert sent[idle].eq(0).all()
    others = [agent for agent in range(8) if agent not in e.attackers]
    assert torch.equal(sent[others], honest[others])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["label_flip", "gaussian"])
def test_weights_find_them(kind: str) -> None:
    e = prepare(load(None, [*SMALL, f"attack.{kind}=2", "algorithm.shapley.floor=0.1", "partition.kind=iid"]))
    shares = torch.zeros(8)
    for step in rounds(e):
        shares += torch.tensor(step.row["shapley"]["share"]).view(8, 8).sum(0)
    shares /= shares.sum()
    worst, best = max(shares[agent] for agent in e.attackers), min(shares[a] for a in range(8) if a not in e.attackers)
    assert worst < best if kind == "label_flip" else worst <= best  # random vectors do no harm on average
    assert e.metadata()["attackers"] == [[agent, kind.replace("_", "-")] for agent in sorted(e.attackers)]
