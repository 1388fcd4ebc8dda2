"""`pdsl contributions`: table, pairs, JSON and CSV of a run's account."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pdsl.shapley.account_fields import agree
from tests.helpers.accounts import hospital_account, write_account
from tests.helpers.commands import pdsl


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "300")
    return write_account(tmp_path, hospital_account())


def printed_lines(*words: object) -> list[str]:
    """Lines of the command's output without the rules of its tables."""
    outcome = pdsl("contributions", *words)
    assert (outcome.code, outcome.err) == (0, "")
    return [" ".join(line.replace("│", " ").split()) for line in outcome.out.splitlines()]


def test_the_table_has_every_party_and_the_conclusion_follows(run: Path) -> None:
    lines = printed_lines(run)
    assert "Aachen 21.3 19.3 to 23.3 25.4 %" in lines
    assert "Freiburg 0.0 −1.0 to 1.0 0.0 %" in lines
    assert any(line.startswith("Aachen has the largest contribution: 21.3 of 84.0 points.") for line in lines)


def test_pairs_say_which_order_is_decided(run: Path) -> None:
    lines = [
        " ".join(line.replace("│", " ").split()) for line in pdsl("contributions", run, "--pairs").out.splitlines()
    ]
    assert "Aachen Dresden 1.1 −2.1 to 4.3 not decided" in lines
    assert "Bonn Freiburg 12.1 10.0 to 14.2 decided" in lines
    assert sum(line.endswith("decided") for line in lines) == 15


def test_json_is_the_file_and_csv_has_all_digits(run: Path, tmp_path: Path) -> None:
    outcome = pdsl("contributions", run, "--json", "--csv", tmp_path / "out.csv")
    stored = json.loads((run / "contributions.json").read_text(encoding="utf-8"))
    assert agree(json.loads(outcome.out), stored, tolerance=1e-12)
    parties = list(csv.DictReader((tmp_path / "out.csv").read_text(encoding="utf-8").splitlines()))
    assert [party["name"] for party in parties][:2] == ["Aachen", "Dresden"]
    assert float(parties[1]["value"]) == pytest.approx(0.202, abs=1e-12)


def test_a_run_without_an_account_is_one_line(run: Path, tmp_path: Path) -> None:
    pdsl("contributions", run, "--csv", tmp_path / "none" / "out.csv").refused("there is no folder", "--csv")
    (run / "contributions.json").unlink()
    pdsl("contributions", run).refused("has no contributions.json")
    pdsl("contributions", tmp_path / "nowhere").refused("there is no run directory")
    (run / "contributions.json").write_text("{}")
    pdsl("contributions", run).refused("not an account of format 1")


def test_only_light_packages_are_imported(run: Path) -> None:
    program = f"import sys; sys.argv = ['pdsl', 'contributions', {str(run)!r}]\nimport pdsl.cli.main\n"
    program += "try:\n    pdsl.cli.main.main()\nexcept SystemExit:\n    pass\n"
    program += "print(sorted({'torch', 'scipy', 'networkx'} & sys.modules.keys()), file=sys.stderr)"
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert outcome.stderr.strip() == "[]"
    assert "Aachen" in outcome.stdout
