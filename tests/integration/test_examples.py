"""Every file in examples/ is run: scripts as they are, configs for one round where their data are."""

import runpy
import sys
from pathlib import Path

import pytest

from pdsl.config import load
from pdsl.training.experiment import prepare
from pdsl.training.trainer import rounds
from tests.helpers.real_data import real

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
def test_script(script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("config", sorted(EXAMPLES.glob("*.toml")), ids=lambda p: p.name)
def test_config(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ["rounds=1", "data.validation=50", "batch.size=20", "model.channels=[2, 3]"]
    settings = load(config, small)
    monkeypatch.setenv("PDSL_DATA", str(real(settings.data.name)))
    experiment = prepare(settings)
    (step,) = rounds(experiment)
    assert step.row["shapley"]["coalitions"] > 0
