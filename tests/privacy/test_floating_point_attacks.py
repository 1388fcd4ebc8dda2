"""Attacks of a neighbour that listens, at a claimed total ε of 0.1: each must do no better than its false alarms.

Agents on one star, or one full graph, are as many independent trials: some have the record, the others do not.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import networkx
import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

import pdsl
from pdsl.engine.base import weighted_sum
from pdsl.peer.experiment import agreed_mechanisms, describe_task
from pdsl.peer.identity import Identity
from pdsl.peer.membership import join
from pdsl.peer.plan import Timeouts, TrainingPlan
from pdsl.peer.runner import run
from pdsl.peer.transport import Loop, Transport
from tests.helpers.floating_point import (
    ALLOWED,
    CLASSES,
    EPSILON,
    PIXELS,
    RECORDS,
    STATISTICS,
    STRONGEST,
    TRIALS,
    Ear,
    Overheard,
    Own,
    TappedAlgorithm,
    TappedDPSGD,
    TappedMuffliato,
    TappedPDSL,
    Trials,
    always,
    counts,
    eavesdropped,
    features,
    impossible_gradients,
    impossible_mixtures,
    noisy,
    one_more,
    public_records,
    records,
    saturating,
    steering,
    strongest,
    weights_of,
)
from tests.helpers.organisations import make_organisations, make_plan

pytestmark = pytest.mark.slow

D = CLASSES * PIXELS + CLASSES  # numbers in a model
ROUNDS = 24
MAKERS = 3 * 21  # times ROUNDS, enough for TRIALS
BACKGROUND = weights_of([PIXELS - 1])
SMALL = 2.0**-7  # a learning rate that loses no digits
WAYS = [(name, chance) for name in ("pdsl", "d-psgd", "muffliato") for chance in ("seeded", "system")]


def check(attacks: Mapping[str, Trials]) -> None:
    """Fail if one of them tells agents with the record from those without."""
    assert all(len(values) == TRIALS for trials in attacks.values() for values in trials)
    rates = {name: trials.rates() for name, trials in attacks.items()}
    print(*(f"{name}: TPR {r.with_record:.3f}, FPR {r.without:.3f}" for name, r in rates.items()), sep="\n")
    assert {name: r for name, r in rates.items() if r.advantage > ALLOWED} == {}


def by_values(o: Overheard, impossible: Callable[[bool], Tensor], in_a_row: int = 1) -> dict[str, Trials]:
    """How many values are impossible, in float32 arithmetic and in float64 that is rounded once."""
    kinds = {"impossible in float32": False, "impossible in float64": True}
    return {kind: o.trials(counts(impossible(wide)), in_a_row) for kind, wide in kinds.items()}


def by_statistic(o: Overheard) -> dict[str, Trials]:
    y = o.noisy_gradients()
    return {name: o.trials(statistic(y, o.sigma)) for name, statistic in STATISTICS.items()}


@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("rate", [0.0, SMALL], ids=["gradients", "models"])
def test_noise_that_is_a_float32_gives_a_record_away(rate: float, wide: bool) -> None:
    """The attacks do succeed, where noise is added as it should not be."""
    rng, sigma = torch.Generator().manual_seed(1), STRONGEST
    n = torch.randn(3 * TRIALS, D, generator=rng)
    models = torch.randn(3 * TRIALS, D, generator=rng) * rate
    g = torch.rand(3 * TRIALS, D, generator=rng) * 1e-3
    g[TRIALS:] = 0.0
    y = noisy(g, sigma, n, wide)
    o = Overheard(3, models - rate * y if rate else y, models, sigma, rate)
    rates = o.trials(counts(o.impossible(wide))).rates()
    assert rates.with_record > 0.99 and rates.without == 0.0


def overheard(name: str, randomness: str, chosen: bool, makers: int = MAKERS) -> Overheard:
    """One neighbour of all: by the protocol, or with models of its choice."""
    algorithm: TappedAlgorithm
    speech, graph = steering(saturating()), pdsl.full(makers + 1)
    if name == "pdsl":
        algorithm = TappedPDSL(learning_rate=1e-3, gossip_steps=1)
        speech, graph = always(saturating()), pdsl.star(makers + 1)
    elif name == "d-psgd":
        algorithm = TappedDPSGD(learning_rate=1.0 if chosen else SMALL)
    else:
        algorithm = TappedMuffliato(learning_rate=1.0 if chosen else SMALL, gossip_steps=2)
    ear = Ear(speech=speech if chosen else None)
    return eavesdropped(
        algorithm,
        graph,
        records,
        one_more,
        makers=makers,
        rounds=ROUNDS,
        ear=ear,
        randomness=randomness,
        skipped=int(chosen),  # until the model has arrived
    )


@pytest.fixture(scope="module", params=WAYS, ids="-".join)
def chosen(request: pytest.FixtureRequest) -> Overheard:
    """Messages about a model at which all gradients are exactly 0, but for the record's; more than TRIALS of each."""
    name, randomness = request.param
    return overheard(name, randomness, chosen=True, makers=3 * 35)


def test_messages_of_zero_gradients_contain_no_impossible_values(chosen: Overheard) -> None:
    check(by_values(chosen, chosen.impossible))


def test_low_bits_of_messages_do_not_tell_of_a_record(chosen: Overheard) -> None:
    check(by_statistic(chosen))


def test_a_classifier_of_bits_does_not_learn_to_tell_a_record(chosen: Overheard) -> None:
    seen = features(chosen.noisy_gradients(), chosen.sigma)
    rest = [chosen.trials(column, first=TRIALS, most=10**6) for column in seen.T]  # to learn from
    known, unknown = np.column_stack([t.with_record for t in rest]), np.column_stack([t.without for t in rest])
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    classifier.fit(np.concatenate([known, unknown]), np.repeat([1, 0], [len(known), len(unknown)]))
    check({"classifier": chosen.trials(classifier.decision_function(seen))})


@pytest.mark.parametrize(("algorithm", "randomness"), WAYS)
def test_messages_on_a_black_background_contain_no_impossible_values(algorithm: str, randomness: str) -> None:
    o = overheard(algorithm, randomness, chosen=False)
    check(by_values(o, lambda wide: o.impossible(wide)[:, BACKGROUND]))


# Answers to a neighbour that may ask about any model


def asked_about(
    model: Tensor,
    own: Callable[[int], Own] = records,
    more: Callable[[Own], Own] = one_more,
    noise: bool = True,
    makers: int = MAKERS,
    rounds: int = ROUNDS,
    batch: int = 64,
) -> Overheard:
    """PDSL's messages about one and the same model."""
    return eavesdropped(
        TappedPDSL(learning_rate=1e-3, gossip_steps=1),
        pdsl.star(makers + 1),
        own,
        more,
        makers=makers,
        rounds=rounds,
        ear=Ear(speech=always(model)),
        noise=noise,
        batch=batch,
    )


def test_the_chosen_model_has_gradients_of_zero_but_at_the_record() -> None:
    assert not asked_about(saturating(), noise=False, rounds=1).messages.any()
    with_record = asked_about(saturating(), lambda agent: one_more(records(agent)), noise=False, rounds=1)
    assert with_record.messages.all()


def test_messages_of_known_gradients_contain_no_impossible_values() -> None:
    """No gradient is 0 here: the attacker knows all records but one, and so what the gradient is without that one."""
    model = 0.3 * torch.arange(D).sin()
    known = asked_about(model, noise=False, rounds=1).messages.repeat_interleave(ROUNDS, 0)  # the same in each round
    assert (known != 0).double().mean() > 0.9
    o = asked_about(model)
    check(by_values(o, lambda wide: impossible_gradients(o.messages, known, o.sigma, wide)))


def test_messages_of_cancelling_gradients_contain_no_impossible_values() -> None:
    """Large gradients that add up to exactly 0, until a small one comes between them."""

    def pairs(agent: int) -> Own:
        rng = np.random.default_rng(agent)
        x = torch.from_numpy(2.0 ** rng.integers(-1, 3, (3, PIXELS)) * rng.choice([-1.0, 1.0], (3, PIXELS))).float()
        return torch.stack([x, -x], 1).flatten(0, 1), torch.arange(3).repeat_interleave(2)

    def with_small(own: Own) -> Own:
        x, y = own
        return torch.cat([x[:3], torch.full((1, PIXELS), 1e-3), x[3:]]), torch.cat([y[:3], y[:1], y[3:]])

    weights = slice(0, CLASSES * PIXELS)  # the biases do not cancel
    assert not asked_about(torch.zeros(D), pairs, noise=False, rounds=1).messages[:, weights].any()
    o = asked_about(torch.zeros(D), pairs, with_small)
    check(by_values(o, lambda wide: o.impossible(wide)[:, weights]))


def test_messages_of_subnormal_gradients_look_like_those_of_zero_gradients() -> None:
    """A record of which the model is only nearly sure: its gradient is between 1e-45 and 1e-42, and not 0."""

    def with_faint(own: Own) -> Own:
        x, y = own
        faint = torch.full((1, PIXELS), 0.05)
        faint[0, 0] = 1.0
        return torch.cat([x, faint]), torch.cat([y, y[:1]])

    model = saturating() / 100
    faintest = asked_about(model, lambda agent: with_faint(records(agent)), noise=False, rounds=1).messages
    assert 0 < float(faintest.abs().max()) < 1e-38
    o = asked_about(model, more=with_faint)
    check(by_values(o, o.impossible) | by_statistic(o))


def test_messages_of_empty_batches_look_like_others() -> None:
    """An agent has a single record, at which the gradient is 0, and is often without any in its batch."""
    o = asked_about(saturating(), lambda agent: records(agent, count=1), makers=2 * MAKERS, batch=1)
    check(by_values(o, o.impossible, in_a_row=2))


def test_mixtures_of_models_contain_no_impossible_values() -> None:
    """The attacker is two steps away: it gets what a neighbour has made of the message, of its own and of others."""
    links = networkx.empty_graph(2 * MAKERS + 1)
    links.add_edges_from(edge for i in range(1, MAKERS + 1) for edge in ((0, i), (i, i + MAKERS)))
    graph, ear = pdsl.from_networkx(links), Ear(exchange=1)
    o = eavesdropped(
        TappedMuffliato(learning_rate=SMALL, gossip_steps=2),
        graph,
        lambda agent: records(agent, background=PIXELS // 2),
        one_more,
        makers=MAKERS,
        rounds=ROUNDS,
        ear=ear,
        owner=lambda maker: maker + MAKERS,
    )
    local = torch.stack([h.models[h.maker + MAKERS] for h in ear.heard])
    known = [torch.stack([h.before[0] for h in ear.heard]), torch.stack([h.before[h.maker] for h in ear.heard])]
    weights = [float(graph.W[1, j]) for j in (0, 1, 1 + MAKERS)]
    black = weights_of(range(PIXELS // 2, PIXELS))

    def impossible(wide: bool) -> Tensor:
        return impossible_mixtures(o.messages, local, SMALL, o.sigma, known, weights, wide)[:, black]

    check(by_values(o, impossible))


# Between organisations: one peer in the middle, and three around it of which the first has the record

PEERS: dict[str, dict[str, int]] = {"pdsl": {"gossip_steps": 1}, "d-psgd": {}}
QUIET = TRIALS  # rounds at the models as they are; the one after it sends a chosen model, to be heard of from then on


class Spy:
    """What the peer in the middle sends and gets over the wire."""

    def __init__(self, plan: TrainingPlan):
        self.plan = plan
        self.gradients = plan.config.algorithm.name == "pdsl"  # which answer the models of the first exchange
        self.sent: list[Tensor] = []
        self.got: list[dict[int, Tensor]] = []

    def listen(self, patch: pytest.MonkeyPatch) -> None:
        exchange = Transport.exchange

        def listening(transport: Transport, t: int, phase: int, rows: dict[int, Tensor]) -> dict[int, Tensor]:
            if transport.me != 0:
                return exchange(transport, t, phase, rows)
            if phase == 0 and t > QUIET:
                rows = dict.fromkeys(rows, saturating())
            elif phase == 0 and not self.gradients:
                rows = dict.fromkeys(rows, torch.zeros(D))  # it never learns, and so models stay small
            got = exchange(transport, t, phase, rows)
            if phase == int(self.gradients):
                self.sent.append(rows[1])
                self.got.append(got)
            return got

        patch.setattr(Transport, "exchange", listening)

    def overheard(self, rounds: slice) -> Overheard:
        messages = torch.stack([torch.stack([got[j] for got in self.got]) for j in (1, 2, 3)])  # [3, rounds, d]
        models, rate = torch.zeros_like(messages), 0.0
        if not self.gradients:
            rate = self.plan.config.as_dict()["algorithm"]["learning_rate"]
            weights = [float(self.plan.graph.W[1, j]) for j in (0, 1)]
            for t, sent in enumerate(self.sent[:-1]):
                models[:, t + 1] = weighted_sum([sent.expand(3, -1), messages[:, t]], weights)
        sigma = agreed_mechanisms(self.plan)[1].sigmas[0]
        return Overheard(3, messages[:, rounds].flatten(0, 1), models[:, rounds].flatten(0, 1), sigma, rate)


@pytest.mark.peer
@pytest.mark.parametrize("algorithm", PEERS)
def test_messages_between_peers_do_not_tell_of_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    members = make_organisations(tmp_path)
    for i, member in enumerate(members):
        write_records(member, one_more(records(i)) if i == 1 else records(i))
    plan = planned(members, algorithm, 1.0)
    plan = planned(members, algorithm, strongest(agreed_mechanisms(plan)[1].sigmas[0]))
    for member in members:
        join(member, plan)
    spy, loop = Spy(plan), Loop()
    spy.listen(monkeypatch)
    with ThreadPoolExecutor(len(members)) as pool:
        summaries = list(pool.map(lambda member: run(member, loop), members))
    loop.close()
    assert all(summary["epsilon"] <= EPSILON for summary in summaries)

    quiet, loud = spy.overheard(slice(0, QUIET)), spy.overheard(slice(QUIET + 1, None))
    background = by_values(quiet, lambda wide: quiet.impossible(wide)[:, BACKGROUND])
    on_background = {f"{name}, on a black background": trials for name, trials in background.items()}
    check(by_values(loud, loud.impossible) | on_background | by_statistic(loud))


def write_records(member: Identity, own: Own) -> None:
    (x, y), (public_x, public_y) = own, public_records()
    np.savez(member.folder / "data.npz", x=x.numpy(), y=y.numpy())
    np.savez(
        member.folder / "public.npz",
        x_test=public_x[:4].numpy(),
        y_test=public_y[:4].numpy(),
        x_validation=public_x[4:].numpy(),
        y_validation=public_y[4:].numpy(),
    )


def planned(members: list[Identity], algorithm: str, C: float) -> TrainingPlan:
    return make_plan(
        members,
        describe_task(members[0].folder / "public.npz", records=RECORDS, classes=CLASSES),
        Timeouts(silence=60, deadline=120, start=120),
        rounds=QUIET + 1 + TRIALS,
        evaluate_every=QUIET + 1 + TRIALS,
        graph={"kind": "star"},
        algorithm={"name": algorithm, "learning_rate": 2.0**-14, **PEERS[algorithm]},
        privacy={"target_epsilon": EPSILON, "max_grad_norm": C},
    )
