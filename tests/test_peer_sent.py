"""Noise is used once: the log, incarnations, and an account that equals what was sent."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdsl.algorithms import ALGORITHMS, PDSL
from pdsl.errors import PdslError
from pdsl.parallel import Workers
from pdsl.peer.account import Account
from pdsl.peer.events import Events
from pdsl.peer.secrets import check_account, incarnate, key_file, log_file
from pdsl.peer.sent import ConflictError, DamagedError, LoggedNoise, SentLog
from pdsl.privacy import Mechanism, Noise, epsilon
from pdsl.randomness import SecretStreams
from tests.refusals import refused

MECHANISM = Mechanism(sigma=0.05, sensitivity=1 / 64, messages=3, rate=0.1)


def account(algorithm: str = "pdsl") -> Account:
    return Account(1e-5, 8.0, MECHANISM, ALGORITHMS[algorithm](), 100, 0, (0, 1, 2), {})


def noisy(log: SentLog, g: torch.Tensor, t: int = 1, key: bytes = bytes(32)) -> torch.Tensor:
    """Agent 0's messages to itself and to 1 and 2."""
    with Workers(1) as workers:
        noise = LoggedNoise([0.05], SecretStreams(0, key), workers, log)
        return noise.add(t, torch.zeros(3, dtype=torch.int64), torch.arange(3), g)


def test_the_same_gradients_again_give_the_same_bytes_and_others_give_nothing(tmp_path: Path) -> None:
    g = torch.arange(12.0).reshape(3, 4)
    log = SentLog(tmp_path / "sent")
    first = noisy(log, g)
    with Workers(1) as workers:
        plain = Noise([0.05], SecretStreams(0, bytes(32)), workers).add(1, torch.zeros(3).long(), torch.arange(3), g)
    assert torch.equal(first, plain)
    size = (tmp_path / "sent").stat().st_size
    log.close()
    log = SentLog(tmp_path / "sent")  # after a crash
    assert torch.equal(noisy(log, g), first)
    other = g.clone()
    other[2, 0] += 1e-3  # a neighbour that asks for another model's gradient
    with pytest.raises(ConflictError, match="agent 2"):
        noisy(log, other)
    assert (tmp_path / "sent").stat().st_size == size
    noisy(log, other, t=2)
    assert sorted(log.draws) == [(t, 0, 0, j) for t in (1, 2) for j in range(3)]


def test_a_line_that_a_crash_cut_off_never_left(tmp_path: Path) -> None:
    g = torch.ones(3, 4)
    log = SentLog(tmp_path / "sent")
    noisy(log, g)
    content = (tmp_path / "sent").read_bytes()
    (tmp_path / "sent").write_bytes(content + b'[2, 0, 0, 1, "ab')
    log = SentLog(tmp_path / "sent")
    assert (tmp_path / "sent").read_bytes() == content
    noisy(log, 2 * g, t=2)
    lines = content.splitlines(keepends=True)
    (tmp_path / "sent").write_bytes(lines[0] + b"garbage\n" + lines[1])
    with pytest.raises(DamagedError):
        SentLog(tmp_path / "sent")


def test_what_cannot_be_written_down_does_not_leave(tmp_path: Path) -> None:
    log = SentLog(tmp_path / "sent")
    noisy(log, torch.ones(3, 4))
    before = (tmp_path / "sent").read_bytes()
    full = os.open("/dev/full", os.O_WRONLY)
    real, log._file = log._file, full
    with pytest.raises(OSError):
        noisy(log, torch.ones(3, 4), t=2)
    log._file = real
    assert (tmp_path / "sent").read_bytes() == before and (2, 0, 0, 0) not in log.draws


def test_a_lost_log_or_key_is_a_new_incarnation_and_what_it_sends_is_charged_again(tmp_path: Path) -> None:
    events = Events(tmp_path / "events")
    spent = account()
    first = incarnate(tmp_path, spent, events)
    assert first.number == 1 and key_file(tmp_path, 1).stat().st_mode & 0o777 == 0o600
    g = torch.ones(3, 4)
    spent = spent.charged(1, 1, frozenset({1, 2}))
    sent = noisy(first.log, g, key=first.key)
    first.log.close()
    again = incarnate(tmp_path, spent, events)
    assert (again.number, again.key) == (1, first.key)
    again.log.close()

    log_file(tmp_path, 1).unlink()
    second = incarnate(tmp_path, spent, events)
    assert second.number == 2 and second.key != first.key
    assert not torch.equal(noisy(second.log, g, key=second.key), sent)
    once, spent = spent.epsilon, spent.charged(1, 2, frozenset({1, 2}))
    assert spent.epsilon == epsilon(((MECHANISM, 2),), 1e-5) > once
    second.log.close()
    assert incarnate(tmp_path, spent, events).number == 2
    key_file(tmp_path, 2).unlink()
    assert incarnate(tmp_path, spent, events).number == 3
    assert [event["number"] for event in events.read()] == [2, 3]


BOTH = frozenset({1, 2})


def three_rounds(run: Path) -> Account:
    """Charged and sent; the log is closed again."""
    spent = account()
    log = incarnate(run, spent, Events(run / "events")).log
    for t in (1, 2, 3):
        spent = spent.charged(t, 1, BOTH, log.begin(t))
        noisy(log, torch.ones(3, 4), t)
    log.close()
    return spent


@pytest.mark.parametrize("kept", [[0, 1, 2, 3], list(range(8)), [*range(6), *range(7, 12)], []])
def test_a_log_that_lacks_something_is_lost(tmp_path: Path, kept: list[int]) -> None:
    """Round 1 alone; all but the last round; one line in the middle missing; nothing."""
    spent = three_rounds(tmp_path)
    file = log_file(tmp_path, 1)
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 12  # each round begins, and has three vectors
    assert incarnate(tmp_path, spent, Events(tmp_path / "events")).number == 1
    file.write_bytes(b"".join(lines[n] for n in kept))
    assert incarnate(tmp_path, spent, Events(tmp_path / "events")).number == 2


def test_a_log_is_its_own_keys(tmp_path: Path) -> None:
    spent = three_rounds(tmp_path)
    key_file(tmp_path, 1).write_bytes(bytes(range(32)))
    assert incarnate(tmp_path, spent, Events(tmp_path / "events")).number == 2


def test_a_copy_of_a_log_is_in_nobodys_way(tmp_path: Path) -> None:
    spent = three_rounds(tmp_path)
    (tmp_path / "sent-1-copy.log").write_bytes(log_file(tmp_path, 1).read_bytes())
    check_account(tmp_path, spent, [])


def test_a_round_cut_between_its_charge_and_its_noise_is_run_again(tmp_path: Path) -> None:
    spent = three_rounds(tmp_path)
    events = Events(tmp_path / "events")
    log = incarnate(tmp_path, spent, events).log
    spent = spent.charged(4, 1, BOTH, log.begin(4))
    log.close()
    again = incarnate(tmp_path, spent, events)
    assert again.number == 1
    assert again.log.begin(4) == spent.mark  # nothing is written twice
    noisy(again.log, torch.ones(3, 4), 4)
    again.log.close()
    assert incarnate(tmp_path, spent, events).number == 1


def test_a_ledger_that_went_back_in_time_is_refused(tmp_path: Path) -> None:
    spent = three_rounds(tmp_path)
    check_account(tmp_path, spent, [{"round": t} for t in (1, 2, 3)])
    older = account().charged(1, 1, BOTH)
    with refused("does not account for all of round 2", "sent-1.log"):
        check_account(tmp_path, older, [])
    with refused("does not account for all of round 1", "sent-1.log"):  # nobody was there, it says
        check_account(tmp_path, replace(spent, charges=dict.fromkeys(spent.charges, frozenset())), [])
    with refused("does not account for all of round 1", "sent-1.log"):  # an incarnation is forgotten
        check_account(tmp_path, replace(spent, charges={(3, 2): BOTH}), [])
    log_file(tmp_path, 1).unlink()
    with refused("does not account for all of round 3", "rows.jsonl"):
        check_account(tmp_path, older, [{"round": 1}, {"round": 2, "absent": True}, {"round": 3}])


def test_an_account_charges_for_who_was_there_and_never_for_less() -> None:
    full, half = frozenset({1, 2}), frozenset({1})
    spent = account().charged(1, 1, full).charged(2, 1, half)
    alone = Mechanism(MECHANISM.sigma, MECHANISM.sensitivity, 2, rate=0.1)
    assert spent.epsilon == pytest.approx(epsilon(((MECHANISM, 1), (alone, 1)), 1e-5))
    assert spent.charged(1, 1, half) == spent  # run again with fewer: what was sent stays sent
    assert spent.charged(2, 1, frozenset({2})).charges[2, 1] == full  # to one before the crash, to the other after
    assert spent.as_ledger().epsilon == pytest.approx(spent.epsilon)
    one = account("muffliato").charged(1, 1, full)
    assert one.of(full).messages == one.of(frozenset()).messages == 1  # its own model, whoever gets it


def test_the_budget_is_kept_by_what_was_planned_and_by_what_was_not() -> None:
    whole = epsilon(((MECHANISM, 3),), 1e-5)
    spent = replace(account(), planned=3, budget=whole)
    for t in (1, 2, 3):
        spent = spent.charged(t, 1, frozenset({1, 2}))
        assert spent.within_budget and spent.epsilon <= whole
    assert not spent.charged(3, 2, frozenset({1})).within_budget  # a lost log, paid for again
    assert (
        not replace(account(), planned=3, budget=0.99 * epsilon(((MECHANISM, 1),), 1e-5))
        .charged(1, 1, frozenset({1, 2}))
        .within_budget
    )


def test_an_account_survives_its_file() -> None:
    spent = account().charged(1, 1, frozenset({1, 2})).charged(2, 1, frozenset({2})).charged(2, 2, frozenset({2}))
    text = spent.to_json(["a", "b", "c"])
    assert account().read(text.encode(), "ledger") == spent
    assert '"messages": {"a": 3, "b": 1, "c": 3}' in text


@pytest.mark.parametrize("change", [{"sigma": 10**400}, {"sigma": "x"}, {"stretch": 3}, {"stretch": ["x"]}])
def test_noise_that_is_none_is_refused_in_one_line(change: dict[str, Any]) -> None:
    stored = json.loads(account().charged(1, 1, BOTH).to_json(["a", "b", "c"]))
    stored["mechanism"] |= change
    with refused("ledger"):
        account().read(json.dumps(stored).encode(), "ledger")


@pytest.mark.parametrize(
    "change",
    [
        {"me": 1},
        {"plan": "another"},
        {"budget": 50.0},
        {"delta": 1e-6},
        {"members": (0, 1)},
        {"mechanism": replace(MECHANISM, sigma=0.5)},
        {"mechanism": replace(MECHANISM, rate=0.4)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_an_account_of_something_else_is_refused(change: dict[str, Any]) -> None:
    spent = account().charged(1, 1, BOTH)
    with refused("ledger"):
        replace(account(), **change).read(spent.to_json(["a", "b", "c"]).encode(), "ledger")


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 400), st.integers(0, 8))
def test_fuzz_a_damaged_account_is_refused_in_one_line(junk: bytes, at: int, cut: int) -> None:
    content = account().charged(1, 1, frozenset({1, 2})).to_json(["a", "b", "c"]).encode()
    at = min(at, len(content))
    try:
        read = account().read(content[:at] + junk + content[at + cut :], "ledger")
    except PdslError as e:
        assert "\n" not in str(e)
    else:
        assert isinstance(read, Account) and isinstance(read.algorithm, PDSL)
