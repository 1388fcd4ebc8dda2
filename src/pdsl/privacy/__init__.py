"""Privacy: what leaves an agent, and what it costs.

Read `mechanism` (noise, sensitivity) first, then `accounting` (from what is released to ε), `calibration` (from a
budget to σ), `ledger` (what has been spent), `bond` (what ties a ledger to its run), `statement` (the same in words),
`metering` (only declared messages leave), `calculator` (planning), `theorem1` (the paper's own bound). `pdsl.auditing`
tries to break all of it.
"""

from pdsl.privacy.accounting import Mechanism, epsilon
from pdsl.privacy.calibration import Release, by_weight, mechanisms
from pdsl.privacy.ledger import Ledger
from pdsl.privacy.mechanism import Noise, sensitivity
from pdsl.privacy.theorem1 import theorem1_sigma

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
