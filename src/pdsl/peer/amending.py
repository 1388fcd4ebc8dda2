"""Propose, sign and apply amendments in an organisation's folder."""

from collections.abc import Sequence

from pdsl.peer.amendment import Amendment, Change
from pdsl.peer.identity import PINS, Identity, PeerInfo
from pdsl.peer.membership import load_chain, pin_contacts, read_charge_marker, store_amendment
from pdsl.peer.routes import find_contacts
from pdsl.peer.stages import CHANGES, Chain, StagePlan, check_chain, find_signers
from pdsl.peer.trust_store import TrustStore
from pdsl.utils.errors import PdslError


def propose(
    own: Identity,
    change: Change,
    member: str,
    first_round: int,
    card: PeerInfo | None = None,
    neighbours: Sequence[str] = (),
) -> Amendment:
    """The next amendment of the plan, signed by this organisation; PdslError if it could never be applied."""
    chain = load_chain(own)
    stage = chain.newest
    number = len(chain.amendments) + 1
    made = Amendment(
        stage.original_hash, number, stage.hash, first_round, change, member, card=card, neighbours=tuple(neighbours)
    )
    _check_future(own, made)
    return sign(own, made)


def sign(own: Identity, amendment: Amendment) -> Amendment:
    """Add the signature of this organisation, if the amendment would be the next one and needs it."""
    chain = load_chain(own)
    stage = chain.newest
    check_chain(stage, len(chain.amendments), amendment)
    CHANGES[amendment.change](stage, amendment, f"amendment {amendment.number}")
    _check_future(own, amendment)
    card = stage.card(own.card.name)
    if card is None or card.certificate != own.card.certificate:
        raise PdslError(
            f"{own.folder} has another certificate of {own.card.name} than the plan, so its signature would not count;"
            " have your neighbours record the new card: pdsl peer replace"
        )
    if not any(own.card.name in names for names in find_signers(stage, amendment)):
        raise PdslError(f"{own.card.name} is neither {amendment.member} nor a neighbour of it; ask these to sign")
    return amendment.sign(own)


def find_missing(own: Identity, amendment: Amendment) -> list[list[str]]:
    """Sets of members of which one must still sign; empty if the signatures suffice."""
    missing = [
        [name for name in names if name not in amendment.signatures]
        for names in find_signers(load_chain(own).newest, amendment)
    ]
    return missing if all(missing) else []


def apply(own: Identity, amendment: Amendment, late: bool = False) -> StagePlan:
    """Store an amendment and pin the certificates that it needs. Returns the stage that it starts.

    `late`: also if rounds from its first one on were charged without it. They stay as they are, and the amendment is in
    force from the next round on.
    """
    chain = load_chain(own)
    if any(amendment.hash == known.hash for known in chain.amendments):
        raise PdslError(f"{own.folder} has amendment {amendment.number} already; nothing changed")
    chain.append(amendment)
    if not late:
        _check_future(own, amendment)
    stage = chain.newest
    if stage.card(own.card.name) is not None:
        pin_contacts(own, stage)
        _pin_replacement(own, chain, amendment)
    store_amendment(own, amendment)
    return stage


def _pin_replacement(own: Identity, chain: Chain, amendment: Amendment) -> None:
    """Accept the certificate of a replaced card besides the old one, until the amendment is in force."""
    stage = chain.newest
    contacts = [stage.members[j].name for j in find_contacts(stage, stage.agent(own.card.name))]
    if amendment.card is not None and amendment.member in contacts:
        TrustStore(own.folder / PINS).add(amendment.card)


def _check_future(own: Identity, amendment: Amendment) -> None:
    marker = read_charge_marker(own)
    if marker is not None and marker.round >= amendment.first_round:
        raise PdslError(
            f"amendment {amendment.number} is to be in force from round {amendment.first_round} on, but {own.card.name}"
            f" has run round {marker.round}; agree on a later round"
        )
