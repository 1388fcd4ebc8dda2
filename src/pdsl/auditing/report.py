"""Findings of an audit, and the verdict they come to."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

FALSE_ALARM = 1e-6  # probability, per check


class Verdict(IntEnum):
    """Also the exit code."""

    PASS = 0
    FAIL = 1
    INCONCLUSIVE = 2


@dataclass(frozen=True)
class Finding:
    check: str
    verdict: Verdict
    detail: str


@dataclass(frozen=True)
class Report:
    """All findings, and the verdict."""

    claim: str
    findings: list[Finding]

    @property
    def verdict(self) -> Verdict:
        """One failure is a failure; with none, one check that could not be made leaves it open."""
        found = {finding.verdict for finding in self.findings}
        return next(v for v in (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS) if v in found)

    def as_dict(self) -> dict[str, Any]:
        findings = [{"check": f.check, "verdict": f.verdict.name.lower(), "detail": f.detail} for f in self.findings]
        return {"verdict": self.verdict.name.lower(), "claim": self.claim, "findings": findings}

    def __str__(self) -> str:
        lines = [f"{f.verdict.name.lower():<12} {f.check}: {f.detail}" for f in self.findings]
        return "\n".join([*lines, f"{self.verdict.name.lower()}: {self.claim}"])


def conclude(check: str, problems: Sequence[str], passed: str) -> Finding:
    """A failure that names the first problem, or a pass that names the coverage."""
    if not problems:
        return Finding(check, Verdict.PASS, passed)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return Finding(check, Verdict.FAIL, problems[0] + more)
