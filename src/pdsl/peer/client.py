"""Client side of a peer: requests to neighbours, liveness, the roll call of a round, and the exchange of messages.

A neighbour is *silent* after `silence` seconds without any response, pings included, and *unreachable* if its own calls
arrive meanwhile. It is *late* if it responds but
makes no progress for `deadline` seconds, not counting time in which it waits for another peer. It is *blocked* if it
waits for a silent peer; it is then awaited for at most `patience` seconds, because otherwise one fault would stop all
peers. In each case it is excluded from the round, and later rounds do not wait for it until it reaches them.
"""

import asyncio
import math
import re
import ssl
import time
from dataclasses import dataclass

from torch import Tensor

from pdsl.peer.attendance import Attendance, QuorumError, RollCallResult
from pdsl.peer.connections import ConnectionPool, NoPinError
from pdsl.peer.http1 import FAILED, Response
from pdsl.peer.identity import Identity
from pdsl.peer.listener import describe_failure
from pdsl.peer.messages import (
    MODEL_PHASE,
    PROOF_BYTES,
    Answer,
    Header,
    RefusedError,
    Request,
    decode,
    max_message_bytes,
    split,
    split_proof,
)
from pdsl.peer.plan import TrainingPlan
from pdsl.peer.server import BAD_REQUEST, FORBIDDEN, OK
from pdsl.peer.state import ServerState
from pdsl.peer.status import Events
from pdsl.peer.trust_store import TrustStore

RETRY_DELAY = 0.1  # seconds between failed attempts
POLL_DELAY = 0.01  # seconds before asking again after an answer "wait", which the server itself delays
GONE = ("silent", "unreachable", "cannot reach us", "late", "blocked")  # reasons not to wait in later rounds
REASON = re.compile(rb"[A-Za-z0-9 .]{1,40}")  # of a refusal, in a neighbour's words
SKIP_SHARE = 0.1  # of the plan's rounds, which one neighbour can make this peer skip by its word alone
MAX_DEADLINES = 10  # deadlines granted to a neighbour that reports that it is waiting


@dataclass
class Neighbour:
    """Connection to a neighbour, and its last known state."""

    name: str
    pool: ConnectionPool
    state: str = "not contacted"
    address: str = ""
    at: tuple[int, bool] = (0, False)  # its round, and whether its roll call is open
    progress: float = 0.0  # time at which it last advanced or reported that it is waiting


class Client:
    """Connections of one peer to all its neighbours."""

    def __init__(
        self,
        own: Identity,
        plan: TrainingPlan,
        trust_store: TrustStore,
        state: ServerState,
        events: Events,
        d: int,
    ):
        self._plan, self._d = plan, d
        self._state, self._events = state, events
        self._me, self._timeouts = plan.agent(own.card.name), plan.timeouts
        cards = {j: plan.members[j] for j in sorted(state.neighbours)}
        self.neighbours = {
            j: Neighbour(card.name, ConnectionPool(own, card, trust_store), address=card.address)
            for j, card in cards.items()
        }
        self._own_address = own.card.address
        rounds = max(len(plan.members), math.ceil(SKIP_SHARE * plan.config.rounds))
        self._skip_credit = dict.fromkeys(self.neighbours, rounds)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._ping(j)) for j in self.neighbours]
        self._tasks.append(asyncio.create_task(self._discount_own_pauses()))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for neighbour in self.neighbours.values():
            neighbour.pool.stop()

    async def _ping(self, j: int) -> None:
        """Ping a neighbour whenever there was no contact for a while."""
        every = min(self._timeouts.silence / 4, self._timeouts.patience / 2)
        while True:
            await asyncio.sleep(every)
            if time.monotonic() - self._state.last_contact[j] >= every:
                await self.hello(j, 0)

    async def _discount_own_pauses(self) -> None:
        """Shift all clocks by time in which this process was stopped: it is not the neighbours' silence."""
        every = min(self._timeouts.silence / 8, self._timeouts.patience / 4)
        while True:
            before = time.monotonic()
            await asyncio.sleep(every)
            pause = time.monotonic() - before - every
            if pause > every:
                self._state.waiting_since += pause
                for j in self.neighbours:
                    self._state.last_contact[j] += pause
                self._state.calls = {j: (a, b + pause) for j, (a, b) in self._state.calls.items()}

    # Single calls

    async def hello(self, j: int, t: int) -> Answer | None:
        """Ask j for its state in round t, 0 for a ping; None without a valid response."""
        try:
            response = await self._call(j, "/hello", self._request(j, t, 0))
            return None if response is None else self._note_answer(j, response)
        except RefusedError as e:
            self._events.log("refused", what="answer", of=self.neighbours[j].name, reason=e.reason)
            return None

    def _request(self, j: int, t: int, phase: int) -> bytes:
        return Request(self._plan.hash, t, phase, self._state.receipts.held[j]).encode()

    async def _call(self, j: int, path: str, content: bytes) -> bytes | None:
        """Response to one request; None if j cannot be reached, does not respond in time or rejects the request."""
        neighbour = self.neighbours[j]
        task = asyncio.ensure_future(
            neighbour.pool.request(path, content, 1 + PROOF_BYTES + max_message_bytes(self._d))
        )
        began = time.monotonic()
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=self._timeouts.silence / 4)
                if not task.done() and (self._is_silent(j) or time.monotonic() - began > self._timeouts.deadline):
                    neighbour.pool.close()  # a silent connection may stay dead after the network is back
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
            task.cancel()
        return await self._check_status(j, response)

    async def _check_status(self, j: int, response: Response) -> bytes | None:
        if response.status in (BAD_REQUEST, FORBIDDEN):
            reason = response.body.decode() if REASON.fullmatch(response.body) else "no reason"
            self.neighbours[j].state = f"rejects us: {reason}"
            await asyncio.sleep(RETRY_DELAY)
            return None
        if response.status != OK:
            raise RefusedError("status")
        self._state.record_contact(j)
        return response.body

    def _note_answer(self, j: int, content: bytes) -> Answer:
        neighbour, answer = self.neighbours[j], Answer.decode(content, self._plan.hash, self._plan.config.rounds)
        self._state.receipts.check(j, answer.served)
        if answer.waiting or (answer.round, answer.gathering) != neighbour.at:
            neighbour.progress = time.monotonic()
        neighbour.at = (answer.round, answer.gathering)
        neighbour.state = "here" if answer.state != "finished" else "finished"
        if answer.state == "unreached":
            neighbour.state = f"cannot reach us at {self._own_address}"
        return answer

    def _is_late(self, j: int, began: float) -> bool:
        now, deadline = time.monotonic(), self._timeouts.deadline
        return now - max(began, self.neighbours[j].progress) > deadline or now - began > MAX_DEADLINES * deadline

    def _is_blocked(self, answer: Answer, began: float) -> bool:
        """Whether the sender of this answer has been awaited for `patience` seconds and is blocked itself."""
        return answer.held and time.monotonic() - began > self._timeouts.patience

    def _is_silent(self, j: int) -> bool:
        """Whether calls to j are not answered."""
        return time.monotonic() - self._state.last_contact[j] > self._timeouts.silence

    def _describe_silence(self, j: int) -> str:
        return f"unreachable at {self.neighbours[j].address}" if self._state.is_calling(j) else "silent"

    def _exclude(self, j: int, reason: str) -> None:
        """Exclude j from this round."""
        if reason.startswith(GONE):
            self._state.leave(j)
        self._state.drop(j)
        self._events.log("lost", who=self.neighbours[j].name, round=self._state.round, why=reason)
        self.neighbours[j].state = reason

    # Rounds

    async def roll_call(self, t: int) -> RollCallResult:
        """Find the neighbours that take part in round t, or the later round to jump to."""
        state, timeouts = self._state, self._timeouts
        state.begin_roll_call(t)
        gone = {j for j in self.neighbours if j in state.away or (t > 1 and self._is_silent(j))}
        attendance = Attendance(t, len(self._plan.members), pending=set(self.neighbours) - gone)
        callers = [asyncio.create_task(self._call_neighbour(j, t, attendance)) for j in self.neighbours]
        began = time.monotonic()
        state.wait_for(attendance.pending if t > 1 else set())  # before the first round there was no contact yet
        try:
            while True:
                attendance.present |= state.arrived
                attendance.pending -= attendance.present
                rounds = self._plan.config.rounds
                if jump := attendance.jump_target(len(self.neighbours), rounds, self._skip_credit):
                    for j in jump.voices:
                        self._skip_credit[j] -= jump.round - t
                    state.begin_round(())
                    return RollCallResult(frozenset(), jump.round)
                if not attendance.pending and len(attendance.present) >= timeouts.quorum:
                    break
                if time.monotonic() - began > timeouts.start and not attendance.pending:
                    raise QuorumError(self._describe_quorum(t, len(attendance.present)))
                for caller in callers:
                    if caller.done():
                        caller.result()  # raises the error of a failed task
                await state.wait_for_change(time.monotonic() + RETRY_DELAY)
        finally:
            state.waiting = False
            for caller in callers:
                caller.cancel()
            await asyncio.gather(*callers, return_exceptions=True)
        state.begin_round(attendance.present | state.arrived)
        return RollCallResult(state.present)

    def _describe_quorum(self, t: int, present: int) -> str:
        unreached = [n.name for n in self.neighbours.values() if n.state.startswith("cannot reach us")]
        advice = "run again when they are online"
        if unreached:
            advice = f"{', '.join(unreached)} cannot reach you at {self._own_address}: open that port to them"
        return (
            f"round {t}: {present} neighbours present after {self._timeouts.start:g} s, but the plan requires"
            f" {self._timeouts.quorum}; {advice}"
        )

    async def _call_neighbour(self, j: int, t: int, attendance: Attendance) -> None:
        """Call one neighbour until it is present, also after the roll call has stopped waiting for it."""
        silence = self._timeouts.silence
        began = time.monotonic()
        while j not in self._state.arrived:
            answer = await self.hello(j, t)
            if answer is None:
                now, first_call = time.monotonic(), self._state.calls.get(j, (0.0, 0.0))[0]
                patience = self._timeouts.start if t == 1 and not first_call else silence
                silent = now - max(began, self._state.last_contact[j], first_call) > patience
                if j in attendance.pending and (silent or now - began > max(patience, self._timeouts.deadline)):
                    attendance.give_up(j)
                    self._exclude(j, self._describe_silence(j) if silent else "late")
                await asyncio.sleep(RETRY_DELAY)
            elif answer.state == "unreached":
                if j in attendance.pending and time.monotonic() - began > silence:
                    attendance.give_up(j)
                    self._exclude(j, f"cannot reach us at {self._own_address}")
                await asyncio.sleep(POLL_DELAY)
            elif answer.state == "here":
                self._state.away.pop(j, None)
                attendance.present.add(j)
                self._state.notify()
                return
            elif answer.state == "wait":
                near = attendance.worth_waiting(answer.round)
                blocked = self._is_blocked(answer, began)
                if j in attendance.pending and near and not blocked and not self._is_late(j, began):
                    attendance.behind.add(j)
                elif j in attendance.pending:
                    attendance.give_up(j)
                    self._exclude(j, "blocked" if blocked else "late" if near else "far behind")
                await asyncio.sleep(POLL_DELAY)
            else:
                attendance.pending.discard(j)
                elsewhere = {
                    "out": attendance.without_us,
                    "ahead": attendance.ahead,
                    "left": attendance.ahead,
                    "finished": attendance.finished,
                }
                elsewhere[answer.state].add(j)
                (attendance.left.add if answer.state == "left" else attendance.left.discard)(j)
                attendance.later[j] = max(t + 1, answer.round + (not answer.gathering))
                self._state.notify()
                await asyncio.sleep(RETRY_DELAY)

    async def exchange(self, t: int, phase: int, messages: dict[int, bytes]) -> dict[int, Tensor]:
        """Publish the messages of a phase and fetch the neighbours' messages.

        A neighbour without an entry in the result is excluded from the round.
        """
        state = self._state
        state.publish(phase, messages)
        awaited = set(messages)
        state.wait_for(awaited)

        async def fetch(j: int) -> Tensor | None:
            try:
                return await self._fetch(j, t, phase)
            finally:
                awaited.discard(j)

        try:
            fetched = await asyncio.gather(*(fetch(j) for j in messages))
        finally:
            state.waiting = False
        return {j: v for j, v in zip(messages, fetched, strict=True) if v is not None}

    async def _fetch(self, j: int, t: int, phase: int) -> Tensor | None:
        """Fetch the message of j, or exclude j from the round and return None."""
        began = time.monotonic()
        header = Header(self._plan.hash, t, phase, sender=j, receiver=self._me)
        while True:
            try:
                response = await self._call(j, "/fetch", self._request(j, t, phase))
                if response is None:
                    if self._is_silent(j) or self._is_late(j, began):
                        self._exclude(j, self._describe_silence(j) if self._is_silent(j) else "late")
                        return None
                    await asyncio.sleep(RETRY_DELAY)
                    continue
                has_vector, rest = split(response)
                if has_vector:
                    receipt, content = split_proof(rest)
                    vector = decode(content, header, self._d)
                    self._state.receipts.keep(j, receipt, t)
                    return vector
                answer = self._note_answer(j, rest)
            except RefusedError as e:
                self._events.log("refused", what="message", of=self.neighbours[j].name, reason=e.reason)
                self._exclude(j, f"refused: {e.reason}")
                return None
            blocked = self._is_blocked(answer, began)
            if answer.state != "wait" or blocked or self._is_late(j, began):
                self._exclude(j, answer.state if answer.state != "wait" else "blocked" if blocked else "late")
                return None
            await asyncio.sleep(POLL_DELAY)

    async def fetch_models(self) -> list[Tensor]:
        """Fetch the models of all neighbours that offer one, to restart without a checkpoint."""
        return [v for v in await asyncio.gather(*(self._fetch_model(j) for j in self.neighbours)) if v is not None]

    async def _fetch_model(self, j: int) -> Tensor | None:
        try:
            response = await self._call(j, "/fetch", self._request(j, 0, MODEL_PHASE))
            if response is None:
                return None
            has_vector, rest = split(response)
            if not has_vector:
                return None
            header = Header(self._plan.hash, 0, MODEL_PHASE, sender=j, receiver=j)
            return decode(split_proof(rest)[1], header, self._d)
        except RefusedError as e:
            self._events.log("refused", what="model", of=self.neighbours[j].name, reason=e.reason)
            return None

    async def drain(self) -> None:
        """After the last round, wait until all present neighbours have fetched their messages or are silent."""
        began = time.monotonic()
        while time.monotonic() - began < self._timeouts.deadline:
            if all(self._state.fetched_all(j) or self._is_silent(j) for j in self._state.present):
                return
            await asyncio.sleep(RETRY_DELAY)
