"""The client's side of the wire: the roll call, and the exchange of messages with those who are there.

Who is silent or late (see `calls`) is out of the round, and in the next rounds nobody waits for it until it is heard
again.
"""

import asyncio
import time

from torch import Tensor

from pdsl.peer.calls import PAUSE, Calls
from pdsl.peer.events import Events
from pdsl.peer.node import Node
from pdsl.peer.plan import Plan
from pdsl.peer.roll import AloneError, Outcome, Roll
from pdsl.peer.wire import MODEL, Answer, Header, RefusedError, Request, decode, split

BREATH = 0.01  # seconds before asking again one that says 'wait': it should have held that back for a while itself


class Lines:
    """What a peer asks of its neighbours in a round."""

    def __init__(self, calls: Calls, plan: Plan, me: int, node: Node, events: Events, d: int):
        self._calls, self._plan, self._me, self._node, self._events, self._d = calls, plan, me, node, events, d
        self._conduct = plan.conduct

    async def roll_call(self, t: int) -> Outcome:
        """Who is there for round t, or the later round at which the others are."""
        node = self._node
        node.gather(t)
        gone = {j for j in self._calls.neighbours if j in node.away or (t > 1 and self._calls.silent(j))}
        roll = Roll(t, len(self._plan.members), pending=set(self._calls.neighbours) - gone)
        callers = [asyncio.create_task(self._call_on(j, t, roll)) for j in self._calls.neighbours]
        began = time.monotonic()
        node.wait_for(roll.pending if t > 1 else set())  # before the first round nobody has been heard of yet
        try:
            while True:
                roll.present |= node.arrived
                roll.pending -= roll.present
                if jump := roll.jump(len(self._calls.neighbours), self._plan.config.rounds):
                    node.begin(())
                    return Outcome(frozenset(), jump)
                if not roll.pending and len(roll.present) >= self._conduct.quorum:
                    break
                if time.monotonic() - began > self._conduct.start and not roll.pending:
                    raise AloneError(
                        f"round {t}: {len(roll.present)} neighbours came within {self._conduct.start:g} s, but the plan"
                        f" asks for {self._conduct.quorum}; run again when they are there"
                    )
                for caller in callers:
                    if caller.done():
                        caller.result()  # which raises what it ended with, if that was an error
                await node.change(time.monotonic() + PAUSE)
        finally:
            node.waiting = False
            for caller in callers:
                caller.cancel()
            await asyncio.gather(*callers, return_exceptions=True)
        node.begin(roll.present | node.arrived)
        return Outcome(node.present)

    async def _call_on(self, j: int, t: int, roll: Roll) -> None:
        """Call one neighbour until it is in, elsewhere, or nobody waits for it any more; and go on calling."""
        patience = self._conduct.start if t == 1 else self._conduct.silence
        began = time.monotonic()
        while j not in self._node.arrived:
            answer = await self._calls.ask(j, Request(self._plan.hash, t, 0))
            if answer is None:
                now = time.monotonic()
                gone = now - max(began, self._node.heard[j]) > patience
                if j in roll.pending and (gone or now - began > max(patience, self._conduct.deadline)):
                    roll.give_up(j)
                    self._lose(j, "silent" if gone else "late")
                await asyncio.sleep(PAUSE)
            elif answer.state == "here":
                self._node.away.pop(j, None)
                roll.present.add(j)
                self._node.wake()
                return
            elif answer.state == "wait":
                near = roll.worth_waiting(answer.round)
                held_up = self._calls.held_up(answer, began)
                if j in roll.pending and near and not held_up and not self._calls.late(j, began):
                    roll.behind.add(j)
                elif j in roll.pending:
                    roll.give_up(j)
                    self._lose(j, "held up" if held_up else "late" if near else "far behind")
                await asyncio.sleep(BREATH)
            else:
                roll.pending.discard(j)
                elsewhere = {"out": roll.without_us, "ahead": roll.ahead, "left": roll.ahead, "finished": roll.finished}
                elsewhere[answer.state].add(j)
                (roll.left.add if answer.state == "left" else roll.left.discard)(j)
                roll.later[j] = max(t + 1, answer.round + (not answer.gathering))
                self._node.wake()
                await asyncio.sleep(PAUSE)

    async def exchange(self, t: int, phase: int, messages: dict[int, bytes]) -> dict[int, Tensor]:
        """Publish a phase's messages and fetch the neighbours'. Who is missing in the result is out of the round."""
        node = self._node
        node.publish(phase, messages)
        awaited = set(messages)
        node.wait_for(awaited)

        async def fetch(j: int) -> Tensor | None:
            try:
                return await self._fetch(j, t, phase)
            finally:
                awaited.discard(j)

        try:
            fetched = await asyncio.gather(*(fetch(j) for j in messages))
        finally:
            node.waiting = False
        return {j: v for j, v in zip(messages, fetched, strict=True) if v is not None}

    async def _fetch(self, j: int, t: int, phase: int) -> Tensor | None:
        began = time.monotonic()
        request = Request(self._plan.hash, t, phase).encode()
        header = Header(self._plan.hash, t, phase, sender=j, receiver=self._me)
        while True:
            try:
                response = await self._calls.call(j, "Fetch", request)
                if response is None:
                    if self._calls.silent(j) or self._calls.late(j, began):
                        self._lose(j, "silent" if self._calls.silent(j) else "late")
                        return None
                    await asyncio.sleep(PAUSE)
                    continue
                has_vector, rest = split(response)
                if has_vector:
                    return decode(rest, header, self._d)
                answer = self._calls.noted(j, Answer.decode(rest, self._plan.hash))
            except RefusedError as e:
                self._events.log("refused", what="message", of=self._calls.neighbours[j].name, reason=e.reason)
                self._lose(j, f"refused: {e.reason}")
                return None
            held_up = self._calls.held_up(answer, began)
            if answer.state != "wait" or held_up or self._calls.late(j, began):
                self._lose(j, answer.state if answer.state != "wait" else "held up" if held_up else "late")
                return None
            await asyncio.sleep(BREATH)

    async def models(self) -> list[Tensor]:
        """The models of those neighbours that give theirs: a start for one who has lost its own."""
        return [v for v in await asyncio.gather(*(self._model(j) for j in self._calls.neighbours)) if v is not None]

    async def _model(self, j: int) -> Tensor | None:
        try:
            response = await self._calls.call(j, "Fetch", Request(self._plan.hash, 0, MODEL).encode())
            if response is None:
                return None
            has_vector, rest = split(response)
            if not has_vector:
                return None
            return decode(rest, Header(self._plan.hash, 0, MODEL, sender=j, receiver=j), self._d)
        except RefusedError as e:
            self._events.log("refused", what="model", of=self._calls.neighbours[j].name, reason=e.reason)
            return None

    async def farewell(self) -> None:
        """After the last round: stay until those who were in it have what they need, or are gone."""
        began = time.monotonic()
        while time.monotonic() - began < self._conduct.deadline:
            if all(self._node.fetched_all(j) or self._calls.silent(j) for j in self._node.present):
                return
            await asyncio.sleep(PAUSE)

    def _lose(self, j: int, why: str) -> None:
        """j is out of this round."""
        if why in ("silent", "late", "held up"):
            self._node.leave(j)
        self._node.drop(j)
        self._events.log("lost", who=self._calls.neighbours[j].name, round=self._node.round, why=why)
        self._calls.say(j, why)
