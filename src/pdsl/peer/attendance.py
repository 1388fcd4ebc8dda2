"""Attendance at the roll call of a round, and the decision to jump to a later round."""

from collections.abc import Mapping
from typing import NamedTuple

from pdsl.utils.errors import PdslError


class QuorumError(PdslError):
    """Fewer neighbours than the quorum arrived in time."""


class Jump(NamedTuple):
    """Decision to continue at a later round."""

    round: int
    voices: frozenset[int]  # neighbours whose word it follows, against the word of others; empty if there is no other


class RollCallResult(NamedTuple):
    """Neighbours that take part in the round, or a later round to jump to.

    A jump to the same round means that an amendment came into force: it starts again with other neighbours.
    """

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

    @property
    def answered(self) -> set[int]:
        """Neighbours in any known round."""
        return self.present | self.behind | self.ahead | self.without_us | self.finished

    def give_up(self, j: int) -> None:
        """Stop waiting for j in this round."""
        self.pending.discard(j)
        self.behind.discard(j)

    def worth_waiting(self, at: int) -> bool:
        """Whether a neighbour in round `at` will arrive soon; from further behind it has to jump."""
        return self._t - at <= self._near

    def jump_target(self, neighbours: int, last: int, credit: Mapping[int, int]) -> Jump | None:
        """The later round to jump to; None to stay in this round.

        Neighbours slightly ahead wait, so this peer stays with the neighbours present, and without any it jumps to the
        nearest. Neighbours that are far ahead, or have left, do not wait: if they are most of the neighbours that
        answered, this peer jumps to them. If they are a single one, or just half, they may be lying, but staying could
        split the network. Their word is then followed as long as each has `credit`, in rounds.
        """
        elsewhere = self.ahead | self.without_us | self.finished
        answered = self.answered
        if not self.pending <= answered:
            return None
        if self.finished and len(self.finished) == neighbours:
            return Jump(last + 1, frozenset())
        far = {j for j in self.ahead if j in self.left or self.later[j] - self._t > self._near}
        others = answered - self.finished - far
        if far and len(far) >= len(others):
            target = min(last + 1, *(self.later[j] for j in far))
            if not others or len(far) > max(1, len(others)):
                return Jump(target, frozenset())
            if target <= last and all(target - self._t <= credit[j] for j in far):
                return Jump(target, frozenset(far))
        if (self.ahead or len(elsewhere) == neighbours) and not self.present | self.behind:
            near = (self.ahead | self.without_us) - far or self.ahead | self.without_us
            return Jump(min(last + 1, *(self.later[j] for j in near)), frozenset())
        return None
