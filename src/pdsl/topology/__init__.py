"""Graphs of agents: topologies, schedules of graphs, the mixing matrix W and its spectral gap."""

from collections.abc import Callable

from pdsl.settings import GraphSettings
from pdsl.topology.convert import as_graph, describe_schedule, from_edges, from_matrix, from_networkx, from_setup
from pdsl.topology.generators import (
    bipartite,
    complete_bipartite,
    erdos_renyi,
    exponential,
    full,
    grid,
    k_regular,
    line,
    ring,
    small_world,
    star,
    torus,
)
from pdsl.topology.graph import Graph, Schedule
from pdsl.topology.schedules import base_k, one_peer_exponential
from pdsl.utils.random import Streams

GRAPHS: dict[str, Callable[[GraphSettings, int], Graph]] = {
    "full": lambda s, _: full(s.agents),
    "ring": lambda s, _: ring(s.agents),
    "bipartite": lambda s, _: bipartite(s.agents),
    "complete-bipartite": lambda s, _: complete_bipartite(s.agents),
    "star": lambda s, _: star(s.agents),
    "line": lambda s, _: line(s.agents),
    "grid": lambda s, _: grid(s.agents),
    "torus": lambda s, _: torus(s.agents),
    "k-regular": lambda s, seed: k_regular(s.agents, s.degree, seed),
    "erdos-renyi": lambda s, seed: erdos_renyi(s.agents, s.probability, seed),
    "small-world": lambda s, seed: small_world(s.agents, s.degree, s.probability, seed),
    "exponential": lambda s, _: exponential(s.agents),
    "one-peer-exponential": lambda s, _: one_peer_exponential(s.agents),
    "base-k": lambda s, _: base_k(s.agents, s.k),
    "file": lambda s, _: from_edges(s.path, s.agents),
}
SCHEDULES = ("one-peer-exponential", "base-k")  # kinds whose graph changes from round to round


def build(settings: GraphSettings, streams: Streams) -> Graph:
    """Build the graph of the settings; the same seed, of the settings or else of the streams, gives the same graph."""
    return GRAPHS[settings.kind](settings, streams.seed if settings.seed is None else settings.seed)


__all__ = [
    "GRAPHS",
    "SCHEDULES",
    "Graph",
    "Schedule",
    "as_graph",
    "base_k",
    "bipartite",
    "build",
    "complete_bipartite",
    "describe_schedule",
    "erdos_renyi",
    "exponential",
    "from_edges",
    "from_matrix",
    "from_networkx",
    "from_setup",
    "full",
    "grid",
    "k_regular",
    "line",
    "one_peer_exponential",
    "ring",
    "small_world",
    "star",
    "torus",
]
