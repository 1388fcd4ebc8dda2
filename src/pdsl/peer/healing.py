"""Graph of the members after a departure or an arrival.

A departed member keeps its number and has no edges, so that ledgers, logs and receipts stay valid. The others heal the
graph by a rule that needs nothing but the graph:

1. The departed member's neighbours fall into groups that still reach each other without it. From each group, the
   neighbour with the fewest neighbours is chosen, and the first in the plan of several. The chosen are joined in a
   ring, in the order of the plan.
2. If there is one group only and the departed member had exactly two neighbours, these two become neighbours: a ring
   stays a ring.

So the graph stays connected, and no member gets more than one neighbour more than it had.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from pdsl.topology.graph import Floats, Graph, Links, metropolis


@dataclass(frozen=True, eq=False)
class MemberGraph(Graph):
    """Graph of all members there ever were; those outside `active` have no neighbours and do not count."""

    active: tuple[int, ...] = field(kw_only=True)

    @cached_property
    def eigenvalues(self) -> Floats:
        """Eigenvalues of W among the active members, ascending; the last is 1."""
        return np.linalg.eigvalsh(self.W[np.ix_(self.active, self.active)]).astype(np.float64)

    def describe(self) -> str:
        degrees = self.degrees[list(self.active)]
        return (
            f"{self.name} graph of {len(self.active)} agents, {degrees.min()} to {degrees.max()} members each,"
            f" spectral gap {self.spectral_gap:.3g}"
        )


def build_graph(links: Links, active: Iterable[int]) -> MemberGraph:
    """Graph with Metropolis–Hastings weights; PdslError unless the active members are at least two and connected."""
    members = tuple(sorted(active))
    metropolis("amended", links[np.ix_(members, members)])  # checks its size, and that it is connected
    W = metropolis("amended", links, connected=False).W
    return MemberGraph("amended", W, active=members, connected=False)


def get_links(graph: Graph) -> Links:
    """Links between different members."""
    links: Links = graph.W > 0
    np.fill_diagonal(links, False)
    return links


def remove_member(links: Links, member: int) -> Links:
    """Links after the departure of a member, healed by the rule of this module."""
    neighbours = np.flatnonzero(links[member]).tolist()
    healed = links.copy()
    healed[member, :] = healed[:, member] = False
    groups = _find_groups(healed, neighbours)
    if len(groups) == 1 and len(neighbours) == 2:
        groups = [[j] for j in neighbours]
    chosen = sorted(min(group, key=lambda j: (healed[j].sum(), j)) for group in groups)
    for a, b in pairwise([*chosen, chosen[0]] if len(chosen) > 1 else []):
        healed[a, b] = healed[b, a] = True
    return healed


def add_member(links: Links, neighbours: Iterable[int]) -> Links:
    """Links with one more member, which is the last one."""
    extended = np.pad(links, (0, 1))
    for j in neighbours:
        extended[-1, j] = extended[j, -1] = True
    return extended


def _find_groups(links: Links, members: list[int]) -> list[list[int]]:
    """Split members into groups that reach each other."""
    groups: list[list[int]] = []
    rest = list(members)
    while rest:
        reached = _reach(links, rest[0])
        groups.append([j for j in rest if reached[j]])
        rest = [j for j in rest if not reached[j]]
    return groups


def _reach(links: Links, start: int) -> Links:
    """Whether each member can be reached from `start`, [M]."""
    reached = np.zeros(len(links), dtype=np.bool_)
    frontier = np.array([start])
    while frontier.size:
        reached[frontier] = True
        frontier = np.flatnonzero(links[frontier].any(axis=0) & ~reached)
    return reached
