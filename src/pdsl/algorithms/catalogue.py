"""Catalogue of all algorithms: paper, update rule, traffic, privacy cost and settings."""

from pdsl import topology
from pdsl.algorithms import ALGORITHMS
from pdsl.algorithms.base import Algorithm
from pdsl.section import describe_section
from pdsl.utils.types import JsonDict

EXAMPLE = topology.ring(10)  # graph for traffic and privacy cost, where these depend on it
MEMBERS = 3  # size of its neighbourhoods


def catalogue() -> list[JsonDict]:
    """One object per algorithm, in the order of `ALGORITHMS`."""
    return [_entry(kind) for kind in ALGORITHMS.values()]


def _entry(kind: type[Algorithm]) -> JsonDict:
    algorithm = kind()
    release, larger = algorithm.releases(MEMBERS), algorithm.releases(MEMBERS + 1)
    return {
        "name": kind.name,
        "what": (kind.__doc__ or "").strip(),
        "paper": kind.paper,
        "rule": kind.rule,
        "messages_per_round": algorithm.sends(EXAMPLE, noise_multiplier=1.0),
        "k": release.messages,
        "k_is_neighbourhood": larger.messages > release.messages,
        "releases_per_round": release.steps,
        "settings": [
            {"name": name, "default": default, "help": text}
            for name, default, text in describe_section(kind, "algorithm.")
        ],
    }
