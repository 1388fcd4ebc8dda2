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
    from pdsl import callbacks
    from pdsl.algorithms import (
        ALGORITHMS,
        CGA,
        DMSGD,
        DPADMM,
        DPCGA,
        DPDPSGD,
        DPSGD,
        GUT,
        MSPD,
        NGC,
        PDSL,
        Algorithm,
        DefKT,
        DFedSAM,
        DFedSAMMGS,
        DPNetFleet,
        GradientTracking,
        Metrics,
        MomentumTracking,
        Muffliato,
        NetFleet,
        QGDSGDm,
        Round,
        SoftDSGD,
    )
    from pdsl.api import audit, rounds, train
    from pdsl.config import Config
    from pdsl.data import Data
    from pdsl.models.private import make_private
    from pdsl.models.residual import Residual
    from pdsl.options import binary, multiclass, multilabel, regression
    from pdsl.privacy import Release
    from pdsl.privacy.recommendation import recommend
    from pdsl.runs.listeners import RunListener, StopTraining
    from pdsl.runs.result import Result, RoundResult
    from pdsl.saved import SavedRun, load
    from pdsl.settings import ShapleySettings as Shapley
    from pdsl.topology import (
        Graph,
        Schedule,
        base_k,
        bipartite,
        complete_bipartite,
        erdos_renyi,
        exponential,
        from_edges,
        from_matrix,
        from_networkx,
        full,
        grid,
        k_regular,
        line,
        one_peer_exponential,
        ring,
        small_world,
        star,
        torus,
    )
    from pdsl.utils.errors import PdslError, PrivacyWarning

__version__ = "0.1.0"

_ALGORITHMS = (
    *("ALGORITHMS", "Algorithm", "Metrics", "Round", "CGA", "DFedSAM", "DFedSAMMGS", "DMSGD", "DPADMM", "DPCGA"),
    *("DPDPSGD", "DPNetFleet", "DPSGD", "DefKT", "GUT", "GradientTracking", "MSPD", "MomentumTracking", "Muffliato"),
    *("NGC", "NetFleet", "PDSL", "QGDSGDm", "SoftDSGD"),
)
_TOPOLOGIES = (
    *("base_k", "erdos_renyi", "k_regular", "one_peer_exponential", "small_world", "Schedule"),
    *("bipartite", "complete_bipartite", "exponential", "from_edges", "from_matrix", "from_networkx"),
    *("full", "grid", "line", "ring", "star", "torus", "Graph"),
)
_MODULES = {
    **dict.fromkeys(_ALGORITHMS, "pdsl.algorithms"),
    **dict.fromkeys(("audit", "rounds", "train"), "pdsl.api"),
    **dict.fromkeys(_TOPOLOGIES, "pdsl.topology"),
    "Config": "pdsl.config",
    "Data": "pdsl.data",
    **dict.fromkeys(("binary", "multiclass", "multilabel", "regression"), "pdsl.options"),
    **dict.fromkeys(("PdslError", "PrivacyWarning"), "pdsl.utils.errors"),
    **dict.fromkeys(("SavedRun", "load"), "pdsl.saved"),
    **dict.fromkeys(("Result", "RoundResult"), "pdsl.runs.result"),
    **dict.fromkeys(("RunListener", "StopTraining"), "pdsl.runs.listeners"),
    "make_private": "pdsl.models.private",
    "Residual": "pdsl.models.residual",
    "Release": "pdsl.privacy",
    "recommend": "pdsl.privacy.recommendation",
    "Shapley": "pdsl.settings",
}

__all__ = [
    "ALGORITHMS",
    "CGA",
    "DMSGD",
    "DPADMM",
    "DPCGA",
    "DPDPSGD",
    "DPSGD",
    "GUT",
    "MSPD",
    "NGC",
    "PDSL",
    "Algorithm",
    "Config",
    "DFedSAM",
    "DFedSAMMGS",
    "DPNetFleet",
    "Data",
    "DefKT",
    "GradientTracking",
    "Graph",
    "Metrics",
    "MomentumTracking",
    "Muffliato",
    "NetFleet",
    "PdslError",
    "PrivacyWarning",
    "QGDSGDm",
    "Release",
    "Residual",
    "Result",
    "Round",
    "RoundResult",
    "RunListener",
    "SavedRun",
    "Schedule",
    "Shapley",
    "SoftDSGD",
    "StopTraining",
    "audit",
    "base_k",
    "binary",
    "bipartite",
    "callbacks",
    "complete_bipartite",
    "erdos_renyi",
    "exponential",
    "from_edges",
    "from_matrix",
    "from_networkx",
    "full",
    "grid",
    "k_regular",
    "line",
    "load",
    "make_private",
    "multiclass",
    "multilabel",
    "one_peer_exponential",
    "recommend",
    "regression",
    "ring",
    "rounds",
    "small_world",
    "star",
    "torus",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "callbacks":
        return importlib.import_module("pdsl.callbacks")
    if name not in _MODULES:
        raise AttributeError(f"module 'pdsl' has no attribute '{name}'")
    module = importlib.import_module(_MODULES[name])
    value = getattr(module, "ShapleySettings" if name == "Shapley" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
