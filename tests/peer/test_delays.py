"""Delays by a minority of the neighbours cost a bounded time in total, and the neighbour is named."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pdsl.peer import delays
from pdsl.peer.delays import CREDIT_DEADLINES, GRACE, REFILL, Delays, Wait
from pdsl.peer.plan import Timeouts
from pdsl.peer.transport import Loop, Transport
from tests.helpers.hood import ROUNDS, row, run_hood


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(delays, "time", made)
    return made


def simulate(clock: Clock, rounds: int, late: dict[int, float], phases: int = 4, deadline: float = 10.0) -> list[float]:
    """Lengths of rounds of a peer with seven neighbours, each phase of 0.25 s; some try to be late in each phase."""
    account, lengths = Delays(range(7), deadline), []
    for _ in range(rounds):
        began = clock.now
        account.begin_round()
        present = set(range(7))
        for _ in range(phases):
            clock.now += 0.25
            wait = Wait(account, present)
            for j in present - set(late):
                wait.arrive(j)
            start = clock.now
            for j in sorted(present & set(late), key=lambda j: late[j]):
                arrival, cutoff = start + late[j], wait.cutoff(j, blocked=False)
                clock.now = max(clock.now, min(arrival, cutoff))
                if arrival <= cutoff:
                    wait.arrive(j)
                else:
                    present.discard(j)
            wait.end()
        lengths.append(clock.now - began)
    return lengths


@pytest.mark.parametrize("late", [{6: 9.9}, {6: 1e9}, {6: 1.0}, {6: 0.2}, {5: 9.9, 6: 9.9}, {4: 3.0, 5: 9.9, 6: 1.0}])
def test_the_total_cost_of_delays_is_bounded(clock: Clock, late: dict[int, float]) -> None:
    rounds, usual, deadline = 400, 1.0, 10.0
    lengths = simulate(clock, rounds, late, deadline=deadline)
    assert sum(lengths) <= rounds * usual * (1 + (GRACE + REFILL) * len(late)) + CREDIT_DEADLINES * deadline * len(late)
    assert max(lengths[-100:]) <= usual + (GRACE + REFILL) * len(late) * 1.5


def test_a_neighbour_that_is_always_late_by_little_is_never_excluded(clock: Clock) -> None:
    account = Delays(range(3), deadline=10.0)
    for _ in range(1000):
        account.begin_round()
        clock.now += 1.0
        wait = Wait(account, range(3))
        wait.arrive(0)
        wait.arrive(1)
        clock.now += 0.09
        assert clock.now < wait.cutoff(2, blocked=False)
        wait.arrive(2)
        wait.end()


def test_a_single_outage_leaves_credit_for_the_next(clock: Clock) -> None:
    account = Delays(range(3), deadline=10.0)
    for t in range(200):
        account.begin_round()
        clock.now += 1.0
        wait = Wait(account, range(3))
        wait.arrive(0)
        wait.arrive(1)
        if t % 100 == 50:  # an outage of four seconds in a hundred
            clock.now += 4.0
            assert clock.now < wait.cutoff(2, blocked=False)
        wait.arrive(2)
        wait.end()
    assert account.total[2] == pytest.approx(8.0)


def test_a_peer_with_one_neighbour_waits_for_the_deadline(clock: Clock) -> None:
    """Without it there is no round, so a slower machine is not excluded."""
    account = Delays([1], deadline=10.0)
    for _ in range(100):
        account.begin_round()
        clock.now += 1.0
        wait = Wait(account, [1])
        clock.now += 9.9
        assert clock.now < wait.cutoff(1, blocked=False)
        wait.arrive(1)
        wait.end()
    assert account.total[1] == 0


def test_the_deadline_covers_a_round_and_not_each_phase(clock: Clock) -> None:
    account = Delays(range(3), deadline=10.0)
    account.begin_round()
    for _ in range(3):
        wait = Wait(account, range(3))
        clock.now += 3.0
        wait.end()
    wait = Wait(account, range(3))
    assert wait.cutoff(0, blocked=False) == pytest.approx(clock.now + 1.0)
    assert wait.cutoff(0, blocked=True) == pytest.approx(clock.now + 11.0)


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def train(peer: Transport, stall: float) -> float:
    """Rounds of two phases with some work; a stalling peer delivers each message late. Returns the seconds."""
    began, t = time.monotonic(), 1
    while t <= ROUNDS:
        result = peer.roll_call(t)
        for phase in range(0 if result.jump else 2):
            time.sleep(0.1 + stall)
            peer.exchange(t, phase, dict.fromkeys(peer.state.present, row(peer)))
        t = result.jump or t + 1
    seconds = time.monotonic() - began
    peer.finish()
    return seconds


@pytest.mark.peer
def test_a_stalling_member_costs_a_fifth_and_three_deadlines_and_is_named(tmp_path: Path, loop: Loop) -> None:
    deadline = 2.0
    timeouts = Timeouts(silence=8.0, patience=4.0, deadline=deadline, start=20.0)
    took: list[Any] = []
    for stall in (0.0, 0.9 * deadline):
        with (
            run_hood(tmp_path / str(stall), loop, 5, timeouts, graph={"kind": "full", "agents": 5}) as hood,
            ThreadPoolExecutor(5) as pool,
        ):
            lives = [pool.submit(train, peer, stall if peer.me == 4 else 0.0) for peer in hood.peers]
            took.append([life.result(300) for life in lives[:4]])
            lives[4].result(300)
    clean, stalled = took
    assert max(stalled) <= 1.2 * max(clean) + 3 * deadline
    for i, peer in enumerate(hood.peers[:4]):
        totals = peer.client.delays.total
        assert max(totals, key=lambda j: totals[j]) == 4
        assert "eli" in {event["who"] for event in hood.events[i].read() if event["event"] in ("delayed", "lost")}
