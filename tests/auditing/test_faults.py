"""The audit catches every planted fault of `tests/faults/` and passes every correct run."""

from typing import Any

import pytest

from tests.faults.accounting import ledger_reset, sent_before_charged
from tests.faults.base import Fault, audited_in_directory, caught_by, examined, failed, findings_of, settings
from tests.faults.clean_data import neighbours_differ
from tests.faults.files import OTHER_HONEST, honest_runs
from tests.faults.noise_independence import conflicting_use
from tests.faults.register import FAULTS
from tests.faults.sampler import own_records

pytestmark = pytest.mark.slow

SOME = honest_runs()[::5]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught(fault: Fault) -> None:
    caught = examined(fault)
    caught = caught if caught_by(fault, caught) else examined(fault, whole=True)  # to say what does catch it
    assert caught_by(fault, caught), f"{fault.what}: not caught by '{fault.by}', but by {caught or 'nothing'}"


def test_faults_have_names_of_their_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert all(fault.what for fault in FAULTS)


@pytest.mark.parametrize("values", [*OTHER_HONEST, *SOME], ids=lambda values: f"{values.get('algorithm', {})}")
def test_an_honest_run_is_not_accused(values: dict[str, Any]) -> None:
    assert not failed(findings_of(values))


def test_honest_objects_are_not_accused() -> None:
    private = settings(privacy={"randomness": "system"}, batch={"size": 16, "records": 300})
    assert not failed(findings_of(private, **own_records()))
    assert not audited_in_directory(settings(privacy={"randomness": "system"}, rounds=3))


def test_unit_checks_pass_without_a_fault() -> None:
    assert not conflicting_use()
    assert not neighbours_differ()
    assert not sent_before_charged(settings(rounds=3))
    assert not ledger_reset(settings(rounds=3, checkpoint_every=2))
