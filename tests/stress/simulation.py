"""Deterministic simulation of the protocol between peers: the real code on simulated clocks, networks and disks.

    python -m tests.stress.simulation --schedules 100000 [--first 0] [--seconds 600] [--out FILE]
    python -m tests.stress.simulation --every-crash

A schedule is a number. It determines peers, graph, rounds, a member that leaves by an amendment, the order and time of
every delivery, lost and repeated requests, cut lines, crashes and power failures. The round loop, roll call, client,
server, ledger, noise log and checkpoints are those of `pdsl.peer`. Only the training step is a stand-in: a tiny one,
with the real noise. After each schedule the histories of all peers are checked (`tests/stress/history.py`). Schedules
are independent, so a range can be split between processes or continued with `--first`. Prints one JSON object.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from tests.stress import history
from tests.stress.tiny import TIMEOUTS, Simulated, installed, make_chain, make_plan, write_folder
from tests.stress.world import Cut, Disk, Network, Process, World

MAX_SECONDS = 600.0  # simulated, of a schedule
MAX_STARTS, MAX_ATTEMPTS = 6, 3  # starts of a peer in all, and after a process that found no neighbours
FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
LOSSES = ("sent-*.log", "secret-*.key", "checkpoint/*", "receipts.json", "rows.jsonl")
CRASHES = ("step", "iteration", "time")


@dataclass
class Crash:
    """End of a process: at a step of its blocking code, an iteration of the event loop, or a time."""

    agent: int
    kind: str
    at: float
    power: bool = False  # the machine fails, and loses what is not on disk
    goodbye: bool = False  # SIGTERM instead
    restart_after: float = 1.0  # seconds
    loses: str = ""  # pattern of files in `run/` that are lost as well


@dataclass
class Schedule:
    """Circumstances of one simulation."""

    number: int
    kind: str = "full"
    peers: int = 3
    rounds: int = 3
    loss: float = 0.0
    repeat: float = 0.0
    slowest: float = 0.05  # seconds, of a request
    crashes: list[Crash] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    pauses: dict[int, float] = field(default_factory=dict)  # seconds that an agent computes in each round
    spread: float = 0.5  # seconds between the starts
    leaves: int = 0  # first round without the last peer, by an amendment; 0: it stays

    @property
    def calm(self) -> bool:
        """Whether nothing happens that could exclude a peer from a round.

        A repeated delivery can: it counts as fetched, so after the last round a peer may end before the real one.
        So can an answer that takes longer than the patience: the peer that waits for it is blocked.
        """
        return not (self.crashes or self.cuts or self.loss or self.repeat) and self.slowest < TIMEOUTS.patience


def draw_schedule(number: int) -> Schedule:
    """The schedule of a number."""
    rng = random.Random(f"schedule {number}")
    peers = rng.choice((2, 3, 3, 4))
    made = Schedule(
        number,
        kind=rng.choice(("full", "ring", "star", "line")) if peers > 2 else "full",
        peers=peers,
        rounds=rng.choice((2, 3, 4)),
        loss=rng.choice((0.0, 0.0, 0.02, 0.1)),
        repeat=rng.choice((0.0, 0.05)),
        slowest=rng.choice((0.05, 0.05, 0.5, 3.0)),
        spread=rng.choice((0.0, 0.5, 3.0)),
    )
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        kind = rng.choice(CRASHES)
        at = {"step": rng.randint(1, 80), "iteration": rng.randint(1, 600), "time": rng.uniform(0.0, 3.0)}[kind]
        crash = Crash(rng.randrange(peers), kind, at, restart_after=rng.choice((0.0, 0.3, rng.uniform(0.0, 6.0))))
        crash.power, crash.goodbye = rng.random() < 0.5, kind != "step" and rng.random() < 0.15
        if number % 8 == 5:
            crash.loses = rng.choice(LOSSES)
        made.crashes.append(crash)
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        side = frozenset(rng.sample(range(peers), rng.randint(1, peers - 1)))
        start = rng.uniform(0.0, 3.0)
        made.cuts.append(Cut(side, start, start + rng.choice((0.3, 1.0, 3.0, 8.0)), one_way=number % 4 == 3))
    if rng.random() < 0.3:
        made.pauses = {rng.randrange(peers): rng.choice((0.1, 0.6, 1.5))}
    if peers > 2 and number % 16 in (9, 13):
        made.leaves = rng.randint(2, made.rounds)
    return made


@dataclass
class Site:
    """Machine of one organisation in the simulation."""

    agent: int
    disk: Disk
    lines: list[dict[str, Any]] = field(default_factory=list)  # history of all its processes, which no crash can lose
    process: Process | None = None
    starts: int = 0
    ends: list[str] = field(default_factory=list)  # how each of its processes ended
    pending: bool = True  # a start is planned
    epsilon: float | None = None
    lost_files: bool = False


@dataclass
class Outcome:
    """Result of a schedule."""

    faults: list[str]
    ends: list[list[str]]
    seconds: float  # simulated
    iterations: int
    rounds_run: int
    doubly_stochastic: int
    steps: list[int]  # of each peer's last process
    digest: str  # of all histories


class Simulation:
    """One schedule."""

    def __init__(self, schedule: Schedule, folder: Path):
        self.schedule = schedule
        self.rng = random.Random(f"world {schedule.number}")
        self.world = World(self.rng)
        self.plan, self.members = make_plan(schedule.kind, schedule.peers, schedule.rounds)
        self.network = Network(self.world, schedule.loss, schedule.repeat, schedule.slowest)
        self.sites: list[Site] = []
        for agent, member in enumerate(self.members):
            write_folder(folder / member.card.name, self.plan)
            self.sites.append(Site(agent, Disk(folder / member.card.name, self.rng)))
        self.crashes = list(schedule.crashes)
        self._at_iteration = {int(c.at): c for c in self.crashes if c.kind == "iteration"}
        self.unexpected: list[str] = []

    def run(self) -> Outcome:
        with self.world.in_charge(), installed(self.rng), self._intercept_files():
            self.network.cuts = self.schedule.cuts
            for site in self.sites:
                self.world.call_later(self.rng.uniform(0.0, self.schedule.spread), self._start, site)
            for crash in self.crashes:
                if crash.kind == "time":
                    self.world.call_later(crash.at, self._crash, crash)
            self.world.on_iteration = self._count
            ended = self.world.run_until(self._all_ended, MAX_SECONDS)
            for site in self.sites:
                if site.process is not None:
                    site.process.kill()
            self.world.end_tasks()
        return self._check(ended)

    def _all_ended(self) -> bool:
        return not any(site.pending or (site.process and not site.process.ended) for site in self.sites)

    def _start(self, site: Site) -> None:
        site.pending, site.starts = False, site.starts + 1
        self.network.unplugged.discard(site.agent)
        planned = next((c for c in self.crashes if c.kind == "step" and c.agent == site.agent), None)
        if planned is not None:
            self.crashes.remove(planned)
        at = None if planned is None else int(planned.at)
        site.process = Process(self.world, site.agent, lambda process: self._main(process, site, planned), at)
        site.process.start()

    def _main(self, process: Process, site: Site, planned: Crash | None) -> None:
        """Target of a process: one call of `pdsl peer run`."""
        own = self.members[site.agent]
        pause = self.schedule.pauses.get(site.agent, 0.0)
        simulated = Simulated(
            own,
            make_chain(self.plan, self.members, self.schedule.leaves),
            process,
            self.network,
            site.lines,
            site.disk.folder,
            pause,
        )
        try:
            site.epsilon = simulated.train()
            site.ends.append("finished")
        except KeyboardInterrupt:
            site.ends.append("goodbye")
        except simulated.expected as e:
            site.ends.append(str(e).replace(str(site.disk.folder), own.card.name))
            if "run again" in str(e) and site.starts < MAX_ATTEMPTS:
                self._plan_start(site, 1.0)
        except FAILURES as e:
            site.ends.append(repr(e))
            self.unexpected.append(f"{own.card.name}: error: {e!r}")
        finally:
            simulated.release_files()
            if process.died_in_step and planned is not None:
                self._after_crash(site, planned)

    def _count(self, iteration: int) -> None:
        if (crash := self._at_iteration.get(iteration)) is not None:
            self._crash(crash)

    def _crash(self, crash: Crash) -> None:
        site = self.sites[crash.agent]
        if site.process is None or site.process.ended or site.process.dead:
            return
        if crash.goodbye:
            site.process.interrupt(KeyboardInterrupt())
            self._plan_start(site, crash.restart_after + 3.0)
        else:
            site.process.kill()
            self._after_crash(site, crash)

    def _after_crash(self, site: Site, crash: Crash) -> None:
        site.ends.append("power failure" if crash.power else "killed")
        if crash.power:
            site.disk.lose_power()
            self.network.unplugged.add(site.agent)
        for path in (site.disk.folder / "run").glob(crash.loses) if crash.loses else ():
            path.unlink()
            site.lost_files = True
        self._plan_start(site, crash.restart_after)

    def _plan_start(self, site: Site, after: float) -> None:
        if not site.pending and site.starts < MAX_STARTS:
            site.pending = True
            self.world.call_later(after, self._start, site)

    @contextmanager
    def _intercept_files(self) -> Iterator[None]:
        """Let every write to disk be a step of the process that does it."""
        sync, swap, write = os.fsync, os.replace, os.write

        def step() -> Site | None:
            for site in self.sites:
                if site.process is not None and site.process.is_running:
                    site.process.step()
                    return site
            return None

        def fsync(file: int) -> None:
            site = step()
            if site is not None:
                site.disk.sync(file)
                step()

        def replace(a: Any, b: Any) -> None:
            step()
            swap(a, b)

        def write_step(file: int, content: bytes) -> int:
            step()
            return write(file, content)

        with mock.patch.multiple(os, fsync=fsync, replace=replace, write=write_step):
            yield
        assert sync is os.fsync

    def _load(self, site: Site) -> history.Peer | None:
        """Files and history of a peer; None without an intact ledger."""
        try:
            return history.load(site.disk.folder, site.lines)
        except (FileNotFoundError, ValueError):
            return None

    def _check(self, ended: bool) -> Outcome:
        peers = []
        for site, member in zip(self.sites, self.members, strict=True):
            if (peer := self._load(site)) is not None:
                peer.names = [other.card.name for other in self.members]
                peer.stated_epsilon = site.epsilon
                if site.lost_files:
                    peer.lost_logs = set(peer.logs)
                peers.append(peer)
            elif any(line["do"] == "charged" for line in site.lines):
                self.unexpected.append(f"{member.card.name}: ledger: it is lost or damaged")
        faults = [*self.unexpected, *self.world.errors, *(str(fault) for fault in history.check(peers))]
        if not ended:
            faults.append(f"no end after {self.world.now - 1000:.0f} s: {[site.ends for site in self.sites]}")
        stochastic, rounds = history.count_doubly_stochastic(peers)
        if self.schedule.calm and ended and (stochastic, rounds) != (self.schedule.rounds, self.schedule.rounds):
            faults.append(f"{stochastic} of {self.schedule.rounds} rounds without faults had a doubly stochastic W")
        lines = [line for site in self.sites for line in site.lines if line["do"] != "started"]  # has random keys
        return Outcome(
            faults,
            [site.ends for site in self.sites],
            self.world.now - 1000,
            self.world.iteration,
            sum(len(peer.mixed) for peer in peers),
            stochastic,
            [site.process.steps if site.process else 0 for site in self.sites],
            hashlib.sha256(json.dumps(lines).encode()).hexdigest(),
        )


def every_crash(agent: int = 0) -> Iterator[Schedule]:
    """A crash of one peer at every step of its round loop and every iteration of the event loop, in the same run."""
    whole = simulate(Schedule(-1, rounds=2))
    for kind, last in (("step", whole.steps[agent]), ("iteration", whole.iterations)):
        for at in range(1, last + 1):
            for power in (False, True):
                yield Schedule(-1, rounds=2, crashes=[Crash(agent, kind, at, power, restart_after=0.3)])


def simulate(schedule: Schedule | int) -> Outcome:
    """Run one schedule in a temporary folder."""
    schedule = draw_schedule(schedule) if isinstance(schedule, int) else schedule
    base = _folder()
    folder = Path(tempfile.mkdtemp(dir=base))
    try:
        return Simulation(schedule, folder).run()
    finally:
        shutil.rmtree(folder)


@cache
def _folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def search(
    schedules: Iterable[Schedule],
    seconds: float = float("inf"),
    on_fault: Callable[[Schedule, Outcome], None] = lambda schedule, outcome: None,
) -> dict[str, Any]:
    """Run schedules until the time is up. Returns counts, and the faults of failing schedules."""
    began, failing = time.perf_counter(), []
    ends: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for schedule in schedules:
        if time.perf_counter() - began > seconds:
            break
        outcome = simulate(schedule)
        total.update(schedules=1, rounds_run=outcome.rounds_run, iterations=outcome.iterations)
        total.update(simulated_seconds=round(outcome.seconds))
        ends.update(_kind(end) for site in outcome.ends for end in site)
        if outcome.faults:
            failing.append([str(schedule), outcome.faults])
            on_fault(schedule, outcome)
    spent = time.perf_counter() - began
    rate = round(60 * total["schedules"] / max(spent, 1e-9))
    return {**total, "schedules_per_minute": rate, "ends": dict(ends.most_common()), "failing": failing}


def _kind(end: str) -> str:
    return end if end in ("finished", "killed", "power failure", "goodbye") else "stopped"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first schedule")
    parser.add_argument("--every-crash", action="store_true", help="instead: one run with a crash at every point")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after this time")
    parser.add_argument("--out", type=Path, help="write the result here as well")
    arguments = parser.parse_args()
    numbers = range(arguments.first, arguments.first + arguments.schedules)
    schedules = every_crash() if arguments.every_crash else map(draw_schedule, numbers)
    result = search(schedules, arguments.seconds, lambda schedule, outcome: print(schedule, outcome.faults, flush=True))
    if not arguments.every_crash:
        result = {"first": arguments.first, "next": arguments.first + result["schedules"], **result}
    content = json.dumps(result, indent=1, ensure_ascii=False)
    if arguments.out is not None:
        arguments.out.write_text(content)
    print(content)
    raise SystemExit(1 if result["failing"] else 0)


if __name__ == "__main__":
    main()
