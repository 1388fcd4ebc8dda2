"""State of a peer, and its answers to neighbours.

Neighbours fetch messages; a peer never pushes them. A repeated request therefore gets the same bytes, a restarted peer
can request what it lost, and no peer can fill the memory of another. The state is used on one event loop only.

A round starts with a roll call. A neighbour takes part if a call in either direction is answered while both peers are
in the roll call, and if calls in both directions work: a neighbour that cannot be called cannot deliver. Every other
neighbour gets the answer "out" in this round, so both ends leave each other out.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterable

from pdsl.peer.messages import ANSWER, MODEL_PHASE, VECTOR, Answer
from pdsl.peer.receipts import Receipts


class ServerState:
    """Round, attendance and published messages of one peer, and its answers."""

    def __init__(
        self,
        plan: str,
        neighbours: Iterable[int],
        receipts: Receipts,
        poll: float,
        patience: float,
        silence: float,
    ):
        self.plan = plan  # hash
        self.receipts = receipts
        self.neighbours = frozenset(neighbours)
        self.poll = poll  # seconds for which an answer "wait" is delayed
        self.patience = patience  # seconds of silence of an awaited neighbour before this peer is blocked
        self.silence = silence  # seconds after which an unanswered neighbour is not reached any more
        self.round = 0
        self.gathering = False  # the roll call is open
        self.finished = False
        self.waiting = False
        self.awaited: set[int] = set()  # neighbours that can block this peer
        self.waiting_since = 0.0
        self.present: frozenset[int] = frozenset()  # neighbours in this round
        self.arrived: set[int] = set()  # neighbours that called during the roll call
        # Neighbours that are not awaited until they reach this round → their round when they got the answer "left".
        self.away: dict[int, int | None] = {}
        self.last_contact = dict.fromkeys(self.neighbours, time.monotonic())  # last answered call, or the start
        self.answered: set[int] = set()  # neighbours that have answered a call
        self.departed: dict[int, float] = {}  # neighbours that said goodbye → time
        self.calls: dict[int, tuple[float, float]] = {}  # times of a neighbour's first and last call
        self.last_request: dict[int, int] = dict.fromkeys(self.neighbours, 0)  # round
        self.model: bytes | None = None  # for a neighbour that returns without a checkpoint
        self._messages: dict[tuple[int, int], bytes] = {}  # (phase, receiver)
        self._previous: tuple[int, frozenset[int], dict[tuple[int, int], bytes]] = (0, frozenset(), {})
        self._fetched: set[tuple[int, int]] = set()
        self.on_send: Callable[[int, int, int, bytes], None] = lambda j, t, phase, content: None
        self._changed = asyncio.Event()

    def begin_roll_call(self, t: int) -> None:
        """Open the roll call of round t. The messages of the previous round stay available to slower neighbours."""
        if self._messages:
            self._previous = (self.round, self.present, self._messages)
        self.round, self.gathering, self.present, self._messages = t, True, frozenset(), {}
        self.arrived, self._fetched = set(), set()
        self.notify()

    def begin_round(self, present: Iterable[int]) -> None:
        """Close the roll call and start the round with these neighbours."""
        self.present, self.gathering = frozenset(present), False
        self.notify()

    def publish(self, phase: int, messages: dict[int, bytes]) -> None:
        self._messages |= {(phase, j): content for j, content in messages.items()}
        self.notify()

    def drop(self, j: int) -> None:
        """Exclude j from the rest of this round."""
        self.present -= {j}
        self.notify()

    def leave(self, j: int) -> None:
        """Continue without j until it reaches the round of this peer."""
        self.away[j] = None

    def finish(self) -> None:
        self.finished = True
        self.notify()

    def wait_for(self, neighbours: set[int]) -> None:
        """Report `waiting` from now on, and `blocked` while a neighbour in this set is silent."""
        self.waiting, self.awaited, self.waiting_since = True, neighbours, time.monotonic()

    def record_contact(self, j: int, began: float = math.inf) -> None:
        """Note that j has answered a call. An answer to a call from before its goodbye is ignored."""
        if began < self.departed.get(j, 0.0):
            return
        self.last_contact[j] = time.monotonic()
        self.departed.pop(j, None)
        if j not in self.answered:
            self.answered.add(j)
            self.notify()

    def record_goodbye(self, j: int) -> None:
        """Note that j has ended: it is silent from now on, until it answers a call."""
        self.departed[j] = time.monotonic()
        self.answered.discard(j)
        self.last_contact[j] = time.monotonic() - 2 * self.silence
        self.calls.pop(j, None)
        self.notify()

    def record_call(self, j: int, t: int) -> None:
        """Note that j has called, in round t."""
        now = time.monotonic()
        self.calls[j] = self.calls.get(j, (now, now))[0], now
        self.last_request[j] = t or self.last_request[j]

    def reaches(self, j: int) -> bool:
        """Whether calls to j work."""
        return j in self.answered and time.monotonic() - self.last_contact[j] <= self.silence

    def is_calling(self, j: int) -> bool:
        """Whether calls of j arrive although it does not answer: a call just after its last answer may be its last."""
        last = self.calls.get(j, (0.0, 0.0))[1]
        return time.monotonic() - last <= self.silence and last - self.last_contact[j] > self.silence / 2

    def fetched_all(self, j: int) -> bool:
        """Whether j has fetched all messages to it of this round."""
        return all(key in self._fetched for key in self._messages if key[1] == j)

    async def hello(self, j: int, t: int) -> Answer:
        """Answer whether this peer is in round t with j; round 0 is a ping."""
        self.record_call(j, t)
        if 0 < t >= self.round and self.reaches(j):
            self.away.pop(j, None)
        until = time.monotonic() + self.poll
        while t > 0:
            if self.finished:
                return self._answer("finished", j)
            if t <= self.round and self.reaches(j):
                return self._answer_call(j, t)
            if not await self.wait_for_change(until):
                break
        return self._answer("unreached" if 0 < t <= self.round else "wait", j)

    def _answer_call(self, j: int, t: int) -> Answer:
        """Answer to a call in this round or an earlier one."""
        if t < self.round:
            return self._answer("left" if self._has_left(j, t) else "ahead", j)
        if self.gathering:
            self.arrived.add(j)
            self.notify()
            return self._answer("here", j)
        return self._answer("here" if j in self.present else "out", j)

    def _has_left(self, j: int, t: int) -> bool:
        """Whether this peer continues without j, which is in round t.

        If j moves on to a later round with other neighbours, this peer waits for it again.
        """
        noted = self.away.get(j)
        if noted is not None and noted < t:
            del self.away[j]
        elif j in self.away:
            self.away[j] = t
        return j in self.away

    async def fetch(self, j: int, t: int, phase: int) -> bytes:
        """Return the message to j of a phase of round t, or an Answer."""
        self.record_call(j, t)
        if phase == MODEL_PHASE:
            return self._encoded_answer("wait", j) if self.model is None else self._send(j, 0, phase, self.model)
        until = time.monotonic() + self.poll
        while True:
            response = self._find_response(j, t, phase)
            if response is not None:
                return response
            if not await self.wait_for_change(until):
                return self._encoded_answer("wait", j)

    def _find_response(self, j: int, t: int, phase: int) -> bytes | None:
        """Look up the response to a fetch request; None if there is none yet."""
        current = t == self.round
        number, present, messages = (self.round, self.present, self._messages) if current else self._previous
        if t > self.round or (current and self.gathering):
            return self._encoded_answer("finished", j) if self.finished else None
        if t != number or (not current and (phase, j) not in messages):
            return self._encoded_answer("ahead", j)
        if j not in present:
            return self._encoded_answer("out", j)
        if (phase, j) not in messages:
            return None
        if current:
            self._fetched.add((phase, j))
        return self._send(j, number, phase, messages[phase, j])

    def _send(self, j: int, t: int, phase: int, content: bytes) -> bytes:
        self.on_send(j, t, phase, content)
        return VECTOR + self.receipts.attach(j) + content

    def _answer(self, state: str, j: int) -> Answer:
        served = self.receipts.held[j]
        return Answer(self.plan, state, self.round, self.gathering, self.waiting, self.blocked, served)

    def _encoded_answer(self, state: str, j: int) -> bytes:
        return ANSWER + self._answer(state, j).encode()

    @property
    def blocked(self) -> bool:
        """Whether this peer waits for a silent neighbour."""
        now = time.monotonic()
        return self.waiting and any(
            now - max(self.waiting_since, self.last_contact[j]) > self.patience for j in self.awaited
        )

    def notify(self) -> None:
        """Wake all coroutines in `wait_for_change`."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_change(self, until: float) -> bool:
        """Wait for a change of state; False if there is none before the monotonic time `until`."""
        left = until - time.monotonic()
        if left <= 0:
            return False
        try:
            async with asyncio.timeout(left):  # wait_for of Python 3.11 loses a cancellation at the moment of a change
                await self._changed.wait()
        except TimeoutError:
            return False
        return True
