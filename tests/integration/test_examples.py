"""Every file in examples/ is run: scripts as they are, configs for one round where their data are."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pdsl.config import load
from pdsl.training.experiment import prepare
from pdsl.training.trainer import rounds
from tests.helpers.real_data import real

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


Names = dict[str, Any]  # the variables of a script after it has run


def sent(names: Names) -> int:
    """Parameters that the agents of a script's last run send."""
    parameters: int = names["result"].experiment.network.num_parameters
    return parameters


def trainable(names: Names) -> int:
    return sum(p.numel() for p in names["model"].parameters() if p.requires_grad)


# Conditions on a script's variables, far from what they are today: the scripts are examples, not benchmarks.
CONDITIONS: dict[str, Callable[[Names], bool]] = {
    "breast_cancer.py": lambda n: (
        n["result"].metrics["auc"] > 0.95
        and set(n["result"].summary["names"]) == {"hospital-a", "hospital-b", "hospital-c"}
        and set(n["result"].metrics["recall"]) == {"benign", "malignant"}
    ),
    "diabetes.py": lambda n: n["result"].metrics["r2"] > 0.2 and n["result"].epsilon <= 8,
    "multi_label.py": lambda n: min(n["result"].metrics["recall"].values()) > 0.5,
    "imbalanced.py": lambda n: n["result"].metrics["recall"]["very rare"] > 0.1 and n["result"].accuracy > 0.9,
    "text_gru.py": lambda n: n["result"].accuracy > 0.6 and n["result"].experiment.data.x.dtype == torch.int64,
    "text_transformer.py": lambda n: n["result"].accuracy > 0.6,
    "frozen_backbone.py": lambda n: sent(n) == 128 * 10 + 10 and n["result"].accuracy > 0.85,
    "lora.py": lambda n: sent(n) == trainable(n) == n["trained"] and n["result"].accuracy > 0.3,
    "hugging_face.py": lambda n: n["result"].accuracy > 0.8 and "seven" in n["result"].metrics["recall"],
    "two_inputs.py": lambda n: n["result"].accuracy > 0.6,
}


@pytest.mark.filterwarnings("ignore::pdsl.PrivacyWarning")
@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
def test_script(script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    names = runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip()
    assert CONDITIONS.get(script.name, lambda names: True)(names)


def test_the_gallery_has_every_example() -> None:
    page = (EXAMPLES.parent / "docs" / "gallery.md").read_text(encoding="utf-8")
    files = [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.toml"), *EXAMPLES.glob("*.ipynb")]
    assert [file.name for file in files if f"`{file.name}`" not in page] == []


@pytest.mark.parametrize("notebook", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda p: p.name)
def test_notebook(notebook: Path, tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    cells = nbformat.read(notebook, as_version=4)
    nbclient.NotebookClient(cells, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in cells.cells for output in cell.get("outputs", ())]
    assert outputs
    assert all(output.output_type != "error" for output in outputs)


@pytest.mark.parametrize("config", sorted(EXAMPLES.glob("*.toml")), ids=lambda p: p.name)
def test_config(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ["rounds=1", "data.validation=50", "batch.size=20", "model.channels=[2, 3]"]
    small += ["public.filters=8", "public.components=20"]
    settings = load(config, small)
    monkeypatch.setenv("PDSL_DATA", str(real(settings.data.name)))
    experiment = prepare(settings)
    (step,) = rounds(experiment)
    assert step.row["shapley"]["coalitions"] > 0
