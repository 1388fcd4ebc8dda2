"""Joining a plan: is it about us, whom do we talk to, and whose certificates do we accept from now on."""

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
    begun = begun_plan(own)
    if begun not in (None, plan.hash):
        raise PdslError(f"{own.folder} has begun another plan; make a new folder with 'pdsl peer init' for this one")
    if plan.members[me] != own.card and begun is None:  # else the key was renewed since, and neighbours pinned it
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


def begun_plan(own: Identity) -> str | None:
    """The hash of the plan under which this organisation has charged something; None if there is none.

    It stands beside `run/`, so that a budget is not forgotten together with what was spent of it.
    """
    file = own.folder / BEGUN
    return file.read_text(encoding="utf-8", errors="replace").strip() if file.exists() else None


def begin_plan(own: Identity, plan: Plan) -> None:
    """From now on the folder is for this plan."""
    if begun_plan(own) != plan.hash:
        write_whole(own.folder / BEGUN, f"{plan.hash}\n".encode())


def joined(own: Identity) -> Plan:
    """The plan that this organisation has joined."""
    if not (own.folder / PLAN).exists():
        raise PdslError(f"{own.folder} has joined no plan; 'pdsl peer join {own.folder} plan.toml'")
    plan = Plan.read(own.folder / PLAN)
    plan.agent(own.card.name)
    return plan
