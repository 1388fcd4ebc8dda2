"""Start-up: help and version do not import torch."""

import subprocess
import sys

import pytest

import pdsl

PROGRAM = "import sys; sys.argv = ['pdsl', *{args}]\nimport pdsl.cli.main\n"
PROGRAM += "try:\n    pdsl.cli.main.main()\nexcept SystemExit:\n    pass\n"
PROGRAM += "heavy = {{'torch', 'numpy', 'scipy', 'networkx', 'h11'}} & sys.modules.keys()\n"
PROGRAM += "print(sorted(heavy), file=sys.stderr)"


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["peer", "--help"], ["data", "--help"]])
def test_help_imports_no_heavy_package(args: list[str]) -> None:
    program = PROGRAM.format(args=args)
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert outcome.stderr.strip() == "[]"
    assert "pdsl" in outcome.stdout.lower()


def test_import_pdsl_does_not_import_torch() -> None:
    program = "import sys, pdsl; print(pdsl.__version__, 'torch' in sys.modules)"
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert outcome.stdout.split() == [pdsl.__version__, "False"]


def test_every_public_name_is_there() -> None:
    for name in pdsl.__all__:
        assert getattr(pdsl, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pdsl.nothing
