"""Noise log, key generations and the ledger of a peer: each noise draw is used on one gradient and charged."""

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
from pdsl.peer.ledger import PeerLedger
from pdsl.peer.noise_log import (
    ConflictError,
    DamagedError,
    LoggedNoise,
    NoiseLog,
    check_ledger,
    key_file,
    log_file,
    start_generation,
)
from pdsl.peer.status import Events
from pdsl.privacy import Mechanism, Noise, epsilon
from pdsl.utils.errors import PdslError
from pdsl.utils.random import SecretStreams
from pdsl.utils.workers import Workers
from tests.helpers.refusals import refused

MECHANISM = Mechanism(sigma=0.05, sensitivity=1 / 64, messages=3, rate=0.1)


def make_ledger(algorithm: str = "pdsl") -> PeerLedger:
    return PeerLedger(1e-5, 8.0, MECHANISM, ALGORITHMS[algorithm](), 100, 0, (0, 1, 2), {})


def noisy(log: NoiseLog, g: torch.Tensor, t: int = 1, key: bytes = bytes(32)) -> torch.Tensor:
    """Noisy messages of agent 0 to itself and to agents 1 and 2."""
    with Workers(1) as workers:
        noise = LoggedNoise([0.05], SecretStreams(0, key), workers, log)
        return noise.add(t, torch.zeros(3, dtype=torch.int64), torch.arange(3), g)


def test_noise_is_reused_for_the_same_gradient_only(tmp_path: Path) -> None:
    g = torch.arange(12.0).reshape(3, 4)
    log = NoiseLog(tmp_path / "sent")
    first = noisy(log, g)
    with Workers(1) as workers:
        plain = Noise([0.05], SecretStreams(0, bytes(32)), workers).add(1, torch.zeros(3).long(), torch.arange(3), g)
    assert torch.equal(first, plain)
    size = (tmp_path / "sent").stat().st_size
    log.close()
    log = NoiseLog(tmp_path / "sent")  # after a crash
    assert torch.equal(noisy(log, g), first)
    other = g.clone()
    other[2, 0] += 1e-3  # a neighbour requests the gradient of another model
    with pytest.raises(ConflictError, match="agent 2"):
        noisy(log, other)
    assert (tmp_path / "sent").stat().st_size == size
    noisy(log, other, t=2)
    assert sorted(log.draws) == [(t, 0, 0, j) for t in (1, 2) for j in range(3)]


def test_an_incomplete_last_line_is_removed(tmp_path: Path) -> None:
    g = torch.ones(3, 4)
    log = NoiseLog(tmp_path / "sent")
    noisy(log, g)
    content = (tmp_path / "sent").read_bytes()
    (tmp_path / "sent").write_bytes(content + b'[2, 0, 0, 1, "ab')
    log = NoiseLog(tmp_path / "sent")
    assert (tmp_path / "sent").read_bytes() == content
    noisy(log, 2 * g, t=2)
    lines = content.splitlines(keepends=True)
    (tmp_path / "sent").write_bytes(lines[0] + b"garbage\n" + lines[1])
    with pytest.raises(DamagedError):
        NoiseLog(tmp_path / "sent")


def test_nothing_is_sent_if_the_log_cannot_be_written(tmp_path: Path) -> None:
    log = NoiseLog(tmp_path / "sent")
    noisy(log, torch.ones(3, 4))
    before = (tmp_path / "sent").read_bytes()
    full = os.open("/dev/full", os.O_WRONLY)
    real, log._file = log._file, full
    with pytest.raises(OSError):
        noisy(log, torch.ones(3, 4), t=2)
    log._file = real
    assert (tmp_path / "sent").read_bytes() == before and (2, 0, 0, 0) not in log.draws


def test_a_lost_log_or_key_starts_a_new_generation_with_new_charges(tmp_path: Path) -> None:
    events = Events(tmp_path / "events")
    spent = make_ledger()
    first = start_generation(tmp_path, spent, events)
    assert first.number == 1 and key_file(tmp_path, 1).stat().st_mode & 0o777 == 0o600
    g = torch.ones(3, 4)
    spent = spent.charge(1, 1, frozenset({1, 2}))
    sent = noisy(first.log, g, key=first.key)
    first.log.close()
    again = start_generation(tmp_path, spent, events)
    assert (again.number, again.key) == (1, first.key)
    again.log.close()

    log_file(tmp_path, 1).unlink()
    second = start_generation(tmp_path, spent, events)
    assert second.number == 2 and second.key != first.key
    assert not torch.equal(noisy(second.log, g, key=second.key), sent)
    once, spent = spent.epsilon, spent.charge(1, 2, frozenset({1, 2}))
    assert spent.epsilon == epsilon(((MECHANISM, 2),), 1e-5) > once
    second.log.close()
    assert start_generation(tmp_path, spent, events).number == 2
    key_file(tmp_path, 2).unlink()
    assert start_generation(tmp_path, spent, events).number == 3
    assert [event["number"] for event in events.read()] == [2, 3]


BOTH = frozenset({1, 2})


def three_rounds(run: Path) -> PeerLedger:
    """Charge and send three rounds, then close the log."""
    spent = make_ledger()
    log = start_generation(run, spent, Events(run / "events")).log
    for t in (1, 2, 3):
        spent = spent.charge(t, 1, BOTH, log.begin_round(t))
        noisy(log, torch.ones(3, 4), t)
    log.close()
    return spent


@pytest.mark.parametrize("kept", [[0, 1, 2, 3], list(range(8)), [*range(6), *range(7, 12)], []])
def test_an_incomplete_log_counts_as_lost(tmp_path: Path, kept: list[int]) -> None:
    """Round 1 only; all but the last round; one line missing in the middle; empty."""
    spent = three_rounds(tmp_path)
    file = log_file(tmp_path, 1)
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 12  # per round: its start and three vectors
    assert start_generation(tmp_path, spent, Events(tmp_path / "events")).number == 1
    file.write_bytes(b"".join(lines[n] for n in kept))
    assert start_generation(tmp_path, spent, Events(tmp_path / "events")).number == 2


def test_a_log_must_match_its_key(tmp_path: Path) -> None:
    spent = three_rounds(tmp_path)
    key_file(tmp_path, 1).write_bytes(bytes(range(32)))
    assert start_generation(tmp_path, spent, Events(tmp_path / "events")).number == 2


def test_copies_of_a_log_are_ignored(tmp_path: Path) -> None:
    spent = three_rounds(tmp_path)
    (tmp_path / "sent-1-copy.log").write_bytes(log_file(tmp_path, 1).read_bytes())
    check_ledger(tmp_path, spent, [])


def test_a_round_interrupted_between_charge_and_noise_is_repeated(tmp_path: Path) -> None:
    spent = three_rounds(tmp_path)
    events = Events(tmp_path / "events")
    log = start_generation(tmp_path, spent, events).log
    spent = spent.charge(4, 1, BOTH, log.begin_round(4))
    log.close()
    again = start_generation(tmp_path, spent, events)
    assert again.number == 1
    assert again.log.begin_round(4) == spent.mark  # no second line
    noisy(again.log, torch.ones(3, 4), 4)
    again.log.close()
    assert start_generation(tmp_path, spent, events).number == 1


def test_an_outdated_ledger_is_refused(tmp_path: Path) -> None:
    spent = three_rounds(tmp_path)
    check_ledger(tmp_path, spent, [{"round": t} for t in (1, 2, 3)])
    older = make_ledger().charge(1, 1, BOTH)
    with refused("does not account for all of round 2", "sent-1.log"):
        check_ledger(tmp_path, older, [])
    with refused("does not account for all of round 1", "sent-1.log"):  # no neighbours in the charges
        check_ledger(tmp_path, replace(spent, charges=dict.fromkeys(spent.charges, frozenset())), [])
    with refused("does not account for all of round 1", "sent-1.log"):  # a generation is missing
        check_ledger(tmp_path, replace(spent, charges={(3, 2): BOTH}), [])
    log_file(tmp_path, 1).unlink()
    with refused("does not account for all of round 3", "rows.jsonl"):
        check_ledger(tmp_path, older, [{"round": 1}, {"round": 2, "absent": True}, {"round": 3}])


def test_charges_are_for_the_neighbours_present_and_never_shrink() -> None:
    full, half = frozenset({1, 2}), frozenset({1})
    spent = make_ledger().charge(1, 1, full).charge(2, 1, half)
    alone = Mechanism(MECHANISM.sigma, MECHANISM.sensitivity, 2, rate=0.1)
    assert spent.epsilon == pytest.approx(epsilon(((MECHANISM, 1), (alone, 1)), 1e-5))
    assert spent.charge(1, 1, half) == spent  # repeated with fewer neighbours: the charge stays
    assert spent.charge(2, 1, frozenset({2})).charges[2, 1] == full  # one neighbour before a crash, another after it
    assert spent.to_run_ledger().epsilon == pytest.approx(spent.epsilon)
    one = make_ledger("muffliato").charge(1, 1, full)
    assert (
        one.mechanism_with(full).messages == one.mechanism_with(frozenset()).messages == 1
    )  # one model, independent of the receivers


def test_the_budget_limits_planned_and_repeated_rounds() -> None:
    whole = epsilon(((MECHANISM, 3),), 1e-5)
    spent = replace(make_ledger(), planned_rounds=3, budget=whole)
    for t in (1, 2, 3):
        spent = spent.charge(t, 1, frozenset({1, 2}))
        assert spent.within_budget and spent.epsilon <= whole
    assert not spent.charge(3, 2, frozenset({1})).within_budget  # charged again after a lost log
    assert (
        not replace(make_ledger(), planned_rounds=3, budget=0.99 * epsilon(((MECHANISM, 1),), 1e-5))
        .charge(1, 1, frozenset({1, 2}))
        .within_budget
    )


def test_ledger_round_trip() -> None:
    spent = make_ledger().charge(1, 1, frozenset({1, 2})).charge(2, 1, frozenset({2})).charge(2, 2, frozenset({2}))
    text = spent.to_json(["a", "b", "c"])
    assert make_ledger().restore(text.encode(), "ledger") == spent
    assert '"messages": {"a": 3, "b": 1, "c": 3}' in text


@pytest.mark.parametrize("change", [{"sigma": 10**400}, {"sigma": "x"}, {"sigma_scale": 3}, {"sigma_scale": ["x"]}])
def test_invalid_noise_is_a_one_line_error(change: dict[str, Any]) -> None:
    stored = json.loads(make_ledger().charge(1, 1, BOTH).to_json(["a", "b", "c"]))
    stored["mechanism"] |= change
    with refused("ledger"):
        make_ledger().restore(json.dumps(stored).encode(), "ledger")


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
def test_the_ledger_of_another_peer_plan_or_noise_is_refused(change: dict[str, Any]) -> None:
    spent = make_ledger().charge(1, 1, BOTH)
    with refused("ledger"):
        replace(make_ledger(), **change).restore(spent.to_json(["a", "b", "c"]).encode(), "ledger")


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 400), st.integers(0, 8))
def test_fuzz_a_damaged_ledger_is_a_one_line_error(junk: bytes, at: int, cut: int) -> None:
    content = make_ledger().charge(1, 1, frozenset({1, 2})).to_json(["a", "b", "c"]).encode()
    at = min(at, len(content))
    try:
        read = make_ledger().restore(content[:at] + junk + content[at + cut :], "ledger")
    except PdslError as e:
        assert "\n" not in str(e)
    else:
        assert isinstance(read, PeerLedger) and isinstance(read.algorithm, PDSL)
