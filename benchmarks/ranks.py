"""A thousand agents on two ranks: memory beside one process, bytes beside the edges that cross, the same models.

    python benchmarks/ranks.py [--ranks 2] [--agents 1000] [--rounds 20] [--model softmax] [--hidden 64]

PDSL on a 4-regular graph and the embedded digits. Peak memory is what the kernel says at the end of each process; that
of a run with two agents is what torch and the libraries take before any agent is there, and that of `import torch` is
what no rank can be without. Most of it is the libraries' code, which processes on one machine have in common: the
proportional share, looked at ten times a second, counts a page that n of them use as 1/n. Where the system allows it,
the ranks run in a network namespace of their own, and its loopback device counts every byte, headers included.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

from pdsl import topology
from pdsl.algorithms import PDSL
from pdsl.engine.distributed import block
from pdsl.settings import GraphSettings
from pdsl.utils.random import Streams

COUNTED = "lo.txt"
TORCH = "import torch; print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"


def settings(a: argparse.Namespace, agents: int) -> list[str]:
    chosen = {
        "rounds": a.rounds if agents == a.agents else 2,
        "graph.kind": "k-regular" if agents > 5 else "full",
        "graph.agents": agents,
        "graph.degree": 4,
        "model.name": a.model,
        **({"model.hidden": a.hidden} if a.hidden else {}),
        "algorithm.shapley.sample": 50,
        "evaluate_every": 10,
        "checkpoint_every": 10,
        "engine.workers": 1,
        "engine.exact": "true",
    }
    return [word for name, value in chosen.items() for word in ("--set", f"{name}={value}")]


@dataclass(frozen=True)
class Memory:
    """The most that a process had, in MiB: all of it, and its share of what it has in common with others."""

    peak: float
    share: float


def measured(folder: Path, arguments: list[str], ranks: int) -> tuple[dict[str, Any], list[Memory]]:
    """A run's summary, and the memory of each of its processes."""
    me = [__file__, "--inside", str(folder), "run", "--json", "--out", str(folder / "run"), *arguments]
    command = [sys.executable, *me]
    if ranks:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = in_namespace([sys.executable, *launch, *me], folder)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return summary, [Memory(**json.loads((folder / f"{rank}.json").read_text())) for rank in range(ranks or 1)]


def in_namespace(command: list[str], folder: Path) -> list[str]:
    alone = ["unshare", "--net"]
    if not shutil.which("ip") or subprocess.run([*alone, "true"], capture_output=True).returncode:
        return command
    script = f'ip link set lo up && "$@" && grep lo: /proc/net/dev > {folder / COUNTED}'
    return [*alone, "sh", "-c", script, "sh", *command]


def inside(folder: Path, argv: list[str]) -> None:
    """`pdsl argv…`; then how much memory it took is left in a file."""
    from pdsl.cli.main import main

    sys.argv = ["pdsl", *argv]
    shares: list[float] = []
    ended = Event()

    def look() -> None:
        while not ended.wait(0.1):
            lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
            shares.append(next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 2**10)

    watcher = Thread(target=look)
    watcher.start()
    try:
        main()
    finally:
        ended.set()
        watcher.join()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        told = json.dumps({"peak": peak, "share": max(shares)})
        (folder / f"{os.environ.get('RANK', 0)}.json").write_text(told)


def crossing(a: argparse.Namespace) -> int:
    """Vectors from rank to rank in a round: over every edge that crosses, as many as the algorithm sends."""
    graph = topology.build(GraphSettings(kind="k-regular", agents=a.agents, degree=4), Streams(0))
    rank_of = {agent: rank for rank in range(a.ranks) for agent in block(a.agents, rank, a.ranks)}
    ends = zip(graph.receiver.tolist(), graph.sender.tolist(), strict=True)
    return PDSL().sends(graph, noise_multiplier=1.0) * sum(rank_of[i] != rank_of[j] for i, j in ends)


def main() -> None:
    if sys.argv[1:2] == ["--inside"]:
        inside(Path(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser()
    for name, default in (("ranks", 2), ("agents", 1000), ("rounds", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", default="softmax")
    parser.add_argument("--hidden", type=int, help="width of the hidden layer, for --model mlp")
    a = parser.parse_args()
    torch = int(subprocess.run([sys.executable, "-c", TORCH], check=True, capture_output=True).stdout) / 2**10
    found = {}
    for name, agents, ranks in (("nobody", 2, 0), ("alone", a.agents, 0), ("ranks", a.agents, a.ranks)):
        with tempfile.TemporaryDirectory() as folder:
            found[name] = measured(Path(folder), settings(a, agents), ranks)
            facts = json.loads((Path(folder) / "run" / "setup.json").read_text())
            lo = Path(folder) / COUNTED
            counted = int(lo.read_text().split()[1]) if lo.exists() else None
        summary, memory = found[name]
        told = ", ".join(f"peak {of.peak:.0f} MiB (share {of.share:.0f})" for of in memory)
        print(f"{name}: {summary['rounds']} rounds in {summary['seconds']:.0f} s, {told}", flush=True)
    (empty,), (alone,), several = (found[name][1] for name in ("nobody", "alone", "ranks"))
    d = facts["parameters"]
    expected = crossing(a) * d * 4 * a.rounds
    sent = found["ranks"][0]["bytes_between_processes"]
    print(f"{a.agents} agents, {a.ranks} ranks, {d} parameters")
    largest = max(of.peak for of in several)
    least = torch + (alone.peak - torch) / a.ranks
    print(f"memory of the largest rank over one process: {largest / alone.peak:.2f}")
    print(f"torch alone, {torch:.0f} MiB, and a rank's share of all the rest would be: {least / alone.peak:.2f}")
    print(f"the same by proportional shares: {max(of.share for of in several) / alone.share:.2f}")
    print(f"without what a run of two agents takes: {(largest - empty.peak) / (alone.peak - empty.peak):.2f}")
    print(f"bytes between ranks: {sent:,}; edges that cross times message size: {expected:,}")
    if counted is not None:
        print(f"bytes on the loopback device: {counted:,}, {counted / sent:.2f} times as many")
    print(f"same models: {found['ranks'][0]['models_sha256'] == found['alone'][0]['models_sha256']}")


if __name__ == "__main__":
    main()
