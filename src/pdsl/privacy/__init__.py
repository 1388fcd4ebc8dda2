"""Differential privacy of an agent's messages: noise, accounting, and the record of the privacy spent.

Read in this order: `noise` (sensitivity and the Gaussian mechanism, with the sampler in `discrete_gaussian`),
`accounting` (from released messages to ε), `calibration` (from a budget to σ; the paper's Theorem 1), `ledger` (privacy
spent so far), `seal` (ties a ledger to its run), `statement` (the guarantee in words), `metering` (enforces the
declared number of messages), `planning` (noise and ε before a run). `pdsl.auditing` tries to refute all of it.
"""

from pdsl.privacy.accounting import Mechanism, epsilon
from pdsl.privacy.calibration import Release, by_weight, mechanisms, theorem1_sigma
from pdsl.privacy.ledger import Ledger
from pdsl.privacy.noise import Noise, sensitivity

__all__ = [
    "Ledger",
    "Mechanism",
    "Noise",
    "Release",
    "by_weight",
    "epsilon",
    "mechanisms",
    "sensitivity",
    "theorem1_sigma",
]
