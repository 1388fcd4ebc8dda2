"""Who is in a round: weights without the absent, rows without the lost, and where to go when the others are ahead."""

import asyncio
import time

import numpy as np
import pytest
import torch
from torch import Tensor

from pdsl.graph import Graph, full, grid, ring, star
from pdsl.peer.engine import Peer, longest_honest
from pdsl.peer.node import Node
from pdsl.peer.roll import Roll
from pdsl.peer.wire import VECTOR, Answer
from pdsl.settings import PrivacySettings


class Wire:
    """In the place of a network: what neighbours send is given, and what is sent to them is kept."""

    def __init__(self, me: int, rows: dict[int, Tensor] | None = None):
        self.me, self.rows = me, rows or {}
        self.sent: list[dict[int, Tensor]] = []

    def exchange(self, t: int, phase: int, rows: dict[int, Tensor]) -> dict[int, Tensor]:
        self.sent.append(rows)
        return {j: self.rows[j] for j in rows if j in self.rows}


def peer(graph: Graph, wire: Wire) -> Peer:
    return Peer(graph, wire)  # type: ignore[arg-type]


@pytest.mark.parametrize("graph", [ring(6), full(4), star(5), grid(6)])
@pytest.mark.parametrize("absent", [set(), {0}, {1, 3}])
def test_weights_stay_doubly_stochastic_where_both_ends_agree(graph: Graph, absent: set[int]) -> None:
    W = np.eye(graph.agents)  # who is absent keeps what it has
    for i in set(range(graph.agents)) - absent:
        engine = peer(graph, Wire(i))
        engine.begin(1, frozenset(graph.neighbourhood(i).tolist()) - {i} - absent)
        W[i] = 0
        W[i, engine.sender] = engine.omega
        assert engine.receiver.tolist() == [i] * len(engine.sender) and engine.offsets == [0, len(engine.sender)]
    assert np.allclose(W, W.T) and np.allclose(W.sum(0), 1) and (W >= 0).all()
    if not absent:
        assert np.array_equal(W, graph.W)  # to the last bit


def test_what_a_lost_neighbour_did_not_send_is_replaced_by_the_own_row() -> None:
    graph, d = ring(4), 3
    wire = Wire(1, {0: torch.full((d,), 5.0), 2: torch.full((d,), 7.0)})
    engine = peer(graph, wire)
    engine.begin(3, frozenset({0, 2}))
    x = torch.ones(1, d)
    assert engine.deliver(x)[:, 0].tolist() == [5, 1, 7]
    del wire.rows[2]
    made = torch.arange(3.0)[:, None].repeat(1, d)  # for 0, for itself, for 2
    assert engine.reply(made)[:, 0].tolist() == [5, 1, 1]
    assert {j: float(row[0]) for j, row in wire.sent[1].items()} == {0: 0.0, 2: 2.0}  # each gets what is its own
    assert engine.lost == {2: 1}
    expected = (5 + 1 + 1) / 3
    assert engine.mix(x)[0, 0].item() == pytest.approx(expected)
    assert set(wire.sent[2]) == {0}  # nothing more goes to who is lost
    assert (engine.messages, engine.bytes) == (5, 5 * 4 * d)
    engine.begin(4, frozenset({0, 2}))
    assert engine.lost == {}


def asked(engine: Peer, own: Tensor) -> Tensor:
    """What comes of it if everybody is asked, and the own answers are these."""
    (at,) = engine.ask(torch.zeros(1, len(own)), lambda who, asks, x: own.repeat(len(x), 1))
    return at.v


def test_a_gradient_longer_than_an_honest_one_is_shortened_and_others_are_left_as_they_are() -> None:
    d = 4
    honest, lie = torch.tensor([0.5, -0.5, 0.5, -0.5]), torch.full((d,), -1e6)
    engine = peer(ring(4), Wire(1, {0: honest, 2: lie}))
    engine.longest = [3.0] * 4
    engine.begin(1, frozenset({0, 2}))
    own = torch.full((d,), 9.0)  # one's own gradient is nobody else's business
    v = asked(engine, own)
    assert torch.equal(v[0], honest) and torch.equal(v[1], own)
    assert v[2].tolist() == [-1.5] * d
    assert engine.shortened == [2]
    engine.begin(2, frozenset({0, 2}))
    assert engine.shortened == []


def test_the_own_row_in_the_place_of_a_lost_neighbour_is_not_shortened() -> None:
    engine = peer(ring(4), Wire(1, {0: torch.ones(4)}))
    engine.longest = [3.0] * 4
    engine.begin(1, frozenset({0, 2}))
    own = torch.full((4,), 9.0)
    assert torch.equal(asked(engine, own)[2], own)
    assert set(engine.lost) == {2} and engine.shortened == []


@pytest.mark.parametrize("size", [1, 16, 64])
@pytest.mark.parametrize("clipping", ["per-sample", "batch"])
def test_no_honest_gradient_of_four_times_the_agreed_records_is_too_long(clipping: str, size: int) -> None:
    """All records alike, as many as Poisson draws of them, and noise: ten thousand rounds."""
    d, sigma, rng = 650, 0.02, np.random.default_rng(0)
    privacy = PrivacySettings.model_validate({"clipping": clipping, "max_grad_norm": 0.5})
    drawn = rng.binomial(40 * size, 0.1, size=10_000)  # agreed: ten batches' worth; here: forty
    signal = 0.5 * (np.minimum(drawn, size) if clipping == "batch" else drawn) / size
    along, across = sigma * rng.normal(size=len(drawn)), sigma * np.sqrt(rng.chisquare(d - 1, size=len(drawn)))
    assert np.hypot(signal + along, across).max() <= longest_honest(privacy, size, sigma, d)


T, MEMBERS, LAST = 4, 5, 100


@pytest.mark.parametrize(
    ("present", "behind", "ahead", "without_us", "finished", "pending", "jump"),
    [
        ([0, 1], [], {}, {}, [], [], None),
        ([], [], {0: 7, 1: 8}, {}, [], [], 7),  # nobody is here: to the nearest
        ([0], [], {1: 7}, {}, [], [], None),  # one is here: the other is near, and waits for us
        ([], [0], {1: 7}, {}, [], [], None),  # or one is on its way here
        ([0], [], {1: 50}, {}, [], [], 50),  # one of two is far ahead, and does not wait
        ([0], [2], {1: 50}, {}, [], [], None),  # one of three may be a liar
        ([], [], {1: 50}, {}, [], [0], None),  # nothing is known of the other yet
        ([], [], {1: 10**8}, {}, [], [], LAST + 1),
        ([], [], {}, {0: 5, 1: 6}, [], [], 5),  # they began without us
        ([0], [], {}, {1: 5}, [], [], None),  # but one is here
        ([], [], {}, {}, [0, 1], [], LAST + 1),
        ([0], [], {}, {}, [1], [], None),  # who has finished early does not end it for others
        ([], [], {}, {0: 5}, [1], [], 5),
    ],
)
def test_when_to_go_where_the_others_are(
    present: list[int],
    behind: list[int],
    ahead: dict[int, int],
    without_us: dict[int, int],
    finished: list[int],
    pending: list[int],
    jump: int | None,
) -> None:
    roll = Roll(T, MEMBERS, set(pending))
    roll.present, roll.behind, roll.finished = set(present), set(behind), set(finished)
    roll.ahead, roll.without_us, roll.later = set(ahead), set(without_us), {**ahead, **without_us}
    neighbours = len({*present, *behind, *ahead, *without_us, *finished, *pending})
    assert roll.jump(neighbours, LAST) == jump


@pytest.mark.parametrize(
    ("present", "ahead", "left", "jump"),
    [
        ([0], {1: 7}, [1], 7),  # the one who left us does not wait: half of those heard from
        ([0, 2], {1: 7}, [1], None),  # one of three may be a liar
        ([0], {1: 7, 2: 6}, [1, 2], 6),  # to the nearest of them
    ],
)
def test_who_was_held_up_follows_those_who_went_on(
    present: list[int], ahead: dict[int, int], left: list[int], jump: int | None
) -> None:
    roll = Roll(T, MEMBERS, set())
    roll.present, roll.ahead, roll.left, roll.later = set(present), set(ahead), set(left), ahead
    assert roll.jump(len(present) + len(ahead), LAST) == jump


def test_who_is_far_behind_is_not_waited_for() -> None:
    roll = Roll(50, MEMBERS, {1})
    assert [roll.worth_waiting(at) for at in (50, 45, 44, 3)] == [True, True, False, False]


def test_a_node_tells_each_where_it_stands() -> None:
    async def story() -> None:
        node = Node("a" * 64, [1, 2], poll=0.0, patience=1.0)

        async def hello(j: int, t: int) -> str:
            return (await node.hello(j, t)).state

        async def fetch(j: int, t: int, phase: int) -> str:
            answer = await node.fetch(j, t, phase)
            return answer[1:].decode() if answer[:1] == VECTOR else Answer.decode(answer[1:], "a" * 64).state

        node.gather(3)
        assert await hello(1, 3) == "here" and node.arrived == {1}
        assert await hello(2, 4) == "wait" and await hello(2, 2) == "ahead"
        assert await fetch(1, 3, 0) == "wait"
        node.begin(node.arrived)
        assert await hello(2, 3) == "out" and await hello(1, 3) == "here"
        assert await fetch(1, 3, 0) == "wait" and await fetch(2, 3, 0) == "out"
        node.publish(0, {1: b"to 1"})
        assert not node.fetched_all(1)
        assert await fetch(1, 3, 0) == await fetch(1, 3, 0) == "to 1"  # as often as it asks
        assert node.fetched_all(1)
        assert await fetch(2, 3, 0) == "out" and await fetch(1, 2, 0) == "ahead"
        node.gather(4)
        assert await fetch(1, 3, 0) == "to 1"  # who is slower still gets the last round's
        assert await fetch(1, 3, 1) == "ahead" and await fetch(2, 3, 0) == "ahead"
        node.gather(6)  # the others were ahead
        assert await fetch(1, 3, 0) == "to 1" and await fetch(1, 4, 0) == await fetch(1, 5, 0) == "ahead"
        node.gather(7)
        node.begin([1])
        node.drop(1)
        assert await fetch(1, 7, 0) == "out"
        node.leave(1)
        assert await hello(1, 5) == await hello(1, 5) == "left" and await hello(2, 5) == "ahead"
        assert await hello(1, 8) == "wait" and not node.away  # it has come
        node.leave(1)
        assert await hello(1, 5) == "left" and set(node.away) == {1}
        assert await hello(1, 6) == "ahead" and not node.away  # it stays with others: we wait for it again
        node.finish()
        assert await hello(1, 8) == "finished" and await fetch(1, 8, 0) == "finished"

    asyncio.run(story())


def test_a_node_says_that_it_is_held_up_only_while_it_waits_for_one_who_is_silent() -> None:
    async def story() -> None:
        node = Node("a" * 64, [1, 2], poll=0.0, patience=5.0)
        long_ago = time.monotonic() - 100
        node.heard = {1: long_ago, 2: time.monotonic()}
        assert not (await node.hello(2, 0)).held  # it computes
        node.wait_for({1, 2})
        assert not (await node.hello(2, 0)).held  # it has not waited long enough to tell
        node.since = long_ago
        assert (await node.hello(2, 0)).held
        node.sign_of_life(1)
        assert not (await node.hello(2, 0)).held
        node.heard[1] = long_ago
        node.awaited.discard(1)
        assert not (await node.hello(2, 0)).held  # it has what it waited for

    asyncio.run(story())
