"""Routes between members: which can be called, and which relay connects two that cannot.

A member without an address calls its neighbours and is never called. Two neighbours without addresses meet at a relay,
any member with an address: their TLS connection passes through it, so it can neither read nor change anything.
"""

from pdsl.peer.identity import NO_ADDRESS
from pdsl.peer.plan import TrainingPlan

MAX_RELAYS = 3  # tried for a pair of members


def has_address(plan: TrainingPlan, i: int) -> bool:
    return plan.members[i].address != NO_ADDRESS


def find_relays(plan: TrainingPlan, a: int, b: int) -> list[int]:
    """Relays for two members, common neighbours first; empty if they need none."""
    if has_address(plan, a) or has_address(plan, b):
        return []
    close = [set(plan.neighbours(a)), set(plan.neighbours(b))]
    reachable = [i for i in range(len(plan.members)) if has_address(plan, i)]
    return sorted(reachable, key=lambda i: -sum(i in near for near in close))[:MAX_RELAYS]


def find_contacts(plan: TrainingPlan, me: int) -> list[int]:
    """Members that connect to this one or are called by it: its neighbours, its relays, and members it relays for."""
    found = set(plan.neighbours(me))
    for j in plan.neighbours(me):
        found.update(find_relays(plan, me, j))
    if has_address(plan, me):
        for a, b in find_relayed_pairs(plan, me):
            found |= {a, b}
    return sorted(found - {me})


def find_relayed_pairs(plan: TrainingPlan, relay: int) -> set[tuple[int, int]]:
    """Ordered pairs of neighbours for which a member is a relay."""
    without = [i for i in range(len(plan.members)) if not has_address(plan, i)]
    pairs = {(a, b) for a in without for b in plan.neighbours(a) if not has_address(plan, b)}
    return {pair for pair in pairs if relay in find_relays(plan, *pair)}
