"""An algorithm of one's own by its import path: resumed, audited, and trained on several ranks."""

import json
from pathlib import Path

import pytest

from tests.helpers.commands import pdsl, result_of, settings
from tests.helpers.ranks import ended, launched

pytestmark = pytest.mark.slow

OWN = """
from typing import ClassVar

import pdsl
from pdsl.algorithms.d_psgd import DPSGD


class Mine(DPSGD):
    name: ClassVar[str] = "mine"
    factor: float = 0.5
"""
ASKED = settings(
    *("rounds=3", "graph.agents=4", "data.validation=40", "batch.size=16", "model.name=softmax", "engine.exact=true"),
    *("algorithm.name=algorithm_of_my_own:Mine", "algorithm.factor=0.25", "engine.workers=1"),
)


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "algorithm_of_my_own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_several_ranks_resume_and_audit_find_it_again(tmp_path: Path) -> None:
    alone = pdsl("run", *ASKED, "--out", "alone", "--json")
    assert alone.code == 0, alone.err
    assert 'name = "algorithm_of_my_own:Mine"' in Path("alone/config.toml").read_text()
    ended(launched(2, "run", *ASKED, "--out", "ranks", "--json", said=tmp_path))
    models = [json.loads((Path(run) / "summary.json").read_text())["models_sha256"] for run in ("alone", "ranks")]
    assert models[0] == models[1]
    before = result_of(Path("alone"))
    resumed = pdsl("run", "--resume", "alone", "--json")
    assert resumed.code == 0, resumed.err
    assert result_of(Path("alone")) == before
    for run in ("alone", "ranks"):
        audited = pdsl("audit", run, "--canaries", 0, "--json")
        assert audited.code == 0, audited.out + audited.err
        assert {finding["verdict"] for finding in json.loads(audited.out)["findings"]} == {"pass"}
