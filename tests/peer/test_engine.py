"""Attendance of a round: mixing weights without absent neighbours, lost messages, and jumps to a later round."""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pdsl.peer.attendance import Attendance
from pdsl.peer.engine import PeerEngine, max_honest_norm
from pdsl.peer.messages import PROOF_BYTES, VECTOR, Answer
from pdsl.peer.receipts import Receipts
from pdsl.peer.state import ServerState
from pdsl.settings import PrivacySettings
from pdsl.topology import Graph, full, grid, ring, star


class Wire:
    """Transport stub: returns given rows of neighbours and keeps the rows sent to them."""

    def __init__(self, me: int, rows: dict[int, Tensor] | None = None):
        self.me, self.rows = me, rows or {}
        self.sent: list[dict[int, Tensor]] = []

    def exchange(self, t: int, phase: int, rows: dict[int, Tensor]) -> dict[int, Tensor]:
        self.sent.append(rows)
        return {j: self.rows[j] for j in rows if j in self.rows}


def peer(graph: Graph, wire: Wire) -> PeerEngine:
    return PeerEngine(graph, wire)  # type: ignore[arg-type]


@pytest.mark.parametrize("graph", [ring(6), full(4), star(5), grid(6)])
@pytest.mark.parametrize("absent", [set(), {0}, {1, 3}])
def test_weights_stay_doubly_stochastic_where_both_ends_agree(graph: Graph, absent: set[int]) -> None:
    W = np.eye(graph.agents)  # an absent agent keeps its model
    for i in set(range(graph.agents)) - absent:
        engine = peer(graph, Wire(i))
        engine.begin_round(1, frozenset(graph.neighbourhood(i).tolist()) - {i} - absent)
        W[i] = 0
        W[i, engine.sender] = engine.omega
        assert engine.receiver.tolist() == [i] * len(engine.sender) and engine.offsets == [0, len(engine.sender)]
    assert np.allclose(W, W.T) and np.allclose(W.sum(0), 1) and (W >= 0).all()
    if not absent:
        assert np.array_equal(W, graph.W)  # bit-identical


def test_own_row_replaces_the_message_of_a_lost_neighbour() -> None:
    graph, d = ring(4), 3
    wire = Wire(1, {0: torch.full((d,), 5.0), 2: torch.full((d,), 7.0)})
    engine = peer(graph, wire)
    engine.begin_round(3, frozenset({0, 2}))
    x = torch.ones(1, d)
    assert engine.deliver(x)[:, 0].tolist() == [5, 1, 7]
    del wire.rows[2]
    made = torch.arange(3.0)[:, None].repeat(1, d)  # for 0, for itself, for 2
    assert engine.reply(made)[:, 0].tolist() == [5, 1, 1]
    assert {j: float(row[0]) for j, row in wire.sent[1].items()} == {0: 0.0, 2: 2.0}  # each receives its own row
    assert engine.lost == {2: 1}
    expected = (5 + 1 + 1) / 3
    assert engine.mix(x)[0, 0].item() == pytest.approx(expected)
    assert set(wire.sent[2]) == {0}  # a lost neighbour gets no further messages
    assert (engine.messages, engine.bytes) == (5, 5 * 4 * d)
    engine.begin_round(4, frozenset({0, 2}))
    assert engine.lost == {}


def request_all_neighbours(engine: PeerEngine, own: Tensor) -> Tensor:
    """Replies to a request to all neighbours, with `own` as the own reply."""
    (at,) = engine.request(torch.zeros(1, len(own)), lambda who, asks, x: own.repeat(len(x), 1))
    return at.values


def test_only_gradients_above_the_largest_honest_norm_are_rescaled() -> None:
    d = 4
    honest, lie = torch.tensor([0.5, -0.5, 0.5, -0.5]), torch.full((d,), -1e6)
    engine = peer(ring(4), Wire(1, {0: honest, 2: lie}))
    engine.max_norms = [3.0] * 4
    engine.begin_round(1, frozenset({0, 2}))
    own = torch.full((d,), 9.0)  # the own gradient is never rescaled
    v = request_all_neighbours(engine, own)
    assert torch.equal(v[0], honest) and torch.equal(v[1], own)
    assert v[2].tolist() == [-1.5] * d
    assert engine.shortened == [2]
    engine.begin_round(2, frozenset({0, 2}))
    assert engine.shortened == []


def test_neighbours_of_an_attempt_before_a_crash_count_as_lost_if_they_are_absent_now() -> None:
    engine = peer(full(4), Wire(1, {0: torch.zeros(2)}))
    engine.begin_round(3, frozenset({0}), before=frozenset({0, 2}))
    engine.deliver(torch.ones(1, 2))
    assert engine.lost == {2: 0}
    assert engine.describe_mixing()["weights"] == pytest.approx({"0": 0.25, "1": 0.75})
    engine.begin_round(4, frozenset({0}))
    assert engine.lost == {}


def test_own_row_that_replaces_a_lost_message_is_not_rescaled() -> None:
    engine = peer(ring(4), Wire(1, {0: torch.ones(4)}))
    engine.max_norms = [3.0] * 4
    engine.begin_round(1, frozenset({0, 2}))
    own = torch.full((4,), 9.0)
    assert torch.equal(request_all_neighbours(engine, own)[2], own)
    assert set(engine.lost) == {2} and engine.shortened == []


@pytest.mark.parametrize("size", [1, 16, 64])
@pytest.mark.parametrize("clipping", ["per-sample", "batch"])
def test_max_honest_norm_covers_four_times_the_agreed_records(clipping: str, size: int) -> None:
    """Ten thousand rounds of a Poisson batch of identical records, plus noise."""
    d, sigma, rng = 650, 0.02, np.random.default_rng(0)
    privacy = PrivacySettings.model_validate({"clipping": clipping, "max_grad_norm": 0.5})
    drawn = rng.binomial(40 * size, 0.1, size=10_000)  # agreed: ten batches of records; here: forty
    signal = 0.5 * (np.minimum(drawn, size) if clipping == "batch" else drawn) / size
    along, across = sigma * rng.normal(size=len(drawn)), sigma * np.sqrt(rng.chisquare(d - 1, size=len(drawn)))
    assert np.hypot(signal + along, across).max() <= max_honest_norm(privacy, size, sigma, d)


T, MEMBERS, LAST, CREDIT = 4, 5, 100, 10


def find_jump(attendance: Attendance, neighbours: int) -> int | None:
    jump = attendance.jump_target(neighbours, LAST, dict.fromkeys(range(5), CREDIT))
    return None if jump is None else jump.round


@pytest.mark.parametrize(
    ("present", "behind", "ahead", "without_us", "finished", "pending", "jump"),
    [
        ([0, 1], [], {}, {}, [], [], None),
        ([], [], {0: 7, 1: 8}, {}, [], [], 7),  # none present: jump to the nearest
        ([0], [], {1: 7}, {}, [], [], None),  # one present; the other is near and waits
        ([], [0], {1: 7}, {}, [], [], None),  # one is behind and will arrive
        ([0], [], {1: 14}, {}, [], [], 14),  # one of two is far ahead and does not wait
        ([0], [], {1: 50}, {}, [], [], None),  # one of two may be a liar: a jump of more rounds than its credit
        ([], [2], {1: 50, 3: 60}, {}, [], [], 50),  # two of three
        ([], [], {1: 50}, {}, [], [], 50),  # the only one that answers
        ([0], [2], {1: 50}, {}, [], [], None),  # one of three may be a liar
        ([], [], {1: 50}, {}, [], [0], None),  # the other has not answered yet
        ([], [], {1: 10**8}, {}, [], [], LAST + 1),
        ([], [], {}, {0: 5, 1: 6}, [], [], 5),  # both started this round without this peer
        ([0], [], {}, {1: 5}, [], [], None),  # but one is present
        ([], [], {}, {}, [0, 1], [], LAST + 1),
        ([0], [], {}, {}, [1], [], None),  # one finished neighbour does not end training
        ([], [], {}, {0: 5}, [1], [], 5),
    ],
)
def test_jump_target(
    present: list[int],
    behind: list[int],
    ahead: dict[int, int],
    without_us: dict[int, int],
    finished: list[int],
    pending: list[int],
    jump: int | None,
) -> None:
    attendance = Attendance(T, MEMBERS, set(pending))
    attendance.present, attendance.behind, attendance.finished = set(present), set(behind), set(finished)
    attendance.ahead, attendance.without_us, attendance.later = set(ahead), set(without_us), {**ahead, **without_us}
    neighbours = len({*present, *behind, *ahead, *without_us, *finished, *pending})
    assert find_jump(attendance, neighbours) == jump


@pytest.mark.parametrize(
    ("present", "ahead", "left", "jump"),
    [
        ([0], {1: 7}, [1], 7),  # one of two answers has left and does not wait
        ([0, 2], {1: 7}, [1], None),  # one of three may be a liar
        ([0], {1: 7, 2: 6}, [1, 2], 6),  # jump to the nearest
    ],
)
def test_jump_target_after_neighbours_have_left(
    present: list[int], ahead: dict[int, int], left: list[int], jump: int | None
) -> None:
    attendance = Attendance(T, MEMBERS, set())
    attendance.present, attendance.ahead, attendance.left, attendance.later = set(present), set(ahead), set(left), ahead
    assert find_jump(attendance, len(present) + len(ahead)) == jump


def test_neighbours_far_behind_are_not_awaited() -> None:
    attendance = Attendance(50, MEMBERS, {1})
    assert [attendance.worth_waiting(at) for at in (50, 45, 44, 3)] == [True, True, False, False]


def make_state(patience: float) -> ServerState:
    """State of a peer whose calls to both neighbours work."""
    receipts = Receipts(b"key", "a" * 64, [1, 2], Path("nowhere"))
    state = ServerState("a" * 64, [1, 2], receipts, poll=0.0, patience=patience, silence=1000.0)
    for j in (1, 2):
        state.record_contact(j)
    return state


def test_answers_of_the_server_state() -> None:
    async def story() -> None:
        state = make_state(patience=1.0)

        async def hello(j: int, t: int) -> str:
            return (await state.hello(j, t)).state

        async def fetch(j: int, t: int, phase: int) -> str:
            answer = await state.fetch(j, t, phase)
            return (
                answer[1 + PROOF_BYTES :].decode()
                if answer[:1] == VECTOR
                else Answer.decode(answer[1:], "a" * 64).state
            )

        state.begin_roll_call(3)
        assert await hello(1, 3) == "here" and state.arrived == {1}
        assert await hello(2, 4) == "wait" and await hello(2, 2) == "ahead"
        assert await fetch(1, 3, 0) == "wait"
        state.begin_round(state.arrived)
        assert await hello(2, 3) == "out" and await hello(1, 3) == "here"
        assert await fetch(1, 3, 0) == "wait" and await fetch(2, 3, 0) == "out"
        state.publish(0, {1: b"to 1"})
        assert not state.fetched_all(1)
        assert await fetch(1, 3, 0) == await fetch(1, 3, 0) == "to 1"  # repeated requests
        assert state.fetched_all(1)
        assert await fetch(2, 3, 0) == "out" and await fetch(1, 2, 0) == "ahead"
        state.begin_roll_call(4)
        assert await fetch(1, 3, 0) == "to 1"  # messages of the previous round stay available
        assert await fetch(1, 3, 1) == "ahead" and await fetch(2, 3, 0) == "ahead"
        state.begin_roll_call(6)  # after a jump
        assert await fetch(1, 3, 0) == "to 1" and await fetch(1, 4, 0) == await fetch(1, 5, 0) == "ahead"
        state.begin_roll_call(7)
        state.begin_round([1])
        state.drop(1)
        assert await fetch(1, 7, 0) == "out"
        state.leave(1)
        assert await hello(1, 5) == await hello(1, 5) == "left" and await hello(2, 5) == "ahead"
        assert await hello(1, 8) == "wait" and not state.away  # it has reached this round
        state.leave(1)
        assert await hello(1, 5) == "left" and set(state.away) == {1}
        assert await hello(1, 6) == "ahead" and not state.away  # it advanced with other peers: awaited again
        state.finish()
        assert await hello(1, 8) == "finished" and await fetch(1, 8, 0) == "finished"

    asyncio.run(story())


def test_blocked_only_while_waiting_for_a_silent_neighbour() -> None:
    async def story() -> None:
        state = make_state(patience=5.0)
        long_ago = time.monotonic() - 100
        state.last_contact = {1: long_ago, 2: time.monotonic()}
        assert not (await state.hello(2, 0)).held  # computing, not waiting
        state.wait_for({1, 2})
        assert not (await state.hello(2, 0)).held  # patience is not exhausted yet
        state.waiting_since = long_ago
        assert (await state.hello(2, 0)).held
        state.record_contact(1)
        assert not (await state.hello(2, 0)).held
        state.last_contact[1] = long_ago
        state.awaited.discard(1)
        assert not (await state.hello(2, 0)).held  # no longer awaited

    asyncio.run(story())
