"""Amendments of a plan: parsing, signatures, the chain of hashes, and the graph after a change."""

import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdsl.algorithms import ALGORITHMS, pdsl
from pdsl.config import validate
from pdsl.peer.amending import apply, find_missing, propose, sign
from pdsl.peer.amendment import Amendment
from pdsl.peer.carry_over import carry_over
from pdsl.peer.healing import add_member, build_graph, get_links, remove_member
from pdsl.peer.identity import Identity
from pdsl.peer.ledger import PeerLedger
from pdsl.peer.membership import join, load_chain, load_plan, write_charge_marker
from pdsl.peer.messages import RefusedError, Request, split_proof
from pdsl.peer.plan import TrainingPlan
from pdsl.peer.receipts import Receipts
from pdsl.peer.stages import Chain
from pdsl.privacy import Mechanism, epsilon
from pdsl.topology import erdos_renyi, ring, star
from pdsl.utils.errors import PdslError
from tests.helpers.organisations import make_organisations, make_plan
from tests.helpers.refusals import refused

few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def four(tmp_path: Path) -> list[Identity]:
    """Four organisations on a ring that have joined a plan of 20 rounds."""
    members = make_organisations(tmp_path)
    plan = make_plan(members, rounds=20)
    for member in members:
        join(member, plan)
    return members


@pytest.fixture
def outsider(tmp_path: Path) -> Identity:
    return Identity.create(tmp_path / "zoe", "zoe", "127.0.0.1:9999")


def plan_of(member: Identity) -> TrainingPlan:
    return load_plan(member).plan


def with_changes(amendment: Amendment, **changes: Any) -> bytes:
    """A file with other values, and with the hash of an amendment that has them."""
    values = {**tomllib.loads(amendment.to_toml()), **changes}
    return tomli_w.dumps(values, multiline_strings=True).encode()


def test_an_amendment_round_trip_keeps_hash_and_signatures(four: list[Identity], outsider: Identity) -> None:
    for made in (
        propose(four[0], "leave", "ada", 5),
        propose(four[0], "join", "zoe", 5, outsider.card, ["ada", "ben"]),
        sign(four[1], propose(four[3], "leave", "ada", 5)),
    ):
        read = Amendment.parse(made.to_toml().encode(), "file")
        assert read == made and read.hash == made.hash
        assert read.hash == replace(read, signatures={}).hash  # comparable before all have signed


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"first_round": 6}, "hash does not match"),
        ({"member": "ben"}, "hash does not match"),
        ({"first_round": True}, "first_round=True"),
        ({"first_round": 2.0}, "first_round=2.0"),
        ({"number": 10**6}, "number=1000000"),
        ({"change": "expel"}, "change='expel'"),
        ({"format": 2}, "format 2"),
        ({"previous": "0"}, "previous is not a SHA-256"),
        ({"signatures": []}, "signatures"),
        ({"signatures": {"ada": "zz"}}, "signature of ada is damaged"),
        ({"signatures": {"../x": "00" * 70}}, "invalid name"),
        ({"extra": 1}, "exactly"),
        ({"neighbours": ["ben"]}, "exactly"),
        ({"member": 3}, "not a name"),
    ],
)
def test_a_changed_amendment_is_refused(four: list[Identity], changes: dict[str, Any], reason: str) -> None:
    made = propose(four[0], "leave", "ada", 5)
    with refused(reason):
        Amendment.parse(with_changes(made, **changes), "file")


@few
@given(damage=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_amendment_is_refused_in_one_line(four: list[Identity], damage: list[tuple[int, int]]) -> None:
    content = bytearray(propose(four[0], "leave", "ada", 5).to_toml().encode())
    for place, byte in damage:
        content[place % len(content)] = byte
    try:
        read = Amendment.parse(bytes(content), "file")
    except PdslError as e:
        assert "\n" not in str(e)
        return
    chain = load_chain(four[1])
    try:
        chain.append(read)
    except PdslError as e:
        assert "\n" not in str(e)
    else:
        assert read.hash == propose(four[0], "leave", "ada", 5).hash


def test_a_file_larger_than_an_amendment_is_refused() -> None:
    with refused("larger than"):
        Amendment.parse(b"#" * 300_001, "file")


def _forge(four: list[Identity]) -> Amendment:
    """ben signs in the name of ada."""
    made = replace(propose(four[0], "leave", "ada", 5), signatures={})
    return made.sign(replace(four[1], card=replace(four[1].card, name="ada")))


def _move_signature(four: list[Identity]) -> Amendment:
    """A genuine signature of ada for another round."""
    return replace(propose(four[0], "leave", "ada", 5), signatures=propose(four[0], "leave", "ada", 6).signatures)


def _outsider_signs(four: list[Identity]) -> Amendment:
    stranger = Identity.create(four[0].folder.parent / "mal", "mal", "none")
    return propose(four[0], "leave", "ada", 5).sign(stranger)


def _too_few(four: list[Identity]) -> Amendment:
    return propose(four[1], "leave", "ada", 5)  # ben is one of two neighbours


def _other_plan(four: list[Identity]) -> Amendment:
    return replace(propose(four[0], "leave", "ada", 5), plan="0" * 64, signatures={}).sign(four[0])


def _out_of_order(four: list[Identity]) -> Amendment:
    return replace(propose(four[0], "leave", "ada", 5), number=2, signatures={}).sign(four[0])


def _other_history(four: list[Identity]) -> Amendment:
    return replace(propose(four[0], "leave", "ada", 5), previous="1" * 64, signatures={}).sign(four[0])


def _after_the_end(four: list[Identity]) -> Amendment:
    return replace(propose(four[0], "leave", "ada", 5), first_round=21, signatures={}).sign(four[0])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_forge, "signature of ada is not valid"),
        (_move_signature, "signature of ada is not valid"),
        (_outsider_signs, "mal, which is no member"),
        (_too_few, "lacks signatures: ada or dora"),
        (_other_plan, "belongs to another plan"),
        (_out_of_order, "cannot be next: the next one is amendment 1"),
        (_other_history, "members have different amendments"),
        (_after_the_end, "first_round=21 is not between 2 and 20"),
    ],
)
def test_an_amendment_without_right_is_refused_and_not_stored(
    four: list[Identity], make: Callable[[list[Identity]], Amendment], reason: str
) -> None:
    made = make(four)
    with refused(reason):
        apply(four[2], made)
    assert load_chain(four[2]).amendments == ()


def test_replayed_and_reordered_amendments_are_refused(four: list[Identity], outsider: Identity) -> None:
    first = propose(four[0], "leave", "ada", 5)
    for member in four:
        apply(member, first)
    with refused("has amendment 1 already"):
        apply(four[1], first)
    second = sign(four[2], propose(four[1], "join", "zoe", 7, outsider.card, ["ben", "cleo"]))
    with refused("first_round=4 is not between 5 and 20"):
        propose(four[1], "join", "zoe", 4, outsider.card, ["ben"])
    with refused("cannot be next: the next one is amendment 1"):
        Chain(plan_of(four[0]), [second, first])
    assert Chain(plan_of(four[0]), [first, second]).newest.hash == second.hash


def test_a_member_that_left_cannot_return_and_a_certificate_is_used_once(
    four: list[Identity], outsider: Identity
) -> None:
    leaving = propose(four[0], "leave", "ada", 5)
    for member in four[:2]:
        apply(member, leaving)
    with refused("ada is or was a member"):
        propose(four[1], "join", "ada", 6, four[0].card, ["ben"])
    with refused("is the address of another member"):
        propose(four[1], "join", "zoe", 6, replace(outsider.card, address=four[2].card.address), ["ben"])
    with refused("certificate of ben was used before"):
        propose(four[1], "replace", "ben", 6, replace(four[1].card, address="127.0.0.1:1"))
    with refused("neighbour mal is not a member"):
        propose(four[1], "join", "zoe", 6, outsider.card, ["ben", "mal"])


def test_only_the_member_and_its_neighbours_sign(four: list[Identity]) -> None:
    with refused("cleo is neither ada nor a neighbour of it"):
        propose(four[2], "leave", "ada", 5)
    half = propose(four[1], "leave", "ada", 5)
    assert find_missing(four[1], half) == [["ada"], ["dora"]]
    assert find_missing(four[1], sign(four[3], half)) == []


def test_an_amendment_of_a_past_round_needs_late(four: list[Identity]) -> None:
    leaving = propose(four[0], "leave", "ada", 5)
    write_charge_marker(four[1], plan_of(four[1]), 5)
    with refused("has run round 5; agree on a later round"):
        apply(four[1], leaving)
    assert apply(four[1], leaving, late=True).hash == leaving.hash
    write_charge_marker(four[0], plan_of(four[0]), 7)
    with refused("has run round 7"):
        propose(four[0], "leave", "ada", 7)


def test_requests_are_accepted_with_the_hash_of_their_round_only(four: list[Identity]) -> None:
    plan = plan_of(four[0])
    leaving = propose(four[0], "leave", "ada", 5)
    chain, without = Chain(plan, [leaving]), Chain(plan)

    def accepted(of: Chain, digest: str, t: int) -> bool:
        try:
            Request.decode(Request(digest, t, 0).encode(), of.newest.accepts, 20)
        except RefusedError as e:
            assert e.reason == "plan"
            return False
        return True

    assert accepted(chain, plan.hash, 4) and not accepted(chain, plan.hash, 5)
    assert accepted(chain, leaving.hash, 5) and not accepted(chain, leaving.hash, 4)
    assert accepted(chain, plan.hash, 0) and accepted(chain, leaving.hash, 0)
    assert not accepted(without, leaving.hash, 5) and not accepted(without, leaving.hash, 0)
    other = Chain(plan, [propose(four[1], "leave", "ben", 5)])  # both are amendment 1
    assert accepted(other, plan.hash, 4) and not accepted(other, leaving.hash, 5)


def test_two_different_first_amendments_cannot_both_be_applied(four: list[Identity]) -> None:
    apply(four[2], propose(four[0], "leave", "ada", 5))
    with refused("cannot be next: the next one is amendment 2"):
        apply(four[2], propose(four[1], "leave", "ben", 5))


def test_pins_follow_an_amendment(four: list[Identity], outsider: Identity) -> None:
    leaving = propose(four[0], "leave", "ada", 5)
    apply(four[1], leaving)
    assert (four[1].folder / "pins" / "dora.pem").read_text() == four[3].card.certificate  # ben and dora meet
    apply(four[3], leaving)
    joining = sign(four[3], propose(four[1], "join", "zoe", 8, outsider.card, ["ben", "dora"]))
    apply(four[1], joining)
    assert (four[1].folder / "pins" / "zoe.pem").read_text() == outsider.card.certificate
    assert join(outsider, plan_of(four[1]), [leaving, joining]) == [1, 3]
    assert sorted(file.stem for file in (outsider.folder / "pins").iterdir()) == ["ben", "dora"]
    with refused("has no member zoe"):
        join(outsider, plan_of(four[1]), [leaving])


def test_a_span_ends_with_a_departure_and_moves_with_a_machine(four: list[Identity], tmp_path: Path) -> None:
    new = Identity.create(tmp_path / "new", "ada", "127.0.0.1:9998")
    chain = Chain(plan_of(four[0]), [propose(four[0], "replace", "ada", 6, new.card)])
    assert (chain.find_span(four[0].card), chain.find_span(new.card)) == ((1, 5), (6, 20))
    assert chain.is_replacement(new.card) and not chain.is_replacement(four[0].card)
    renewed = replace(four[0].card, certificate="unknown")
    assert chain.find_span(renewed) == (1, 5)  # a key that is in no amendment does not continue the old machine
    leaving = propose(four[1], "leave", "ben", 9)
    assert Chain(plan_of(four[0]), [leaving]).find_span(four[1].card) == (1, 8)


def check_graph(links: np.ndarray[Any, Any], active: list[int]) -> None:
    graph = build_graph(links, active)  # refuses a graph that is not connected
    np.testing.assert_allclose(graph.W.sum(axis=0), 1, atol=1e-12)
    np.testing.assert_array_equal(graph.W, graph.W.T)
    assert (graph.W >= 0).all() and graph.spectral_gap > 1e-9
    gone = sorted(set(range(len(links))) - set(active))
    assert all(graph.neighbourhood(i).tolist() == [i] for i in gone)


@few
@given(agents=st.integers(3, 14), seed=st.integers(0, 10**6), data=st.data())
def test_a_healed_graph_is_connected_and_doubly_stochastic(agents: int, seed: int, data: st.DataObject) -> None:
    links, active = get_links(erdos_renyi(agents, 0.4, seed)), list(range(agents))
    for _ in range(data.draw(st.integers(1, 8))):
        if len(active) > 2 and data.draw(st.booleans()):
            member = data.draw(st.sampled_from(active))
            before, active = links.sum(axis=0), [i for i in active if i != member]
            links = remove_member(links, member)
            assert (links.sum(axis=0) <= before + 1).all()
        else:
            chosen = data.draw(st.lists(st.sampled_from(active), min_size=1, max_size=3, unique=True))
            links, active = add_member(links, chosen), [*active, len(links)]
        check_graph(links, active)


def test_a_ring_stays_a_ring_and_a_star_without_its_centre_becomes_one() -> None:
    smaller = build_graph(remove_member(get_links(ring(8)), 3), [0, 1, 2, 4, 5, 6, 7])
    assert smaller.neighbourhood(2).tolist() == [1, 2, 4] and smaller.neighbourhood(4).tolist() == [2, 4, 5]
    assert smaller.spectral_gap == pytest.approx(ring(7).spectral_gap)
    leaves = build_graph(remove_member(get_links(star(6)), 0), range(1, 6))
    assert leaves.spectral_gap == pytest.approx(ring(5).spectral_gap)


def test_a_quorum_is_never_more_than_the_neighbours(tmp_path: Path) -> None:
    members = make_organisations(tmp_path, 3)
    plan = make_plan(members)
    plan = replace(plan, timeouts=plan.timeouts.model_copy(update={"quorum": 2}), written="")
    for member in members:
        join(member, plan)
    assert apply(members[1], propose(members[0], "leave", "ada", 2)).timeouts.quorum == 1
    with refused("only one member would remain"):
        propose(members[1], "leave", "ben", 3)


def test_evidence_stays_with_its_neighbour() -> None:
    before, graph = [1, 2, 3], build_graph(remove_member(get_links(ring(8)), 3), [0, 1, 2, 4, 5, 6, 7])
    x = torch.randn(1, 4)
    evidence = torch.arange(18.0).reshape(1, 3, 6).double()
    sums = torch.arange(12.0).reshape(1, 1, 3, 2, 2).double()
    state = pdsl.State(x, x + 1, evidence, x, sums)
    moved = carry_over(
        validate({"rounds": 3}, "test"), state, before, 2, graph
    )  # the neighbourhood of 2 is now 1, 2, 4
    assert isinstance(moved, pdsl.State)
    torch.testing.assert_close(moved.evidence, torch.cat([evidence[:, :2], torch.zeros(1, 1, 6).double()], 1))
    torch.testing.assert_close(moved.sums[:, :, :2], sums[:, :, :2])
    assert moved.u is state.u and not moved.sums[:, :, 2].any()


def test_a_ledger_charges_each_stage_with_its_own_noise() -> None:
    wide, narrow = Mechanism(0.3, 0.01, 3, rate=0.1), Mechanism(0.2, 0.01, 2, rate=0.1)
    first = PeerLedger(1e-5, 50.0, wide, ALGORITHMS["pdsl"](), 100, 0, (0, 1, 2), {}, stage="a")
    first = first.charge(1, 1, frozenset({1, 2})).charge(2, 1, frozenset({1}))
    names = ["ada", "ben", "cleo", "dora"]
    new = PeerLedger(1e-5, 50.0, narrow, ALGORITHMS["pdsl"](), 100, 0, (0, 3), {}, stage="b")
    second = new.restore(first.to_json(names).encode(), "ledger").charge(3, 2, frozenset({3}))
    partly = replace(wide, messages=2)
    assert second.epsilon == pytest.approx(epsilon(((wide, 1), (partly, 1), (narrow, 1)), 1e-5))
    assert second.epsilon > first.epsilon
    again = new.restore(second.to_json(names).encode(), "ledger")
    assert again.epsilon == second.epsilon and again.charges == second.charges
    with refused("not this organisation's ledger"):  # generation 2 has no neighbour 1
        new.restore(second.charge(4, 2, frozenset({1})).to_json(names).encode(), "ledger")
    with refused("not this organisation's ledger"):  # a stage cannot be entered with less noise than agreed
        replace(new, mechanism=replace(narrow, sigma=0.3)).restore(second.to_json(names).encode(), "ledger")


def test_receipts_survive_a_new_key(tmp_path: Path) -> None:
    path = tmp_path / "receipts.json"
    old = Receipts(b"old key", "p" * 64, [1], path)
    old.released_round = 7
    proof = old.attach(1)
    old.save()
    new = Receipts(b"new key", "p" * 64, [1], path)
    new.check(1, split_proof(proof)[0])
    assert new.proven_round == 7
