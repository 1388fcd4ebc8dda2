"""Limits on the time that a neighbour can make this peer wait, in a round and in total.

A neighbour is *late* by the time that passes between the moment at which most of the neighbourhood was ready, this peer
included, and its own arrival. In every round it may be late by a small part of a usual round. Anything beyond is taken
from its credit, which starts with two deadlines and grows slowly with the time of the rounds. A neighbour without
credit is not awaited any longer than that. So delays by a minority of the neighbours cost a bounded time in total, and
a neighbour that delays more than the others is awaited for less each time. In addition, a neighbour can use up one
deadline per round, or two if it reports that it waits for others, whether or not the others are ready.
"""

import time
from collections.abc import Iterable

CREDIT_DEADLINES = 2.0  # initial credit, and its limit
GRACE = 0.1  # of a usual round, by which a neighbour may be late in every round
REFILL = 0.05  # seconds of credit per second of a round
SMOOTHING = 0.1  # weight of the last round in the length of a usual one


class Delays:
    """Delays of all neighbours in the current round, and their credit."""

    def __init__(self, neighbours: Iterable[int], deadline: float):
        self._deadline = deadline
        self._credit = dict.fromkeys(neighbours, CREDIT_DEADLINES * deadline)
        self.total = dict.fromkeys(self._credit, 0.0)  # seconds, over all rounds
        self._usual: float | None = None  # seconds of a round without delays
        self._began: float | None = None
        self._late = dict.fromkeys(self._credit, 0.0)  # in this round
        self._awaited = dict.fromkeys(self._credit, 0.0)  # in this round, whether or not the others were ready

    def begin_round(self) -> dict[int, float]:
        """Settle the delays of the last round, if any. Returns those beyond the usual."""
        now, settled = time.monotonic(), {}
        if self._began is not None:
            length = max(0.0, now - self._began - max(self._late.values(), default=0.0))
            for j, late in self._late.items():
                beyond = max(0.0, late - self._grace)
                self._credit[j] = min(
                    CREDIT_DEADLINES * self._deadline, max(0.0, self._credit[j] - beyond) + REFILL * length
                )
                self.total[j] += late
                if beyond:
                    settled[j] = late
            self._usual = length if self._usual is None else self._usual + SMOOTHING * (length - self._usual)
        self._began = now
        self._late, self._awaited = dict.fromkeys(self._late, 0.0), dict.fromkeys(self._awaited, 0.0)
        return settled

    def forget_round(self) -> None:
        """Do not settle this round: it was skipped, or neighbours have just started."""
        self._began = None
        self._late = dict.fromkeys(self._late, 0.0)

    @property
    def _grace(self) -> float:
        return GRACE * (self._usual or 0.0)

    def lateness_left(self, j: int, blocked: bool) -> float:
        """Seconds by which j may still be late in this round; `blocked`: it reports that it waits for others."""
        return self._grace + min(self._credit[j], self._deadline * (1 + blocked)) - self._late[j]

    def wait_left(self, j: int, blocked: bool) -> float:
        """Seconds for which j may still be awaited in this round."""
        return self._deadline * (1 + blocked) - self._awaited[j]

    def add(self, j: int, awaited: float, late: float) -> None:
        self._awaited[j] += awaited
        self._late[j] += late


class Wait:
    """A wait for several neighbours at once: a phase or a roll call."""

    def __init__(self, delays: Delays, neighbours: Iterable[int]):
        self._delays, self._neighbours = delays, frozenset(neighbours)
        self._began = time.monotonic()
        self._arrivals: dict[int, float] = {}

    def arrive(self, j: int) -> None:
        if j in self._neighbours:
            self._arrivals.setdefault(j, time.monotonic())

    def cutoff(self, j: int, blocked: bool) -> float:
        """Time after which j is not awaited any longer."""
        limit = self._began + self._delays.wait_left(j, blocked)
        if (ready := self._find_ready()) is None:
            return limit
        return min(limit, ready + self._delays.lateness_left(j, blocked))

    def end(self) -> None:
        """Charge all neighbours for their delays."""
        now, ready = time.monotonic(), self._find_ready()
        for j in self._neighbours:
            arrived = self._arrivals.get(j, now)
            late = 0.0 if ready is None else max(0.0, arrived - ready)
            self._delays.add(j, awaited=arrived - self._began, late=late)

    def _find_ready(self) -> float | None:
        """Time at which most of the neighbourhood was ready; None before it."""
        needed = (len(self._neighbours) + 1) // 2  # with this peer, more than half
        arrivals = sorted(self._arrivals.values())
        return arrivals[needed - 1] if 0 < needed <= len(arrivals) else None
