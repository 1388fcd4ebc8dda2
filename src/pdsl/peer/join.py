"""Joining a plan: is it about us, whom do we talk to, and whose certificates do we accept from now on."""

from pdsl.errors import PdslError
from pdsl.files import write_whole
from pdsl.peer.identity import Identity
from pdsl.peer.pins import Pins
from pdsl.peer.plan import PLAN, Plan

PINS, RUN = "pins", "run"


def join(own: Identity, plan: Plan) -> list[int]:
    """Pin the neighbours' certificates and keep the plan. Returns the neighbours.

    Pins that are there already stay as they are: to join again does not bring back what was revoked.
    """
    me = plan.agent(own.card.name)
    if plan.members[me] != own.card:
        raise PdslError(
            f"the plan has another card for {own.card.name} than {own.folder} has; send yours again, and get a new plan"
        )
    kept = own.folder / PLAN
    if kept.exists() and (own.folder / RUN).exists() and Plan.read(kept).hash != plan.hash:
        raise PdslError(f"{own.folder} has begun another plan; make a new folder with 'pdsl peer init' for this one")
    pins = Pins(own.folder / PINS)
    neighbours = plan.neighbours(me)
    for j in neighbours:
        if not (own.folder / PINS / f"{plan.members[j].name}.pem").exists():
            pins.add(plan.members[j])
    write_whole(kept, plan.to_toml().encode())
    return neighbours


def joined(own: Identity) -> Plan:
    """The plan that this organisation has joined."""
    if not (own.folder / PLAN).exists():
        raise PdslError(f"{own.folder} has joined no plan; 'pdsl peer join {own.folder} plan.toml'")
    plan = Plan.read(own.folder / PLAN)
    plan.agent(own.card.name)
    return plan
