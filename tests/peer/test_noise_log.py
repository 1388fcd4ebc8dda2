"""Noise log, key generations and the ledger of a peer: each noise draw is used on one gradient and charged."""

import json
import os
import shutil
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
    Generation,
    Generations,
    LoggedNoise,
    NoiseLog,
    check_ledger,
    key_file,
    log_file,
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


BOTH = frozenset({1, 2})


def start(run: Path, ledger: PeerLedger, t: int, present: frozenset[int] = BOTH) -> Generation:
    """The generation that a new process uses for round t."""
    return Generations(run, ledger, Events(run / "events")).choose(t, present, ledger)


def three_rounds(run: Path) -> PeerLedger:
    """Charge and send three rounds, then close the log."""
    spent = make_ledger()
    made = start(run, spent, 1)
    assert made.number == 1 and key_file(run, 1).stat().st_mode & 0o777 == 0o600
    for t in (1, 2, 3):
        spent = spent.charge(t, 1, BOTH, made.log.begin_round(t))
        noisy(made.log, torch.ones(3, 4), t, made.key)
    made.log.close()
    return spent


def test_every_process_has_its_own_key_for_rounds_not_yet_run(tmp_path: Path) -> None:
    spent = three_rounds(tmp_path)
    first = key_file(tmp_path, 1).read_bytes()
    keys = {start(tmp_path, spent, 4).key for _ in range(3)}
    assert len(keys) == 3 and first not in keys


def test_a_copy_of_a_folder_cannot_reuse_the_noise_of_later_rounds(tmp_path: Path) -> None:
    """Two processes that continue from the same files draw different noise, so it never cancels."""
    (tmp_path / "a").mkdir()
    spent = three_rounds(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    sent = []
    for copy, g in (("a", 1.0), ("b", 2.0)):
        made = start(tmp_path / copy, spent, 4)
        sent.append(noisy(made.log, torch.full((3, 4), g), 4, made.key))
    assert not torch.allclose(sent[1] - sent[0], torch.ones(3, 4), atol=1e-6)


def test_a_round_with_all_its_vectors_in_the_log_is_repeated_with_the_same_bytes(tmp_path: Path) -> None:
    spent = three_rounds(tmp_path)
    again = start(tmp_path, spent, 3)
    assert (again.number, again.key) == (1, key_file(tmp_path, 1).read_bytes())
    assert again.log.begin_round(3) == (log_file(tmp_path, 1).stat().st_size, again.log.begin_round(3)[1])
    noisy(again.log, torch.ones(3, 4), 3, again.key)
    with pytest.raises(ConflictError):
        noisy(again.log, 2 * torch.ones(3, 4), 3, again.key)
    with pytest.raises(ConflictError, match="earlier process"):  # a vector that the log does not have
        noisy(again.log, torch.ones(3, 4), 4, again.key)


def test_a_round_without_all_its_vectors_is_repeated_with_a_new_key(tmp_path: Path) -> None:
    spent = three_rounds(tmp_path)
    lines = log_file(tmp_path, 1).read_bytes().splitlines(keepends=True)
    log_file(tmp_path, 1).write_bytes(b"".join(lines[:-1]))  # cut off after the mark of round 3
    assert start(tmp_path, spent, 3).number == 2
    assert start(tmp_path, replace(spent, charges={(3, 1): frozenset({1})}), 3).number == 3  # another neighbour


def test_the_charge_of_a_round_without_vectors_is_refunded(tmp_path: Path) -> None:
    spent = three_rounds(tmp_path)
    log = NoiseLog(log_file(tmp_path, 1), key_file(tmp_path, 1).read_bytes())
    spent = spent.charge(4, 1, BOTH, log.begin_round(4))
    log.close()
    generations = Generations(tmp_path, spent, Events(tmp_path / "events"))
    assert generations.choose(4, BOTH, spent).number == 2
    refunded = generations.refund(4, spent)
    assert set(refunded.charges) == {(1, 1), (2, 1), (3, 1)}
    assert generations.refund(3, spent) == spent  # its vectors may have been sent
    log_file(tmp_path, 1).unlink()
    assert Generations(tmp_path, spent, Events(tmp_path / "events")).refund(4, spent) == spent  # unknown


@pytest.mark.parametrize("loss", ["log", "key", "other key"])
def test_a_lost_log_or_key_is_charged_again(tmp_path: Path, loss: str) -> None:
    spent = three_rounds(tmp_path)
    if loss == "other key":
        key_file(tmp_path, 1).write_bytes(bytes(range(32)))
    else:
        (log_file if loss == "log" else key_file)(tmp_path, 1).unlink()
    events = Events(tmp_path / "events")
    generations = Generations(tmp_path, spent, events)
    made = generations.choose(3, BOTH, spent)
    assert made.number == 2 and [event["number"] for event in events.read()] == [1]
    again = generations.refund(3, spent).charge(3, 2, BOTH)
    assert again.epsilon == epsilon(((MECHANISM, 4),), 1e-5) > spent.epsilon


@pytest.mark.parametrize("kept", [[0, 1, 2, 3], list(range(8)), [*range(6), *range(7, 12)], []])
def test_an_incomplete_log_counts_as_lost(tmp_path: Path, kept: list[int]) -> None:
    """Round 1 only; all but the last round; one line missing in the middle; empty."""
    spent = three_rounds(tmp_path)
    file = log_file(tmp_path, 1)
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 12  # per round: its start and three vectors
    assert start(tmp_path, spent, 3).number == 1
    file.write_bytes(b"".join(lines[n] for n in kept))
    assert start(tmp_path, spent, 3).number == 2


def test_copies_of_a_log_are_ignored(tmp_path: Path) -> None:
    spent = three_rounds(tmp_path)
    (tmp_path / "sent-1-copy.log").write_bytes(log_file(tmp_path, 1).read_bytes())
    check_ledger(tmp_path, spent, [])


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
