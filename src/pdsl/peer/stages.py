"""Stages of a plan: the rounds between two amendments, with one set of members and one graph.

Every stage has a hash: that of its last amendment, or of the plan. A request for a round carries the hash of the stage
of that round, and a peer computes the same from its own amendments. Peers with different amendments thus refuse each
other from the first round on in which they differ.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pdsl.peer.amendment import Amendment
from pdsl.peer.healing import add_member, build_graph, get_links, remove_member
from pdsl.peer.identity import NO_ADDRESS, PeerInfo
from pdsl.peer.plan import MAX_MEMBERS, TrainingPlan
from pdsl.topology import Graph
from pdsl.topology.graph import Links
from pdsl.utils.errors import PdslError

FindNext = Callable[[int], Amendment | None]


@dataclass(frozen=True)
class StagePlan(TrainingPlan):
    """The plan with all amendments of a stage. Members keep their numbers; a departed one has no address."""

    digest: str = field(kw_only=True)  # hash of this stage
    plan: TrainingPlan = field(kw_only=True, repr=False)  # without amendments
    first_round: int = field(default=1, kw_only=True)
    links: Links | None = field(default=None, kw_only=True, compare=False, repr=False)  # None: those of the plan
    departed: frozenset[int] = field(default=frozenset(), kw_only=True)
    chain: "Chain" = field(kw_only=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Check what an amendment can change; the plan itself was checked before."""
        if self.links is not None:
            self.config.algorithm.check(int(self.graph.degrees.max()))

    @cached_property
    def hash(self) -> str:
        return self.digest

    @property
    def original_hash(self) -> str:
        return self.plan.hash

    @property
    def last_round(self) -> int:
        return self.chain.last_round(self)

    def joining_round(self, agent: int) -> int:
        name = self.members[agent].name
        return next((a.first_round for a in self.chain.amendments if (a.change, a.member) == ("join", name)), 1)

    def refresh(self) -> bool:
        return self.chain.refresh()

    def is_abandoned(self, agent: int) -> bool:
        removed = {a.member for a in self.chain.amendments if a.change == "leave" and a.member not in a.signatures}
        return self.last_round < self.config.rounds and removed.issuperset(
            self.neighbour_names(self.members[agent].name)
        )

    def accepts(self, digest: str, t: int) -> bool:
        return self.chain.accepts(digest, t)

    @cached_property
    def graph(self) -> Graph:
        return self.plan.graph if self.links is None else build_graph(self.links, self.active)

    @property
    def active(self) -> list[int]:
        """Members that have not left."""
        return [i for i in range(len(self.members)) if i not in self.departed]

    def plan_members(self, agent: int) -> list[int]:
        """Neighbourhood of an agent in the plan without amendments; empty if it joined later."""
        graph = self.plan.graph
        return graph.neighbourhood(agent).tolist() if agent < graph.agents else []

    def card(self, name: str) -> PeerInfo | None:
        """Card of a member of this stage; None if there is no such member."""
        return next((self.members[i] for i in self.active if self.members[i].name == name), None)

    def neighbour_names(self, name: str) -> list[str]:
        return [self.members[j].name for j in self.neighbours(self.agent(name))]


class Span(NamedTuple):
    """Rounds in which a certificate stands for a member, first and last."""

    first: int
    last: int

    def clamp(self, t: int) -> int:
        """The round of this span that is nearest to t."""
        return min(self.last, max(self.first, t))


class Chain:
    """A plan and its amendments. It grows while a peer runs, and never changes otherwise."""

    def __init__(
        self, plan: TrainingPlan, amendments: Iterable[Amendment] = (), find_next: FindNext = lambda number: None
    ):
        """Chain of a plan; `find_next` returns the amendment with a number once it is stored."""
        self._find_next = find_next
        shared = {name: getattr(plan, name) for name in TrainingPlan.__dataclass_fields__}
        self._stages: tuple[StagePlan, ...] = (StagePlan(**shared, digest=plan.hash, plan=plan, chain=self),)
        self.amendments: tuple[Amendment, ...] = ()
        for amendment in amendments:
            self.append(amendment)

    def append(self, amendment: Amendment) -> None:
        """Add the next amendment; PdslError unless it follows the chain, obeys the rules and is signed."""
        self._stages = (*self._stages, apply_amendment(self.newest, len(self.amendments), amendment))
        self.amendments = (*self.amendments, amendment)

    def refresh(self) -> bool:
        """Append amendments that were stored meanwhile. Returns whether there were any."""
        before = len(self.amendments)
        while (following := self._find_next(len(self.amendments) + 1)) is not None:
            self.append(following)
        return len(self.amendments) > before

    @property
    def newest(self) -> StagePlan:
        return self._stages[-1]

    def at(self, t: int) -> StagePlan:
        """Stage of a round."""
        return [stage for stage in self._stages if stage.first_round <= t][-1]

    def knows(self, digest: str) -> bool:
        """Whether a stage has this hash."""
        return any(stage.hash == digest for stage in self._stages)

    def accepts(self, digest: str, t: int) -> bool:
        return self.at(t).hash == digest if t > 0 else self.knows(digest)

    def last_round(self, stage: StagePlan) -> int:
        """Last round of a stage, before that of the next one; less than its first round if it has none."""
        later = self._stages[self._index(stage) + 1 :]
        return later[0].first_round - 1 if later else stage.config.rounds

    def _index(self, stage: StagePlan) -> int:
        return [known.hash for known in self._stages].index(stage.hash)

    def find_span(self, own: PeerInfo) -> Span:
        """Rounds in which a member takes part with its card.

        A certificate that is in no card came from `--renew`. It stands for the member's first card only: after a
        replacement, every new certificate needs an amendment, because the old machine must not continue.
        """
        cards = [stage.card(own.name) for stage in self._stages]
        known = [card.certificate for card in cards if card is not None]
        if not known:
            self.newest.agent(own.name)  # names the members
        certificate = own.certificate if own.certificate in known else known[0]
        held = [card is not None and card.certificate == certificate for card in cards]
        last = len(held) - 1 - held[::-1].index(True)
        span = Span(self._stages[held.index(True)].first_round, self.last_round(self._stages[last]))
        if span.last < span.first:
            raise PdslError(f"the card of {own.name} was replaced before its first round; run the newer machine")
        return span

    def is_replacement(self, own: PeerInfo) -> bool:
        """Whether a card replaced an earlier one of the same member."""
        cards = [card for stage in self._stages if (card := stage.card(own.name)) is not None]
        return own.certificate in {card.certificate for card in cards} - {cards[0].certificate}

    def has_first_card(self, own: PeerInfo) -> bool:
        """Whether a card has the certificate with which its member came into the plan."""
        cards = [card for stage in self._stages if (card := stage.card(own.name)) is not None]
        return own.certificate == cards[0].certificate

    def replaced_cards(self, stage: StagePlan) -> list[PeerInfo]:
        """Cards of earlier stages whose certificates are not those of a stage any more."""
        earlier = self._stages[: self._index(stage)]
        current = {card.certificate for card in stage.members}
        return list({c.certificate: c for s in earlier for c in s.members if c.certificate not in current}.values())


def apply_amendment(stage: StagePlan, count: int, a: Amendment) -> StagePlan:
    """The stage after the next amendment; `count`: amendments before it. PdslError unless it is valid."""
    where = check_chain(stage, count, a)
    changed = CHANGES[a.change](stage, a, where)
    check_signatures(stage, a, where)
    degrees = changed.graph.degrees[changed.active]
    quorum = min(changed.timeouts.quorum, int(degrees.min()) - 1)
    return replace(changed, timeouts=changed.timeouts.model_copy(update={"quorum": quorum}))


def check_chain(stage: StagePlan, count: int, a: Amendment) -> str:
    """Raise PdslError unless an amendment follows the stage and its `count` amendments. Returns its name for errors."""
    where = f"amendment {a.number} ({a.hash[:16]})"
    if a.plan != stage.original_hash:
        raise PdslError(f"{where} belongs to another plan; request the amendments of this plan")
    if a.number != count + 1:
        raise PdslError(
            f"{where} cannot be next: the next one is amendment {count + 1}; apply them in order, each once"
        )
    if a.previous != stage.hash:
        raise PdslError(
            f"{where} follows {a.previous[:16]}, but the plan is at {stage.hash[:16]}: the members have different"
            " amendments; agree on one, and sign the other again after it"
        )
    first = max(2, stage.first_round)
    if not first <= a.first_round <= stage.config.rounds:
        raise PdslError(
            f"{where}: first_round={a.first_round} is not between {first} and {stage.config.rounds}; choose another"
        )
    return where


def find_signers(stage: StagePlan, a: Amendment) -> list[list[str]]:
    """Sets of members of which one must sign: the member itself or all its neighbours; all future neighbours."""
    if a.change == "join":
        return [list(a.neighbours)]
    return [[a.member], stage.neighbour_names(a.member)]


def check_signatures(stage: StagePlan, a: Amendment, where: str) -> None:
    """Raise PdslError unless each signature is valid and the signers suffice."""
    for name in a.signatures:
        card = stage.card(name)
        if card is None:
            raise PdslError(f"{where} is signed by {name}, which is no member at that time; request the file again")
        if not a.is_signed_by(card):
            raise PdslError(
                f"{where}: the signature of {name} is not valid: forged, damaged, or made with a key that is not in the"
                " plan; request the file again"
            )
    needed = find_signers(stage, a)
    if not any(set(names) <= set(a.signatures) for names in needed):
        missing = " or ".join(", ".join(sorted(set(names) - set(a.signatures))) for names in needed)
        raise PdslError(f"{where} lacks signatures: {missing}; they sign with: pdsl peer sign FOLDER FILE")


def _leave(stage: StagePlan, a: Amendment, where: str) -> StagePlan:
    i = _find_member(stage, a, where)
    if len(stage.active) < 3:
        raise PdslError(f"{where}: only one member would remain; stop the run instead")
    gone = replace(stage.members[i], address=NO_ADDRESS)
    rest = [stage.members[j] for j in stage.active if j != i]
    _check_addresses(rest, where)
    links = remove_member(_links(stage), i)
    return _change(stage, a, tuple(gone if j == i else c for j, c in enumerate(stage.members)), links, {i})


def _join(stage: StagePlan, a: Amendment, where: str) -> StagePlan:
    assert a.card is not None  # the parser requires it
    if any(card.name == a.member for card in stage.members):
        raise PdslError(
            f"{where}: {a.member} is or was a member; a member that left cannot return, because its budget would start"
            " again"
        )
    if not a.neighbours or len(set(a.neighbours)) < len(a.neighbours) or len(stage.members) >= MAX_MEMBERS:
        raise PdslError(f"{where}: a new member needs at least one neighbour, each named once; sign another amendment")
    for name in a.neighbours:
        if stage.card(name) is None:
            raise PdslError(f"{where}: neighbour {name} is not a member; sign another amendment")
    _check_card(stage, a.card, where)
    neighbours = [stage.agent(name) for name in a.neighbours]
    return _change(stage, a, (*stage.members, a.card), add_member(_links(stage), neighbours))


def _replace(stage: StagePlan, a: Amendment, where: str) -> StagePlan:
    assert a.card is not None  # the parser requires it
    i, card = _find_member(stage, a, where), a.card
    _check_card(stage, card, where, besides=i)
    return _change(stage, a, tuple(card if j == i else c for j, c in enumerate(stage.members)), _links(stage))


CHANGES: dict[str, Callable[[StagePlan, Amendment, str], StagePlan]] = {
    "leave": _leave,
    "join": _join,
    "replace": _replace,
}


def _change(
    stage: StagePlan, a: Amendment, members: tuple[PeerInfo, ...], links: Links, left: set[int] | None = None
) -> StagePlan:
    departed = stage.departed | (left or set())
    return replace(stage, members=members, links=links, departed=departed, digest=a.hash, first_round=a.first_round)


def _links(stage: StagePlan) -> Links:
    return get_links(stage.graph) if stage.links is None else np.copy(stage.links)


def _find_member(stage: StagePlan, a: Amendment, where: str) -> int:
    if stage.card(a.member) is None:
        raise PdslError(f"{where}: {a.member} is not a member at that time; request the file again")
    return stage.agent(a.member)


def _check_card(stage: StagePlan, card: PeerInfo, where: str, besides: int | None = None) -> None:
    """Raise PdslError if a new card has a certificate that was ever used, or another member's address."""
    used = {c.certificate for c in [*stage.members, *stage.chain.replaced_cards(stage)]}
    if card.certificate in used:
        raise PdslError(f"{where}: the certificate of {card.name} was used before; create a new one: pdsl peer init")
    others = [stage.members[i] for i in stage.active if i != besides]
    if card.address != NO_ADDRESS and card.address in {c.address for c in others}:
        raise PdslError(f"{where}: {card.address} is the address of another member; choose another")
    _check_addresses([*others, card], where)


def _check_addresses(cards: list[PeerInfo], where: str) -> None:
    if all(card.address == NO_ADDRESS for card in cards):
        raise PdslError(f"{where}: no remaining member has an address, so none can be called")
