"""Fixed graphs: named topologies and random graphs.

The full graph has ω = 1/M, the ring 1/3, and the bipartite graph the weights of the CGA code. All other graphs have
Metropolis–Hastings weights.
"""

import math
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from pdsl.settings import GraphSettings
from pdsl.topology.graph import Graph, Links, check_size, is_connected, metropolis
from pdsl.utils.errors import PdslError
from pdsl.utils.random import Streams

if TYPE_CHECKING:
    import networkx

MAX_DRAWS = 100  # draws of a random graph until one is connected


def _links(name: str, agents: int, generate: "Callable[[ModuleType], networkx.Graph[Any]]") -> Links:
    """Links of the graph that `generate` makes with the module networkx."""
    check_size(name, agents)
    import networkx  # here, because it takes long to import

    linked: Links = networkx.to_numpy_array(generate(networkx), weight=None) > 0
    np.fill_diagonal(linked, False)
    return linked


def _settings(kind: str, agents: int, **others: Any) -> GraphSettings:
    return GraphSettings(kind=kind, agents=agents, **others)


def full(agents: int) -> Graph:
    """All agents are neighbours: ω = 1/M."""
    check_size("full", agents)
    return Graph("full", np.full((agents, agents), 1 / agents), settings=_settings("full", agents))


def ring(agents: int) -> Graph:
    """Each agent has two neighbours: ω = 1/3. With two or three agents this is the full graph."""
    linked = _links("ring", agents, lambda nx: nx.cycle_graph(agents))
    return Graph("ring", (linked + np.eye(agents)) / min(agents, 3), settings=_settings("ring", agents))


def bipartite(agents: int) -> Graph:
    """Two hubs, agents 0 and 1, joined to all others but not to each other, with the weights of the CGA code.

    An edge has weight a = ⌊100/(M-1)⌋/100. Beyond 101 agents that would be 0, and a = 1/(M-1).
    """
    if agents < 4:
        raise PdslError(f"graph 'bipartite' has {agents} agents, and at least 4 are needed; try graph.kind=line")
    a = 100 // (agents - 1) / 100 or 1 / (agents - 1)
    linked = _links("bipartite", agents, lambda nx: nx.complete_bipartite_graph(2, agents - 2))
    W = np.where(linked, a, 0.0)
    np.fill_diagonal(W, 1 - W.sum(axis=1))
    return Graph("bipartite", W, settings=_settings("bipartite", agents))


def complete_bipartite(agents: int) -> Graph:
    """Each agent with an even number is joined to each agent with an odd number."""
    check_size("complete-bipartite", agents)
    odd = np.arange(agents) % 2 == 1
    return _metropolis("complete-bipartite", np.not_equal.outer(odd, odd))


def star(agents: int) -> Graph:
    """Agent 0 is joined to all others."""
    return _metropolis("star", _links("star", agents, lambda nx: nx.star_graph(agents - 1)))


def line(agents: int) -> Graph:
    """A ring without one edge: each of the two ends has one neighbour."""
    return _metropolis("line", _links("line", agents, lambda nx: nx.path_graph(agents)))


def grid(agents: int) -> Graph:
    """Rows and columns, as square as M allows; each agent is joined to the agents beside, above and below it."""
    return _lattice("grid", agents, periodic=False)


def torus(agents: int) -> Graph:
    """A grid whose rows and columns are closed to rings."""
    return _lattice("torus", agents, periodic=True)


def _metropolis(kind: str, linked: Links, **others: Any) -> Graph:
    return metropolis(kind, linked, _settings(kind, len(linked), **others))


def _lattice(name: str, agents: int, periodic: bool) -> Graph:
    check_size(name, agents)
    rows = max(r for r in range(1, math.isqrt(agents) + 1) if agents % r == 0)
    if rows == 1:
        sizes = "4" if agents < 4 else f"{agents - 1} or {agents + 1}"
        raise PdslError(
            f"graph {name!r} cannot have {agents} agents: a prime has no rows and columns; try agents={sizes}"
        )
    return _metropolis(name, _links(name, agents, lambda nx: nx.grid_2d_graph(rows, agents // rows, periodic=periodic)))


def exponential(agents: int) -> Graph:
    """Agent i is joined to i ± 2^k mod M, for every 2^k below M."""
    steps = [2**k for k in range((agents - 1).bit_length())]
    return _metropolis("exponential", _links("exponential", agents, lambda nx: nx.circulant_graph(agents, steps)))


def k_regular(agents: int, degree: int = 4, seed: int = 0) -> Graph:
    """Random connected graph in which each agent has `degree` neighbours besides itself.

    Args:
        agents: number of agents.
        degree: neighbours of each agent, itself not counted; agents times degree must be even.
        seed: the same seed gives the same graph.
    """
    what = f"graph 'k-regular' of {agents} agents cannot have degree {degree}"
    check_size("k-regular", agents)
    if not 1 <= degree < agents:
        raise PdslError(f"{what}: it lies between 1 and {agents - 1}; try degree={min(agents - 1, 4)}")
    if agents * degree % 2:
        raise PdslError(f"{what}: agents times degree must be even; try degree={degree + 1} or agents={agents + 1}")
    if degree == 1 and agents > 2:
        raise PdslError(f"{what}: that makes pairs, which are not connected; try degree=2 or more")
    # networkx is slow if degree is near M, and the complement of a regular graph is regular
    missing = agents - 1 - degree

    def draw(rng: np.random.Generator) -> Links:
        number = int(rng.integers(2**63))  # networkx is 10 to 30 times slower with a generator than with an integer
        drawn = _links("k-regular", agents, lambda nx: nx.random_regular_graph(min(degree, missing), agents, number))
        return drawn if degree <= missing else ~drawn & ~np.eye(agents, dtype=np.bool_)

    linked = _draw_connected("k-regular", draw, seed, f"degree={degree + 1} or more, or kind=ring")
    return _metropolis("k-regular", linked, degree=degree, seed=seed)


def erdos_renyi(agents: int, probability: float = 0.3, seed: int = 0) -> Graph:
    """Each pair of agents is joined with this probability; redrawn until the graph is connected.

    Args:
        agents: number of agents.
        probability: of each edge.
        seed: the same seed gives the same graph.
    """
    check_size("erdos-renyi", agents)
    _check_probability("erdos-renyi", probability)

    def draw(rng: np.random.Generator) -> Links:
        upper = np.triu(rng.random((agents, agents)) < probability, k=1)
        return upper | upper.T

    high = min(1.0, 2 * math.log(agents) / agents)  # beyond log(M)/M it is connected almost surely
    linked = _draw_connected("erdos-renyi", draw, seed, f"to raise probability, e.g. to {high:.2g}")
    return _metropolis("erdos-renyi", linked, probability=probability, seed=seed)


def small_world(agents: int, degree: int = 4, probability: float = 0.3, seed: int = 0) -> Graph:
    """Watts–Strogatz: a ring lattice of this degree, each edge rewired with this probability; connected.

    Args:
        agents: number of agents.
        degree: neighbours of each agent in the lattice, itself not counted; even.
        probability: that an edge is rewired.
        seed: the same seed gives the same graph.
    """
    what = f"graph 'small-world' of {agents} agents cannot have degree {degree}"
    if agents < 3:
        raise PdslError(f"graph 'small-world' has {agents} agents, and at least 3 are needed; try graph.kind=full")
    if not 2 <= degree < agents:
        raise PdslError(f"{what}: it lies between 2 and {agents - 1}; try degree={2 if agents < 5 else 4}")
    if degree % 2:
        raise PdslError(f"{what}: it must be even, half to each side of the ring; try degree={degree - 1 or 2}")
    _check_probability("small-world", probability)

    def draw(rng: np.random.Generator) -> Links:
        number = int(rng.integers(2**63))
        return _links("small-world", agents, lambda nx: nx.watts_strogatz_graph(agents, degree, probability, number))

    linked = _draw_connected("small-world", draw, seed, "a larger degree or a lower probability")
    return _metropolis("small-world", linked, degree=degree, probability=probability, seed=seed)


def _check_probability(name: str, probability: float) -> None:
    if not 0 < probability <= 1:
        raise PdslError(f"graph {name!r} has probability {probability}; choose a number above 0 and up to 1")


def _draw_connected(name: str, draw: Callable[[np.random.Generator], Links], seed: int, advice: str) -> Links:
    """Draw until the graph is connected."""
    if seed < 0:
        raise PdslError(f"graph {name!r} has seed {seed}; choose 0 or more")
    rng = Streams(seed).generator("graph")
    for _ in range(MAX_DRAWS):
        linked = draw(rng)
        if is_connected(linked):
            return linked
    raise PdslError(f"graph {name!r} of {len(linked)} agents was not connected in {MAX_DRAWS} draws; try {advice}")
