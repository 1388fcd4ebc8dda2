"""The audit of honest runs that learn from their public set; planted faults are in tests/faults/public.py."""

from pathlib import Path
from typing import Any

import pytest

import pdsl
from pdsl.auditing import Verdict, audit_run
from tests.faults.base import failed, findings_of, settings
from tests.faults.public import LEARNED, SCATTERED
from tests.public.test_runs import frozen_model

pytestmark = pytest.mark.slow

Values = dict[str, Any]
SMALL: Values = {"rounds": 3, "graph": {"kind": "ring", "agents": 3}, "validation": 60, "partition": "iid"}


@pytest.mark.parametrize("values", [LEARNED, SCATTERED, {"public": {"start": "labels"}}], ids=str)
def test_an_honest_run_is_not_accused(values: Values) -> None:
    findings = findings_of(settings(**values))
    assert not failed(findings)
    assert "public values" in {finding.check for finding in findings}


@pytest.mark.parametrize("randomness", ["seeded", "system"])
def test_a_run_directory_with_features_and_start_passes(tmp_path: Path, randomness: str) -> None:
    values = {**SMALL, "public": LEARNED["public"], "privacy": {"randomness": randomness}}
    result = pdsl.train("auto", "digits", out=tmp_path / "run", **values)
    for report in (audit_run(tmp_path / "run", canaries=0), pdsl.audit(result, canaries=0)):
        assert report.verdict is Verdict.PASS, report.findings
        assert "features, start" in report.claim


def test_a_run_passes_whose_start_was_computed_from_a_cached_map(empty_cache: Path) -> None:
    """The audit computes map and start anew, and must get the same bits."""
    values = {**SMALL, "validation": 61}
    pdsl.train("auto", "digits", public={**LEARNED["public"], "start": "none"}, **{**values, "rounds": 1})
    result = pdsl.train("auto", "digits", public=LEARNED["public"], **values)
    report = pdsl.audit(result, canaries=0)
    assert report.verdict is Verdict.PASS, report.findings


def test_a_run_of_a_frozen_model_passes(tmp_path: Path) -> None:
    public = {"features": "model", "components": 30, "start": "labels"}
    result = pdsl.train(frozen_model(), "digits", public=public, out=tmp_path / "run", **SMALL)
    assert pdsl.audit(result, canaries=0).verdict is Verdict.PASS
    report = pdsl.load(tmp_path / "run", model=frozen_model(seed=1)).audit(canaries=0)
    assert report.verdict is Verdict.PASS, report.findings
