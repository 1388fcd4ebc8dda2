"""What there is to choose from: every algorithm with its paper, rule, traffic, privacy cost and settings."""

from typing import Any

from pdsl import graph as graphs
from pdsl.algorithms import ALGORITHMS
from pdsl.algorithms.base import Algorithm

EXAMPLE = graphs.ring(10)  # where traffic and cost depend on the graph, they are given for this one
MEMBERS = 3  # of its neighbourhoods


def catalogue() -> list[dict[str, Any]]:
    """One object per algorithm, in the order of `ALGORITHMS`."""
    return [_entry(kind) for kind in ALGORITHMS.values()]


def _entry(kind: type[Algorithm]) -> dict[str, Any]:
    algorithm = kind()
    release, elsewhere = algorithm.releases(MEMBERS), algorithm.releases(MEMBERS + 1)
    return {
        "name": kind.name,
        "what": (kind.__doc__ or "").strip(),
        "paper": kind.paper,
        "rule": kind.rule,
        "messages_per_round": algorithm.sends(EXAMPLE, noise_multiplier=1.0),
        "k": release.messages,
        "k_is_neighbourhood": elsewhere.messages > release.messages,
        "releases_per_round": release.steps,
        "settings": [
            {"name": f"algorithm.{name}", "default": field.get_default(), "help": field.description}
            for name, field in kind.model_fields.items()
            if not field.exclude
        ],
    }
