"""Membership in a plan: joining it, loading it, and the record of charged rounds that binds a folder to its plan."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pdsl.peer.amendment import MAX_NUMBER, Amendment
from pdsl.peer.identity import AMENDMENTS, CHARGE_MARKER, PINS, PLAN, Identity
from pdsl.peer.plan import TrainingPlan
from pdsl.peer.routes import find_contacts
from pdsl.peer.stages import Chain, StagePlan
from pdsl.peer.trust_store import TrustStore
from pdsl.utils.errors import PdslError
from pdsl.utils.files import read_file, write_whole


def join(own: Identity, plan: TrainingPlan, amendments: Sequence[Amendment] = ()) -> list[int]:
    """Pin the certificates of neighbours and relays, and store the plan and its amendments. Returns the neighbours.

    Existing pins stay unchanged: joining again does not restore a revoked certificate. Without amendments, those that
    the folder has of this plan are kept.
    """
    chain = Chain(plan, amendments or read_amendments(own.folder, plan))
    stage = chain.newest
    me = stage.agent(own.card.name)
    # After the first charge the card may differ: the key was renewed, and neighbours pinned the new certificate.
    if check_charge_marker(own, plan) is None and stage.card(own.card.name) != own.card:
        raise PdslError(
            f"the plan has another card for {own.card.name} than {own.folder}; send your card again and get a new plan"
        )
    pin_contacts(own, stage)
    write_whole(own.folder / PLAN, plan.to_toml().encode())
    for amendment in chain.amendments:
        store_amendment(own, amendment)
    return stage.neighbours(me)


def pin_contacts(own: Identity, stage: StagePlan) -> None:
    """Pin the certificates of neighbours and relays of which the folder has no pins yet."""
    trust_store = TrustStore(own.folder / PINS)
    for j in find_contacts(stage, stage.agent(own.card.name)):
        if not (own.folder / PINS / f"{stage.members[j].name}.pem").exists():
            trust_store.add(stage.members[j])
        trust_store.certificates(stage.members[j].name)  # reports a damaged file now


def pin_stage(own: Identity, stage: StagePlan) -> None:
    """Pin what a stage needs when it starts, and remove the pins of replaced certificates."""
    pin_contacts(own, stage)
    trust_store = TrustStore(own.folder / PINS)
    for card in stage.chain.replaced_cards(stage):
        trust_store.discard(card)


def load_chain(own: Identity) -> Chain:
    """Load the plan that an organisation has joined, with its amendments."""
    if not (own.folder / PLAN).exists():
        raise PdslError(f"{own.folder} has not joined a plan; run: pdsl peer join {own.folder} plan.toml")
    plan = TrainingPlan.read(own.folder / PLAN)
    chain = Chain(plan, read_amendments(own.folder, plan), lambda number: _read_amendment(own.folder, plan, number))
    chain.newest.agent(own.card.name)
    return chain


def load_plan(own: Identity) -> StagePlan:
    """Load the plan that an organisation has joined, as it is after all amendments."""
    return load_chain(own).newest


def load_current_stage(own: Identity) -> StagePlan:
    """Load the plan with the amendments that are in force after the last charged round."""
    chain, marker = load_chain(own), read_charge_marker(own)
    return chain.at(chain.find_span(own.card).clamp(1 if marker is None else marker.round + 1))


def store_amendment(own: Identity, amendment: Amendment) -> None:
    (own.folder / AMENDMENTS).mkdir(exist_ok=True)
    write_whole(own.folder / AMENDMENTS / _file_name(amendment.number), amendment.to_toml().encode())


def read_amendments(folder: Path, plan: TrainingPlan) -> list[Amendment]:
    """Amendments of this plan in the folder."""
    found: list[Amendment] = []
    while (following := _read_amendment(folder, plan, len(found) + 1)) is not None:
        found.append(following)
    return found


def _read_amendment(folder: Path, plan: TrainingPlan, number: int) -> Amendment | None:
    """Amendment with a number; None if there is none, or if it belongs to another plan."""
    path = folder / AMENDMENTS / _file_name(number)
    if number > MAX_NUMBER or not path.exists():
        return None
    found = Amendment.read(path)
    return found if found.plan == plan.hash else None


def _file_name(number: int) -> str:
    return f"{number:03}.toml"


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
        hash_, *rounds = read_file(own.folder / CHARGE_MARKER).decode(errors="replace").split()
        found = ChargeMarker(hash_, max(map(int, rounds), default=0))
    except (FileNotFoundError, ValueError):
        return None
    return found if len(found.plan) == 64 else None


def check_charge_marker(own: Identity, plan: TrainingPlan) -> ChargeMarker | None:
    """Read the charge marker; PdslError if it belongs to another plan."""
    found = read_charge_marker(own)
    if found is not None and found.plan != plan.original_hash:
        raise PdslError(f"{own.folder} is bound to another plan; create a new folder for this one: pdsl peer init")
    return found


def write_charge_marker(own: Identity, plan: TrainingPlan, t: int) -> None:
    """Record that round t is charged: the plan's hash on the first line, then one line per round."""
    before = read_charge_marker(own)
    if before is None:
        write_whole(own.folder / CHARGE_MARKER, f"{plan.original_hash}\n{t}\n".encode())
    elif before.round < t:
        with (own.folder / CHARGE_MARKER).open("a", encoding="utf-8") as file:
            file.write(f"{t}\n")
            file.flush()
            os.fsync(file.fileno())
