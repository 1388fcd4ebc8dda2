"""What one organisation has sent and spent: a charge per round and incarnation, with the neighbours that were there.

A round is charged before anything of it leaves, for its own noisy message and one to each neighbour that answered the
roll call. A neighbour that is lost later has been charged for; a round that is run again, after a crash and with others
present, is charged for all of both times.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from pdsl.algorithms import Algorithm
from pdsl.errors import PdslError
from pdsl.peer.sent import Mark
from pdsl.privacy import Ledger, Mechanism, epsilon
from pdsl.privacy.ledger import Entry

Charges = Mapping[tuple[int, int], frozenset[int]]  # (round, incarnation): the neighbours


@dataclass(frozen=True)
class Account:
    """Immutable: `charged` gives the next one."""

    delta: float
    budget: float
    mechanism: Mechanism  # of a round in which all neighbours are there
    algorithm: Algorithm
    planned: int  # rounds
    me: int
    members: tuple[int, ...]  # of the neighbourhood, ascending, itself included
    charges: Charges
    plan: str = ""  # its hash
    mark: Mark = (0, "")  # of the last charge's log, when it was charged

    def charged(self, t: int, incarnation: int, peers: frozenset[int], mark: Mark = (0, "")) -> "Account":
        before = self.charges.get((t, incarnation), frozenset())
        return replace(self, charges={**self.charges, (t, incarnation): before | peers}, mark=mark)

    def of(self, peers: frozenset[int]) -> Mechanism:
        """What leaves in a round with these neighbours: the noise is the same whoever is there."""
        release = self.algorithm.releases(1 + len(peers))
        stretch = self.mechanism.stretch and tuple(
            factor for j, factor in zip(self.members, self.mechanism.stretch, strict=True) if j in peers or j == self.me
        )
        return replace(self.mechanism, messages=release.messages, steps=release.steps, stretch=stretch)

    @cached_property
    def epsilon(self) -> float:
        """Total ε of everything sent."""
        counts = Counter(self.of(peers) for peers in self.charges.values())
        return epsilon(tuple(counts.items()), self.delta)

    @property
    def within_budget(self) -> bool:
        """A part of what was planned costs no more than all of it, so that mostly nothing has to be computed."""
        if len(self.charges) <= self.planned and self._of_the_plan <= self.budget:
            return True
        return self.epsilon <= self.budget

    @property
    def _of_the_plan(self) -> float:
        """ε of all planned rounds, with everybody there."""
        return epsilon(((self.mechanism, self.planned),), self.delta)

    @property
    def rounds(self) -> int:
        """The last round charged."""
        return max((t for t, _ in self.charges), default=0)

    @property
    def incarnation(self) -> int:
        return max((incarnation for _, incarnation in self.charges), default=1)

    def rounds_of(self, incarnation: int) -> list[int]:
        return sorted(t for t, of in self.charges if of == incarnation)

    def mark_of(self, incarnation: int) -> Mark:
        """What the log of an incarnation must begin with; of those before the last one nothing is asked."""
        return self.mark if self.charges and incarnation == self.incarnation else (0, "")

    def as_ledger(self) -> Ledger:
        """The same as a run's ledger of one agent, for summaries and statements."""
        entries = tuple(Entry(t, t, self.of(peers)) for (t, _), peers in sorted(self.charges.items()))
        everyone = frozenset({self.me}).union(*self.charges.values())
        return Ledger(self.delta, self.budget, (tuple(sorted(everyone)),), (entries,))

    def to_json(self, names: list[str]) -> str:
        """For the file: every charge, and how many noisy messages went to whom."""
        sent: Counter[int] = Counter({self.me: 0})
        for peers in self.charges.values():
            steps = self.of(peers).steps
            sent.update(dict.fromkeys((*peers, self.me), steps))
        return json.dumps(
            {
                "name": names[self.me],
                "agent": self.me,
                "plan": self.plan,
                "delta": self.delta,
                "budget": self.budget,
                "mechanism": asdict(self.mechanism),
                "charges": [
                    [t, incarnation, sorted(peers)] for (t, incarnation), peers in sorted(self.charges.items())
                ],
                "mark": self.mark,
                "messages": {names[j]: count for j, count in sorted(sent.items())},
            }
        )

    def read(self, content: bytes, where: str) -> "Account":
        """The account as it was written, with the noise that it was written with.

        PdslError if it is damaged, or of another organisation, plan or noise than this one.
        """
        try:
            stored: dict[str, Any] = json.loads(content)
            mechanism = Mechanism(**stored["mechanism"])
            charges = {(int(t), int(n)): frozenset(int(j) for j in peers) for t, n, peers in stored["charges"]}
            size, digest = stored["mark"]
            mark = int(size), str(digest)
            said = (stored["plan"], stored["agent"], stored["delta"], stored["budget"])
            alike = _alike(mechanism, self.mechanism)
        except (PdslError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as e:
            raise PdslError(
                f"{where} is damaged, or of an earlier version, so what was spent is not known; restore it from a copy"
            ) from e
        if said[0] != self.plan:
            raise PdslError(f"{where} is of another plan; make a new folder with 'pdsl peer init' for this one")
        strangers = frozenset().union(*charges.values()) - set(self.members)
        if said[1:] != (self.me, self.delta, self.budget) or strangers or not alike:
            raise PdslError(f"{where} is not this organisation's in this plan, or was changed; restore it from a copy")
        return replace(self, mechanism=mechanism, charges=charges, mark=mark)


def _alike(stored: Mechanism, planned: Mechanism) -> bool:
    """The same release, with the same noise but for how another version of a library rounds it."""
    if len(stored.stretch) != len(planned.stretch):
        return False
    numbers = zip((stored.sigma, *stored.stretch), (planned.sigma, *planned.stretch), strict=True)
    same = replace(stored, sigma=planned.sigma, stretch=planned.stretch) == planned
    return same and all(math.isclose(a, b, rel_tol=1e-6) for a, b in numbers)
