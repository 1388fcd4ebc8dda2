"""Attendance at the roll call of a round, and the decision to jump to a later round."""

from typing import NamedTuple

from pdsl.utils.errors import PdslError


class QuorumError(PdslError):
    """Fewer neighbours than the quorum arrived in time."""


class RollCallResult(NamedTuple):
    """Neighbours that take part in the round, or a later round to jump to."""

    present: frozenset[int]
    jump: int | None = None


class Attendance:
    """State of a roll call in progress."""

    def __init__(self, t: int, members: int, pending: set[int]):
        self._t = t
        # A ring without one absent member is a line, and its ends can be as many rounds apart as it has members.
        self._near = members
        self.pending = pending  # neighbours to wait for
        self.present: set[int] = set()
        self.behind: set[int] = set()  # responsive, and in an earlier round
        self.ahead: set[int] = set()  # in a later round
        self.left: set[int] = set()  # subset of `ahead` that does not wait for this peer
        self.without_us: set[int] = set()  # in this round, which they started without this peer
        self.finished: set[int] = set()
        self.later: dict[int, int] = {}  # for neighbours ahead or without this peer: the next round to meet them

    def give_up(self, j: int) -> None:
        """Stop waiting for j in this round."""
        self.pending.discard(j)
        self.behind.discard(j)

    def worth_waiting(self, at: int) -> bool:
        """Whether a neighbour in round `at` will arrive soon; from further behind it has to jump."""
        return self._t - at <= self._near

    def jump_target(self, neighbours: int, last: int) -> int | None:
        """The later round to jump to; None to stay in this round.

        Neighbours slightly ahead wait, so this peer stays with the neighbours present, and without any it jumps to the
        nearest. Neighbours that are far ahead, or have left, do not wait: if they are at least half of all neighbours
        that answered, this peer jumps to them. With more than two neighbours, a single liar is not half.
        """
        elsewhere = self.ahead | self.without_us | self.finished
        answered = self.present | self.behind | elsewhere
        if not self.pending <= answered:
            return None
        if self.finished and len(self.finished) == neighbours:
            return last + 1
        far = [self.later[j] for j in self.ahead if j in self.left or self.later[j] - self._t > self._near]
        if far and 2 * len(far) >= len(answered - self.finished):
            return min(*far, last + 1)
        if (self.ahead or len(elsewhere) == neighbours) and not self.present | self.behind:
            return min(*(self.later[j] for j in self.ahead | self.without_us), last + 1)
        return None
