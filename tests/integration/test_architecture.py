"""docs/architecture.md and docs/api.md against the code: layers, paths and public names."""

import ast
import importlib
import re
from pathlib import Path

import pytest

import pdsl

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "pdsl"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGES = [(int(row), name) for row, name in re.findall(r"^\| (\d+) \| `(\w+)` \|", PAGE, flags=re.MULTILINE)]


def imports(file: Path) -> set[str]:
    """Return the top-level packages of pdsl that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "pdsl":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("pdsl."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("pdsl.")}
    return found


def test_imports_go_down_or_to_the_right() -> None:
    place = {name: (row, position) for position, (row, name) in enumerate(PACKAGES)}
    assert len(place) == len(PACKAGES) > 20
    for name in place:
        files = [SOURCE / f"{name}.py"] if (SOURCE / f"{name}.py").exists() else list((SOURCE / name).rglob("*.py"))
        assert files, name
        for file in files:
            above = [other for other in imports(file) & place.keys() if place[other] < place[name]]
            assert above == [], f"{file} imports from above"


def test_named_paths_exist() -> None:
    paths = re.findall(r"`((?:\w+/)*\w+\.py|\w+/)`", PAGE)
    assert len(paths) > 40
    assert [path for path in paths if not (SOURCE / path).exists()] == []


def test_the_api_page_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^::: pdsl\.(\w+)$", page, flags=re.MULTILINE)) == sorted(pdsl.__all__)


def test_the_table_of_benchmarks_has_every_script() -> None:
    table = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    scripts = [path.name for path in (ROOT / "benchmarks").glob("*.py") if path.name != "__init__.py"]
    commands = {script: (f"`python benchmarks/{script}", f"`python -m benchmarks.{script[:-3]}") for script in scripts}
    assert [script for script, forms in commands.items() if not any(form in table for form in forms)] == []
    for link in re.findall(r"\]\(\.\./([^)#]+)", table):
        assert (ROOT / link).exists(), link


@pytest.mark.parametrize("script", sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py")))
def test_benchmarks_find_their_imports(script: str) -> None:
    assert importlib.import_module(f"benchmarks.{script}").__doc__ or script == "__init__"
