"""Running peers in one process, and callers with any certificate."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import torch

from pdsl.peer.connections import ConnectionPool
from pdsl.peer.http1 import FAILED
from pdsl.peer.identity import Identity, PeerInfo
from pdsl.peer.membership import join
from pdsl.peer.plan import Timeouts, TrainingPlan
from pdsl.peer.status import Events
from pdsl.peer.transport import Loop, Transport
from pdsl.peer.trust_store import TrustStore
from tests.helpers.organisations import make_organisations, make_plan

D, ROUNDS = 6, 40
QUICK = Timeouts(silence=1.5, deadline=3.0, start=2.0)


@dataclass
class Hood:
    """Running peers in one process."""

    loop: Loop
    members: list[Identity]
    plan: TrainingPlan
    peers: list[Transport]
    events: list[Events]

    def together(self, function: Any) -> list[Any]:
        """Call function(peer) for all peers at once."""
        with ThreadPoolExecutor(len(self.peers)) as pool:
            return list(pool.map(function, self.peers))

    def refusals(self, i: int) -> list[str]:
        return [str(event["reason"]) for event in self.events[i].read() if event["event"] == "refused"]

    def state(self, i: int) -> Any:
        state = self.peers[i].state
        return state.round, state.gathering, state.present, dict(state._messages), set(state.arrived), set(state.away)

    def call(self, by: Identity, content: bytes, path: str = "/hello", at: int = 0) -> Any:
        """Call peer `at` with the certificate of `by`. Returns the content of the response or its status."""
        return self.loop.run(call(by, self.members[at].card, content, path))


class Pins(TrustStore):
    """Trust store of a test caller that accepts the certificate of one card."""

    def __init__(self, certificate: str):
        super().__init__(Path())
        object.__setattr__(self, "certificate", certificate)

    def accepted(self, name: str) -> tuple[str, ...]:
        return (self.certificate,)  # type: ignore[attr-defined]


async def call(by: Identity, card: PeerInfo, content: bytes, path: str) -> Any:
    """Content of the response, (status, reason), or the error of the connection."""
    pool = ConnectionPool(by, card, Pins(card.certificate))
    try:
        status, body = await asyncio.wait_for(pool.request(path, content, 10**6), 3)
    except FAILED as e:
        return e
    finally:
        pool.close()
    return body if status == 200 else (status, body.decode())


@contextmanager
def run_hood(
    folder: Path,
    loop: Loop,
    count: int,
    timeouts: Timeouts,
    without_address: Collection[int] = (),
    **settings: Any,
) -> Iterator[Hood]:
    members = make_organisations(folder, count, without_address)
    plan = make_plan(members, timeouts=timeouts, rounds=ROUNDS, **settings)
    events = [Events(member.folder / "events.jsonl") for member in members]
    for member in members:
        join(member, plan)
    peers = [Transport(loop, member, plan, log, D) for member, log in zip(members, events, strict=True)]
    for peer in peers:
        peer.start()
    try:
        yield Hood(loop, members, plan, peers, events)
    finally:
        for peer in peers:
            peer.stop()


def row(peer: Transport) -> torch.Tensor:
    return torch.full((D,), float(peer.me + 1))


def exchange(t: int, phase: int) -> Any:
    return lambda peer: peer.exchange(t, phase, dict.fromkeys(peer.state.present, row(peer)))


def run_rounds(peer: Transport, end: Event) -> list[tuple[float, frozenset[int]]]:
    """Run rounds of two phases until `end` or the last round. Returns the duration and the neighbours of each."""
    found, t = [], 1
    while t <= ROUNDS and not end.is_set():
        began = time.monotonic()
        present, jump = peer.roll_call(t)
        for phase in range(0 if jump else 2):
            peer.exchange(t, phase, dict.fromkeys(peer.state.present, row(peer)))
        found.append((time.monotonic() - began, present))
        t = jump or t + 1
        time.sleep(0.1)
    peer.finish()
    return found


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
