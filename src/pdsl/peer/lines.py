"""The client's side of the wire: calling neighbours, fetching from them, and knowing when to go on without one.

A neighbour is silent when nothing was heard of it, not even an answer to a ping, for `silence` seconds; it is late when
it lives but has not got where it should be for `deadline` seconds in which it was not itself waiting for somebody.
Either way it is out of the round, and in the next rounds nobody waits for it until it is heard again.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from pdsl.errors import PdslError
from pdsl.peer import tls
from pdsl.peer.events import Events
from pdsl.peer.identity import Identity
from pdsl.peer.node import Node
from pdsl.peer.pins import Pins
from pdsl.peer.plan import Plan
from pdsl.peer.server import SERVICE
from pdsl.peer.wire import MODEL, Answer, Header, RefusedError, Request, decode, message_bytes, split

PAUSE = 0.1  # seconds before trying again
LONGEST = 10  # deadlines that even one who says it is waiting itself gets


class AloneError(PdslError):
    """Too few neighbours came."""


class Outcome(NamedTuple):
    """What came of a roll call: who is in the round, or the round to go to instead."""

    present: frozenset[int]
    jump: int | None = None


@dataclass
class Neighbour:
    """What is known of a neighbour from its own words."""

    name: str
    state: str = "not heard of"
    at: tuple[int, bool] = (0, False)  # its round, and whether it was calling for it
    progress: float = 0.0  # when it last moved, or said that it was waiting
    channel: Any = None


class Lines:
    """Lines to all neighbours of one peer."""

    def __init__(self, grpc: Any, own: Identity, plan: Plan, pins: Pins, node: Node, events: Events, d: int):
        self._grpc, self._own, self._plan, self._pins, self._node, self._events = grpc, own, plan, pins, node, events
        self._me, self._d, self._conduct = plan.agent(own.card.name), d, plan.conduct
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

    async def roll_call(self, t: int) -> Outcome:
        """Who is there for round t, or the later round at which the others are."""
        node = self._node
        node.gather(t)
        roll = _Roll(pending={j for j in self.neighbours if j not in node.away and not (t > 1 and self._silent(j))})
        callers = [asyncio.create_task(self._call_on(j, t, roll)) for j in self.neighbours]
        began = time.monotonic()
        node.waiting = True
        try:
            while True:
                roll.present |= node.arrived
                roll.pending -= roll.present
                if jump := roll.jump(len(self.neighbours), self._plan.config.rounds):
                    return Outcome(frozenset(), jump)
                if not roll.pending and len(roll.present) >= self._conduct.quorum:
                    break
                if time.monotonic() - began > self._conduct.start and not roll.pending:
                    raise AloneError(
                        f"round {t}: {len(roll.present)} neighbours came within {self._conduct.start:g} s, but the plan"
                        f" asks for {self._conduct.quorum}; run again when they are there"
                    )
                await node.change(time.monotonic() + PAUSE)
        finally:
            node.waiting = False
            for caller in callers:
                caller.cancel()
            await asyncio.gather(*callers, return_exceptions=True)
        node.begin(roll.present | node.arrived)
        return Outcome(node.present)

    async def _call_on(self, j: int, t: int, roll: "_Roll") -> None:
        """Call one neighbour until it is in, elsewhere, or nobody waits for it any more; and go on calling."""
        patience = self._conduct.start if t == 1 else self._conduct.silence
        began = time.monotonic()
        while j not in self._node.arrived:
            answer = await self._ask(j, Request(self._plan.hash, t, 0))
            if answer is None:
                now = time.monotonic()
                if j in roll.pending and (now - max(began, self._node.heard[j]) > patience or self._late(j, began)):
                    roll.pending.discard(j)
                    self._lose(j, "silent" if self._silent(j) else "late")
                await asyncio.sleep(PAUSE)
            elif answer.state == "here":
                roll.present.add(j)
                self._node.wake()
                return
            elif answer.state == "wait":
                roll.behind.add(j)
                if j in roll.pending and self._late(j, began):
                    roll.pending.discard(j)
                    self._lose(j, "late")
            else:
                roll.pending.discard(j)
                {"out": roll.without_us, "ahead": roll.ahead, "finished": roll.finished}[answer.state].add(j)
                roll.later[j] = max(t + 1, answer.round + (not answer.gathering))
                self._node.wake()
                await asyncio.sleep(PAUSE)

    async def exchange(self, t: int, phase: int, messages: dict[int, bytes]) -> dict[int, Tensor]:
        """Publish a phase's messages and fetch the neighbours'. Who is missing in the result is out of the round."""
        node = self._node
        node.publish(phase, messages)
        node.waiting = True
        try:
            fetched = await asyncio.gather(*(self._fetch(j, t, phase) for j in messages))
        finally:
            node.waiting = False
        return {j: v for j, v in zip(messages, fetched, strict=True) if v is not None}

    async def _fetch(self, j: int, t: int, phase: int) -> Tensor | None:
        began = time.monotonic()
        request = Request(self._plan.hash, t, phase).encode()
        header = Header(self._plan.hash, t, phase, sender=j, receiver=self._me)
        while True:
            try:
                response = await self._call(j, "Fetch", request)
                if response is None:
                    if self._silent(j) or self._late(j, began):
                        self._lose(j, "silent" if self._silent(j) else "late")
                        return None
                    await asyncio.sleep(PAUSE)
                    continue
                has_vector, rest = split(response)
                if has_vector:
                    return decode(rest, header, self._d)
                answer = self._noted(j, Answer.decode(rest, self._plan.hash))
            except RefusedError as e:
                self._events.log("refused", what="message", of=self.neighbours[j].name, reason=e.reason)
                self._lose(j, f"refused: {e.reason}")
                return None
            if answer.state != "wait" or self._late(j, began):
                self._lose(j, "late" if answer.state == "wait" else answer.state)
                return None

    async def models(self) -> list[Tensor]:
        """The models of those neighbours that give theirs: a start for one who has lost its own."""
        return [v for v in await asyncio.gather(*(self._model(j) for j in self.neighbours)) if v is not None]

    async def _model(self, j: int) -> Tensor | None:
        try:
            response = await self._call(j, "Fetch", Request(self._plan.hash, 0, MODEL).encode())
            if response is None:
                return None
            has_vector, rest = split(response)
            if not has_vector:
                return None
            return decode(rest, Header(self._plan.hash, 0, MODEL, sender=j, receiver=j), self._d)
        except RefusedError as e:
            self._events.log("refused", what="model", of=self.neighbours[j].name, reason=e.reason)
            return None

    async def farewell(self) -> None:
        """After the last round: stay until those who were in it have what they need, or are gone."""
        began = time.monotonic()
        while time.monotonic() - began < self._conduct.deadline:
            if all(self._node.fetched_all(j) or self._silent(j) for j in self._node.present):
                return
            await asyncio.sleep(PAUSE)

    async def _watch(self, j: int) -> None:
        """Ping a neighbour that has said nothing for a while."""
        every = self._conduct.silence / 4
        while True:
            await asyncio.sleep(every)
            if time.monotonic() - self._node.heard[j] >= every:
                await self._ask(j, Request(self._plan.hash, 0, 0))

    async def _tick(self) -> None:
        """Time in which this process itself was stopped is nobody's silence."""
        every = self._conduct.silence / 8
        while True:
            before = time.monotonic()
            await asyncio.sleep(every)
            asleep = time.monotonic() - before - every
            if asleep > every:
                for j in self.neighbours:
                    self._node.heard[j] += asleep

    async def _ask(self, j: int, request: Request) -> Answer | None:
        try:
            response = await self._call(j, "Hello", request.encode())
            if response is None:
                return None
            return self._noted(j, Answer.decode(response, self._plan.hash))
        except RefusedError as e:
            self._events.log("refused", what="answer", of=self.neighbours[j].name, reason=e.reason)
            return None

    async def _call(self, j: int, method: str, content: bytes) -> bytes | None:
        """The response to one call; None if there was none: no connection, no answer in time, or they refuse us."""
        codes = self._grpc.StatusCode
        call = self._channel(j).unary_unary(f"/{SERVICE}/{method}")(content, timeout=self._conduct.deadline)
        task = asyncio.ensure_future(_response(call))
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=self._conduct.silence / 4)
                if self._silent(j) and not task.done():
                    await self._hang_up(j)
                    return None
            response: bytes = task.result()
        except self._grpc.aio.AioRpcError as e:
            if e.code() in (codes.PERMISSION_DENIED, codes.INVALID_ARGUMENT):
                self._say(j, f"refuses us: {str(e.details())[:40]}")
                await asyncio.sleep(PAUSE)
            elif e.code() == codes.RESOURCE_EXHAUSTED and "larger than max" in str(e.details()):
                raise RefusedError("size") from None
            else:
                self._say(j, "not reached")
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

    def _channel(self, j: int) -> Any:
        neighbour, card = self.neighbours[j], self._plan.members[j]
        if neighbour.channel is None:
            pinned = self._pins.of(card.name)
            most = message_bytes(self._d) + 1
            neighbour.channel = tls.channel(self._grpc, self._own, card.name, card.address, pinned, most)
        return neighbour.channel

    async def _hang_up(self, j: int) -> None:
        """A connection that has gone silent may stay so long after the network is back: the next call makes another."""
        channel, self.neighbours[j].channel = self.neighbours[j].channel, None
        if channel is not None:
            await channel.close()

    def _noted(self, j: int, answer: Answer) -> Answer:
        neighbour = self.neighbours[j]
        if answer.waiting or (answer.round, answer.gathering) != neighbour.at:
            neighbour.progress = time.monotonic()
        neighbour.at = (answer.round, answer.gathering)
        self._say(j, "here" if answer.state != "finished" else "finished")
        return answer

    def _late(self, j: int, began: float) -> bool:
        now, deadline = time.monotonic(), self._conduct.deadline
        return now - max(began, self.neighbours[j].progress) > deadline or now - began > LONGEST * deadline

    def _silent(self, j: int) -> bool:
        return time.monotonic() - self._node.heard[j] > self._conduct.silence

    def _lose(self, j: int, why: str) -> None:
        """j is out of this round."""
        if why == "late":
            self._node.away.add(j)
        self._node.drop(j)
        self._events.log("lost", who=self.neighbours[j].name, round=self._node.round, why=why)
        self._say(j, why)

    def _say(self, j: int, state: str) -> None:
        self.neighbours[j].state = state


async def _response(call: Any) -> bytes:
    response: bytes = await call
    return response


class _Roll:
    """A roll call while it lasts."""

    def __init__(self, pending: set[int]):
        self.pending = pending  # whom to wait for
        self.present: set[int] = set()
        self.behind: set[int] = set()  # alive, and not there yet
        self.ahead: set[int] = set()  # beyond this round
        self.without_us: set[int] = set()  # in this round, which they began when we were not there
        self.finished: set[int] = set()
        self.later: dict[int, int] = {}  # the next round in which each of these can be met

    def jump(self, neighbours: int, last: int) -> int | None:
        """The round to go to, if this one is over for us.

        It is if at least half of those heard from are beyond it: with more neighbours than two, one liar is not half.
        It is too if nobody is left to run it with. When all have finished, there is none.
        """
        elsewhere = self.ahead | self.without_us | self.finished
        heard = self.present | self.behind | elsewhere
        if self.finished and len(self.finished) == neighbours:
            return last + 1
        if self.ahead and self.pending <= heard and 2 * len(self.ahead) >= len(heard - self.finished):
            return min(max(self.later[j] for j in self.ahead), last + 1)
        if len(elsewhere) == neighbours:
            return min(max(self.later[j] for j in elsewhere - self.finished), last + 1)
        return None
