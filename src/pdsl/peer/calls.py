"""Calls to neighbours: one question, one answer or none; and who is alive.

A neighbour is silent when nothing was heard of it, not even an answer to a ping, for `silence` seconds; it is late when
it lives but has not got where it should be for `deadline` seconds in which it was not itself waiting for somebody. If
it waits for one who is silent, nobody waits for it longer than `patience`: else one fault would stop everybody.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from pdsl.peer import tls
from pdsl.peer.events import Events
from pdsl.peer.identity import Identity
from pdsl.peer.node import Node
from pdsl.peer.pins import Pins
from pdsl.peer.plan import Plan
from pdsl.peer.server import SERVICE
from pdsl.peer.wire import Answer, RefusedError, Request, message_bytes

PAUSE = 0.1  # seconds before trying again
LONGEST = 10  # deadlines that even one who says it is waiting itself gets


@dataclass
class Neighbour:
    """What is known of a neighbour from its own words."""

    name: str
    state: str = "not heard of"
    at: tuple[int, bool] = (0, False)  # its round, and whether it was calling for it
    progress: float = 0.0  # when it last moved, or said that it was waiting
    channel: Any = None
    pinned: list[str] = field(default_factory=list)  # the certificates that the channel accepts


class Calls:
    """The lines to all neighbours of one peer, kept open and watched."""

    def __init__(self, grpc: Any, own: Identity, plan: Plan, pins: Pins, node: Node, events: Events, d: int):
        self._grpc, self._own, self._plan, self._pins, self._node, self._events = grpc, own, plan, pins, node, events
        self._d, self._conduct = d, plan.conduct
        self.neighbours = {j: Neighbour(plan.members[j].name) for j in sorted(node.neighbours)}
        self._watchers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._watchers = [asyncio.create_task(self._watch(j)) for j in self.neighbours]
        self._watchers.append(asyncio.create_task(self._tick()))

    async def stop(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for neighbour in self.neighbours.values():
            if neighbour.channel is not None:
                await neighbour.channel.close()

    async def _watch(self, j: int) -> None:
        """Ping a neighbour that has said nothing for a while."""
        every = min(self._conduct.silence / 4, self._conduct.patience / 2)
        while True:
            await asyncio.sleep(every)
            if time.monotonic() - self._node.heard[j] >= every:
                await self.ask(j, Request(self._plan.hash, 0, 0))

    async def _tick(self) -> None:
        """Time in which this process itself was stopped is nobody's silence."""
        every = min(self._conduct.silence / 8, self._conduct.patience / 4)
        while True:
            before = time.monotonic()
            await asyncio.sleep(every)
            asleep = time.monotonic() - before - every
            if asleep > every:
                self._node.since += asleep
                for j in self.neighbours:
                    self._node.heard[j] += asleep

    async def ask(self, j: int, request: Request) -> Answer | None:
        try:
            response = await self.call(j, "Hello", request.encode())
            if response is None:
                return None
            return self.noted(j, Answer.decode(response, self._plan.hash))
        except RefusedError as e:
            self._events.log("refused", what="answer", of=self.neighbours[j].name, reason=e.reason)
            return None

    async def call(self, j: int, method: str, content: bytes) -> bytes | None:
        """The response to one call; None if there was none: no connection, no answer in time, or they refuse us."""
        codes = self._grpc.StatusCode
        channel = await self._channel(j)
        if channel is None:
            return None
        call = channel.unary_unary(f"/{SERVICE}/{method}")(content, timeout=self._conduct.deadline)
        task = asyncio.ensure_future(_response(call))
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=self._conduct.silence / 4)
                if self.silent(j) and not task.done():
                    await self._hang_up(j)
                    return None
            response: bytes = task.result()
        except self._grpc.aio.AioRpcError as e:
            if e.code() in (codes.PERMISSION_DENIED, codes.INVALID_ARGUMENT):
                self.say(j, f"refuses us: {str(e.details())[:40]}")
                await asyncio.sleep(PAUSE)
            elif e.code() == codes.RESOURCE_EXHAUSTED and "larger than max" in str(e.details()):
                raise RefusedError("size") from None
            else:
                self.say(j, "not reached")
            return None
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is None or current.cancelling():
                raise
            return None  # another call hung up
        finally:
            task.cancel()
        self._node.sign_of_life(j)
        return response

    async def _channel(self, j: int) -> Any:
        """A connection to j under the pins that it has now; None if it has none, since none means nobody."""
        neighbour, card = self.neighbours[j], self._plan.members[j]
        pinned = self._pins.of(card.name)
        if pinned != neighbour.pinned:
            await self._hang_up(j)
            neighbour.pinned = pinned
        if not pinned:
            self.say(j, "no pin")
            return None
        if neighbour.channel is None:
            most = message_bytes(self._d) + 1
            neighbour.channel = tls.channel(self._grpc, self._own, card.name, card.address, pinned, most)
        return neighbour.channel

    async def _hang_up(self, j: int) -> None:
        """A connection that has gone silent may stay so long after the network is back: the next call makes another."""
        channel, self.neighbours[j].channel = self.neighbours[j].channel, None
        if channel is not None:
            await channel.close()

    def noted(self, j: int, answer: Answer) -> Answer:
        neighbour = self.neighbours[j]
        if answer.waiting or (answer.round, answer.gathering) != neighbour.at:
            neighbour.progress = time.monotonic()
        neighbour.at = (answer.round, answer.gathering)
        self.say(j, "here" if answer.state != "finished" else "finished")
        return answer

    def late(self, j: int, began: float) -> bool:
        now, deadline = time.monotonic(), self._conduct.deadline
        return now - max(began, self.neighbours[j].progress) > deadline or now - began > LONGEST * deadline

    def held_up(self, answer: Answer, began: float) -> bool:
        """Whether somebody's silence has kept j from us for long enough."""
        return answer.held and time.monotonic() - began > self._conduct.patience

    def silent(self, j: int) -> bool:
        return time.monotonic() - self._node.heard[j] > self._conduct.silence

    def say(self, j: int, state: str) -> None:
        self.neighbours[j].state = state


async def _response(call: Any) -> bytes:
    response: bytes = await call
    return response
