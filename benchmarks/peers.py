"""pdsl beside other libraries: a round of 20 agents on a ring, each with one step on 250 MNIST images.

python benchmarks/peers.py [--rounds 5] [--threads 1] [--only pdsl,fluke] [--json]

Every contestant has the same images and the same network, and a process of its own; other libraries have a virtual
environment of their own, made at the first run. Time is the median over rounds, after one to warm up. Who cannot be
installed or run has the reason in the place of numbers.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from pdsl.data import data_root, load
from pdsl.errors import PdslError
from pdsl.randomness import Streams
from pdsl.settings import DataSettings

DRIVERS = Path(__file__).resolve().with_suffix("")
AGENTS = 20
SECONDS = 1800  # for one contestant
TORCH = "torch>=2.13,<2.14"
Row = dict[str, Any]


class UnavailableError(Exception):
    """A contestant cannot be installed or run; the message is the reason, in one line."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment of a library."""

    name: str
    packages: tuple[str, ...]

    def python(self, folder: Path) -> Path:
        """Its interpreter; installs the environment where there is none."""
        home = folder.resolve() / self.name
        python = home / "bin" / "python"
        if python.exists():
            return python
        try:
            _checked([sys.executable, "-m", "venv", str(home)])
            _checked([str(python), "-m", "pip", "install", "-q", *self.packages])
        except BaseException:
            shutil.rmtree(home, ignore_errors=True)  # half of an environment would pass for one the next time
            raise
        return python


@dataclass(frozen=True)
class Contestant:
    name: str
    driver: str
    arguments: tuple[str, ...] = ()
    environment: Environment | None = None  # None: this one


FLUKE = Environment("fluke", ("fluke-fl", TORCH))
# Its dependencies alone do not import: datasets 2.15 is older than what the newest of these two ask for or offer, and
# the package itself imports what only its extra 'dp' brings.
P2PFL = Environment("p2p", ("p2pfl[dp]", TORCH, "pyarrow<21", "huggingface_hub<1"))
CONTESTANTS = (
    Contestant("plain torch", "plain.py"),
    Contestant("pdsl", "ours.py", ("batch",)),
    Contestant("pdsl", "ours.py", ("per-sample",)),
    Contestant("fluke", "run_fluke.py", ("fedavg",), FLUKE),
    Contestant("fluke", "run_fluke.py", ("gossip",), FLUKE),
    Contestant("p2pfl", "run_p2pfl.py", ("default",), P2PFL),
    Contestant("p2pfl", "run_p2pfl.py", ("short",), P2PFL),
)


def _checked(command: list[str], **options: Any) -> str:
    """What a command prints; its last complaint, or that it took too long, as a reason."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, **options)
    except subprocess.TimeoutExpired as e:
        raise UnavailableError(f"not done after {e.timeout:.0f} s") from e
    if done.returncode:
        complaints = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise UnavailableError(complaints[-1] if complaints else f"ended with code {done.returncode}")
    return done.stdout


def deal(folder: Path) -> None:
    """Write x [agents, n, 1, 28, 28] and y [agents, n]: MNIST, dealt at random."""
    data = load(DataSettings(name="mnist"), Streams(0))
    order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(0)).view(AGENTS, -1)
    np.save(folder / "x.npy", data.x[order].numpy())
    np.save(folder / "y.npy", data.y[order].numpy())


def measure(contestant: Contestant, rounds: int, threads: int | None, venvs: Path, folder: Path) -> Row:
    python = contestant.environment.python(venvs) if contestant.environment else Path(sys.executable)
    arguments = [str(rounds), *contestant.arguments]
    environment = os.environ | {"PEERS_DATA": str(folder), "PDSL_DATA": str(data_root().resolve())}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
        if contestant.driver == "ours.py":
            arguments.append(str(threads))
    command = [str(python), str(DRIVERS / contestant.driver), *arguments]
    output = _checked(command, env=environment, cwd=folder, timeout=SECONDS)  # p2pfl writes logs where it is
    row: Row = json.loads(output.splitlines()[-1])
    return row


def as_table(rows: list[Row], rounds: int) -> Table:
    cores, load = os.cpu_count(), os.getloadavg()[1]
    table = Table(
        *("", "version", "threads", "s/round", "CPU s", "peak MB", "what a round is"),
        header_style="bold",
        title=f"{AGENTS} agents, one step on 250 MNIST images each; median of {rounds} rounds",
        caption=f"{cores} cores, load average of the last 5 minutes {load:.1f}",
    )
    for row in rows:
        if "reason" in row:
            table.add_row(row["name"], "", "", "", "", "", f"not measured: {row['reason']}")
        else:
            times = (f"{row[key]:.2f}" for key in ("seconds", "cpu_seconds"))
            table.add_row(row["name"], row["version"], row["threads"], *times, f"{row['megabytes']:,.0f}", row["what"])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one to warm up")
    parser.add_argument("--threads", type=int, help="threads of torch and workers of pdsl; default: as each decides")
    parser.add_argument("--venvs", type=Path, default=Path(".peers"), help="folder of the virtual environments")
    parser.add_argument("--only", help="names of contestants, with commas between; default: all")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    names = {contestant.name for contestant in CONTESTANTS}
    wanted = set(options.only.split(",")) if options.only else names
    if wanted - names:
        parser.error(f"--only: no contestant {', '.join(sorted(wanted - names))}; there are {', '.join(sorted(names))}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            deal(Path(folder))
        except PdslError as e:
            sys.exit(str(e))
        for contestant in (contestant for contestant in CONTESTANTS if contestant.name in wanted):
            print(f"{contestant.name} {' '.join(contestant.arguments)} …", file=sys.stderr)
            try:
                row = measure(contestant, options.rounds, options.threads, options.venvs, Path(folder))
            except UnavailableError as e:
                row = {"reason": str(e)}
            rows.append({"name": contestant.name, "arguments": contestant.arguments} | row)
    if options.json:
        print(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg(), "rows": rows}, indent=2))
        return
    console = Console()
    console.print(as_table(rows, options.rounds))
    for name, note in dict.fromkeys((row["name"], note) for row in rows for note in row.get("notes", ())):
        console.print(f"{name}: {note}")


if __name__ == "__main__":
    main()
