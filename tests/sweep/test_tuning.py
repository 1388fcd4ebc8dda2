"""Grids grow while their best learning rate is at an edge; a winner needs a significant difference."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import pytest
from scipy.stats import t as student

from pdsl.config import validate
from pdsl.sweep.comparison import Comparison, ComparisonPlan, Line, summarise
from pdsl.sweep.job import Job, Score
from pdsl.sweep.presentation import WORSE, caption, cells, describe_edges, headings, headline
from pdsl.sweep.significance import is_significant, paired_p_value
from pdsl.sweep.tuning import MAX_EXTENSIONS, Edge, Tuning, count_jobs, needed_jobs

CONFIG = validate({}, "test")


def job(rate: float, seed: int = 0) -> Job:
    return Job(f"{rate:g}-seed{seed}", CONFIG)


def tuning_of(grid: tuple[float, ...], extends: bool = True) -> Tuning:
    return Tuning(
        {rate: job(rate) for rate in grid}, lambda rate: [job(rate, s) for s in (0, 1)], job if extends else None
    )


def score(wanted: Job, optimum: float) -> Score:
    """An accuracy that falls with the distance from the optimum, in factors of two."""
    rate = float(wanted.name.partition("-")[0])
    return Score(wanted.name, on_public=0.9 - 0.1 * abs(math.log2(rate / optimum)), loss=1.0, bytes=1)


def run_all(tuning: Tuning, optimum: float, scores: dict[str, Score] | None = None) -> dict[str, Score]:
    """Run one job after another, as an interrupted sweep would."""
    scores = dict(scores or {})
    while missing := [j for j in needed_jobs([tuning], scores) if j.name not in scores]:
        assert len(scores) < count_jobs([tuning], scores)
        scores[missing[0].name] = score(missing[0], optimum)
    assert len(scores) == count_jobs([tuning], scores)
    return scores


@pytest.mark.parametrize(
    ("optimum", "tried", "edge"),
    [
        (0.5, {0.25, 0.5, 1.0}, None),
        (0.25, {0.125, 0.25, 0.5, 1.0}, None),
        (0.0625, {0.03125, 0.0625, 0.125, 0.25, 0.5, 1.0}, None),
        (2.0, {0.25, 0.5, 1.0, 2.0, 4.0}, None),
        (0.001, {0.25 / 2**k for k in range(MAX_EXTENSIONS + 1)} | {0.5, 1.0}, Edge.LOWER),
        (1e6, {2.0**k for k in range(MAX_EXTENSIONS + 1)} | {0.25, 0.5}, Edge.UPPER),
    ],
)
def test_a_grid_grows_until_its_best_rate_is_inside(optimum: float, tried: set[float], edge: Edge | None) -> None:
    tuning = tuning_of((0.25, 0.5, 1.0))
    scores = run_all(tuning, optimum)
    assert set(tuning.wanted_trials(scores)) == tried
    assert tuning.edge(scores) is edge
    nearest = min(tried, key=lambda rate: abs(math.log2(rate / optimum)))
    assert tuning.best_rate(scores) == nearest
    assert {f"{nearest:g}-seed0", f"{nearest:g}-seed1"} <= set(scores)


def test_an_interrupted_tuning_continues_the_same_way() -> None:
    tuning = tuning_of((0.25, 0.5, 1.0))
    whole = run_all(tuning, 0.0625)
    for kept in range(len(whole)):
        assert run_all(tuning, 0.0625, dict(list(whole.items())[:kept])) == whole
    assert tuning.best_rate(dict(list(whole.items())[:3])) is None  # an extension is missing


def test_one_rate_and_a_fixed_grid_are_not_extended() -> None:
    one = tuning_of((0.5,))
    scores = run_all(one, 0.01)
    assert set(one.wanted_trials(scores)) == {0.5}
    assert one.edge(scores) is None
    fixed = tuning_of((0.25, 0.5), extends=False)
    scores = run_all(fixed, 0.01)
    assert set(fixed.wanted_trials(scores)) == {0.25, 0.5}
    assert fixed.edge(scores) is Edge.LOWER


def test_a_rate_that_diverges_ends_the_growth() -> None:
    tuning = tuning_of((0.5, 1.0))
    scores = {job(r).name: replace(score(job(r), 8.0), loss=1e9 if r > 1 else 1.0) for r in (0.5, 1.0, 2.0)}
    assert set(tuning.wanted_trials(scores)) == {0.5, 1.0, 2.0}
    assert tuning.best_rate(scores) == 1.0


def test_the_key_of_a_plan_depends_on_the_grid_as_given() -> None:
    plan = ComparisonPlan.of(CONFIG, ("pdsl", "muffliato"), (0.5, 1.0), 3)
    assert plan.key == ComparisonPlan.of(CONFIG, ("pdsl", "muffliato"), (1.0, 0.5), 3).key
    assert plan.as_dict()["grid"] == (0.5, 1.0)
    assert ComparisonPlan.from_dict(json.loads(json.dumps(plan.as_dict()))) == plan


def by_hand(differences: list[float]) -> float:
    """The two-sided p-value of the textbook's paired t-test."""
    n = len(differences)
    statistic = fmean(differences) / (stdev(differences) / math.sqrt(n))
    return float(2 * student.sf(abs(statistic), n - 1))


def test_the_p_value_is_that_of_a_paired_t_test() -> None:
    draw = random.Random(1)
    for n in (3, 5, 20):
        ours, theirs = ([draw.gauss(0.9, 0.02) for _ in range(n)] for _ in range(2))
        expected = by_hand([a - b for a, b in zip(ours, theirs, strict=True)])
        assert paired_p_value(ours, theirs) == pytest.approx(expected, rel=1e-9)
        assert paired_p_value([*ours, None, 0.5], [*theirs, 0.9, None]) == pytest.approx(expected, rel=1e-9)
    assert paired_p_value([0.9, 0.8], [0.7, 0.7]) is None
    assert paired_p_value([0.9, 0.8, 0.7], [0.9, 0.8, 0.7]) == 1
    assert paired_p_value([0.9, 0.8, 0.7], [0.8, 0.7, 0.6]) == 0


def test_equal_algorithms_are_rarely_told_apart() -> None:
    draw = random.Random(2)
    wrong = sum(
        is_significant(
            paired_p_value([draw.gauss(0.9, 0.02) for _ in range(5)], [draw.gauss(0.9, 0.02) for _ in range(5)])
        )
        for _ in range(2000)
    )
    assert 60 <= wrong <= 140  # 5 % of 2,000 are 100, with a deviation of 10


def compared(folder: Path, task: dict[str, object] | None = None, **accuracies: list[float]) -> Comparison:
    """A comparison of algorithms with these accuracies, by seed, at the rate 0.5 of the grid 0.25, 0.5, 1."""
    metric = "accuracy" if task is None else str(task["metric"])
    seeds = len(next(iter(accuracies.values())))
    names = [name.replace("_", "-") for name in accuracies]
    plan = ComparisonPlan.of(CONFIG, names, (0.25, 0.5, 1.0), seeds)
    scores: dict[str, Score] = {}
    for name, values in zip(names, accuracies.values(), strict=True):
        for rate in plan.grid:
            trial = plan.job(name, rate, 0).name
            scores[trial] = Score(trial, on_public=0.9 if rate == 0.5 else 0.8, accuracy=0.1, loss=1.0, bytes=1)
        for seed, value in enumerate(values):
            final = plan.job(name, 0.5, seed).name
            scores[final] = replace(scores.get(final, Score(final, on_public=0.9, loss=1.0, bytes=1)), accuracy=value)
            (folder / final).mkdir(exist_ok=True)
            (folder / final / "config.toml").write_text("")
            setup = {"agents": 1, "edges": [], "parameters": 1, "graph": "", "data": "", "task": task}
            (folder / final / "setup.json").write_text(json.dumps(setup))
            (folder / final / "summary.json").write_text(json.dumps({"rounds": 1, "metric": metric}))
            row = {"round": 1, "loss": 1.0, metric: value}
            (folder / final / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return summarise(plan, scores, folder)


def test_a_winner_is_named_if_the_paired_difference_is_significant(tmp_path: Path) -> None:
    """The seeds differ by more than the algorithms, but the differences are alike: a paired test sees them."""
    found = compared(tmp_path, pdsl=[0.80, 0.90, 0.95], muffliato=[0.78, 0.881, 0.93])
    assert found.winner == "pdsl"
    assert headline(found) == "pdsl reaches 88.3\N{NO-BREAK SPACE}% accuracy, significantly better than muffliato."
    first, second = found.lines
    assert second.p_value == pytest.approx(by_hand([0.02, 0.019, 0.02]))
    assert not first.is_worse
    assert second.is_worse
    assert [cells(line)[2].endswith(WORSE) for line in found.lines] == [False, True]
    assert "significantly worse than the first (paired t-test over seeds, 95%)" in caption(found)
    assert "Not private: seeded noise" in caption(found)


def test_without_significance_nothing_is_decided(tmp_path: Path) -> None:
    found = compared(tmp_path, pdsl=[0.88, 0.87, 0.86], muffliato=[0.86, 0.88, 0.85], d_psgd=[0.5, 0.49, 0.48])
    assert found.winner is None
    said = headline(found)
    assert said.startswith("Not decided: pdsl reaches 87.0")
    assert "muffliato (86.3" in said
    assert "d-psgd" not in said
    assert "not significant; more --seeds" in said
    assert [line.is_worse for line in found.lines] == [False, False, True]


@pytest.mark.parametrize(("seeds", "said"), [(1, "1 seed is too few"), (2, "2 seeds are too few")])
def test_few_seeds_decide_nothing(tmp_path: Path, seeds: int, said: str) -> None:
    found = compared(tmp_path, pdsl=[0.9] * seeds, muffliato=[0.1] * seeds)
    assert found.winner is None
    assert said in headline(found)
    assert "use --seeds 3" in headline(found)


def test_one_algorithm_has_no_rival(tmp_path: Path) -> None:
    assert headline(compared(tmp_path, pdsl=[0.9])) == "pdsl reaches 90.0\N{NO-BREAK SPACE}% accuracy."


def test_an_edge_is_said(tmp_path: Path) -> None:
    found = compared(tmp_path, pdsl=[0.9])
    assert describe_edges(found) == []
    (line,) = found.lines

    def said(changed: Line) -> list[str]:
        return describe_edges(replace(found, lines=[changed]))

    [extended] = said(replace(line, rates=(0.125, *line.rates)))
    assert extended == "pdsl: the best learning rate was at the edge of the grid, so 0.125 was added"
    [edge] = said(replace(line, rates=(0.125, *line.rates), learning_rate=0.125, edge=Edge.LOWER))
    assert "0.125, is the smallest that was tried (added to the grid: 0.125); a smaller one may be better" in edge
    [edge] = said(replace(line, learning_rate=1.0, edge=Edge.UPPER))
    assert "is the largest that was tried; a larger one may be better: extend --grid" in edge


def test_of_an_error_the_smallest_is_the_best(tmp_path: Path) -> None:
    task: dict[str, object] = {"kind": "regression", "metric": "rmse", "higher_is_better": False}
    found = compared(tmp_path, task, pdsl=[60.0, 61.0, 62.0], muffliato=[55.0, 56.1, 57.0])
    assert [line.algorithm for line in found.lines] == ["muffliato", "pdsl"]
    assert headline(found) == "muffliato reaches RMSE 56, significantly better than pdsl."
    assert found.level == pytest.approx(1.05 * 55)
    assert [line.rounds_to_level for line in found.lines] == [1, None]
    assert headings(found)[2] == "RMSE"
    assert cells(found.lines[1], found.metric)[2] == "61 ± 1*"
    stored = found.as_dict()
    assert stored["metric"] == "rmse"
    assert stored["algorithms"][0]["rmse_per_seed"] == (55.0, 56.1, 57.0)


def test_a_large_loss_is_a_divergence_of_classifiers_only() -> None:
    large = Score("a", on_public=-60.0, accuracy=60.0, loss=3600.0, bytes=1)
    assert large.unfit == "diverged: its loss is 3.6e+03"
    assert replace(large, max_loss=math.inf).unfit is None
