"""Calls of a peer to its neighbours, and what their answers say about them.

A neighbour that has not answered for a while is called again and again, and its connections are renewed.
"""

import asyncio
import math
import re
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass

from pdsl.peer.connections import ConnectionPool, NoPinError
from pdsl.peer.http1 import FAILED, Response
from pdsl.peer.identity import Identity
from pdsl.peer.listener import describe_failure
from pdsl.peer.messages import MAX_CONTROL, PROOF_BYTES, Answer, RefusedError, Request, max_message_bytes
from pdsl.peer.plan import TrainingPlan
from pdsl.peer.server import BAD_REQUEST, FORBIDDEN, OK
from pdsl.peer.state import ServerState
from pdsl.peer.status import Events

RETRY_DELAY = 0.1  # seconds between failed attempts
CHECK_SECONDS = 0.5  # between checks whether a callee is silent or has said goodbye
GOODBYE_SECONDS = 2.0  # to reach all neighbours
MAX_PAUSE = 5.0  # seconds between signs of life of the event loop
REASON = re.compile(rb"[A-Za-z0-9 .]{1,40}")  # of a refusal, in a neighbour's words


@dataclass
class Neighbour:
    """Connection to a neighbour, and its last known state."""

    name: str
    pool: ConnectionPool
    state: str = "not contacted"
    address: str = ""
    at: tuple[int, bool] = (0, False)  # its round, and whether its roll call is open
    waiting: bool = False  # it reports that it waits for other neighbours


class Calls:
    """Connections of one peer to all its neighbours."""

    def __init__(
        self,
        own: Identity,
        plan: TrainingPlan,
        pools: Mapping[int, ConnectionPool],
        state: ServerState,
        events: Events,
        d: int,
    ):
        self._plan, self._d = plan, d
        self._state, self._events = state, events
        self._timeouts = plan.timeouts
        cards = {j: plan.members[j] for j in sorted(state.neighbours)}
        self.neighbours = {j: Neighbour(card.name, pools[j], address=card.address) for j, card in cards.items()}
        self.own_address = own.card.address
        self._tasks: list[asyncio.Task[None]] = []
        self._unclaimed: set[asyncio.Task[Response]] = set()
        self._alive = time.monotonic()  # when the event loop last ran

    @property
    def pause(self) -> float:
        """Seconds since the event loop last ran, for other threads."""
        return time.monotonic() - self._alive

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._ping(j)) for j in self.neighbours]
        self._tasks.append(asyncio.create_task(self._discount_own_pauses()))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for neighbour in self.neighbours.values():
            neighbour.pool.stop()

    async def say_goodbye(self) -> None:
        """Tell all neighbours that this peer ends now."""
        requests = [
            n.pool.request("/goodbye", self.encode_request(j, 0, 0), MAX_CONTROL) for j, n in self.neighbours.items()
        ]
        tasks = [asyncio.create_task(request) for request in requests]
        _, late = await asyncio.wait(tasks, timeout=GOODBYE_SECONDS)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ping(self, j: int) -> None:
        """Ping a neighbour whenever there was no contact for a while."""
        every = min(self._timeouts.silence / 4, self._timeouts.patience / 2)
        while True:
            await asyncio.sleep(every)
            if time.monotonic() - self._state.last_contact[j] >= every:
                await self.hello(j, 0)

    async def _discount_own_pauses(self) -> None:
        """Shift all clocks by time in which this process was stopped: it is not the neighbours' silence."""
        every = min(self._timeouts.silence / 8, self._timeouts.patience / 4, MAX_PAUSE)
        while True:
            before = time.monotonic()
            await asyncio.sleep(every)
            self._alive = time.monotonic()
            pause = time.monotonic() - before - every
            if pause > every:
                self._state.waiting_since += pause
                for j in self.neighbours:
                    self._state.last_contact[j] += pause
                self._state.calls = {j: (a, b + pause) for j, (a, b) in self._state.calls.items()}

    async def hello(self, j: int, t: int) -> Answer | None:
        """Ask j for its state in round t, 0 for a ping; None without a valid response."""
        try:
            response = await self.call(j, "/hello", self.encode_request(j, t, 0), self._timeouts.silence)
            return None if response is None else self.note_answer(j, response)
        except RefusedError as e:
            self._events.log("refused", what="answer", of=self.neighbours[j].name, reason=e.reason)
            return None

    def encode_request(self, j: int, t: int, phase: int) -> bytes:
        return Request(self._plan.hash, t, phase, self._state.receipts.held[j]).encode()

    async def call(self, j: int, path: str, content: bytes, limit: float = math.inf) -> bytes | None:
        """Response to one request; None if j cannot be reached, does not respond in time or rejects the request.

        A request that takes longer than `limit` seconds is given up even if j answers others: its connection is dead.
        """
        neighbour = self.neighbours[j]
        task = asyncio.create_task(neighbour.pool.request(path, content, 1 + PROOF_BYTES + max_message_bytes(self._d)))
        began = time.monotonic()
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=min(CHECK_SECONDS, self._timeouts.silence / 4))
                contact = max(began, self._state.last_contact[j])
                silent = j in self._state.departed or time.monotonic() - contact > self._timeouts.silence
                if not task.done() and silent:
                    neighbour.pool.close()  # a silent connection may stay dead after the network is back
                    return None
                if not task.done() and time.monotonic() - began > limit:
                    return None
            response = task.result()
        except NoPinError:
            neighbour.state = "no pin"
            return None
        except FAILED as e:
            neighbour.state = "unreachable"
            if isinstance(e, ssl.SSLError):
                self._events.log("refused", what="handshake", of=neighbour.name, reason=describe_failure(e))
            return None
        finally:
            if not task.done():
                self._let_finish(task)
            elif not task.cancelled():
                task.exception()  # or asyncio reports it, if the caller was cancelled at the moment of the failure
        return await self._check_status(j, response, began)

    def _let_finish(self, task: "asyncio.Task[Response]") -> None:
        """Let a request finish that has no caller any more: a request that is cut off costs its connection."""
        self._unclaimed.add(task)
        timer = asyncio.get_running_loop().call_later(self._timeouts.silence, task.cancel)

        def end(task: "asyncio.Task[Response]") -> None:
            timer.cancel()
            self._unclaimed.discard(task)
            if not task.cancelled():
                task.exception()  # a failure is of no interest

        task.add_done_callback(end)

    async def _check_status(self, j: int, response: Response, began: float) -> bytes | None:
        if response.status in (BAD_REQUEST, FORBIDDEN):
            reason = response.body.decode() if REASON.fullmatch(response.body) else "no reason"
            self.neighbours[j].state = f"rejects us: {reason}"
            self._events.log("rejected", of=self.neighbours[j].name, reason=reason)
            await asyncio.sleep(RETRY_DELAY)
            return None
        if response.status != OK:
            raise RefusedError("status")
        self._state.record_contact(j, began)
        return response.body

    def note_answer(self, j: int, content: bytes) -> Answer:
        neighbour, answer = self.neighbours[j], Answer.decode(content, self._plan.accepts, self._plan.config.rounds)
        self._state.receipts.check(j, answer.served)
        neighbour.at, neighbour.waiting = (answer.round, answer.gathering), answer.waiting
        neighbour.state = "here" if answer.state != "finished" else "finished"
        if answer.state == "unreached":
            neighbour.state = f"cannot reach us at {self.own_address}"
        return answer

    def is_silent(self, j: int) -> bool:
        """Whether calls to j are not answered."""
        return time.monotonic() - self._state.last_contact[j] > self._timeouts.silence
