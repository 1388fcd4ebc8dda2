"""Peers under faults: processes on a ring, in separate network namespaces, that are killed, stopped and disconnected.

    python tests/stress/soak.py [--peers 8] [--rounds 100] [--every 5] [--out DIR]      (namespaces need root)

Runs a plan without faults, then with a fault every few rounds: kill -9 and a restart, SIGSTOP and SIGCONT, a
disconnected and reconnected network cable, or a slow one. Afterwards the histories of all peers are checked
(`tests/stress/history.py`). Prints one JSON object with the measurements and the checks.
"""

import argparse
import ctypes
import json
import math
import multiprocessing as mp
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # as a program, its folder alone is on the path
from tests.stress import history

PRELOADED = [
    "pdsl.peer.runner",
    "pdsl.peer.identity",
    "dp_accounting.pld",
    "h11",
    "scipy.special",
]
KINDS = ("kill", "stop", "cut", "slow")
SILENCE, PATIENCE = 2.0, 0.5
RECOVERY = 2 * SILENCE  # seconds after a victim has rejoined: to notice a silence, and that others wait for it


def peer_process(folder: str, namespace: str | None, max_file_bytes: int | None, log: str) -> None:
    """Run `pdsl peer run` in this process, optionally in a namespace and with a limit on file sizes."""
    if namespace is not None:
        with Path(f"/run/netns/{namespace}").open() as net:
            if ctypes.CDLL(None, use_errno=True).setns(net.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), "setns")
    if max_file_bytes is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    error = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(error, 1)
    os.dup2(error, 2)
    sys.argv = ["pdsl", "peer", "run", folder, "--json"]
    from pdsl.cli.main import main

    main()


@dataclass
class Site:
    """Machine of one organisation."""

    folder: Path
    namespace: str | None
    context: Any
    target: Callable[[str, str | None, int | None, str], None] = peer_process  # function that its process runs
    process: Any = None
    exits: list[int] = field(default_factory=list)

    def start(self, max_file_bytes: int | None = None) -> None:
        arguments = (str(self.folder), self.namespace, max_file_bytes, str(self.folder / "process.log"))
        self.process = self.context.Process(target=self.target, args=arguments, daemon=True)
        self.process.start()

    def signal(self, number: int) -> None:
        if self.process.is_alive():
            os.kill(self.process.pid, number)

    def restart(self) -> None:
        self.process.join()
        self.start()

    @property
    def rows(self) -> list[dict[str, Any]]:
        try:
            lines = (self.folder / "run" / "rows.jsonl").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    @property
    def events(self) -> list[dict[str, Any]]:
        path = self.folder / "run" / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def summary(self) -> dict[str, Any] | None:
        path = self.folder / "run" / "summary.json"
        return json.loads(path.read_text()) if path.exists() else None


def forkserver() -> Any:
    """Multiprocessing context whose processes have the heavy modules imported already."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def ledger_matches_log(site: Site) -> bool:
    """Whether every noisy message in the logs was charged, and every charge of a completed round has its messages.

    A round interrupted between charge and noise has a charge and no message.
    """
    ledger = json.loads((site.folder / "run" / "ledger.json").read_text())
    charged = {(t, n): set(peers) for t, n, peers in ledger["charges"]}
    made: dict[tuple[int, int], set[int]] = {}
    for log in (site.folder / "run").glob("sent-*.log"):
        for line in log.read_text().splitlines():
            t, *vector = json.loads(line)
            if vector:  # otherwise the start of a round
                made.setdefault((t, int(log.stem.partition("-")[2])), set()).add(vector[2])
    me = json.loads((site.folder / "run" / "setup.json").read_text())["agent"]
    run = {row["round"] for row in site.rows if "absent" not in row}
    return all(made.get(key, set()) - {me} <= charged.get(key, set()) for key in {*made, *charged}) and all(
        made[key] == charged[key] | {me} for key in charged if key[0] in run and key in made
    )


class Network:
    """A switch with a cable to each site, all in namespaces: the network of the machine is unchanged."""

    def __init__(self, count: int, prefix: str):
        self.names = [f"{prefix}{i}" for i in range(count)]
        self._hub = f"{prefix}hub"
        self._ip("netns", "add", self._hub)
        self._ip("-n", self._hub, "link", "add", "switch", "type", "bridge")
        self._ip("-n", self._hub, "link", "set", "switch", "up")
        for i, name in enumerate(self.names):
            self._ip("netns", "add", name)
            self._ip("-n", self._hub, "link", "add", f"p{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            self._ip("-n", self._hub, "link", "set", f"p{i}", "master", "switch", "up")
            self._ip("-n", name, "addr", "add", f"{self.host(i)}/24", "dev", "eth0")
            self._ip("-n", name, "link", "set", "eth0", "up")
            self._ip("-n", name, "link", "set", "lo", "up")

    @staticmethod
    def host(i: int) -> str:
        return f"10.77.0.{i + 1}"

    def cable(self, i: int, state: str) -> None:
        self._ip("-n", self._hub, "link", "set", f"p{i}", state)

    def slow(self, i: int, state: str) -> None:
        """Limit traffic to site i to 32 kB/s, so that the messages of a round take most of a second."""
        limit = ["root", "tbf", "rate", "256kbit", "burst", "4kb", "latency", "2s"] if state == "down" else ["root"]
        what = "add" if state == "down" else "del"
        subprocess.run(["tc", "-n", self._hub, "qdisc", what, "dev", f"p{i}", *limit], check=True)

    def remove(self) -> None:
        for name in [*self.names, self._hub]:
            subprocess.run(["ip", "netns", "del", name], check=False)

    @staticmethod
    def _ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)


def create_organisations(folder: Path, addresses: list[str], settings: list[str], timeouts: dict[str, float]) -> None:
    """Create organisations with digits, and a plan that all of them have joined."""
    from pdsl.data import load, partition, split_public
    from pdsl.peer.experiment import describe_task
    from pdsl.peer.identity import Identity
    from pdsl.peer.membership import join
    from pdsl.peer.plan import Timeouts, compose
    from pdsl.settings import DataSettings, PartitionSettings
    from pdsl.utils.random import Streams

    members = [Identity.create(folder / f"org-{i}", f"org-{i}", address) for i, address in enumerate(addresses)]
    digits = load(DataSettings(), Streams(0))
    parts = partition(digits.y, len(members), PartitionSettings(mu=1.0), Streams(0), None)
    (q_x, q_y), (x, y) = split_public(digits, None, Streams(0))
    for member, part in zip(members, parts, strict=True):
        np.savez(member.folder / "data.npz", x=digits.x[part].numpy(), y=digits.y[part].numpy())
        np.savez(member.folder / "public.npz", x_validation=q_x, y_validation=q_y, x_test=x, y_test=y)
    task = describe_task(members[0].folder / "public.npz", float(np.mean([len(part) for part in parts])), None)
    plan = compose([m.card for m in members], None, settings, task, Timeouts(**timeouts))  # type: ignore[arg-type]
    for member in members:
        join(member, plan)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(s.getsockname()[1]) for s in sockets]


def latest_round(sites: list[Site]) -> int:
    return max((len(site.rows) for site in sites), default=0)


@dataclass
class Fault:
    kind: str
    victim: int
    at: int  # round
    until: float  # monotonic time at which it ends
    seconds: float
    over: int | None = None  # round in which it ended
    rows: int = 0  # of the victim at the end of the fault
    began: float = field(default_factory=time.time)  # by the clock of the event logs
    ended: float = math.inf
    rejoined: float = math.inf  # when its victim had run a round with a neighbour again

    @property
    def times(self) -> list[float]:
        """Seconds from the start to the end, and to the return of the victim."""
        return [round(self.ended - self.began, 1), round(self.rejoined - self.began, 1)]


def inject_faults(sites: list[Site], network: Network | None, rounds: int, every: int, seed: int) -> list[Fault]:
    """Inject faults until shortly before the last round, so that every victim can rejoin; all faults end before it."""
    draw = random.Random(seed)
    faults: list[Fault] = []
    kinds = KINDS if network is not None else KINDS[:2]
    following = every
    while any(site.process.is_alive() for site in sites):
        for fault in [fault for fault in faults if fault.over is None and time.monotonic() > fault.until]:
            end_fault(fault, sites, network)
        for fault in faults:
            if fault.ended < fault.rejoined == math.inf and has_rejoined(sites[fault.victim], fault):
                fault.rejoined = time.time()
        if latest_round(sites) >= following and following <= rounds - 4 * every:
            busy = {fault.victim for fault in faults if fault.over is None}
            victim = draw.choice([i for i in range(len(sites)) if i not in busy])
            seconds = draw.uniform(0.5, 6.0)
            fault = Fault(
                draw.choice(kinds), victim, latest_round(sites), time.monotonic() + seconds, round(seconds, 1)
            )
            faults.append(fault)
            start_fault(fault, sites, network)
            following += every
        time.sleep(0.05)
    return faults


def start_fault(fault: Fault, sites: list[Site], network: Network | None) -> None:
    site = sites[fault.victim]
    if fault.kind == "kill":
        site.signal(signal.SIGKILL)
    elif fault.kind == "stop":
        site.signal(signal.SIGSTOP)
    elif network is not None:
        (network.cable if fault.kind == "cut" else network.slow)(fault.victim, "down")


def end_fault(fault: Fault, sites: list[Site], network: Network | None) -> None:
    fault.over = latest_round(sites)
    site = sites[fault.victim]
    fault.ended, fault.rows = time.time(), len(site.rows)
    if fault.kind == "kill":
        site.restart()
    elif fault.kind == "stop":
        site.signal(signal.SIGCONT)
    elif network is not None:
        (network.cable if fault.kind == "cut" else network.slow)(fault.victim, "up")


def run(folder: Path, count: int, rounds: int, every: int | None, seed: int, network: Network | None) -> dict[str, Any]:
    """One complete training, with a fault every `every` rounds unless it is None."""
    hosts = [f"{network.host(i)}:7443" for i in range(count)] if network else []
    addresses = hosts or [f"127.0.0.1:{port}" for port in free_ports(count)]
    settings = [f"rounds={rounds}", "model.name=softmax", "algorithm.learning_rate=2.0", "graph.kind=ring"]
    timeouts = {"silence": SILENCE, "patience": PATIENCE, "deadline": 30.0, "start": 120.0}
    create_organisations(folder, addresses, settings, timeouts)
    context = forkserver()
    names = network.names if network else [None] * count
    sites = [Site(folder / f"org-{i}", name, context) for i, name in enumerate(names)]
    start = time.monotonic()
    for site in sites:
        site.start()
    faults = inject_faults(sites, network, rounds, every, seed) if every else []
    for site in sites:
        site.process.join()
    return evaluate_run(sites, faults, rounds, time.monotonic() - start)


def evaluate_run(sites: list[Site], faults: list[Fault], rounds: int, seconds: float) -> dict[str, Any]:
    summaries = [site.summary for site in sites]
    finished = [summary for summary in summaries if summary is not None]
    waits = network_times(sites, faults)
    return {
        "seconds": round(seconds, 1),
        "finished": len(finished),
        "exit_codes": [site.process.exitcode for site in sites],
        "accuracy": float(np.mean([s["accuracy"] for s in finished])) if finished else None,
        "epsilon": [s["epsilon"] for s in finished],
        "within_budget": all(s["epsilon"] <= s["budget"] for s in finished),
        "rounds_run": [s["rounds_run"] for s in finished],
        "last_round_of_all": all(s["rounds"] == rounds for s in finished),
        "ledger_matches_log": [ledger_matches_log(site) for site in sites],
        "histories": history.summarise([history.load(site.folder) for site in sites]),
        "conflicts": sum(event["event"] == "conflict" for site in sites for event in site.events),
        "generations": [s["generation"] for s in finished],
        "excluded_without_a_fault": excluded_without_a_fault(sites, faults),
        "median_wait_seconds": {who: round(float(np.median(seconds)), 2) for who, seconds in waits.items() if seconds},
        "longest_wait_seconds": {who: round(max(seconds), 2) for who, seconds in waits.items() if seconds},
        "rejoined": [has_rejoined(sites[fault.victim], fault) for fault in faults],
        "faults": [[fault.kind, fault.victim, fault.at, fault.seconds, *fault.times] for fault in faults],
    }


def network_times(sites: list[Site], faults: list[Fault]) -> dict[str, list[float]]:
    """Network time of each round in seconds: without a fault, and during faults, near a victim and further away.

    Rounds with a slow cable are listed separately, because a round takes as long as its slowest peer.
    """
    waits: dict[str, list[float]] = {"calm": [], "victims and neighbours": [], "others": [], "a slow cable": []}
    for i, site in enumerate(sites):
        for row in [row for row in site.rows[1:] if "waited" in row]:
            now = [fault for fault in faults if fault.at <= row["round"] <= (fault.over or row["round"]) + 2]
            if any(fault.kind == "slow" for fault in now):
                who = "a slow cable"
            elif any(ring_distance(fault.victim, i, sites) <= 1 for fault in now):
                who = "victims and neighbours"
            else:
                who = "others" if now else "calm"
            waits[who].append(row["waited"])
    return waits


def ring_distance(i: int, j: int, sites: list[Site]) -> int:
    """Distance on the ring."""
    return min((i - j) % len(sites), (j - i) % len(sites))


def excluded_without_a_fault(sites: list[Site], faults: list[Fault]) -> list[tuple[str, dict[str, Any]]]:
    """Exclusions from a round where neither end was near a victim at that time, each with the excluding peer.

    A fault counts until RECOVERY seconds after its victim has run a round with a neighbour again: a killed peer needs
    seconds to start, and its neighbours may have begun the round to which it jumps. Times are compared and not rounds,
    because peers are in different rounds, and a restart takes more rounds on a fast machine.
    """
    names = [site.folder.name for site in sites]
    exclusions = [(i, event) for i, site in enumerate(sites) for event in site.events if event["event"] == "lost"]
    return [
        (names[i], event)
        for i, event in exclusions
        if not any(
            min(ring_distance(fault.victim, end, sites) for end in (i, names.index(event["who"]))) <= 1
            and fault.began <= event["time"] <= fault.rejoined + RECOVERY
            for fault in faults
        )
    ]


def has_rejoined(site: Site, fault: Fault) -> bool:
    """Whether the victim ran a whole round with a neighbour after the end of the fault."""
    return any(set(row.get("present", ())) - set(row.get("lost", ())) for row in site.rows[fault.rows :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--every", type=int, default=5, help="rounds between faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="keep the folders here")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    out = arguments.out or Path(tempfile.mkdtemp(prefix="pdsl-soak-"))
    network = Network(arguments.peers, f"pdsl{os.getpid()}-") if os.geteuid() == 0 and shutil.which("ip") else None
    try:
        calm = run(out / "calm", arguments.peers, arguments.rounds, None, arguments.seed, network)
        rough = run(out / "rough", arguments.peers, arguments.rounds, arguments.every, arguments.seed, network)
    finally:
        if network is not None:
            network.remove()
        if arguments.out is None:
            shutil.rmtree(out)
    others = rough["longest_wait_seconds"].get("others", 0.0)
    kept = {
        "every peer finished": rough["finished"] == arguments.peers and rough["last_round_of_all"],
        "every victim rejoined": all(rough["rejoined"]),
        "every ledger matches the messages sent": all(rough["ledger_matches_log"]),
        "no fault in the histories": not calm["histories"]["faults"] and not rough["histories"]["faults"],
        "within budget": rough["within_budget"],
        "only victims and their neighbours were excluded": not rough["excluded_without_a_fault"],
        "only victims and their neighbours were delayed": others < SILENCE,
        "accuracy within 2 points": abs(rough["accuracy"] - calm["accuracy"]) <= 0.02,
    }
    print(json.dumps({"namespaces": network is not None, "calm": calm, "rough": rough, "kept": kept}, indent=1))
    raise SystemExit(0 if all(kept.values()) else 1)


if __name__ == "__main__":
    main()
