"""Private, serverless, peer-to-peer machine learning.

Reading order, the way of the data: `data` (records, partition, batches) → `models`, `graph` → `gradients` (clipped
cross-gradients) → `privacy` (noise) → `engine` (deliver, reply, ask, mix) → `shapley` (what a message is worth) →
`algorithms.pdsl` (Algorithm 1) → `train` (the round loop) → `runs`, `checkpoints`, `report`. `settings` and `config`
hold every knob; `api` and `cli` are the two ways in. `cells` are many runs side by side, of which `compare` and
`reproduce` are made; `rogues` spoil experiments on purpose; `peer` is the same between organisations.
"""

from pdsl.algorithms import ALGORITHMS, PDSL, Algorithm, Facts, Round
from pdsl.api import audit, rounds, train
from pdsl.config import Config
from pdsl.data import Data
from pdsl.errors import PdslError
from pdsl.graph import (
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
from pdsl.privacy import Release
from pdsl.results import Result
from pdsl.settings import ShapleySettings as Shapley
from pdsl.train import Step

__all__ = [
    "ALGORITHMS",
    "PDSL",
    "Algorithm",
    "Config",
    "Data",
    "Facts",
    "Graph",
    "PdslError",
    "Release",
    "Result",
    "Round",
    "Shapley",
    "Step",
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
