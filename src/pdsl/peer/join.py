"""Joining a plan: is it about us, whom do we talk to, and whose certificates do we accept from now on."""

import os
from typing import NamedTuple

from pdsl.errors import PdslError
from pdsl.files import write_whole
from pdsl.peer.identity import Identity
from pdsl.peer.pins import Pins
from pdsl.peer.plan import PLAN, Plan

PINS, RUN, BEGUN = "pins", "run", "begun"


def join(own: Identity, plan: Plan) -> list[int]:
    """Pin the neighbours' certificates and keep the plan. Returns the neighbours.

    Pins that are there already stay as they are: to join again does not bring back what was revoked.
    """
    me = plan.agent(own.card.name)
    if (
        begun_under(own, plan) is None and plan.members[me] != own.card
    ):  # else the key was renewed since, and neighbours pinned it
        raise PdslError(
            f"the plan has another card for {own.card.name} than {own.folder} has; send yours again, and get a new plan"
        )
    pins = Pins(own.folder / PINS)
    neighbours = plan.neighbours(me)
    for j in neighbours:
        if not (own.folder / PINS / f"{plan.members[j].name}.pem").exists():
            pins.add(plan.members[j])
        pins.of(plan.members[j].name)  # whoever has a damaged one learns it now
    write_whole(own.folder / PLAN, plan.to_toml().encode())
    return neighbours


class Begun(NamedTuple):
    """The plan under which this organisation has charged something, and the last round of it that was charged.

    It stands beside `run/`, so that what was spent is not forgotten with the ledger, and an older one is known.
    """

    plan: str  # its hash
    round: int


def begun(own: Identity) -> Begun | None:
    """None if nothing was charged in this folder."""
    try:
        hash_, *rounds = (own.folder / BEGUN).read_text(encoding="utf-8", errors="replace").split()
        found = Begun(hash_, max(map(int, rounds), default=0))
    except (FileNotFoundError, ValueError):
        return None
    return found if len(found.plan) == 64 else None  # if it is damaged, the ledger has to be believed


def begun_under(own: Identity, plan: Plan) -> Begun | None:
    """The same, refused if it was under another plan."""
    found = begun(own)
    if found is not None and found.plan != plan.hash:
        raise PdslError(f"{own.folder} has begun another plan; make a new folder with 'pdsl peer init' for this one")
    return found


def write_begun(own: Identity, plan: Plan, t: int) -> None:
    """Round t is charged. A line per round, and the plan's hash first."""
    before = begun(own)
    if before is None:
        write_whole(own.folder / BEGUN, f"{plan.hash}\n{t}\n".encode())
    elif before.round < t:
        with (own.folder / BEGUN).open("a", encoding="utf-8") as file:
            file.write(f"{t}\n")
            file.flush()
            os.fsync(file.fileno())


def joined(own: Identity) -> Plan:
    """The plan that this organisation has joined."""
    if not (own.folder / PLAN).exists():
        raise PdslError(f"{own.folder} has joined no plan; 'pdsl peer join {own.folder} plan.toml'")
    plan = Plan.read(own.folder / PLAN)
    plan.agent(own.card.name)
    return plan
