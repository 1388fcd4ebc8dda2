"""`pdsl compare`: one task, one budget, the same trials for all; an interrupted comparison continues."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pdsl.config import validate
from pdsl.sweep.comparison import ComparisonPlan, run_comparison, summarise
from pdsl.sweep.job import SCORE, Score
from pdsl.sweep.page import write_page
from pdsl.sweep.tuning import MAX_EXTENSIONS, count_jobs
from tests.helpers.commands import PATIENCE, pdsl, settings, started, wait_for

pytestmark = pytest.mark.slow

TASK: dict[str, Any] = {
    "rounds": 4,
    "graph": {"kind": "ring", "agents": 4},
    "data": {"validation": 40},
    "batch": {"size": 16},
    "privacy": {"target_epsilon": 8.0},
}
ASKED = settings("rounds=4", "graph.agents=4", "data.validation=40", "batch.size=16")


def plan(algorithms: tuple[str, ...] = ("d-psgd", "muffliato"), grid: tuple[float, ...] = (0.5, 1.0)) -> ComparisonPlan:
    return ComparisonPlan.of(validate(TASK, "test"), algorithms, grid, seeds=2)


class Reported(list[Score]):
    def __call__(self, score: Score, done: int, new: bool) -> None:
        self.append(score)
        assert done == len(self)


def test_all_have_the_same_trials_and_the_best_on_the_public_set_is_used(tmp_path: Path) -> None:
    reported = Reported()
    scores = run_comparison(plan(), tmp_path / "c", reported)
    assert len(scores) == len(reported) == count_jobs(plan().tunings, scores)
    comparison = summarise(plan(), scores, tmp_path / "c")
    for line in comparison.lines:
        assert {0.5, 1.0} <= set(line.rates)
        trials = {rate: scores[plan().job(line.algorithm, rate, 0).name] for rate in line.rates}
        assert line.learning_rate == max(trials, key=lambda rate: trials[rate].on_public)
        inside = min(line.rates) < line.learning_rate < max(line.rates)
        assert inside == (line.edge is None)
        assert inside or len(line.rates) == 2 + MAX_EXTENSIONS
        finals = [scores[plan().job(line.algorithm, line.learning_rate, seed).name] for seed in (0, 1)]
        assert line.accuracy == pytest.approx(sum(s.accuracy for s in finals) / 2)
        assert line.runs == 2
        assert line.deviation is not None
        assert line.epsilon is not None
        assert 0.97 * 8 <= line.epsilon <= 8
    assert comparison.lines[0].accuracy == max(line.accuracy or 0 for line in comparison.lines)

    page = re.sub("<[^>]*>", "", write_page(comparison).read_text(encoding="utf-8"))
    assert all(name in page for name in ("d-psgd", "muffliato", "Accuracy over rounds"))

    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("rows.jsonl")}
    again = run_comparison(plan(), tmp_path / "c", Reported())
    assert again == scores
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("rows.jsonl")}

    with pytest.raises(Exception, match="holds another comparison"):
        run_comparison(plan(grid=(0.5,)), tmp_path / "c", Reported())


def test_a_failed_job_is_reported_and_stops_no_other(tmp_path: Path) -> None:
    wild = plan(("d-psgd", "gradient-tracking"), grid=(0.5, 1e39))
    comparison = summarise(wild, run_comparison(wild, tmp_path / "c", Reported()), tmp_path / "c")
    for line in comparison.lines:
        assert line.learning_rate is not None
        assert line.learning_rate <= 0.5
        assert line.runs == 2
        assert len(line.failed) == 1
        assert "diverged" in line.failed[0]


def test_a_killed_comparison_continues_and_ends_the_same(tmp_path: Path) -> None:
    command = ("compare", *ASKED, "--algorithms", "d-psgd,dmsgd", "--grid", "0.5,1", "--seeds", 1, "--json")
    whole = pdsl(*command, "--out", tmp_path / "whole")
    assert whole.code == 0, whole.err
    process = started(*command, "--out", tmp_path / "cut")
    wait_for(lambda: bool(list((tmp_path / "cut").rglob(SCORE))))
    process.kill()
    process.join(PATIENCE)
    again = pdsl(*command, "--out", tmp_path / "cut")
    assert again.code == 0, again.err

    def without_time(text: str) -> Any:
        found = json.loads(text)
        return [{k: v for k, v in line.items() if k != "seconds"} for line in found["algorithms"]]

    assert without_time(again.out) == without_time(whole.out)


def test_mistakes_are_refused(tmp_path: Path) -> None:
    pdsl("compare", "--algorithms", "pdsl,fedavg").refused("no algorithm 'fedavg'")
    pdsl("compare", "--algorithms", "pdsl,pdsl").refused("each algorithm once")
    pdsl("compare", "--grid", "0.5,fast").refused("--grid 0.5,fast")
    pdsl("compare", "--grid", "0").refused("above 0")
    (tmp_path / "mine").write_text("")
    pdsl("compare", "--out", tmp_path).refused("not empty")


OWN = """
from typing import ClassVar

from pdsl.algorithms.d_psgd import DPSGD


class Slow(DPSGD):
    name: ClassVar[str] = "slow"
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of one's own in the working directory."""
    (tmp_path / "own_of_compare.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_of_compare"


def test_an_algorithm_of_ones_own_is_compared_by_its_path(own: str) -> None:
    options = ("--algorithms", f"d-psgd,{own}:Slow", "--grid", "0.5", "--seeds", 3, "--out", "c")
    outcome = pdsl("compare", *ASKED, *options, "--json")
    assert outcome.code == 0, outcome.err
    found = {line["algorithm"]: line for line in json.loads(outcome.out)["algorithms"]}
    assert set(found) == {"d-psgd", f"{own}:Slow"}
    built_in, mine = found["d-psgd"], found[f"{own}:Slow"]
    assert mine["accuracy_per_seed"] == built_in["accuracy_per_seed"]  # the same rule under another name
    assert json.loads(outcome.out)["winner"] is None
    assert (Path("c") / f"{own}.Slow-0.5-seed0" / "report.html").exists()
    page = Path("c/compare.html").read_text(encoding="utf-8")
    assert "Not decided: " in page
    again = pdsl("compare", *ASKED, *options)
    assert "Not decided: " in again.out
    assert "runs were finished before" not in again.err


def test_an_algorithm_of_ones_own_that_cannot_be_compared(own: str) -> None:
    pdsl("compare", "--algorithms", f"{own}:Nothing").refused("--algorithms", f"{own}:Nothing")
    pdsl("compare", "--algorithms", "json:dumps").refused("not a pdsl.Algorithm")
