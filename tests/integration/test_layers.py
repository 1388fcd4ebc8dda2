"""The layers of docs/architecture.md: imports go down only."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINTER = Path(sys.executable).with_name("lint-imports")


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(tree / "src"), "PATH": "/usr/bin:/bin", "NO_COLOR": "1"}
    command = [str(LINTER), "--no-cache"]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_contract_holds(tree: Path) -> None:
    outcome = lint(tree)
    assert outcome.returncode == 0, outcome.stdout
    assert "1 kept, 0 broken" in outcome.stdout


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("utils/errors.py", "from pdsl.settings import Section"),
        ("privacy/ledger.py", "from pdsl.training.experiment import Experiment"),
        ("report/__init__.py", "from pdsl.runs.directory import RunDirectory"),
        ("engine/local.py", "def late() -> None:\n    import pdsl.cli.main"),
    ],
)
def test_contract_breaks_on_an_upward_import(tree: Path, file: str, line: str) -> None:
    with (tree / "src/pdsl" / file).open("a") as source:
        source.write(f"\n{line}\n")
    outcome = lint(tree)
    assert outcome.returncode == 1, outcome.stdout
    assert "BROKEN" in outcome.stdout
