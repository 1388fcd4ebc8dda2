"""The roll call of a round: who is there, who is elsewhere, and when to go where the others are."""

from typing import NamedTuple

from pdsl.errors import PdslError


class AloneError(PdslError):
    """Too few neighbours came."""


class Outcome(NamedTuple):
    """What came of a roll call: who is in the round, or the round to go to instead."""

    present: frozenset[int]
    jump: int | None = None


class Roll:
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
