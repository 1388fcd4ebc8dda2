"""Files, modes, reports and the sampling rate reveal nothing about records (finding D4)."""

import json
import re
import stat
from pathlib import Path

import numpy as np
import pytest
import torch

import pdsl
from pdsl.auditing.leaks import check_files
from pdsl.auditing.report import Verdict
from pdsl.privacy.seal import tensors_digest
from pdsl.runs.runner import resume
from tests.helpers.commands import pdsl as command
from tests.helpers.experiments import experiment
from tests.helpers.refusals import refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private run on custom data."""
    folder = tmp_path_factory.mktemp("private")
    random = np.random.default_rng(0)
    x, y = random.random((240, 12), dtype=np.float32), random.integers(0, 3, 240)
    np.savez(folder / "records.npz", x=x, y=y)
    own = [f"data.path={folder / 'records.npz'}", "data.name=npz", "privacy.randomness=system", "batch.records=60"]
    few = ["graph.agents=4", "rounds=3", "privacy.target_epsilon=2", "batch.size=20"]
    given = [argument for assignment in own + few for argument in ("--set", assignment)]
    outcome = command("run", "--json", "--out", folder / "run", *given)
    assert outcome.code == 0, outcome.err
    return folder


def test_exact_counts_are_in_one_file_that_only_its_owner_can_read(folder: Path) -> None:
    e, _ = resume(folder / "run")
    assert stat.S_IMODE((folder / "run/owner.json").stat().st_mode) == 0o600
    stored = json.loads((folder / "run/owner.json").read_text())
    assert stored["labels"] == e.labels.tolist()
    assert "data owner only" in stored["for"]
    assert check_files(e, folder / "run").verdict is Verdict.PASS
    assert "labels" not in json.loads((folder / "run/setup.json").read_text())


def test_the_report_leaves_counts_out_and_the_owners_report_marks_them(folder: Path) -> None:
    assert "Records per agent" not in re.sub(r"<[^>]*>", "", (folder / "run/report.html").read_text())
    assert command("report", "--owner", folder / "run").code == 0
    page = folder / "run/report-owner.html"
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    assert "For the data owner only" in page.read_text()
    assert "Records per agent" in re.sub(r"<[^>]*>", "", page.read_text())


def test_the_report_of_a_directory_without_the_owners_file_can_be_written(folder: Path, tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(folder / "run", tmp_path / "copy"))
    (copy / "owner.json").unlink()
    assert command("report", copy).code == 0


def test_the_digest_of_records_is_keyed(folder: Path) -> None:
    e, _ = resume(folder / "run")
    plain = tensors_digest((e.data.x, e.data.y, *e.parts, *e.validation))
    assert plain not in (folder / "run/ledger.json").read_text()
    assert e.seal.digests["records"] != plain


def test_the_sampling_rate_of_a_private_run_is_a_public_constant() -> None:
    x, y = torch.rand(200, 5), torch.arange(200) % 3
    test = (torch.rand(60, 5), torch.arange(60) % 3)

    def rate(n: int, **batch: float) -> float | None:
        privacy = {"randomness": "system", "target_epsilon": 4.0}
        data = ((x[:n], y[:n]), test)
        e = experiment("softmax", data, graph=pdsl.ring(4), rounds=2, privacy=privacy, batch=batch)
        assert e.mechanisms is not None
        return e.mechanisms[0].rate

    assert rate(200, size=10, records=50) == rate(199, size=10, records=50) == 0.2
    assert rate(200, size=10, rate=0.3) == rate(199, size=10, rate=0.3) == 0.3
    with refused("batch.records: not set", "batch.rate"):
        rate(200, size=10)
    with refused("leave one out"):
        rate(200, size=10, rate=0.3, records=50)


def test_a_published_data_set_has_a_published_size() -> None:
    e = experiment("softmax", "digits", graph=pdsl.ring(10), privacy={"randomness": "system"})
    assert e.batches.rate == 64 / (e.data.published / 10)
