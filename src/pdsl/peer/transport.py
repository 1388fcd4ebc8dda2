"""One peer on the network, for code that is not asynchronous: the event loop has a thread of its own."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from torch import Tensor

from pdsl.peer import tls
from pdsl.peer.calls import Calls
from pdsl.peer.events import Events
from pdsl.peer.identity import Identity
from pdsl.peer.join import PINS
from pdsl.peer.lines import Lines
from pdsl.peer.node import Node
from pdsl.peer.pins import Pins
from pdsl.peer.plan import Plan
from pdsl.peer.roll import Outcome
from pdsl.peer.server import Server
from pdsl.peer.wire import MODEL, Header, encode

T = TypeVar("T")


class Loop:
    """An event loop in a thread. Several peers of one process share it, as gRPC wants it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pdsl peer", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its result, in the calling thread; a KeyboardInterrupt there ends it here."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)


class Transport:
    """A node with its server and its lines."""

    def __init__(self, loop: Loop, own: Identity, plan: Plan, events: Events, d: int):
        self._loop, self._own, self._plan = loop, own, plan
        self.me = plan.agent(own.card.name)
        grpc = tls.load()
        pins = Pins(own.folder / PINS)
        patience = plan.conduct.patience
        poll = min(1.0, plan.conduct.silence / 8, patience / 4)
        self.node = Node(plan.hash, plan.neighbours(self.me), poll, patience)
        self._server = Server(grpc, own, plan, pins, self.node, events)
        self.calls = Calls(grpc, own, plan, pins, self.node, events, d)
        self._lines = Lines(self.calls, plan, self.me, self.node, events, d)

    def start(self, listen: str | None = None) -> int:
        async def begin() -> int:
            port = await self._server.start(listen or self._own.card.address)
            self.calls.start()
            return port

        return self._loop.run(begin())

    def stop(self) -> None:
        async def end() -> None:
            await self.calls.stop()
            await self._server.stop()

        self._loop.run(end())

    def roll_call(self, t: int) -> Outcome:
        return self._loop.run(self._lines.roll_call(t))

    def exchange(self, t: int, phase: int, rows: dict[int, Tensor]) -> dict[int, Tensor]:
        """Send each neighbour its row of a phase and get one from each; those missing are out of the round."""
        hash_ = self._plan.hash
        messages = {j: encode(Header(hash_, t, phase, sender=self.me, receiver=j), row) for j, row in rows.items()}
        return self._loop.run(self._lines.exchange(t, phase, messages))

    def offer(self, x: Tensor) -> None:
        """What neighbours get that come back without a model of their own."""
        self.node.model = encode(Header(self._plan.hash, 0, MODEL, sender=self.me, receiver=self.me), x)

    def leave_round(self) -> None:
        """Nobody gets anything more of this round."""

        async def leave() -> None:
            self.node.begin(())

        self._loop.run(leave())

    def models(self) -> list[Tensor]:
        return self._loop.run(self._lines.models())

    def farewell(self) -> None:
        async def end() -> None:
            await self._lines.farewell()
            self.node.finish()

        self._loop.run(end())
