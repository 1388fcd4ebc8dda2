"""Cost of communication: a ring round over mutual TLS and over plain HTTP, compared with the computation of a round.

    python benchmarks/wire.py [--rounds 30]

Four processes on a ring run the exchanges of a PDSL round: a roll call, then five phases of one vector to each
neighbour (on a ring of four, models are mixed twice). Plain HTTP exists only here, for comparison. Then the same with
vectors of the MNIST network, and with ledger, log, row and checkpoint on disk, compared with the computation of one
agent in a round.
"""

import argparse
import asyncio
import json
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

PEERS, PHASES, WARM, PAIRS = 4, 5, 3, 3


def disable_tls(own_name: str) -> None:
    """Disable TLS in this process: a caller is identified by the name that it sends first."""
    from pdsl.peer.connections import ConnectionPool
    from pdsl.peer.http1 import READ_BYTES, HttpConnection
    from pdsl.peer.listener import Listener

    async def dial(self: Any, context: Any) -> HttpConnection:
        host, _, port = self._card.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=READ_BYTES)
        writer.write(own_name.encode() + b"\n")
        return HttpConnection(reader, writer, b"", is_server=False)

    async def accept(self: Any, connection: Any, address: str) -> None:
        reader, writer = await asyncio.open_connection(sock=connection, limit=READ_BYTES)
        name = (await reader.readline()).strip()
        await self._on_connection(self._names[name.decode()], HttpConnection(reader, writer, name, is_server=True))

    ConnectionPool._dial, Listener._shake_hands = dial, accept  # type: ignore[method-assign]
    Listener.identify = lambda self, name: self._names[name.decode()]  # type: ignore[method-assign]


def peer(folder: str, d: int, rounds: int, secure: bool, durable: bool, times: Any) -> None:
    """Run rounds of communication in one process. Puts (wall time, CPU time) of each into `times`."""
    torch.set_num_threads(1)
    from pdsl.algorithms import PDSL
    from pdsl.peer.identity import Identity
    from pdsl.peer.ledger import PeerLedger
    from pdsl.peer.membership import load_plan, write_charge_marker
    from pdsl.peer.noise_log import NoiseLog
    from pdsl.peer.status import Events
    from pdsl.peer.transport import Loop, Transport
    from pdsl.privacy import Mechanism
    from pdsl.runs.checkpoints import Checkpoint
    from pdsl.runs.directory import RunDirectory

    own = Identity.load(Path(folder))
    if not secure:
        disable_tls(own.card.name)
    plan = load_plan(own)
    transport = Transport(Loop(), own, plan, Events(own.folder / "events.jsonl"), d)
    transport.start()
    v = torch.randn(d)
    run = RunDirectory.create(own.folder / "run", "", {})
    log = NoiseLog(own.folder / "run" / "sent-1.log")
    ledger = PeerLedger(1e-5, 8.0, Mechanism(1.0, 0.01, 3, rate=0.01), PDSL(), 100, 0, (0, 1, 2), {})
    taken = []
    for t in range(1, rounds + 1):
        start, worked = time.monotonic(), time.process_time()
        present = transport.roll_call(t).present
        if durable:
            ledger = ledger.charge(t, 1, present, log.begin_round(t))
            run.write("ledger.json", ledger.to_json([card.name for card in plan.members]).encode())
            write_charge_marker(own, plan, t)
            log.record({(t, 0, 0, j): "0" * 64 for j in range(3)})
        for phase in range(PHASES):
            assert len(transport.exchange(t, phase, dict.fromkeys(present, v))) == len(present) == 2
        if durable:
            run.append({"round": t})
            run.save(Checkpoint(t, {"x": v[None], "u": v.clone()[None]}, 0.0))
            run.prune()
        taken.append((time.monotonic() - start, time.process_time() - worked))
    transport.finish()
    times.put(taken[WARM:])
    transport.stop()


def communicate(d: int, rounds: int, secure: bool, durable: bool = False) -> tuple[float, float]:
    """Median wall time and CPU time per peer of a round of communication, in seconds."""
    from tests.stress.soak import create_organisations, free_ports

    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="pdsl-wire-") as folder:
        addresses = [f"127.0.0.1:{port}" for port in free_ports(PEERS)]
        create_organisations(Path(folder), addresses, ["model.name=softmax", f"rounds={rounds}"], {"silence": 60.0})
        times = context.Queue()
        processes = [
            context.Process(target=peer, args=(f"{folder}/org-{i}", d, rounds, secure, durable, times))
            for i in range(PEERS)
        ]
        for process in processes:
            process.start()
        taken = [seconds for _ in processes for seconds in times.get(timeout=600)]
        for process in processes:
            process.join()
    return statistics.median(t for t, _ in taken), statistics.median(w for _, w in taken)


def compare(d: int, rounds: int) -> list[tuple[float, float]]:
    """Wall time and CPU time over TLS and over plain HTTP, measured in turns because the load of a machine changes."""
    pairs = [(communicate(d, rounds, secure=True), communicate(d, rounds, secure=False)) for _ in range(PAIRS)]
    columns = (zip(*(pair[k] for pair in pairs), strict=True) for k in range(2))
    return [(statistics.median(seconds), statistics.median(work)) for seconds, work in columns]


class Echo:
    """Engine with a neighbourhood of three that sends nothing, to measure computation alone."""

    is_main_process = True

    def __init__(self, graph: Any):
        self.agents = range(1)
        self.receiver, self.sender = torch.zeros(3, dtype=torch.int64), torch.arange(3)
        self.omega, self.offsets = torch.full((3,), 1 / 3, dtype=torch.float64), [0, 3]
        self.messages = self.bytes = self.bytes_between_processes = 0

    def enter_round(self, t: int) -> None:
        """Do nothing: there is one graph for all rounds."""

    def request(self, x: torch.Tensor, answer: Any) -> Any:
        from pdsl.engine.base import request_all

        return request_all(self, x, answer)

    def deliver(self, x: torch.Tensor) -> torch.Tensor:
        return x[0] + torch.tensor([0.0, 1e-3, -1e-3])[:, None]  # distinct: equal models share one gradient

    def reply(self, v: torch.Tensor) -> torch.Tensor:
        return v

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, values: Any) -> list[Any]:
        return list(values)

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        return x[0].double()


def compute(rounds: int) -> tuple[float, float, int]:
    """Median wall time and CPU time of a round of one of ten agents of examples/mnist-ring-private.toml, and d."""
    from pdsl.config import load
    from pdsl.training.experiment import prepare
    from pdsl.training.trainer import build_trainer, initial_state, run_round
    from pdsl.utils.workers import Workers

    example = Path(__file__).resolve().parent.parent / "examples" / "mnist-ring-private.toml"
    e = prepare(load(example, ["privacy.randomness=system"]), engine=Echo)
    taken = []
    with Workers(1) as workers:
        parts, state = build_trainer(e, workers), initial_state(e)
        for t in range(1, rounds + 1):
            start, worked = time.monotonic(), time.process_time()
            state, _ = run_round(e.config, state, parts.round(t))
            taken.append((time.monotonic() - start, time.process_time() - worked))
    seconds, work = (statistics.median(column) for column in zip(*taken[1:], strict=True))
    return seconds, work, e.network.num_parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    os.environ["OMP_NUM_THREADS"] = "1"
    d = 250_000  # 1 MB
    (over_tls, tls_work), (over_plain, plain_work) = compare(d, rounds)
    computing, compute_work, parameters = compute(6)
    talking, talk_work = communicate(parameters, rounds, secure=True, durable=True)
    result: dict[str, Any] = {
        "round_of_1_mb_over_tls_seconds": round(over_tls, 4),
        "round_of_1_mb_plain_seconds": round(over_plain, 4),
        "tls_over_plain": round(over_tls / over_plain, 2),
        "tls_over_plain_work": round(tls_work / plain_work, 2),
        "mnist_cnn_parameters": parameters,
        "mnist_cnn_compute_seconds": round(computing, 4),
        "mnist_cnn_peer_mode_seconds": round(talking, 4),
        "overhead": round(talking / computing, 3),
        "overhead_work": round(talk_work / compute_work, 3),  # independent of the load of the machine
    }
    result["kept"] = {
        "TLS at most 1.2 times plain": over_tls <= 1.2 * over_plain,
        "at most 20 %": talking <= computing / 5,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
