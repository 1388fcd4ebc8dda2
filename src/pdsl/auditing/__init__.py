"""The audit: does a run do what its ledger says, and can the claim be broken?

Conformance first: rounds of the run are run again by the code that made them (`replay`, `recorders`), everything it
does is measured, and the claims are computed again from the measurements by code of the audit's own (`reference`,
`noise`, `sampling`, `sensitivity`, `taint`, `accounts`, `files`). Then `canaries`: a lower bound on ε by an attack.

A check that fails is evidence against the claim at a false-alarm rate of about one in a million per check.
"""

from pdsl.auditing.conformance import audit_experiment
from pdsl.auditing.report import Finding, Report, Verdict
from pdsl.auditing.run import audit, audit_run

__all__ = ["Finding", "Report", "Verdict", "audit", "audit_experiment", "audit_run"]
