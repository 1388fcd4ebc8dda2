"""Separate processes under faults (kill, stop, full disk, clock jump): the ledger matches the messages sent."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stress import history
from tests.stress.soak import Site, create_organisations, forkserver, free_ports, ledger_matches_log

pytestmark = pytest.mark.peer

ROUNDS = 60
QUICK = [
    f"rounds={ROUNDS}", "model.name=softmax", "graph.kind=ring", "algorithm.shapley.weighting=uniform",
    "privacy.noise_multiplier=1.0", "privacy.target_epsilon=100",  # no calibration needed
]  # fmt: skip


def until(true: Callable[[], bool], seconds: float = 300) -> None:
    """Wait for a condition, with a limit that suits a busy machine."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


def test_kill_stop_and_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    addresses = [f"127.0.0.1:{port}" for port in free_ports(4)]
    create_organisations(tmp_path, addresses, QUICK, {"silence": 1.5, "deadline": 20.0, "start": 60.0})
    context = forkserver()
    killed, stopped, filled, calm = sites = [Site(tmp_path / f"org-{i}", None, context) for i in range(4)]
    try:
        for site in sites:
            site.start(max_file_bytes=6000 if site is filled else None)

        until(lambda: len(killed.rows) >= 4)
        killed.signal(signal.SIGKILL)
        before = killed.rows
        killed.restart()

        until(lambda: filled.process.exitcode is not None)  # history.jsonl has reached the limit
        assert filled.process.exitcode == 2
        last = (filled.folder / "process.log").read_text().splitlines()[-1]
        assert last.startswith("pdsl: cannot write to") and "pdsl peer run" in last
        kept = filled.rows
        filled.start()

        until(lambda: len(killed.rows) > len(before))
        until(lambda: len(filled.rows) > len(kept))
        at = len(stopped.rows)
        stopped.signal(signal.SIGSTOP)
        until(lambda: len(calm.rows) >= min(ROUNDS, at + 4))  # the other peers continue
        stopped.signal(signal.SIGCONT)
        until(lambda: all(site.process.exitcode is not None for site in sites))
    finally:
        for site in sites:
            site.signal(signal.SIGKILL)
    for site in sites:
        summary = site.summary
        assert summary is not None and summary["rounds"] == ROUNDS and summary["epsilon"] <= summary["budget"]
        assert site.process.exitcode == (0 if summary["rounds_run"] == ROUNDS else 3)
        assert ledger_matches_log(site) and summary["generation"] == (2 if site in (killed, filled) else 1)
        assert summary["accuracy"] > 0.6
    for site, rows in ((killed, before), (filled, kept)):  # a crash may lose the current round
        assert site.rows[: len(rows) - 1] == rows[:-1]
    assert any(event["event"] == "missed" for event in stopped.events)
    assert history.summarise([history.load(site.folder) for site in sites])["faults"] == []
    for neighbour in (killed, filled):  # neighbours of the stopped peer ran rounds without it
        assert any(len(row.get("present", ())) == 1 for row in neighbour.rows)


def test_sigterm_ends_a_peer_within_five_seconds_and_neighbours_do_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    silence = 60.0
    addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]
    create_organisations(tmp_path, addresses, QUICK, {"silence": silence, "deadline": 120.0, "start": 120.0})
    context = forkserver()
    ended, *others = sites = [Site(tmp_path / f"org-{i}", None, context) for i in range(3)]
    try:
        for site in sites:
            site.start()
        until(lambda: len(ended.rows) >= 4)
        began = time.monotonic()
        ended.signal(signal.SIGTERM)
        until(lambda: ended.process.exitcode is not None)
        assert time.monotonic() - began < 5
        assert ended.process.exitcode == 128 + signal.SIGTERM
        assert "resume with: pdsl peer run" in (ended.folder / "process.log").read_text()
        at = len(ended.rows)
        until(lambda: all(len(site.rows) >= min(ROUNDS, at + 4) for site in others))
        assert time.monotonic() - began < silence / 2
        ended.start()
        until(lambda: all(site.process.exitcode is not None for site in sites))
    finally:
        for site in sites:
            site.signal(signal.SIGKILL)
    for site in others:
        assert [event["who"] for event in site.events if event["event"] == "goodbye"] == [ended.folder.name]
    for site in sites:
        assert site.process.exitcode in (0, 3) and ledger_matches_log(site)


CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static time_t ahead(void) {
    const char *file = getenv("AHEAD_WHILE");
    return file && access(file, F_OK) == 0 ? 36000 : 0;
}
int clock_gettime(clockid_t id, struct timespec *t) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int found = real(id, t);
    if (id == CLOCK_REALTIME) t->tv_sec += ahead();
    return found;
}
int gettimeofday(struct timeval *t, void *zone) {
    int (*real)(struct timeval *, void *) = dlsym(RTLD_NEXT, "gettimeofday");
    int found = real(t, zone);
    t->tv_sec += ahead();
    return found;
}
time_t time(time_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t) *t = now.tv_sec;
    return now.tv_sec;
}
"""


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None,
    reason="needs a C compiler and Linux's LD_PRELOAD",
)
def test_a_clock_jump_of_ten_hours_changes_nothing(tmp_path: Path) -> None:
    """The clock of the whole process jumps, for Python and TLS. Timeouts use the monotonic clock."""
    source, library, ahead = (tmp_path / name for name in ("clock.c", "clock.so", "ahead"))
    source.write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]
    create_organisations(tmp_path, addresses, QUICK, {"silence": 10.0, "deadline": 60.0, "start": 120.0})
    jumping, *others = sites = [Site(tmp_path / f"org-{i}", None, forkserver()) for i in range(3)]
    for site in others:
        site.start()
    own = {**os.environ, "OMP_NUM_THREADS": "1", "LD_PRELOAD": str(library), "AHEAD_WHILE": str(ahead)}
    command = [sys.executable, "-m", "pdsl", "peer", "run", str(jumping.folder), "--json"]
    process = subprocess.Popen(command, env=own, stdout=subprocess.DEVNULL)
    try:
        until(lambda: len(jumping.rows) >= 5)
        now = time.time()
        before = len(jumping.rows)
        ahead.touch()
        until(lambda: len(jumping.rows) >= before + 5)
        ahead.unlink()
        assert process.wait(300) == 0
        until(lambda: all(site.process.exitcode is not None for site in others))
        assert all(site.process.exitcode == 0 for site in others)
        jumped = subprocess.run(
            [sys.executable, "-c", "import time; print(time.time())"],
            env={**own, "AHEAD_WHILE": str(library)},
            capture_output=True,
            check=True,
        )
        assert float(jumped.stdout) - now > 35_000  # the preloaded clock does jump
    finally:
        process.kill()
        for site in others:
            site.signal(signal.SIGKILL)
    for site in sites:
        assert [row["round"] for row in site.rows] == list(range(1, ROUNDS + 1))
        assert all(len(row["present"]) == 2 and "lost" not in row for row in site.rows)
        assert ledger_matches_log(site)
