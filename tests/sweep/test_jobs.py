"""A failed job stops no other job, and damaged or mislabelled files are never shown as results."""

import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pdsl.cli.compare import REFERENCE as REFERENCE_NAMES
from pdsl.config import Config, validate
from pdsl.reproduce import CELLS, Results, SweepPlan, Task, archive, collect
from pdsl.reproduce.archive import KeptCell, digest, read
from pdsl.reproduce.export import check_keep, keep_results
from pdsl.reproduce.paper import METHODS, Setting
from pdsl.reproduce.tables import FORMS, as_dict, blocks, list_failures
from pdsl.reproduce.tables import caption as caption_of
from pdsl.sweep.comparison import PLAN, Comparison, ComparisonPlan, Line, summarise
from pdsl.sweep.job import (
    MAX_LOSS,
    SCORE,
    Job,
    Score,
    compute_features,
    load_failure,
    load_score,
    read_curve,
    record_failure,
    run_job,
)
from pdsl.sweep.presentation import caption, footer, table
from pdsl.sweep.progress import SweepProgress
from pdsl.sweep.scheduler import run_jobs
from pdsl.sweep.tuning import best_rate, needed_jobs
from tests.helpers.commands import pdsl, settings
from tests.helpers.real_data import real
from tests.helpers.refusals import refused

TASK: dict[str, Any] = {
    "rounds": 2,
    "privacy": {"mode": "none"},
    "graph": {"agents": 4},
    "data": {"validation": 40},
    "batch": {"size": 16},
    "model": {"name": "softmax"},
    "algorithm": {"name": "d-psgd"},
    "engine": {"workers": 1},
}
ASKED = settings("rounds=2", "privacy.mode=none", "graph.agents=4", "data.validation=40", "batch.size=16")
REFERENCE = REFERENCE_NAMES.split(",")
HERE = Setting("table1", 0.1, "pdsl", "ring", 10)
MODELS = """
import os, pathlib, signal, sys, torch

def good(): return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))

def bad(): raise RuntimeError("no luck\\ntoday")

def leaves(): sys.exit(3)

def stopped(): raise KeyboardInterrupt

def always(): os.kill(os.getpid(), signal.SIGKILL)

def once():
    mark = pathlib.Path(__file__).with_name("once")
    if not mark.exists():
        mark.touch()
        always()
    return good()
"""


def task(**changes: Any) -> Config:
    return validate(TASK | changes, "test")


def task_of_compare(**changes: Any) -> Config:
    return validate({k: v for k, v in TASK.items() if k not in ("algorithm", "model")} | changes, "test")


def with_model(name: str) -> Config:
    return task(model={"name": f"faulty:{name}"})


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of models that fail in several ways."""
    (tmp_path / "faulty.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "faulty", raising=False)


@pytest.mark.usefixtures("faulty")
def test_any_exception_but_an_interruption_is_the_jobs_failure(tmp_path: Path) -> None:
    for name, reason in (("bad", "RuntimeError: no luck today"), ("leaves", "SystemExit: 3")):
        score = run_job(Job(name, with_model(name)), tmp_path)
        assert score is not None
        assert score.failed is not None
        assert reason in score.failed
        assert load_failure(name, tmp_path) == score
    with pytest.raises(KeyboardInterrupt):
        run_job(Job("stopped", with_model("stopped")), tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("faulty")
def test_a_killed_process_loses_only_its_own_job(tmp_path: Path) -> None:
    jobs = [Job(name, with_model(name)) for name in ("bad", "always", "once")]
    reported: list[Score] = []
    scores = run_jobs(lambda done: jobs, tmp_path / "c", lambda score, done, new: reported.append(score), processes=2)
    assert {name for name, score in scores.items() if score.failed is None} == {"once"}
    assert "RuntimeError" in (scores["bad"].failed or "")
    assert "its process was killed" in (scores["always"].failed or "")
    assert load_failure("always", tmp_path / "c") == scores["always"]
    assert sorted(score.name for score in reported) == sorted(job.name for job in jobs)


@pytest.mark.slow
@pytest.mark.usefixtures("faulty")
def test_a_comparison_in_which_nothing_ends_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--algorithms", "d-psgd", "--grid", 1, "--seeds", 1, "--out", tmp_path / "c")
    outcome = pdsl("compare", *ASKED, "--set", "model.name=faulty:bad", *options)
    assert (outcome.code, outcome.out) == (2, "")
    assert "no algorithm has a result" in outcome.err.splitlines()[-1]
    assert "RuntimeError: no luck today" in outcome.err.splitlines()[-1]
    assert not (tmp_path / "c" / "compare.html").exists()
    monkeypatch.setenv("PDSL_DATA", str(tmp_path))
    mnist = ("--set", "data.name=mnist", "--out", tmp_path / "m")
    pdsl("compare", *mnist).refused("mnist is not in", "pdsl data fetch mnist")
    assert not (tmp_path / "m").exists()


def test_features_are_computed_once_before_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSL_CACHE", str(tmp_path / "cache"))
    public = {"features": "patches", "patch": 3, "pool": 2, "filters": 6, "components": 8}
    shared = {"validation": 40, "public_seed": 0}
    jobs = [Job(f"{n}", task(seed=n, data=shared, public=public, model={"name": "linear"})) for n in range(2)]

    def maps() -> int:
        return len(list((tmp_path / "cache").glob("map-*.safetensors")))

    own = Job("own", task(data={"validation": 40}, public=public, model={"name": "linear"}))
    compute_features([own], tmp_path / "cells")
    assert maps() == 0  # its public set depends on its seed
    compute_features(jobs, tmp_path / "cells")
    assert maps() == 1
    scores = [run_job(job, tmp_path / "cells") for job in jobs]
    assert all(score is not None and score.failed is None for score in scores)
    assert maps() == 1
    monkeypatch.setenv("PDSL_CACHE", str(tmp_path / "empty"))
    compute_features(jobs, tmp_path / "cells")
    assert not (tmp_path / "empty").exists()  # both jobs are finished


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished job, to be damaged."""
    folder = tmp_path_factory.mktemp("cells")
    assert run_job(Job("one", task()), folder) is not None
    return folder / "one"


@pytest.mark.parametrize("content", ['{"x": 1}', "[1]", "{}", "", '{"name": "one", "accuracy": 1}'])
def test_a_damaged_score_is_written_anew(run: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = load_score(Job("one", task()), run.parent)
    assert before is not None
    (run / SCORE).write_text(content)
    assert load_score(Job("one", task()), run.parent) is None
    again = run_job(Job("one", task()), run.parent)
    assert again is not None
    assert replace(again, note="", seconds=before.seconds) == before
    SweepProgress(Console(soft_wrap=True), lambda scores: 1)(again, 1, True)
    assert capsys.readouterr().out.count("score.json was damaged and is written anew") == 1
    assert load_score(Job("one", task()), run.parent) == replace(again, note="")


ROWS: dict[str, Callable[[str], str]] = {
    "cut": lambda text: text[:-9],
    "cut after a row": lambda text: text.splitlines()[0] + "\n",
    "empty": lambda text: "",
    "a loss in words": lambda text: re.sub('"loss": [^,]*', '"loss": "high"', text),
    "no loss": lambda text: re.sub('"loss": [^,]*, ', "", text),
}


@pytest.mark.parametrize("damage", ROWS)
def test_damaged_rows_are_refused_by_name(run: Path, damage: str) -> None:
    assert len(read_curve(run)) == 2
    rows = run / "rows.jsonl"
    before = rows.read_text()
    rows.write_text(ROWS[damage](before))
    with refused(str(rows), "is damaged", "move"):
        read_curve(run)
    rows.write_text(before)


@pytest.mark.slow
def test_both_commands_refuse_damaged_rows(tmp_path: Path) -> None:
    plan = ComparisonPlan.of(task_of_compare(), ("d-psgd",), (1.0,), 1)
    (job,) = plan.tuning("d-psgd").trials.values()
    assert run_job(job, tmp_path) is not None
    (tmp_path / PLAN).write_text(json.dumps(plan.as_dict()))
    options = ("--algorithms", "d-psgd", "--grid", 1, "--seeds", 1, "--out", tmp_path)
    assert pdsl("compare", *ASKED, *options).code == 0
    (tmp_path / job.name / "rows.jsonl").write_text("")
    pdsl("compare", *ASKED, *options).refused(f"{job.name}/rows.jsonl is damaged")

    only, asked = "graph=ring,method=dp-dpsgd,epsilon=2", ("--grid", "0.5", "--rounds", 2)
    quick = SweepPlan.of("table1", Task(quick=True, rounds=2, rates=(0.5,)), only, 1)
    (trial,) = needed_jobs(quick.tunings, {})
    assert run_job(trial, tmp_path / CELLS) is not None
    (tmp_path / CELLS / trial.name / "rows.jsonl").unlink()
    outcome = pdsl("reproduce", "fig3", "--quick", "--only", only, *asked, "--out", tmp_path)
    outcome.refused(f"{trial.name}/rows.jsonl is damaged")


def test_a_learning_rate_that_diverges_is_unfit(tmp_path: Path) -> None:
    plan = ComparisonPlan.of(task_of_compare(rounds=3), ("d-psgd",), (1.0, 1e30), 1)
    scores: dict[str, Score] = {}
    while missing := [job for job in needed_jobs(plan.tunings, scores) if job.name not in scores]:
        score = scores[missing[0].name] = run_job(missing[0], tmp_path) or Score("held")
        assert score.failed is None
    wild = plan.job("d-psgd", 1e30, 0).name
    scores[wild] = replace(scores[wild], on_public=1.0)  # possible by chance: huge logits may be in a good order
    (line,) = summarise(plan, scores, tmp_path).lines
    assert line.learning_rate is not None
    assert line.learning_rate <= 1
    assert any(reason.startswith(f"{wild}: diverged: its loss is ") for reason in line.failed)

    good = Score("a", on_public=0.5, loss=MAX_LOSS, bytes=1)
    assert best_rate({2.0: good, 1.0: good, 4.0: replace(good, on_public=0.6, loss=None)}) == 1
    assert best_rate({1.0: replace(good, loss=2 * MAX_LOSS)}) is None


def test_no_kept_trial_would_have_been_chosen_otherwise() -> None:
    kept = read(Path(__file__).parents[2] / "docs/results")
    assert kept
    assert not [name for name, cell in kept.items() if cell.score.unfit]


def test_compare_gives_a_setting_to_each_algorithm_that_has_it() -> None:
    of = ("pdsl", "dp-cga", "d-psgd")
    plan = ComparisonPlan.of(task_of_compare(), of, (1.0,), 1, ["algorithm.momentum=0.25"])
    found = {name: plan.job(name, 1.0, 0).config.as_dict()["algorithm"] for name in of}
    assert [found[name].get("momentum") for name in of] == [0.25, 0.25, None]
    assert plan.key != ComparisonPlan.of(task_of_compare(), of, (1.0,), 1).key
    assert ComparisonPlan.from_dict(json.loads(json.dumps(plan.as_dict()))) == plan
    assert ComparisonPlan.of(task_of_compare(algorithm={"momentum": 0.25}), of, (1.0,), 1) == plan


def test_compare_gives_shapley_settings_to_pdsl() -> None:
    """Those of the file and of the command together: v(∅) = 0 needs the accuracy."""
    file = task_of_compare(algorithm={"shapley": {"value": "accuracy", "floor": 0.5}})
    zero = ["algorithm.shapley.empty_value=zero", "algorithm.shapley.floor="]
    plan = ComparisonPlan.of(file, ("pdsl", "d-psgd"), (1.0,), 1, zero)
    assert plan.own == {"pdsl": {"shapley": {"value": "accuracy", "empty_value": "zero"}}}
    shapley = plan.job("pdsl", 1.0, 0).config.as_dict()["algorithm"]["shapley"]
    assert (shapley["value"], shapley["empty_value"], shapley["floor"]) == ("accuracy", "zero", 0.0)
    assert "shapley" not in plan.job("d-psgd", 1.0, 0).config.as_dict()["algorithm"]
    with refused("none of d-psgd has a setting algorithm.shapley.floor"):
        ComparisonPlan.of(task_of_compare(), ("d-psgd",), (1.0,), 1, ["algorithm.shapley.floor=0.5"])


@pytest.mark.parametrize(
    ("assignment", "parts"),
    [
        ("algorithm.name=d-psgd", ["algorithm.name", "--algorithms"]),
        ("algorithm.learning_rate=1", ["algorithm.learning_rate", "--grid"]),
        ("algorithm={learning_rate=1}", ["by itself", "algorithm.momentum=0.3"]),
        ("algorithm.speed=1", ["none of muffliato", "algorithm.speed"]),
        ("algorithm.momentum=0.5", ["none of muffliato", "algorithm.momentum"]),
    ],
)
def test_compare_refuses_settings_that_it_would_not_use(assignment: str, parts: list[str], tmp_path: Path) -> None:
    command = ("compare", "--algorithms", "muffliato", "--out", tmp_path / "c")
    pdsl(*command, "--set", assignment).refused(*parts)
    assert not (tmp_path / "c").exists()


def test_the_comparison_can_be_read_at_80_columns(tmp_path: Path) -> None:
    plan = ComparisonPlan.of(task_of_compare(), REFERENCE, (0.5, 1.0), 3)
    wrong = f"pdsl-1-seed0: RuntimeError: {30 * 'long '}"
    lines = [
        Line(name, 0.5, 3, 0.91234, 0.01234, 0.92345, 0.3456, 12.3, 123_456_789, 1234, 1.9876, ()) for name in REFERENCE
    ]
    lines[0] = replace(lines[0], failed=(wrong,))
    shown = Comparison(lines, 0.87, tmp_path, plan)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(shown))
    text = console.export_text()
    assert all(f"{name} " in text for name in REFERENCE)
    assert "…" not in text
    assert len(text.splitlines()) == 2 + len(REFERENCE)
    assert f"failed: {wrong}" in footer(shown).splitlines()
    assert "3 seeds ± deviation" in caption(shown)
    assert "5% worse than the best run's" in caption(shown)
    assert "and 1 seed. " in caption(replace(shown, plan=replace(plan, seeds=(0,))))


@pytest.mark.parametrize(
    "assignment",
    [
        "seed=5",
        "graph.kind=star",
        "graph.agents=20",
        'graph={kind="star"}',
        "algorithm.name=d-psgd",
        "algorithm.learning_rate=7",
        "privacy.mode=none",
        "privacy.target_epsilon=100",
        "privacy.epsilon_per_round=9",
        "privacy.sigma=1",
    ],
)
def test_reproduce_refuses_to_change_what_identifies_a_cell(assignment: str, tmp_path: Path) -> None:
    outcome = pdsl("reproduce", "table1", "--quick", "--set", assignment, "--out", tmp_path / "c")
    outcome.refused(assignment.partition("=")[0], "choose with --")
    assert not (tmp_path / "c").exists()


def plan_of(seeds: int = 2, **changes: Any) -> SweepPlan:
    return SweepPlan(Task(**changes), ("table1",), (), tuple(range(seeds)), "command")


def test_a_table_of_other_data_says_so(tmp_path: Path) -> None:
    other = collect("table1", plan_of(assignments=("data.name=fashion-mnist",)), tmp_path, {})
    assert other.title == "Table I: test accuracy on MNIST (fashion-mnist instead)"
    assert collect("table1", plan_of(), tmp_path, {}).title == "Table I: test accuracy on MNIST"


def kept(plan: SweepPlan, at: Setting, seeds: int, accuracy: float) -> dict[str, KeptCell]:
    """Trials of a setting, and some of its final runs."""
    tuning = plan.tuning(at)
    cells = [*tuning.trials.values(), *tuning.finals(plan.task.rates_of(at.table)[0])[:seeds]]
    score = Score("", on_public=0.5, accuracy=accuracy, loss=1.0)
    return {cell.name: KeptCell(replace(score, name=cell.name), digest(cell), [(1, 1.0, accuracy)]) for cell in cells}


def results(plan: SweepPlan, folder: Path, seeds: dict[str, int]) -> Results:
    """Results at HERE with this number of runs per method; fewer runs have a better accuracy."""
    found: dict[str, KeptCell] = {}
    for method, count in seeds.items():
        found |= kept(plan, replace(HERE, method=method), count, accuracy=0.9 - count / 10)
    return collect("table1", plan, folder, found)


def test_a_cell_with_fewer_runs_is_marked_and_not_summarise(tmp_path: Path) -> None:
    some = results(plan_of(), tmp_path, dict.fromkeys(METHODS, 2) | {"muffliato": 1})
    _, block, *_ = blocks(some, [("ring", 10)])
    shown = {method: row[0] for method, row in block.rows.items()}
    assert shown["muffliato"].ours == "0.800¹"
    assert shown["pdsl"].ours == "0.700"
    assert not any(cell.first for cell in shown.values())
    assert "first of the five" not in some.verdict()
    assert "A superscript is the number of seeds, where it differs." in caption_of(some)
    assert "0.887 0.800¹" in FORMS["md"](some)
    assert "0.800$^1$" in FORMS["tex"](some)
    for counts in (dict.fromkeys(METHODS, 2), dict.fromkeys(METHODS, 1)):
        whole = results(plan_of(), tmp_path, counts)
        assert whole.first(HERE)
        assert "first of the five in 1 of 1" in whole.verdict()
    assert not results(plan_of(), tmp_path, {"pdsl": 2, "muffliato": 2}).first(HERE)
    assert "superscript" not in caption_of(results(plan_of(), tmp_path, dict.fromkeys(METHODS, 2)))


def test_a_table_has_all_kept_seeds_and_marks_cells_with_more(tmp_path: Path) -> None:
    found: dict[str, KeptCell] = {}
    for method in METHODS:
        for agents, count in ((10, 6), (15, 2), (20, 2)):
            found |= kept(plan_of(seeds=count), replace(HERE, method=method, agents=agents), count, accuracy=0.5)
    shown = collect("table1", plan_of(seeds=1), tmp_path, found)
    assert shown.entries[HERE].seeds == tuple(range(6))
    assert shown.entries[replace(HERE, agents=20)].seeds == (0, 1)
    assert {seed for _, seed in shown.runs} == set(range(6))
    assert set(shown.curves(HERE)) == set(range(6))
    _, block, *_ = blocks(shown, [("ring", 10), ("ring", 15)])
    assert [cell.ours for cell in block.rows["pdsl"]] == ["0.500⁶", "0.500"]
    assert "and 2 seeds;" in caption_of(shown)


def test_a_table_names_the_command_of_each_cell(tmp_path: Path) -> None:
    rows = as_dict(collect("table1", plan_of(seeds=3, variant="scratch"), tmp_path, {}))["cells"]
    command = "pdsl reproduce table1 --reading total --variant scratch --seeds 3"
    command += " --only agents={},graph=ring,epsilon=2,method=pdsl"
    at = [(r["agents"], r["command"]) for r in rows if (r["graph"], r["epsilon"], r["method"]) == ("ring", 2, "pdsl")]
    assert at == [(agents, command.format(agents)) for agents in (10, 15, 20)]


def keep_table(place: Path, tmp_path: Path) -> None:
    """Keep Table I with two seeds of one cell in the place."""
    whole = results(plan_of(), tmp_path, dict.fromkeys(METHODS, 2))
    place.mkdir()
    archive.add(place, dict(whole.kept))
    keep_results(whole, place)


def test_the_command_loses_no_run_of_a_kept_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSL_DATA", str(real("mnist")))
    keep_table(tmp_path / "kept", tmp_path)
    command = ("reproduce", "table1", "--rounds", "3", "--only", "agents=10")
    pdsl(*command, "--keep", tmp_path / "kept", "--out", tmp_path / "o").refused("would be lost")
    assert not (tmp_path / "o").exists()


def test_a_kept_table_loses_no_run(tmp_path: Path) -> None:
    plan, place = plan_of(), tmp_path / "kept"
    keep_table(place, tmp_path)
    before = {path: path.read_bytes() for path in place.rglob("*.*")}
    earlier = read(place)
    check_keep(plan, tmp_path, place, earlier)
    for other in (
        plan_of(rounds=3),
        plan_of(rates=(3.0,)),
        plan_of(assignments=("batch.size=16",)),
    ):
        with refused("table1-curves.csv has ", "would be lost", "--keep"):
            check_keep(replace(other, asked=(HERE,)), tmp_path, place, earlier)
    check_keep(plan_of(seeds=1), tmp_path, place, earlier)  # the second seed stays
    check_keep(plan_of(quick=True), tmp_path, place, earlier)  # these tables have a folder of their own
    check_keep(plan_of(variant="scratch"), tmp_path, place, earlier)
    with refused("would be lost"):
        keep_results(collect("table1", plan, tmp_path, {}), place)
    assert {path: path.read_bytes() for path in place.rglob("*.*")} == before
    changed = {name: replace(cell, settings="of another day") for name, cell in earlier.items()}
    with refused("would be lost"):
        check_keep(plan, tmp_path, place, changed)
    check_keep(replace(plan, asked=tuple(replace(HERE, method=m) for m in METHODS)), tmp_path, place, changed)


def test_folders_are_checked_before_any_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = ("reproduce", "table1", "--quick")
    pdsl(*command, "--out", tmp_path / "o", "--keep", tmp_path / "file/k").refused("file/k", "choose another --keep")
    pdsl(*command, "--out", tmp_path / "file").refused(f"cannot write to {tmp_path / 'file'}:", "--out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_failures_are_listed_and_refused_without_any_result(tmp_path: Path) -> None:
    plan = replace(plan_of(), asked=(HERE,))
    (tmp_path / CELLS).mkdir()
    name = next(iter(plan.tuning(HERE).trials.values())).name
    record_failure(name, tmp_path / CELLS, "out of luck")
    with refused("no cell has a result", f"{name}: out of luck"):
        list_failures([collect("table1", plan, tmp_path, {})])
    there = replace(HERE, graph="full")
    found = collect("table1", replace(plan, asked=(HERE, there)), tmp_path, kept(plan, there, 2, 0.9))
    assert list_failures([found]) == [f"{name}: out of luck"]
