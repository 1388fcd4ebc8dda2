"""Real processes that are killed, stopped and out of disk: the others go on, and nothing that was paid for is lost."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.soak import Site, forkserver, free_ports, sent_equals_charged, settle

ROUNDS = 30


def until(true: Callable[[], bool], seconds: float = 300) -> None:
    """Wait for it, on a busy machine too."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to that in time"
        time.sleep(0.02)


def test_kill_stop_and_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    addresses = [f"127.0.0.1:{port}" for port in free_ports(4)]
    settings = [f"rounds={ROUNDS}", "model.name=softmax", "graph.kind=ring", "shapley.weighting=uniform"]
    settings += ["privacy.noise_multiplier=1.0", "privacy.target_epsilon=100"]  # which nobody needs to look for
    settle(tmp_path, addresses, settings, {"silence": 1.5, "deadline": 20.0, "start": 60.0})
    context = forkserver()
    killed, stopped, filled, calm = sites = [Site(tmp_path / f"org-{i}", None, context) for i in range(4)]
    try:
        for site in sites:
            site.start(most_file_bytes=6000 if site is filled else None)

        until(lambda: len(killed.rows) >= 4)
        killed.signal(signal.SIGKILL)
        before = killed.rows
        killed.restart()

        until(lambda: filled.process.exitcode is not None)  # its file of rows has come to the limit
        assert filled.process.exitcode == 2
        last = (filled.folder / "process.log").read_text().splitlines()[-1]
        assert last.startswith("pdsl: cannot write to") and "pdsl peer run" in last
        kept = filled.rows
        filled.start()

        until(lambda: len(killed.rows) > len(before))
        until(lambda: len(filled.rows) > len(kept))
        at = len(stopped.rows)
        stopped.signal(signal.SIGSTOP)
        until(lambda: len(calm.rows) >= min(ROUNDS, at + 4))  # the others go on
        stopped.signal(signal.SIGCONT)
        until(lambda: all(site.process.exitcode is not None for site in sites))
    finally:
        for site in sites:
            site.signal(signal.SIGKILL)
    assert [site.process.exitcode for site in sites] == [0, 0, 0, 0]
    for site in sites:
        summary = site.summary
        assert summary is not None and summary["rounds"] == ROUNDS and summary["epsilon"] <= summary["budget"]
        assert sent_equals_charged(site) and summary["incarnation"] == 1
        assert summary["accuracy"] > 0.6
    for site, rows in ((killed, before), (filled, kept)):  # a crash may cost the round in which it is
        assert site.rows[: len(rows) - 1] == rows[:-1]
    assert any(event["event"] == "missed" for event in stopped.events)
    for neighbour in (killed, filled):  # of the one that was stopped: they went on with whom they had
        assert any(len(row.get("present", ())) == 1 for row in neighbour.rows)
