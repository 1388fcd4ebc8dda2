"""What a peer tells its neighbours: where it is, who is in its round, and the messages of this round and the last.

Neighbours fetch; nobody pushes. So asking again is harmless and gets the same bytes, one who was restarted asks for
what it lost, and nobody can fill anybody's memory. Everything here runs on one event loop.

A round begins with a roll call. A neighbour is in it if either end's call was answered while both were calling; who is
not in by then is told so whenever it asks, and so both ends leave each other out.
"""

import asyncio
import time
from collections.abc import Iterable

from pdsl.peer.wire import MODEL, VECTOR, WORDS, Answer


class Node:
    """The state of one peer, and its answers."""

    def __init__(self, plan: str, neighbours: Iterable[int], poll: float, patience: float):
        self.plan = plan
        self.neighbours = frozenset(neighbours)
        self.poll = poll  # seconds for which an answer may be held back when it would be 'wait'
        self.patience = patience  # seconds of silence of one we wait for before we say that we are held up
        self.round = 0
        self.gathering = False
        self.finished = False
        self.waiting = False
        self.awaited: set[int] = set()  # those who can hold us up
        self.since = 0.0  # when we began to wait for them
        self.present: frozenset[int] = frozenset()  # in this round
        self.arrived: set[int] = set()  # called while we were calling
        self.away: dict[int, int | None] = {}  # not waited for until they come to our round; where they were told so
        self.heard: dict[int, float] = dict.fromkeys(self.neighbours, time.monotonic())
        self.asked: dict[int, int] = dict.fromkeys(self.neighbours, 0)  # the last round that each asked about
        self.model: bytes | None = None  # for one who comes back with nothing
        self._messages: dict[tuple[int, int], bytes] = {}  # (phase, receiver)
        self._last: tuple[int, frozenset[int], dict[tuple[int, int], bytes]] = (0, frozenset(), {})
        self._fetched: set[tuple[int, int]] = set()
        self._changed = asyncio.Event()

    def gather(self, t: int) -> None:
        """Begin the roll call of round t. The messages of our last round stay for those who still need them."""
        if self._messages:
            self._last = (self.round, self.present, self._messages)
        self.round, self.gathering, self.present, self._messages = t, True, frozenset(), {}
        self.arrived, self._fetched = set(), set()
        self.wake()

    def begin(self, present: Iterable[int]) -> None:
        """The roll call is over: the round runs with these."""
        self.present, self.gathering = frozenset(present), False
        self.wake()

    def publish(self, phase: int, messages: dict[int, bytes]) -> None:
        self._messages |= {(phase, j): content for j, content in messages.items()}
        self.wake()

    def drop(self, j: int) -> None:
        """j is out of the rest of this round."""
        self.present -= {j}
        self.wake()

    def leave(self, j: int) -> None:
        """Go on without j until it comes to our round."""
        self.away[j] = None

    def finish(self) -> None:
        self.finished = True
        self.wake()

    def wait_for(self, whom: set[int]) -> None:
        """Tell who asks that we wait, and are held up by the silence of any of these while they are in the set."""
        self.waiting, self.awaited, self.since = True, whom, time.monotonic()

    def sign_of_life(self, j: int, t: int = 0) -> None:
        self.heard[j] = time.monotonic()
        self.asked[j] = t or self.asked[j]

    def fetched_all(self, j: int) -> bool:
        """Whether j has everything of this round that is for it."""
        return all(key in self._fetched for key in self._messages if key[1] == j)

    async def hello(self, j: int, t: int) -> Answer:
        """j asks whether we are there for round t; for round 0, only how we are."""
        self.sign_of_life(j, t)
        if 0 < t >= self.round:
            self.away.pop(j, None)
        until = time.monotonic() + self.poll
        while t > 0:
            if self.finished:
                return self._answer("finished")
            if t < self.round:
                return self._answer("left" if self._left_behind(j, t) else "ahead")
            if t == self.round:
                if self.gathering:
                    self.arrived.add(j)
                    self.wake()
                return self._answer("here" if self.gathering or j in self.present else "out")
            if not await self.change(until):
                break
        return self._answer("wait")

    def _left_behind(self, j: int, t: int) -> bool:
        """Whether we go on without j, which is in round t. If it then stays with others there, we wait for it."""
        told = self.away.get(j)
        if told is not None and told < t:
            del self.away[j]
        elif j in self.away:
            self.away[j] = t
        return j in self.away

    async def fetch(self, j: int, t: int, phase: int) -> bytes:
        """j asks for our message to it of a phase of round t."""
        self.sign_of_life(j, t)
        if phase == MODEL:
            return WORDS + self._answer("wait").encode() if self.model is None else VECTOR + self.model
        until = time.monotonic() + self.poll
        while True:
            answer = self._message(j, t, phase)
            if answer is not None:
                return answer
            if not await self.change(until):
                return WORDS + self._answer("wait").encode()

    def _message(self, j: int, t: int, phase: int) -> bytes | None:
        """None: not yet."""
        current = t == self.round
        number, present, messages = (self.round, self.present, self._messages) if current else self._last
        if t > self.round or (current and self.gathering):
            return WORDS + self._answer("finished").encode() if self.finished else None
        if t != number or (not current and (phase, j) not in messages):
            return WORDS + self._answer("ahead").encode()
        if j not in present:
            return WORDS + self._answer("out").encode()
        if (phase, j) not in messages:
            return None
        if current:
            self._fetched.add((phase, j))
        return VECTOR + messages[phase, j]

    def _answer(self, state: str) -> Answer:
        return Answer(self.plan, state, self.round, self.gathering, self.waiting, self.held)

    @property
    def held(self) -> bool:
        """Whether we wait for somebody of whom nothing is heard."""
        now = time.monotonic()
        return self.waiting and any(now - max(self.since, self.heard[j]) > self.patience for j in self.awaited)

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self, until: float) -> bool:
        """Wait for a change; False if there was none in time."""
        left = until - time.monotonic()
        if left <= 0:
            return False
        try:
            await asyncio.wait_for(self._changed.wait(), left)
        except TimeoutError:
            return False
        return True
