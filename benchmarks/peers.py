"""Comparison with other libraries: a round of 20 agents on a ring, each with one step on 250 MNIST images.

python benchmarks/peers.py [--rounds 5] [--threads 1] [--only pdsl,fluke] [--json]

Every library trains on the same images with the same network in a separate process. Other libraries get separate
virtual environments, created at the first run. Times are medians over rounds after one warm-up round. A library that
cannot be installed or run is listed with the reason.
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
from pdsl.settings import DataSettings
from pdsl.utils.errors import PdslError
from pdsl.utils.random import Streams

DRIVERS = Path(__file__).resolve().with_suffix("")
AGENTS = 20
MAX_SECONDS = 1800  # per contestant
TORCH = "torch==2.13.0"
Row = dict[str, Any]


class UnavailableError(Exception):
    """A contestant cannot be installed or run; the message is the reason in one line."""


@dataclass(frozen=True)
class Environment:
    """Virtual environment of a library."""

    name: str
    packages: tuple[str, ...]

    def python(self, folder: Path) -> Path:
        """Path of its interpreter; creates the environment if it does not exist."""
        home = folder.resolve() / self.name
        python = home / "bin" / "python"
        if python.exists():
            return python
        try:
            _run([sys.executable, "-m", "venv", str(home)])
            _run([str(python), "-m", "pip", "install", "-q", *self.packages])
        except BaseException:
            shutil.rmtree(home, ignore_errors=True)  # an incomplete environment would be reused
            raise
        return python


@dataclass(frozen=True)
class Contestant:
    name: str
    driver: str
    arguments: tuple[str, ...] = ()
    environment: Environment | None = None  # None: this one


FLUKE = Environment("fluke", ("fluke-fl", TORCH))
# With its declared dependencies it cannot be imported: datasets 2.15 is incompatible with the newest pyarrow and
# huggingface_hub, and the package imports modules of its extra 'dp'.
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


def _run(command: list[str], **options: Any) -> str:
    """Output of a command; UnavailableError with its last error line, or after a timeout."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, **options)
    except subprocess.TimeoutExpired as e:
        raise UnavailableError(f"timed out after {e.timeout:.0f} s") from e
    if done.returncode:
        errors = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise UnavailableError(errors[-1] if errors else f"exit code {done.returncode}")
    return done.stdout


def write_data(folder: Path) -> None:
    """Write x [agents, n, 1, 28, 28] and y [agents, n]: MNIST, split at random."""
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
    output = _run(command, env=environment, cwd=folder, timeout=MAX_SECONDS)  # p2pfl writes logs to cwd
    row: Row = json.loads(output.splitlines()[-1])
    return row


def as_table(rows: list[Row], rounds: int) -> Table:
    cores, load = os.cpu_count(), os.getloadavg()[1]
    table = Table(
        *("", "version", "threads", "s/round", "CPU s", "peak MB", "round"),
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
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one warm-up round")
    parser.add_argument("--threads", type=int, help="threads of torch and workers of pdsl; default: the library's own")
    parser.add_argument("--venvs", type=Path, default=Path(".peers"), help="folder of the virtual environments")
    parser.add_argument("--only", help="comma-separated names of libraries; default: all")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    names = {contestant.name for contestant in CONTESTANTS}
    wanted = set(options.only.split(",")) if options.only else names
    if wanted - names:
        parser.error(f"--only: unknown {', '.join(sorted(wanted - names))}; choose from {', '.join(sorted(names))}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            write_data(Path(folder))
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
