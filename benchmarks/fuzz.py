"""Every byte that comes from outside, changed at random for as long as is asked for.

    python benchmarks/fuzz.py [--seconds 600] [--seed 0]

Messages, requests and answers, cards, plans, pins, ledgers, logs of what was sent, checkpoints, configs and data files,
each first as it should be, then damaged in many ways; and a live server that gets the same from a pinned neighbour.
Whatever is not refused in the one way it should be is a crash. Prints one JSON object; exit code 1 after a crash.
"""

import argparse
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

from pdsl import checkpoints
from pdsl.algorithms import PDSL
from pdsl.config import Config, load
from pdsl.data.own import load_public, load_records
from pdsl.errors import PdslError
from pdsl.peer import tls
from pdsl.peer.account import Account
from pdsl.peer.events import Events
from pdsl.peer.identity import Card, Identity
from pdsl.peer.join import PINS, join
from pdsl.peer.pins import Pins
from pdsl.peer.plan import Conduct, Plan, Task, compose
from pdsl.peer.sent import SentLog
from pdsl.peer.transport import Loop, Transport
from pdsl.peer.wire import Answer, Header, RefusedError, Request, decode, encode, split
from pdsl.privacy import Ledger, Mechanism

D = 20
SLOW = 5.0  # seconds for one input: a hang
NUMBERS = [b"-1", b"1e999", b"NaN", b"9" * 400, b"0", b"1.5", b"true"]
TOKENS = [*NUMBERS, b"\0", b"\xff" * 8, b"[" * 50, b"[" * 2000, b"{", b'"', b"\n", b"=", b"\x80\x04\x95", b"'''"]

Target = tuple[bytes, Callable[[bytes], Any]]


def changed(content: bytes, draw: random.Random) -> bytes:
    """The content with one to eight changes."""
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
    """What is read, and how: name → (a good example, the reader)."""
    members = [Identity.create(folder / name, name, f"127.0.0.1:{7000 + i}") for i, name in enumerate(("ann", "bob"))]
    task = Task(records=10, shape=(4,), classes=3, public="0" * 64)
    plan = compose([m.card for m in members], None, ["model.name=softmax", "rounds=3"], task, Conduct())
    header = Header(plan.hash, 1, 0, 0, 1)
    account = Account(1e-5, 8.0, Mechanism(0.1, 0.01, 3, rate=0.1), PDSL(), 100, 0, (0, 1, 2), {}).charged(
        1, 1, frozenset({1})
    )
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
        SentLog(path).close()

    def checkpoint(path: Path) -> None:
        _, damaged = checkpoints.newest(path.parent, None, list)
        if damaged:
            raise PdslError(damaged[0])

    state = checkpoints.packed(checkpoints.Checkpoint(1, {"x": torch.ones(1, D), "u": torch.ones(1, D)}, 1.0))
    (folder / "checkpoints").mkdir()
    pins = Pins(folder)
    ledger = Ledger.opened(1e-5, 8.0, [[0, 1]]).charged(1, [account.mechanism])
    return {
        "message": (encode(header, torch.ones(D)), lambda content: decode(content, header, D)),
        "response": (b"\1" + encode(header, torch.ones(D)), split),
        "request": (Request(plan.hash, 1, 0).encode(), lambda content: Request.decode(content, plan.hash)),
        "answer": (Answer(plan.hash, "here", 1, True, False, False).encode(), lambda c: Answer.decode(c, plan.hash)),
        "card": (members[0].card.to_toml().encode(), lambda content: Card.parse(content, "card")),
        "plan": (plan.to_toml().encode(), lambda content: Plan.parse(content, "plan")),
        "pin": (members[0].card.certificate.encode(), by_file("ann.pem", lambda path: pins.of("ann"))),
        "account": (account.to_json(["a", "b"]).encode(), lambda content: account.read(content, "ledger")),
        "ledger": (ledger.to_json().encode(), lambda c: Ledger.from_json(c.decode(errors="replace"), "ledger")),
        "log": (b'[1]\n[1, 0, 0, 1, "ab"]\n[1, 0, 0, 2, "cd"]\n', by_file("sent.log", sent)),
        "checkpoint": (state, by_file("checkpoints/round-000001.safetensors", checkpoint)),
        "config": (Config().to_toml().encode(), by_file("config.toml", load)),
        "data": (npz(x=numbers, y=np.arange(3)), by_file("data.npz", load_records)),
        "public": (
            npz(x_test=numbers, y_test=np.arange(3), x_validation=numbers, y_validation=np.arange(3)),
            by_file("public.npz", load_public),
        ),
    }


class Live:
    """A peer that runs, and a pinned neighbour that sends it anything."""

    def __init__(self, folder: Path):
        self._grpc, self._loop = tls.load(), Loop()
        self.members = [Identity.create(folder / name, name, f"127.0.0.1:{port}") for name, port in _ports()]
        task = Task(records=10, shape=(4,), classes=3, public="0" * 64)
        conduct = Conduct(silence=600, deadline=600)
        self.plan = compose([m.card for m in self.members], None, ["model.name=softmax"], task, conduct)
        for member in self.members:
            join(member, self.plan)
        self._peer = Transport(self._loop, self.members[0], self.plan, Events(folder / "events.jsonl"), D)
        self._peer.node.poll = 0.0
        self._peer.start()
        self._channel: Any = None

    def send(self, content: bytes, method: str) -> str:
        return self._loop.run(self._sent(content, method))

    async def _sent(self, content: bytes, method: str) -> str:
        if self._channel is None:
            card = self.members[0].card
            pinned = Pins(self.members[1].folder / PINS).of(card.name)
            self._channel = tls.channel(self._grpc, self.members[1], card.name, card.address, pinned, 10**6)
        try:
            await self._channel.unary_unary(f"/pdsl.Peer/{method}")(content, timeout=SLOW)
            return "answered"
        except self._grpc.aio.AioRpcError as e:
            return str(e.code().name)


def _ports() -> list[tuple[str, int]]:
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
        read(good)  # as it should be, it is read
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
        content = changed(good, draw)
        start = time.monotonic()
        try:
            read(content)
            accepted[name] += 1
        except (PdslError, RefusedError) as e:
            refused[name] += 1
            if "\n" in str(e):
                crashes.append(f"{name}: a message of two lines: {e}")
        except Exception:
            crashes.append(f"{name}: {content!r:.300}: {traceback.format_exc(limit=-3)}")
        slowest = max(slowest, time.monotonic() - start)
        if draw.random() < 0.05:
            status = live.send(changed(known["request"][0], draw), draw.choice(("Hello", "Fetch")))
            statuses[status] += 1
            if status not in ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "answered"):
                crashes.append(f"server: {status}")
    assert live.send(Request(live.plan.hash, 0, 0).encode(), "Hello") == "answered"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {
        "seconds": seconds,
        "inputs": refused.total() + accepted.total(),
        "refused": dict(refused),
        "still_good": dict(accepted),  # a change in white space, a comment, a number that may be another
        "server": dict(statuses),
        "slowest_seconds": round(slowest, 3),
        "memory_grown_mb": round(grown, 1),
        "crashes": crashes,
        "kept": {"no crash": not crashes, "no hang": slowest < SLOW, "memory bounded": grown < 200},
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
