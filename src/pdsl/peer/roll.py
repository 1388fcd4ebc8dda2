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

    def __init__(self, t: int, members: int, pending: set[int]):
        self._t = t
        # Without one who is away a ring is a line, whose ends may come to be as many rounds apart as it has members.
        self._near = members
        self.pending = pending  # whom to wait for
        self.present: set[int] = set()
        self.behind: set[int] = set()  # alive, and not there yet
        self.ahead: set[int] = set()  # beyond this round
        self.left: set[int] = set()  # those of them who went on without us, and do not wait
        self.without_us: set[int] = set()  # in this round, which they began when we were not there
        self.finished: set[int] = set()
        self.later: dict[int, int] = {}  # the next round in which each of these can be met

    def give_up(self, j: int) -> None:
        """Wait for j no longer in this round."""
        self.pending.discard(j)
        self.behind.discard(j)

    def worth_waiting(self, at: int) -> bool:
        """Whether one who is in round `at` will be here soon; from further back it has to jump."""
        return self._t - at <= self._near

    def jump(self, neighbours: int, last: int) -> int | None:
        """The round to go to, if this one is over for us; None to stay.

        Those who are a little ahead wait for us, so that we stay with whoever is here, and with nobody here go to the
        nearest. Those who are far ahead do not, nor those who left us: if they are at least half of all who were heard
        from, we go to them. With more neighbours than two, one liar is not half.
        """
        elsewhere = self.ahead | self.without_us | self.finished
        heard = self.present | self.behind | elsewhere
        if not self.pending <= heard:
            return None
        if self.finished and len(self.finished) == neighbours:
            return last + 1
        far = [self.later[j] for j in self.ahead if j in self.left or self.later[j] - self._t > self._near]
        if far and 2 * len(far) >= len(heard - self.finished):
            return min(*far, last + 1)
        if (self.ahead or len(elsewhere) == neighbours) and not self.present | self.behind:
            return min(*(self.later[j] for j in self.ahead | self.without_us), last + 1)
        return None
