"""Privacy audit: check that a run does what its ledger claims, and attack the claim.

The conformance checks replay rounds of the run with the code that ran them (`replay`) and measure everything. Separate,
slower code recomputes the claims from the measurements (`reference`, `noise`, `sampling`, `sensitivity`, `leaks`,
`accounts`). Then `canaries` attacks the run to find a lower bound on ε (`adversary`, `one_run`). `run` runs all of it.

A failed check is evidence against the claim, with a false-alarm rate of about one in a million per check.
"""

from pdsl.auditing.report import AuditReport, Finding, Verdict
from pdsl.auditing.run import audit, audit_experiment, audit_run

__all__ = ["AuditReport", "Finding", "Verdict", "audit", "audit_experiment", "audit_run"]
