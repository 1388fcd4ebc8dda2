"""Client side of a peer: the roll call of a round, and the exchange of messages.

A neighbour is *silent* after `silence` seconds without any response, pings included, and *unreachable* if its own calls
arrive meanwhile. It is *late* if it responds but uses up the time that `delays` grants it. It is *blocked* if it waits
for a silent peer; it is then awaited for at most `patience` seconds, because otherwise one fault would stop all peers.
In each case it is excluded from the round, and later rounds do not wait for it until it reaches them.
"""

import asyncio
import math
import time
from collections.abc import Callable

from torch import Tensor

from pdsl.peer.attendance import Attendance, QuorumError, RollCallResult
from pdsl.peer.calls import RETRY_DELAY, Calls
from pdsl.peer.delays import Delays, Wait
from pdsl.peer.messages import MODEL_PHASE, Answer, Header, RefusedError, decode, split, split_proof
from pdsl.peer.plan import TrainingPlan
from pdsl.peer.state import ServerState
from pdsl.peer.status import Events

POLL_DELAY = 0.01  # seconds before asking again after an answer "wait", which the server itself delays
GONE = (
    "silent",
    "unreachable",
    "cannot reach us",
    "rejects us",
    "late",
    "blocked",
    "goodbye",
)  # reasons not to wait later
SKIP_SHARE = 0.1  # of the plan's rounds, which one neighbour can make this peer skip by its word alone
MIN_LOGGED_DELAY = 1.0  # seconds in a round


class Client:
    """Rounds of one peer with its neighbours."""

    def __init__(self, calls: Calls, me: int, plan: TrainingPlan, state: ServerState, events: Events, d: int):
        self._calls, self._me, self._plan, self._d = calls, me, plan, d
        self._state, self._events, self._timeouts = state, events, plan.timeouts
        self.neighbours = calls.neighbours
        self._first = plan.joining_round(me)  # before it, neighbours may not be online yet
        rounds = max(len(plan.members), math.ceil(SKIP_SHARE * plan.config.rounds))
        self.delays = Delays(self.neighbours, plan.timeouts.deadline)
        self._skip_credit = dict.fromkeys(self.neighbours, rounds)
        self.on_receive: Callable[[int, int, int, bytes], None] = lambda j, t, phase, content: None

    def _is_blocked(self, answer: Answer, began: float) -> bool:
        """Whether the sender of this answer has been awaited for `patience` seconds and is blocked itself."""
        return answer.held and time.monotonic() - began > self._timeouts.patience

    def _describe_silence(self, j: int) -> str:
        if j in self._state.departed:
            return "goodbye"
        if self.neighbours[j].state.startswith("rejects us"):
            return self.neighbours[j].state
        return f"unreachable at {self.neighbours[j].address}" if self._state.is_calling(j) else "silent"

    def _exclude(self, j: int, reason: str) -> None:
        """Exclude j from this round."""
        if reason.startswith(GONE):
            self._state.leave(j)
        self._state.drop(j)
        self._events.log("lost", who=self.neighbours[j].name, round=self._state.round, why=reason)
        self.neighbours[j].state = reason

    async def roll_call(self, t: int) -> RollCallResult:
        """Find the neighbours that take part in round t, or the later round to jump to."""
        state, timeouts = self._state, self._timeouts
        self._settle_delays()
        state.begin_roll_call(t)
        gone = {j for j in self.neighbours if j in state.away or (t > self._first and self._calls.is_silent(j))}
        attendance = Attendance(t, len(self._plan.members), pending=set(self.neighbours) - gone)
        callers = [asyncio.create_task(self._call_neighbour(j, t, attendance)) for j in self.neighbours]
        wait = Wait(self.delays, attendance.pending)
        began = time.monotonic()
        state.wait_for(
            attendance.pending if t > self._first else set()
        )  # before the first round there was no contact yet
        try:
            while True:
                attendance.present |= state.arrived
                attendance.pending -= attendance.present
                if t > self._first:
                    self._exclude_late(wait, attendance)
                if self._plan.refresh() and t > self._plan.last_round:
                    state.begin_round(())
                    return RollCallResult(frozenset(), t)
                rounds = self._plan.last_round
                if jump := attendance.jump_target(len(self.neighbours), rounds, self._skip_credit):
                    for j in jump.voices:
                        self._skip_credit[j] -= jump.round - t
                    self.delays.forget_round()
                    state.begin_round(())
                    return RollCallResult(frozenset(), jump.round)
                if not attendance.pending and len(attendance.present) >= timeouts.quorum:
                    break
                if self._is_abandoned(attendance) and time.monotonic() - began > timeouts.silence:
                    state.begin_round(())
                    return RollCallResult(frozenset(), self._plan.last_round + 1)
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
        if t > self._first:
            wait.end()
        state.begin_round(attendance.present | state.arrived)
        return RollCallResult(state.present)

    def _is_abandoned(self, attendance: Attendance) -> bool:
        """Whether no neighbour answers, and none is expected to before an amendment is in force."""
        return not (attendance.pending or attendance.answered) and self._plan.is_abandoned(self._me)

    def _settle_delays(self) -> None:
        for j, seconds in self.delays.begin_round().items():
            if seconds > MIN_LOGGED_DELAY:
                name = self.neighbours[j].name
                self._events.log("delayed", who=name, round=self._state.round, seconds=round(seconds, 1))

    def _exclude_late(self, wait: Wait, attendance: Attendance) -> None:
        """Stop waiting for neighbours that have used up their time."""
        for j in self.neighbours.keys() - attendance.pending:
            wait.arrive(j)
        for j in list(attendance.pending):
            if time.monotonic() > wait.cutoff(j, self.neighbours[j].waiting):
                attendance.give_up(j)
                self._exclude(j, "late")

    def _describe_quorum(self, t: int, present: int) -> str:
        unreached = [n.name for n in self.neighbours.values() if n.state.startswith("cannot reach us")]
        rejecting = [f"{n.name} {n.state}" for n in self.neighbours.values() if n.state.startswith("rejects us")]
        advice = "run again when they are online"
        if rejecting:
            advice = f"{', '.join(rejecting)}; see pdsl peer doctor"
            if any(rejected.endswith(": plan") for rejected in rejecting):
                advice += ", and apply amendments that you lack: pdsl peer amend"
        if unreached:
            advice = f"{', '.join(unreached)} cannot reach you at {self._calls.own_address}: open that port to them"
        return (
            f"round {t}: {present} neighbours present after {self._timeouts.start:g} s, but the plan requires"
            f" {self._timeouts.quorum}; {advice}"
        )

    async def _call_neighbour(self, j: int, t: int, attendance: Attendance) -> None:
        """Call one neighbour until it is present, also after the roll call has stopped waiting for it."""
        silence = self._timeouts.silence
        began = time.monotonic()
        unreached = 0.0  # time of the first answer of that kind
        while j not in self._state.arrived:
            answer = await self._calls.hello(j, t)
            if answer is None:
                now, first_call = time.monotonic(), self._state.calls.get(j, (0.0, 0.0))[0]
                online = t > self._first or first_call or j in self._state.answered
                patience = silence if online else self._timeouts.start
                contact = max(began, self._state.last_contact[j], first_call)
                silent = j in self._state.departed or now - contact > patience
                if j in attendance.pending and (silent or now - began > max(patience, self._timeouts.deadline)):
                    attendance.give_up(j)
                    self._exclude(j, self._describe_silence(j) if silent else "late")
                await asyncio.sleep(RETRY_DELAY)
            elif answer.state == "unreached":
                unreached = unreached or time.monotonic()
                if j in attendance.pending and time.monotonic() - unreached > silence:
                    attendance.give_up(j)
                    self._exclude(j, f"cannot reach us at {self._calls.own_address}")
                await asyncio.sleep(POLL_DELAY)
            elif answer.state == "here":
                self._state.away.pop(j, None)
                attendance.present.add(j)
                self._state.notify()
                return
            elif answer.state == "wait":
                near = attendance.worth_waiting(answer.round)
                blocked = self._is_blocked(answer, began)
                if j in attendance.pending and near and not blocked:
                    attendance.behind.add(j)
                elif j in attendance.pending:
                    attendance.give_up(j)
                    self._exclude(j, "blocked" if blocked else "far behind")
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
        tasks = {asyncio.create_task(self._fetch(j, t, phase)): j for j in messages}
        wait, fetched = Wait(self.delays, messages), dict[int, Tensor]()
        try:
            while tasks:
                next_cutoff = min(wait.cutoff(j, self.neighbours[j].waiting) for j in tasks.values())
                timeout = max(0.0, next_cutoff - time.monotonic())
                done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    j = tasks.pop(task)
                    wait.arrive(j)
                    awaited.discard(j)
                    if (vector := task.result()) is not None:
                        fetched[j] = vector
                now = time.monotonic()
                for task, j in list(tasks.items()):
                    if now > wait.cutoff(j, self.neighbours[j].waiting):
                        task.cancel()
                        del tasks[task]
                        awaited.discard(j)
                        self._exclude(j, "late")
        finally:
            wait.end()
            state.waiting = False
            for task in tasks:
                task.cancel()
        return {j: fetched[j] for j in messages if j in fetched}

    async def _fetch(self, j: int, t: int, phase: int) -> Tensor | None:
        """Fetch the message of j, or exclude j from the round and return None."""
        began = time.monotonic()
        header = Header(self._plan.hash, t, phase, sender=j, receiver=self._me)
        while True:
            try:
                response = await self._calls.call(j, "/fetch", self._calls.encode_request(j, t, phase))
                if response is None:
                    if self._calls.is_silent(j):
                        self._exclude(j, self._describe_silence(j))
                        return None
                    await asyncio.sleep(RETRY_DELAY)
                    continue
                has_vector, rest = split(response)
                if has_vector:
                    receipt, content = split_proof(rest)
                    vector = decode(content, header, self._d)
                    self._state.receipts.keep(j, receipt, t)
                    self.on_receive(j, t, phase, content)
                    return vector
                answer = self._calls.note_answer(j, rest)
            except RefusedError as e:
                self._events.log("refused", what="message", of=self.neighbours[j].name, reason=e.reason)
                self._exclude(j, f"refused: {e.reason}")
                return None
            blocked = self._is_blocked(answer, began)
            if answer.state != "wait" or blocked:
                self._exclude(j, answer.state if answer.state != "wait" else "blocked")
                return None
            await asyncio.sleep(POLL_DELAY)

    async def fetch_models(self) -> list[Tensor]:
        """Fetch the models of all neighbours that offer one, to restart without a checkpoint."""
        return [v for v in await asyncio.gather(*(self._fetch_model(j) for j in self.neighbours)) if v is not None]

    async def _fetch_model(self, j: int) -> Tensor | None:
        try:
            response = await self._calls.call(j, "/fetch", self._calls.encode_request(j, 0, MODEL_PHASE))
            if response is None:
                return None
            has_vector, rest = split(response)
            if not has_vector:
                return None
            header = Header(self._plan.hash, 0, MODEL_PHASE, sender=j, receiver=j)
            content = split_proof(rest)[1]
            vector = decode(content, header, self._d)
            self.on_receive(j, 0, MODEL_PHASE, content)
            return vector
        except RefusedError as e:
            self._events.log("refused", what="model", of=self.neighbours[j].name, reason=e.reason)
            return None

    async def drain(self) -> None:
        """After the last round, wait until all present neighbours have their messages, went on or are silent."""
        began = time.monotonic()
        while time.monotonic() - began < self._timeouts.deadline:
            if not any(self._is_fetching(j) for j in self._state.present):
                return
            await asyncio.sleep(RETRY_DELAY)

    def _is_fetching(self, j: int) -> bool:
        """Whether neighbour j may still fetch messages of this round."""
        later = self.neighbours[j].at[0] > self._state.round
        return not (later or self._state.fetched_all(j) or self._calls.is_silent(j))
