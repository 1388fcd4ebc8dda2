"""Privacy ledger of one organisation: one charge per round and key generation, with the neighbours present.

A round is charged before any of its messages leaves: for the agent's own noisy message and one per neighbour present at
the roll call. A neighbour lost later stays charged. A round that is repeated after a crash is charged for the
neighbours of both attempts.

An amendment can change the neighbourhood, and with it the noise. A generation belongs to one stage of the plan, so its
number tells which noise a charge is for.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from pdsl.algorithms import Algorithm
from pdsl.privacy import Ledger, Mechanism, epsilon
from pdsl.privacy.ledger import Entry
from pdsl.utils.errors import PdslError
from pdsl.utils.types import JsonDict

Charges = Mapping[tuple[int, int], frozenset[int]]  # (round, generation) → neighbours
Mark = tuple[int, str]  # size of a noise log in bytes, and the SHA-256 of its key and content


@dataclass(frozen=True)
class Stage:
    """Neighbourhood and noise of a stage of the plan."""

    stage: str  # hash
    since: int  # its first generation
    members: tuple[int, ...]  # neighbourhood in ascending order, the organisation included
    mechanism: Mechanism  # of a round with all neighbours present


@dataclass(frozen=True)
class PeerLedger:
    """Immutable ledger; `charge` returns the next one."""

    delta: float
    budget: float
    mechanism: Mechanism  # of a round with all neighbours present
    algorithm: Algorithm
    planned_rounds: int
    me: int
    members: tuple[int, ...]  # neighbourhood in ascending order, `me` included
    charges: Charges
    plan: str = ""  # hash
    mark: Mark = (0, "")  # of the noise log, at the last charge
    stage: str = ""  # hash
    since: int = 1  # first generation of this stage
    past: tuple[Stage, ...] = ()  # earlier stages with charges

    def charge(self, t: int, generation: int, peers: frozenset[int], mark: Mark = (0, "")) -> "PeerLedger":
        before = self.charges.get((t, generation), frozenset())
        return replace(self, charges={**self.charges, (t, generation): before | peers}, mark=mark)

    def describe_charge(self, t: int, generation: int) -> tuple[int, frozenset[int], int, int]:
        """Generation, neighbours, messages and local steps of a charge, for the history."""
        peers = self.charges[t, generation]
        mechanism = self.mechanism_with(peers, generation)
        return generation, peers, mechanism.messages, mechanism.steps

    def mechanism_with(self, peers: frozenset[int], generation: int | None = None) -> Mechanism:
        """Mechanism of a round with these neighbours, in the stage of a generation; default: in this stage.

        The noise does not depend on who is present.
        """
        stage = self.find_stage(generation)
        release = self.algorithm.releases(1 + len(peers))
        sigma_scale = stage.mechanism.sigma_scale and tuple(
            factor
            for j, factor in zip(stage.members, stage.mechanism.sigma_scale, strict=True)
            if j in peers or j == self.me
        )
        return replace(stage.mechanism, messages=release.messages, steps=release.steps, sigma_scale=sigma_scale)

    def find_stage(self, generation: int | None = None) -> Stage:
        """Stage of a generation; default: this one."""
        current = Stage(self.stage, self.since, self.members, self.mechanism)
        if generation is None or generation >= self.since:
            return current
        return [stage for stage in self.past if stage.since <= generation][-1]

    def stage_of(self, t: int) -> Stage | None:
        """Stage in which round t was charged last; None if it was not charged."""
        generations = [generation for of, generation in self.charges if of == t]
        return self.find_stage(max(generations)) if generations else None

    @cached_property
    def epsilon(self) -> float:
        """Total ε of all charges."""
        counts: Counter[Mechanism] = Counter()
        for (peers, generation), rounds in self._alike.items():
            counts[self.mechanism_with(peers, generation)] += rounds
        return epsilon(tuple(counts.items()), self.delta)

    @property
    def _alike(self) -> Counter[tuple[frozenset[int], int]]:
        """Number of charges with each set of neighbours and first generation of a stage: a long run has few of them."""
        return Counter((peers, self.find_stage(generation).since) for (_, generation), peers in self.charges.items())

    @property
    def within_budget(self) -> bool:
        """Whether the total ε is within the budget.

        Part of the planned rounds costs at most as much as all of them, so ε rarely has to be computed.
        """
        if not self.past and len(self.charges) <= self.planned_rounds and self._planned_epsilon <= self.budget:
            return True
        return self.epsilon <= self.budget

    @property
    def _planned_epsilon(self) -> float:
        """ε of all planned rounds with all neighbours present."""
        return epsilon(((self.mechanism, self.planned_rounds),), self.delta)

    @property
    def last_round(self) -> int:
        """Last charged round, 0 without charges."""
        return max((t for t, _ in self.charges), default=0)

    @property
    def generation(self) -> int:
        return max((generation for _, generation in self.charges), default=1)

    def peers_in(self, t: int) -> frozenset[int]:
        """Neighbours of all attempts at round t that were charged."""
        return frozenset[int]().union(*(peers for (at, _), peers in self.charges.items() if at == t))

    def refund(self, t: int, generation: int) -> "PeerLedger":
        """Remove the charge of a round in which a generation made no vector, so that nothing can have left."""
        return replace(self, charges={key: peers for key, peers in self.charges.items() if key != (t, generation)})

    def to_run_ledger(self) -> Ledger:
        """Convert to the `Ledger` of a run with one agent, for summaries and statements."""
        charges = sorted(self.charges.items())
        entries = tuple(Entry(t, t, self.mechanism_with(peers, generation)) for (t, generation), peers in charges)
        everyone = frozenset({self.me}).union(*self.charges.values())
        return Ledger(self.delta, self.budget, (tuple(sorted(everyone)),), (entries,))

    def to_json(self, names: list[str]) -> str:
        """Content of the ledger file: all charges, and the number of noisy messages per receiver."""
        sent: Counter[int] = Counter({self.me: 0})
        for (peers, generation), rounds in self._alike.items():
            sent.update(dict.fromkeys((*peers, self.me), rounds * self.mechanism_with(peers, generation).steps))
        return json.dumps(
            {
                "name": names[self.me],
                "agent": self.me,
                "plan": self.plan,
                "delta": self.delta,
                "budget": self.budget,
                "mechanism": asdict(self.mechanism),
                "charges": [[t, generation, sorted(peers)] for (t, generation), peers in sorted(self.charges.items())],
                "mark": self.mark,
                "stage": self.stage,
                "since": self.since,
                "members": self.members,
                "past": [asdict(stage) for stage in self.past],
                "messages": {names[j]: count for j, count in sorted(sent.items())},
            }
        )

    def restore(self, content: bytes, where: str) -> "PeerLedger":
        """Restore charges and noise from a ledger file.

        PdslError if the file is damaged, or belongs to another organisation, plan or noise level than this ledger.
        """
        try:
            stored: JsonDict = json.loads(content)
            last, past = _parse_stage(stored), tuple(_parse_stage(stage) for stage in stored["past"])
            charges = {(int(t), int(n)): frozenset(int(j) for j in peers) for t, n, peers in stored["charges"]}
            size, digest = stored["mark"]
            mark = int(size), str(digest)
            plan, owner = stored["plan"], (stored["agent"], stored["delta"], stored["budget"])
            since = [stage.since for stage in (*past, last)]
            if since[0] > 1 or since != sorted(set(since)):
                raise ValueError("generations without a stage")
            same_noise = last.stage != self.stage or (
                last.members == self.members and _is_equivalent(last.mechanism, self.mechanism)
            )
        except (PdslError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as e:
            raise PdslError(
                f"{where} is damaged or of an earlier version, so the privacy spent is unknown;"
                " restore it from a backup"
            ) from e
        if plan != self.plan:
            raise PdslError(f"{where} belongs to another plan; create a new folder for this one: pdsl peer init")
        restored = replace(self, charges=charges, mark=mark, past=past, since=last.since)
        if last.stage == self.stage:
            restored = replace(restored, mechanism=last.mechanism)
        else:  # an amendment came into force: the next generation has other neighbours
            restored = replace(restored, past=(*past, last), since=1 + max(last.since, restored.generation))
        strangers = any(not peers <= set(restored.find_stage(n).members) for (_, n), peers in charges.items())
        if owner != (self.me, self.delta, self.budget) or strangers or not same_noise:
            raise PdslError(
                f"{where} is not this organisation's ledger for this plan, or was changed; restore it from a backup"
            )
        return restored


def _parse_stage(stored: JsonDict) -> Stage:
    mechanism = Mechanism(**stored["mechanism"])
    return Stage(str(stored["stage"]), int(stored["since"]), tuple(int(j) for j in stored["members"]), mechanism)


def has_no_charges(ledger: bytes) -> bool:
    """Whether the content of a ledger file has no charges; False if it is damaged."""
    try:
        return not json.loads(ledger)["charges"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def _is_equivalent(stored: Mechanism, planned: Mechanism) -> bool:
    """Whether two mechanisms are equal up to rounding, which may differ between versions of a library."""
    if len(stored.sigma_scale) != len(planned.sigma_scale):
        return False
    numbers = zip((stored.sigma, *stored.sigma_scale), (planned.sigma, *planned.sigma_scale), strict=True)
    same = replace(stored, sigma=planned.sigma, sigma_scale=planned.sigma_scale) == planned
    return same and all(math.isclose(a, b, rel_tol=1e-6) for a, b in numbers)
