"""Membership in a plan: joining it, loading it, and the record of charged rounds that binds a folder to its plan."""

import os
from typing import NamedTuple

from pdsl.peer.identity import CHARGE_MARKER, PINS, PLAN, Identity
from pdsl.peer.plan import TrainingPlan
from pdsl.peer.routes import find_contacts
from pdsl.peer.trust_store import TrustStore
from pdsl.utils.errors import PdslError
from pdsl.utils.files import write_whole


def join(own: Identity, plan: TrainingPlan) -> list[int]:
    """Pin the certificates of neighbours and relays, and store the plan. Returns the neighbours.

    Existing pins stay unchanged: joining again does not restore a revoked certificate.
    """
    me = plan.agent(own.card.name)
    # After the first charge the card may differ: the key was renewed, and neighbours pinned the new certificate.
    if check_charge_marker(own, plan) is None and plan.members[me] != own.card:
        raise PdslError(
            f"the plan has another card for {own.card.name} than {own.folder}; send your card again and get a new plan"
        )
    trust_store = TrustStore(own.folder / PINS)
    for j in find_contacts(plan, me):
        if not (own.folder / PINS / f"{plan.members[j].name}.pem").exists():
            trust_store.add(plan.members[j])
        trust_store.certificates(plan.members[j].name)  # reports a damaged file now
    write_whole(own.folder / PLAN, plan.to_toml().encode())
    return plan.neighbours(me)


def load_plan(own: Identity) -> TrainingPlan:
    """Load the plan that an organisation has joined."""
    if not (own.folder / PLAN).exists():
        raise PdslError(f"{own.folder} has not joined a plan; run: pdsl peer join {own.folder} plan.toml")
    plan = TrainingPlan.read(own.folder / PLAN)
    plan.agent(own.card.name)
    return plan


class ChargeMarker(NamedTuple):
    """Plan under which an organisation has charged rounds, and the last of those rounds.

    The file is next to `run/`. It shows that a ledger is missing or older than the last charge.
    """

    plan: str  # hash
    round: int


def read_charge_marker(own: Identity) -> ChargeMarker | None:
    """Read the charge marker; None if nothing was charged in this folder, or if the file is damaged.

    Without a usable marker the ledger alone is trusted.
    """
    try:
        hash_, *rounds = (own.folder / CHARGE_MARKER).read_text(encoding="utf-8", errors="replace").split()
        found = ChargeMarker(hash_, max(map(int, rounds), default=0))
    except (FileNotFoundError, ValueError):
        return None
    return found if len(found.plan) == 64 else None


def check_charge_marker(own: Identity, plan: TrainingPlan) -> ChargeMarker | None:
    """Read the charge marker; PdslError if it belongs to another plan."""
    found = read_charge_marker(own)
    if found is not None and found.plan != plan.hash:
        raise PdslError(f"{own.folder} is bound to another plan; create a new folder for this one: pdsl peer init")
    return found


def write_charge_marker(own: Identity, plan: TrainingPlan, t: int) -> None:
    """Record that round t is charged: the plan's hash on the first line, then one line per round."""
    before = read_charge_marker(own)
    if before is None:
        write_whole(own.folder / CHARGE_MARKER, f"{plan.hash}\n{t}\n".encode())
    elif before.round < t:
        with (own.folder / CHARGE_MARKER).open("a", encoding="utf-8") as file:
            file.write(f"{t}\n")
            file.flush()
            os.fsync(file.fileno())
