"""Private, serverless, peer-to-peer machine learning.

`train` runs everything in one call, `rounds` yields after every round, `audit` tests a result's privacy statement.

Packages, from the top: `cli` (commands) → `sweep`, `reproduce`, `peer`, `auditing`, `theory` → `runs` (training with
files) → `training` (without files), `report` → `config` → `algorithms` (Algorithm 1 is `algorithms.pdsl`) → `engine`,
`shapley`, `privacy`, `gradients` → `data`, `models`, `topology` → `settings` → `utils`. Imports go down only.

Names are imported when they are first used, so that `import pdsl` does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdsl.algorithms import ALGORITHMS, PDSL, Algorithm, Metrics, Round
    from pdsl.api import audit, rounds, train
    from pdsl.config import Config
    from pdsl.data import Data
    from pdsl.privacy import Release
    from pdsl.runs.listeners import RunListener
    from pdsl.runs.result import Result
    from pdsl.settings import ShapleySettings as Shapley
    from pdsl.topology import (
        Graph,
        bipartite,
        complete_bipartite,
        exponential,
        from_edges,
        from_matrix,
        from_networkx,
        full,
        grid,
        line,
        ring,
        star,
        torus,
    )
    from pdsl.training.trainer import RoundResult
    from pdsl.utils.errors import PdslError

__version__ = "0.1.0"

_TOPOLOGIES = (
    *("bipartite", "complete_bipartite", "exponential", "from_edges", "from_matrix", "from_networkx"),
    *("full", "grid", "line", "ring", "star", "torus", "Graph"),
)
_MODULES = {
    **dict.fromkeys(("ALGORITHMS", "PDSL", "Algorithm", "Metrics", "Round"), "pdsl.algorithms"),
    **dict.fromkeys(("audit", "rounds", "train"), "pdsl.api"),
    **dict.fromkeys(_TOPOLOGIES, "pdsl.topology"),
    "Config": "pdsl.config",
    "Data": "pdsl.data",
    "PdslError": "pdsl.utils.errors",
    "Release": "pdsl.privacy",
    "Result": "pdsl.runs.result",
    "RoundResult": "pdsl.training.trainer",
    "RunListener": "pdsl.runs.listeners",
    "Shapley": "pdsl.settings",
}

__all__ = [
    "ALGORITHMS",
    "PDSL",
    "Algorithm",
    "Config",
    "Data",
    "Graph",
    "Metrics",
    "PdslError",
    "Release",
    "Result",
    "Round",
    "RoundResult",
    "RunListener",
    "Shapley",
    "audit",
    "bipartite",
    "complete_bipartite",
    "exponential",
    "from_edges",
    "from_matrix",
    "from_networkx",
    "full",
    "grid",
    "line",
    "ring",
    "rounds",
    "star",
    "torus",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'pdsl' has no attribute '{name}'")
    module = importlib.import_module(_MODULES[name])
    value = getattr(module, "ShapleySettings" if name == "Shapley" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
