"""`pdsl compare`: one task, one budget, the same trials for all; an interrupted comparison continues."""

import json
from pathlib import Path
from typing import Any

import pytest

from pdsl.config import validate
from pdsl.sweep.comparison import ComparisonPlan, run_comparison, summarise
from pdsl.sweep.job import SCORE, Score
from pdsl.sweep.page import write_page
from pdsl.sweep.tuning import count_jobs
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
    assert len(scores) == len(reported) == count_jobs(plan().tunings) == 6
    comparison = summarise(plan(), scores, tmp_path / "c")
    for line in comparison.lines:
        trials = {rate: scores[plan().job(line.algorithm, rate, 0).name] for rate in (0.5, 1.0)}
        assert line.learning_rate == max(trials, key=lambda rate: trials[rate].on_public)
        finals = [scores[plan().job(line.algorithm, line.learning_rate, seed).name] for seed in (0, 1)]
        assert line.accuracy == pytest.approx(sum(s.accuracy for s in finals) / 2)
        assert line.runs == 2
        assert line.deviation is not None
        assert line.epsilon is not None
        assert 0.97 * 8 <= line.epsilon <= 8
    assert comparison.lines[0].accuracy == max(line.accuracy or 0 for line in comparison.lines)

    page = write_page(comparison).read_text(encoding="utf-8")
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
        assert line.learning_rate == 0.5
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
