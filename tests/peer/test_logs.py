"""Logs of a peer: bounded files, JSON lines on standard error, and no effect of a reader that has stopped."""

import io
import json
import os
import time
from pathlib import Path

import pytest

from pdsl.peer import status
from pdsl.peer.log_lines import MAX_WAITING, LogLines
from pdsl.peer.status import Events
from tests.helpers.commands import pdsl


def test_the_event_log_is_bounded_and_keeps_the_newest_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "MAX_LOG_BYTES", 2000)
    monkeypatch.setattr(status, "EVENT_BURST", 1e9)
    events = Events(tmp_path / "events.jsonl")
    for t in range(1, 501):
        events.log("lost", who="ben", round=t, why="silent")
    sizes = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    assert sizes.keys() <= {"events.jsonl", "events.jsonl.1"} and max(sizes.values()) < 2100
    rounds = [event["round"] for event in events.read()]
    assert rounds == list(range(rounds[0], 501)) and len(rounds) >= 20


def test_log_lines_have_no_control_characters_and_nothing_but_named_facts_of_a_round() -> None:
    out = io.BytesIO()
    log = LogLines(out)
    log.log("failed", why="bad \x1b[2J\nline")
    log.on_round({"round": 3, "messages": 2, "bytes": 8, "shapley": {"phi": [1.0]}})  # type: ignore[typeddict-unknown-key]
    log.stop()
    first, second = map(json.loads, out.getvalue().splitlines())
    assert first["why"] == "bad ?[2J?line"
    assert second.keys() == {"time", "event", "round", "messages", "bytes"}


def test_a_reader_that_has_stopped_does_not_block_the_peer() -> None:
    reading, writing = os.pipe()
    with open(writing, "wb", buffering=0) as out:  # noqa: PTH123
        log = LogLines(out)
        start = time.monotonic()
        for t in range(5 * MAX_WAITING):
            log.log("round", round=t, text="x" * 900)
        assert time.monotonic() - start < 5
        content = b""
        while b'"dropped": ' not in content:
            content += os.read(reading, 1 << 20)
            log.log("later")
        os.close(reading)
        log.stop()


def test_a_mistake_is_a_line_of_the_log_and_exit_code_2(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = pdsl("peer", "run", tmp_path / "nowhere", "--log-json")
    assert outcome == (2, "", "")
    line = json.loads(capfd.readouterr().err)
    assert line["event"] == "failed" and "pdsl peer init" in line["why"]
