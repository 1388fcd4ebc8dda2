"""Findings of an audit and its verdict."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from pdsl.utils.types import JsonDict

FALSE_ALARM = 1e-6  # probability that a check fails on a correct run


class Verdict(IntEnum):
    """Result of a check or of the audit; also the exit code of `pdsl audit`."""

    PASS = 0
    FAIL = 1
    INCONCLUSIVE = 2


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    check: str
    verdict: Verdict
    detail: str


@dataclass(frozen=True)
class AuditReport:
    """All findings of an audit of a privacy claim."""

    claim: str
    findings: list[Finding]

    @property
    def verdict(self) -> Verdict:
        """FAIL if any check failed, else INCONCLUSIVE if any check was, else PASS."""
        found = {finding.verdict for finding in self.findings}
        return next(v for v in (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS) if v in found)

    def as_dict(self) -> JsonDict:
        findings = [{"check": f.check, "verdict": f.verdict.name.lower(), "detail": f.detail} for f in self.findings]
        return {"verdict": self.verdict.name.lower(), "claim": self.claim, "findings": findings}

    def __str__(self) -> str:
        lines = [f"{f.verdict.name.lower():<12} {f.check}: {f.detail}" for f in self.findings]
        return "\n".join([*lines, f"{self.verdict.name.lower()}: {self.claim}"])


def conclude(check: str, problems: Sequence[str], passed: str) -> Finding:
    """Fail with the first problem, or pass with a description of the coverage."""
    if not problems:
        return Finding(check, Verdict.PASS, passed)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return Finding(check, Verdict.FAIL, problems[0] + more)
