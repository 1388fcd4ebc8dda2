"""Fuzzing of all untrusted input: messages, files and requests to a live server.

    python tests/stress/fuzz.py [--seconds 600] [--seed 0]

Messages, requests, answers, cards, plans, pins, ledgers, noise logs, checkpoints, configs, statements and data files
are read intact and then with random damage; statements also with a valid signature. A live server gets damaged requests
from a pinned neighbour. Any exception but a refusal is a crash. Prints one JSON object; the exit code is 1 after a
crash.
"""

import argparse
import asyncio
import io
import json
import random
import re
import resource
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pdsl.algorithms import PDSL
from pdsl.config import Config, load
from pdsl.data.files import load_public, load_records
from pdsl.peer.amendment import Amendment
from pdsl.peer.connections import ConnectionPool
from pdsl.peer.http1 import FAILED
from pdsl.peer.identity import PINS, Identity, PeerInfo
from pdsl.peer.ledger import PeerLedger
from pdsl.peer.membership import join
from pdsl.peer.messages import Answer, Header, RefusedError, Request, decode, encode, split
from pdsl.peer.noise_log import NoiseLog
from pdsl.peer.plan import TaskDescription, Timeouts, TrainingPlan, compose
from pdsl.peer.signatures import sign
from pdsl.peer.stages import Chain
from pdsl.peer.statement import PURPOSE, Measurement, Statement, canonical
from pdsl.peer.statement_reader import StatementReader
from pdsl.peer.status import Events
from pdsl.peer.transport import Loop, Transport
from pdsl.peer.trust_store import TrustStore
from pdsl.privacy import Ledger, Mechanism
from pdsl.runs import checkpoints
from pdsl.shapley.masses import BLOCKS
from pdsl.utils.errors import PdslError

D = 20
MAX_SECONDS = 5.0  # per input; more is a hang
NUMBERS = [b"-1", b"1e999", b"NaN", b"9" * 400, b"0", b"1.5", b"true"]
TOKENS = [*NUMBERS, b"\0", b"\xff" * 8, b"[" * 50, b"[" * 2000, b"{", b'"', b"\n", b"=", b"\x80\x04\x95", b"'''"]

Target = tuple[bytes, Callable[[bytes], Any]]


def mutate(content: bytes, draw: random.Random) -> bytes:
    """Apply one to eight random changes."""
    data = bytearray(content)
    for _ in range(draw.randint(1, 8)):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(7):
            case 0:
                data[at : at + draw.randint(1, 16)] = draw.randbytes(draw.randint(0, 16))
            case 1 if data:
                data[at % len(data)] ^= 1 << draw.randrange(8)
            case 2:
                del data[at : at + draw.randint(1, 200)]
            case 3:
                data[at:at] = draw.choice(TOKENS)
            case 4:
                data[at:at] = data[: draw.randint(0, 300)]
            case 5:
                digits = [m.span() for m in re.finditer(rb"[0-9.]+", bytes(data))]
                if digits:
                    a, b = draw.choice(digits)
                    data[a:b] = draw.choice(NUMBERS)
            case _:
                del data[at:]
    return bytes(data)


def targets(folder: Path) -> dict[str, Target]:
    """Inputs by name: a valid example and its reader."""
    members = [Identity.create(folder / name, name, f"127.0.0.1:{7000 + i}") for i, name in enumerate(("ann", "bob"))]
    task = TaskDescription(records=10, shape=(4,), classes=3, public_records=10, public="0" * 64)
    plan = compose([m.card for m in members], None, ["model.name=softmax", "rounds=3"], task, Timeouts())
    header = Header(plan.hash, 1, 0, 0, 1)
    peer_ledger = PeerLedger(1e-5, 8.0, Mechanism(0.1, 0.01, 3, rate=0.1), PDSL(), 100, 0, (0, 1, 2), {}).charge(
        1, 1, frozenset({1})
    )
    new = Identity.create(folder / "cat", "cat", "none").card
    joining = Amendment(plan.hash, 1, plan.hash, 2, "join", "cat", new, ("ann",)).sign(members[0])
    numbers = np.arange(12.0, dtype=np.float32).reshape(3, 4)

    def npz(**arrays: Any) -> bytes:
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        return buffer.getvalue()

    def by_file(name: str, read: Callable[[Path], Any]) -> Callable[[bytes], Any]:
        def reader(content: bytes) -> Any:
            (folder / name).write_bytes(content)
            return read(folder / name)

        return reader

    def sent(path: Path) -> None:
        NoiseLog(path).close()

    def checkpoint(path: Path) -> None:
        _, damaged = checkpoints.newest(path.parent, None, list)
        if damaged:
            raise PdslError(damaged[0])

    sums = np.stack([np.vstack([np.eye(2), [0.5, 0.25 + b / 16]]) for b in range(BLOCKS)])
    model = np.ones(D, dtype=np.float32)
    stated = Statement(
        plan.hash, "ann", 3, 1.0, plan.config.privacy.delta, model,
        tuple(Measurement(name, 3, sums) for name in ("ann", "bob")),
    )  # fmt: skip
    reader = StatementReader(plan, {m.card.name: [m.card.certificate] for m in members}, D, 2)

    def signed_statement(content: bytes) -> None:
        try:
            values = json.loads(content)
            signature = sign(members[0], PURPOSE, canonical(values))
        except (ValueError, RecursionError) as e:
            raise PdslError("not JSON") from e
        if not isinstance(values, dict):
            raise PdslError("not a JSON object")
        reader.parse(canonical({**values, "signature": signature}), "statement")

    state = checkpoints.pack(checkpoints.Checkpoint(1, {"x": torch.ones(1, D), "u": torch.ones(1, D)}, 1.0))
    (folder / "checkpoints").mkdir()
    trust_store = TrustStore(folder)
    ledger = Ledger.empty(1e-5, 8.0, [[0, 1]]).charge(1, [peer_ledger.mechanism])
    return {
        "message": (encode(header, torch.ones(D)), lambda content: decode(content, header, D)),
        "response": (b"\1" + encode(header, torch.ones(D)), split),
        "request": (Request(plan.hash, 1, 0).encode(), lambda content: Request.decode(content, plan.hash)),
        "answer": (Answer(plan.hash, "here", 1, True, False, False).encode(), lambda c: Answer.decode(c, plan.hash)),
        "card": (members[0].card.to_toml().encode(), lambda content: PeerInfo.parse(content, "card")),
        "amendment": (joining.to_toml().encode(), lambda content: Chain(plan, [Amendment.parse(content, "file")])),
        "plan": (plan.to_toml().encode(), lambda content: TrainingPlan.parse(content, "plan")),
        "pin": (members[0].card.certificate.encode(), by_file("ann.pem", lambda path: trust_store.certificates("ann"))),
        "peer ledger": (peer_ledger.to_json(["a", "b"]).encode(), lambda c: peer_ledger.restore(c, "ledger")),
        "ledger": (ledger.to_json().encode(), lambda c: Ledger.from_json(c.decode(errors="replace"), "ledger")),
        "log": (b'[1]\n[1, 0, 0, 1, "ab"]\n[1, 0, 0, 2, "cd"]\n', by_file("sent.log", sent)),
        "checkpoint": (state, by_file("checkpoints/round-000001.safetensors", checkpoint)),
        "config": (Config().to_toml().encode(), by_file("config.toml", load)),
        "data": (npz(x=numbers, y=np.arange(3)), by_file("data.npz", load_records)),
        "statement": (stated.sign(members[0]), lambda content: reader.parse(content, "statement")),
        "signed statement": (canonical(stated.as_dict()), signed_statement),
        "public": (
            npz(x_test=numbers, y_test=np.arange(3), x_validation=numbers, y_validation=np.arange(3)),
            by_file("public.npz", load_public),
        ),
    }


class Live:
    """A running peer, and a pinned neighbour that sends it damaged requests."""

    def __init__(self, folder: Path):
        self._loop = Loop()
        self.members = [Identity.create(folder / name, name, f"127.0.0.1:{port}") for name, port in _find_free_ports()]
        task = TaskDescription(records=10, shape=(4,), classes=3, public_records=10, public="0" * 64)
        timeouts = Timeouts(silence=600, deadline=600)
        self.plan = compose([m.card for m in self.members], None, ["model.name=softmax"], task, timeouts)
        for member in self.members:
            join(member, self.plan)
        self._peer = Transport(self._loop, self.members[0], self.plan, Events(folder / "events.jsonl"), D)
        self._peer.state.poll = 0.0
        self._peer.start()
        self._pool = ConnectionPool(self.members[1], self.members[0].card, TrustStore(self.members[1].folder / PINS))

    def send(self, content: bytes, path: str) -> str:
        return self._loop.run(self._send(content, path))

    async def _send(self, content: bytes, path: str) -> str:
        try:
            response = await asyncio.wait_for(self._pool.request(path, content, 10**6), MAX_SECONDS)
        except FAILED as e:
            return type(e).__name__
        return str(response.status)


def _find_free_ports() -> list[tuple[str, int]]:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as a, socket.create_server(("127.0.0.1", 0)) as b:
        return [("ann", a.getsockname()[1]), ("bob", b.getsockname()[1])]


def fuzz(seconds: float, seed: int, folder: Path) -> dict[str, Any]:
    draw = random.Random(seed)
    (folder / "files").mkdir()
    (folder / "live").mkdir()
    known = targets(folder / "files")
    live = Live(folder / "live")
    for name, (good, read) in known.items():
        read(good)  # the valid example is accepted
        assert name
    refused: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    statuses: Counter[str] = Counter()
    crashes: list[str] = []
    slowest = 0.0
    end = time.monotonic() + seconds
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    while time.monotonic() < end and len(crashes) < 10:
        name = draw.choice(list(known))
        good, read = known[name]
        content = mutate(good, draw)
        start = time.monotonic()
        try:
            read(content)
            accepted[name] += 1
        except (PdslError, RefusedError) as e:
            refused[name] += 1
            if "\n" in str(e):
                crashes.append(f"{name}: an error of two lines: {e}")
        except Exception:
            crashes.append(f"{name}: {content!r:.300}: {traceback.format_exc(limit=-3)}")
        slowest = max(slowest, time.monotonic() - start)
        if draw.random() < 0.05:
            status = live.send(mutate(known["request"][0], draw), draw.choice(("/hello", "/fetch")))
            statuses[status] += 1
            if status not in ("200", "400", "413"):
                crashes.append(f"server: {status}")
    assert live.send(Request(live.plan.hash, 0, 0).encode(), "/hello") == "200"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {
        "seconds": seconds,
        "inputs": refused.total() + accepted.total(),
        "refused": dict(refused),
        "still_good": dict(accepted),  # changes in white space, comments or free numbers
        "server": dict(statuses),
        "slowest_seconds": round(slowest, 3),
        "memory_grown_mb": round(grown, 1),
        "crashes": crashes,
        "kept": {"no crash": not crashes, "no hang": slowest < MAX_SECONDS, "memory bounded": grown < 200},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pdsl-fuzz-") as folder:
        result = fuzz(arguments.seconds, arguments.seed, Path(folder))
    print(json.dumps(result, indent=1))
    raise SystemExit(0 if all(result["kept"].values()) else 1)


if __name__ == "__main__":
    main()
