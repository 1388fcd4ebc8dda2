"""The protocol between peers in a deterministic simulation: schedules keep all invariants, planted faults do not."""

from collections.abc import Iterator
from itertools import islice

import pytest

from tests.stress.protocol_faults import FAULTS
from tests.stress.simulation import Crash, Schedule, draw_schedule, every_crash, search, simulate

RANDOM = 120  # schedules


def test_a_schedule_has_the_same_course_every_time() -> None:
    first = [simulate(draw_schedule(number)) for number in (1, 6, 31)]
    assert first == [simulate(draw_schedule(number)) for number in (1, 6, 31)]
    assert len({outcome.digest for outcome in first}) == 3


def test_peers_without_faults_run_all_rounds_together() -> None:
    outcome = simulate(Schedule(0, kind="ring", peers=4, rounds=4))
    assert outcome.faults == [] and outcome.ends == [["finished"]] * 4
    assert outcome.rounds_run == 16 and outcome.doubly_stochastic == 4


def test_a_member_leaves_by_an_amendment_and_the_others_run_all_rounds() -> None:
    outcome = simulate(Schedule(0, kind="line", peers=4, rounds=4, leaves=3))
    assert outcome.faults == [] and outcome.ends == [["finished"]] * 4
    assert outcome.rounds_run == 3 * 4 + 2 and outcome.doubly_stochastic == 4


@pytest.mark.slow
def test_random_schedules_keep_all_invariants() -> None:
    result = search(draw_schedule(number) for number in range(RANDOM))
    assert result["failing"] == [] and result["schedules"] == RANDOM
    assert min(result["ends"][end] for end in ("finished", "killed", "power failure", "goodbye")) > 0


@pytest.mark.slow
def test_a_crash_at_any_step_of_the_round_loop_keeps_all_invariants() -> None:
    steps: Iterator[Schedule] = (s for s in every_crash() if s.crashes[0].kind == "step")
    result = search(islice(steps, 0, None, 3))
    assert result["failing"] == [] and result["schedules"] > 50


# Each planted fault with a schedule that finds it: the first one among the numbers 0, 1, 2, …
# One needs two crashes at certain steps.
TWO_CRASHES = [Crash(1, "step", 74, restart_after=0.1), Crash(1, "step", 67, power=True, restart_after=0.3)]
FOUND_BY: dict[str, int | Schedule] = {
    "charge_after_send": 6,
    "noise_of_the_last_process": 840,
    "message_of_another_round": 0,
    "one_sided_exclusion": 0,
    "repeated_round_without_a_record": 33,
    "double_charge_on_retry": 1,
    "refund_of_sent_vectors": 33,
    "ledger_without_sync": 1,
    "noise_log_without_sync": 38,
    "unsynced_log_of_a_killed_process": Schedule(-1, peers=2, rounds=3, crashes=TWO_CRASHES),
    "vectors_before_their_log": 11,
    "second_charge_in_a_round": 1,
    "neighbour_missing_in_the_charge": 0,
    "call_on_a_dead_connection": 19,
    "endless_wait": 20,
    "lost_cancellation": 3298,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    plant, rule = FAULTS[name]
    found_by = FOUND_BY[name]
    schedule = draw_schedule(found_by) if isinstance(found_by, int) else found_by
    assert simulate(schedule).faults == []
    with plant():
        found = simulate(schedule).faults
    assert any(rule in fault for fault in found), found
