"""Planted faults: small ways in which a private run can go wrong, and what must catch each of them.

A fault is planted in the code under test, never in the audit. The run and its audit then use the same faulty code, and
the check that the fault names has to fail, or the run has to be refused.

`examined` runs one; `tests/auditing/test_faults.py` and `benchmarks/audit_faults.py` go through all of them."""
