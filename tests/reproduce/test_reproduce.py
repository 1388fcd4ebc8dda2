"""`pdsl reproduce`: the paper's numbers, a run for each cell, work shared by several commands and resumed."""

import csv
import json
import os
import signal
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from pdsl.reproduce import CELLS, SweepPlan, Task, collect
from pdsl.reproduce.archive import FILE, read
from pdsl.reproduce.paper import AGENTS, EPSILONS, FIGURES, GRAPHS, METHODS, TABLES, Setting, accuracies, panels
from pdsl.reproduce.paper import settings_of as settings_of_target
from pdsl.reproduce.tables import caption
from pdsl.sweep.job import SCORE, run_job
from pdsl.sweep.tuning import count_jobs
from pdsl.utils.errors import PdslError
from tests.helpers.commands import PATIENCE, pdsl, started, wait_for

pytestmark = pytest.mark.slow

# Two learning rates of which the second diverges, at the middle ε; then the final run at the first ε.
ONLY = "graph=ring,method=dp-dpsgd,epsilon=1"
ONE = ("--quick", "--rounds", 4, "--only", ONLY, "--grid", "0.5,1e39", "--processes", 1)
Whole = tuple[Path, dict[str, Any]]  # the folder of a finished command, and its output
HERE = Setting("table1", 0.08, "dp-dpsgd", "ring", 10)


def test_the_papers_numbers_are_those_in_its_tables() -> None:
    paper = accuracies()
    assert len(paper) == 270
    for table in TABLES:
        every = {
            Setting(table, e, method, graph, agents)
            for e in EPSILONS[table]
            for method in METHODS
            for graph in GRAPHS
            for agents in AGENTS
        }
        assert {setting for setting in paper if setting.table == table} == every
    for *place, accuracy in (
        ("table1", 0.08, "pdsl", "full", 10, 0.938),
        ("table1", 0.1, "muffliato", "ring", 10, 0.887),
        ("table1", 0.3, "dp-dpsgd", "ring", 20, 0.653),
        ("table1", 0.3, "pdsl", "bipartite", 10, 0.965),
        ("table2", 0.5, "dp-net-fleet", "bipartite", 20, 0.408),
        ("table2", 1.0, "dp-cga", "full", 15, 0.602),
        ("table2", 1.0, "pdsl", "ring", 20, 0.528),
    ):
        assert paper[Setting(*place)] == accuracy  # type: ignore[arg-type]


def test_the_kept_runs_are_found_with_the_settings_of_now() -> None:
    """A setting with another name or default would leave a kept table without its runs."""
    kept_folder = Path(__file__).parents[2] / "docs/results"
    kept = read(kept_folder)
    curves = sorted(kept_folder.glob("*/*/table?-curves.csv"))
    assert len(curves) >= 4
    for file in curves:
        rows = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
        target, seeds = file.name.removesuffix("-curves.csv"), tuple(range(1 + max(int(r["seed"]) for r in rows)))
        task = Task(file.parent.name, variant=file.parent.parent.name)
        found = collect(target, SweepPlan(task, (target,), (), seeds, ""), Path("none"), kept)
        assert found.runs == {
            (Setting(r["table"], float(r["paper_epsilon"]), r["method"], r["graph"], int(r["agents"])), int(r["seed"]))
            for r in rows
        }


def test_the_claims_of_the_papers_text_about_its_tables_hold() -> None:
    paper = accuracies()

    def ratio(at: Setting, method: str) -> float:
        return round(paper[replace(at, method="pdsl")] / paper[replace(at, method=method)], 2)

    mnist = Setting("table1", 0.3, "pdsl", "bipartite", 20)
    said = {"dp-dpsgd": 1.38, "dp-cga": 1.12, "muffliato": 1.13, "dp-net-fleet": 1.06}
    assert all(ratio(mnist, method) == pytest.approx(value, abs=0.011) for method, value in said.items())
    cifar = Setting("table2", 1.0, "pdsl", "ring", 20)
    said = {"dp-dpsgd": 1.49, "dp-cga": 1.21, "muffliato": 1.23, "dp-net-fleet": 1.16}
    assert all(ratio(cifar, method) == pytest.approx(value, abs=0.011) for method, value in said.items())
    assert all(paper[replace(s, method="pdsl")] >= accuracy for s, accuracy in paper.items())


def test_six_figures_have_54_panels_and_show_every_cell_once() -> None:
    assert sum(len(panels(figure)) for figure in FIGURES) == 54
    assert panels("fig1")["a1"] == (10, 0.08)
    assert panels("fig6")["c2"] == (20, 0.7)
    shown = [setting for figure in FIGURES for setting in settings_of_target(figure)]
    assert len(shown) == len(set(shown)) == 270


def test_epsilon_is_read_in_four_ways() -> None:
    mnist, cifar = Setting("table1", 0.1, "pdsl", "ring", 15), Setting("table2", 1.0, "dp-cga", "full", 20)

    def privacy(reading: str, setting: Setting) -> Any:
        return Task(reading).config(setting, 1.0, 0).privacy

    assert (privacy("total", mnist).mode, privacy("total", mnist).target_epsilon) == ("total", 2)
    assert privacy("total", cifar).target_epsilon == 8
    for reading in ("per-round", "paper"):
        assert (privacy(reading, mnist).mode, privacy(reading, mnist).epsilon_per_round) == (reading, 0.1)
        assert privacy(reading, cifar).epsilon_per_round == 1
    assert privacy("none", mnist).mode == "none"
    config = Task().config(cifar, 2.0, 3)
    assert (config.data.name, config.graph.kind, config.graph.agents, config.seed) == ("cifar10", "full", 20, 3)
    assert (config.algorithm.name, config.algorithm.learning_rate) == ("dp-cga", 2.0)  # type: ignore[attr-defined]


def plan(target: str = "table1", only: str | None = None, seeds: int = 2, **task: Any) -> SweepPlan:
    return SweepPlan.of(target, Task(quick=True, **task), only, seeds)


def test_the_table_says_where_runs_are_longer(tmp_path: Path) -> None:
    whole, silent = (
        collect("table1", SweepPlan(Task(reading, variant="scratch"), ("table1",), (), (0,), "command"), tmp_path, {})
        for reading in ("total", "none")
    )
    longer = "ε = 1 and 2: 40 rounds, batches of 250; ε = 4: 60 rounds, batches of 500, EMA of models."
    assert longer in caption(whole)
    assert "seed 0. 40 rounds, batches of 250. " in caption(silent)


def test_a_cell_is_one_run_for_all_commands() -> None:
    whole, part = plan(), plan("fig3", "method=pdsl", seeds=1)
    at = replace(HERE, method="pdsl")
    assert part.tuning(at).finals(1.0) == whole.tuning(at).finals(1.0)[:1]
    assert part.tuning(at).trials == whole.tuning(at).trials
    spot = replace(at, epsilon=0.1)  # where learning rates are tried: its first final run is a trial
    assert whole.tuning(spot).finals(1.0)[0] == whole.tuning(at).trials[1.0]
    assert len(whole.asked) == 45
    assert (
        count_jobs(whole.tunings) == 45 * 2 + 15
    )  # two rates each for five methods on three graphs, of which one is a final
    silent = plan(reading="none")
    assert len({silent.tuning(replace(at, epsilon=e)).finals(1.0)[0].name for e in EPSILONS["table1"]}) == 1
    loud, rich = (
        Task(reading, variant="scratch").config(replace(at, epsilon=0.3), 1.0, 0) for reading in ("per-round", "total")
    )
    assert (loud.rounds, rich.rounds) == (40, 60)  # only a large total has the longer run
    changed = plan(assignments=("batch.size=16",))
    assert changed.tuning(at).finals(1.0)[0].name != whole.tuning(at).finals(1.0)[0].name
    assert changed.tuning(at).finals(1.0)[0].config.batch.size == 16


@pytest.mark.parametrize(
    ("only", "count"),
    [
        ("graph=ring", 15),
        ("agents=15,agents=20", 90),
        ("epsilon=0.3", 15),
        ("epsilon=4", 15),  # the same cells by our ε
        ("graph=ring,agents=10,epsilon=1,method=pdsl", 1),
    ],
)
def test_a_part_of_a_table(only: str, count: int) -> None:
    assert len(plan(only=only).asked) == count


def test_mistakes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pdsl("reproduce", "table3").refused("no table or figure 'table3'", "fig6")
    pdsl("reproduce", "fig1", "--reading", "yearly").refused("--reading yearly", "per-round")
    pdsl("reproduce", "fig1", "--only", "graphs=ring").refused("--only graphs=ring", "graph")
    pdsl("reproduce", "fig1", "--only", "graph=star").refused("--only graph=star", "bipartite")
    pdsl("reproduce", "fig1", "--only", "epsilon=5").refused("epsilon is one of", "0.08")
    pdsl("reproduce", "fig1", "--quick", "--only", "graph=ring").refused("no cell is left")
    pdsl("reproduce", "fig1", "--quick", "--set", "batch.sizes=3").refused("did you mean batch.size")
    monkeypatch.setenv("PDSL_DATA", str(tmp_path))
    pdsl("reproduce", "table2").refused("cifar10 is not in", "pdsl data fetch cifar10")


def test_kept_results_are_shown_without_data_and_without_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSL_DATA", str(tmp_path))
    kept = Path(__file__).parents[2] / "docs/results"
    before = {path: path.read_bytes() for path in kept.rglob("*.*")}
    options = ("--no-run", "--keep", kept, "--out", tmp_path / "o")
    table = json.loads(pdsl("reproduce", "table2", *options, "--json").out)["tables"]["table2"]
    assert table["public_set_alone"] > 0.6
    assert sum(cell["ours"] is not None for cell in table["cells"]) >= 21
    assert pdsl("reproduce", "fig4", *options).code == 0
    assert len(list((tmp_path / "o/features/total").glob("fig4-*.svg"))) >= 3
    assert not (tmp_path / "o" / CELLS).exists()
    assert {path: path.read_bytes() for path in kept.rglob("*.*")} == before
    pdsl("reproduce", "table1", "--no-run", "--out", tmp_path / "none").refused(
        "no finished run in", "leave out --no-run"
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    outcome = pdsl("reproduce", "table1", *ONE, "--out", folder, "--keep", folder / "kept", "--json")
    assert outcome.code == 0, outcome.err
    assert "[3/3]" in outcome.err
    assert " left" in outcome.err
    return folder, json.loads(outcome.out)


def cells(folder: Path) -> set[str]:
    return {path.parent.name for path in (folder / CELLS).rglob(SCORE)}


def test_our_number_stands_beside_the_papers(whole: Whole) -> None:
    folder, printed = whole
    table = printed["tables"]["table1"]
    (cell,) = [c for c in table["cells"] if c["ours"] is not None and c["paper_epsilon"] == 0.08]
    assert len(table["cells"]) == 135
    assert (cell["method"], cell["graph"], cell["agents"], cell["paper"]) == ("dp-dpsgd", "ring", 10, 0.817)
    (run,) = [path for path in cells(folder) if "total1-" in path]
    summary = json.loads((folder / CELLS / run / "summary.json").read_text())
    assert cell["accuracies"] == [pytest.approx(summary["accuracy"], abs=1e-5)]
    assert cell["difference"] == pytest.approx(summary["accuracy"] - 0.817, abs=2e-5)
    assert 0.97 <= cell["total_epsilon"] <= 1
    assert cell["learning_rate"] == 0.5
    assert any("diverged" in reason for reason in cell["failed"])  # the other rate, reported

    assert json.loads((folder / "total/table1.json").read_text()) == table
    with (folder / "total/table1.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["paper"]) for row in rows] == [c["paper"] for c in table["cells"]]
    shown = f"0.817 {summary['accuracy']:.3f}"
    assert shown in (folder / "total/table1.md").read_text()
    assert "0.731 — " in (folder / "total/table1.md").read_text()  # M = 15: not run
    assert "seed 0. 4 rounds, batches of 32. " in (folder / "total/table1.md").read_text()
    tex = (folder / "total/table1.tex").read_text().splitlines()
    assert {line.count("&") for line in tex if "shortstack" in line} == {10}
    assert sum("shortstack" in line for line in tex) == 15
    page = ET.fromstring((folder / "total/table1.html").read_text().split("</header>")[1].split("<footer")[0])
    assert ["0.817", f"{summary['accuracy']:.3f}"] in [[s.text for s in td.iter("span")][:2] for td in page.iter("td")]
    assert {path.name for path in (folder / "kept/total").iterdir()} == {
        "table1.md",
        "table1.csv",
        "table1.json",
        "table1-curves.csv",
    }
    assert "pdsl reproduce table1 --quick" in (folder / "kept/total/table1.md").read_text()


def test_a_table_uses_kept_cells_where_runs_are_missing(whole: Whole, tmp_path: Path) -> None:
    folder, printed = whole
    keep = tmp_path / "kept"
    keep.mkdir()
    before = (folder / "kept" / FILE).read_text()
    (keep / FILE).write_text(before)
    elsewhere = [ONLY.replace("epsilon=1", "epsilon=4") if word == ONLY else word for word in ONE]
    other = ("reproduce", "table1", *elsewhere, "--out", tmp_path, "--keep", keep)
    assert pdsl(*other, "--json").code == 0
    table = json.loads((keep / "total/table1.json").read_text())
    found = {c["paper_epsilon"]: c for c in table["cells"] if c["ours"] is not None}
    assert found.keys() >= {0.08, 0.3}  # the kept cell, and the new run
    assert found[0.08] == next(c for c in printed["tables"]["table1"]["cells"] if c == found[0.08])
    curves = (folder / "kept/total/table1-curves.csv").read_text().splitlines()
    assert set(curves) < set((keep / "total/table1-curves.csv").read_text().splitlines())
    assert set(read(folder / "kept")) < set(read(keep))

    again = ("reproduce", "table1", *ONE, "--out", tmp_path / "third", "--keep", keep, "--json")
    assert pdsl(*again, "--missing").code == 0
    assert cells(tmp_path / "third") == {name for name in cells(folder) if read(keep)[name].score.failed}
    pdsl("reproduce", "table1", *ONE, "--missing").refused("name their folder with --keep")

    (keep / FILE).write_text(before.replace('"settings": "', '"settings": "f'))  # run with other defaults
    pdsl(*other).refused("would be lost")
    (keep / FILE).write_text("{")
    pdsl(*other).refused("is damaged")


def test_the_same_runs_serve_the_figure(whole: Whole) -> None:
    folder, _ = whole
    before = cells(folder)
    outcome = pdsl("reproduce", "fig3", *ONE, "--out", folder)
    assert outcome.code == 0, outcome.err
    assert cells(folder) == before
    (run,) = [path for path in before if "total1-" in path]
    rows = [json.loads(line) for line in (folder / CELLS / run / "rows.jsonl").read_text().splitlines()]
    with (folder / "total/fig3.csv").open() as file:
        drawn = [row for row in csv.DictReader(file) if row["paper_epsilon"] == "0.08"]
    assert [(int(row["round"]), float(row["loss"])) for row in drawn] == [
        (row["round"], pytest.approx(row["loss"], abs=1e-4)) for row in rows if "loss" in row
    ]
    picture = ET.parse(folder / "total/fig3-a1.svg").getroot()
    assert "DP-DPSGD" in [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert not (folder / "total/fig3-b1.svg").exists()


def test_an_interrupted_command_says_how_to_continue(tmp_path: Path) -> None:
    said = tmp_path / "said"
    out = tmp_path / "out"
    process = started("reproduce", "fig3", "--quick", "--processes", 1, "--out", out, err=said)
    wait_for(lambda: bool(cells(out)))
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join(PATIENCE)
    assert process.exitcode == 130
    assert f"interrupted; to continue in {out}, run the same command again" in said.read_text()


def test_a_killed_command_continues_and_ends_with_the_same_table(whole: Whole, tmp_path: Path) -> None:
    process = started("reproduce", "table1", *ONE, "--out", tmp_path)
    wait_for(lambda: bool(cells(tmp_path)))
    process.kill()
    process.join(PATIENCE)
    again = pdsl("reproduce", "table1", *ONE, "--out", tmp_path, "--json")
    assert again.code == 0, again.err
    assert json.loads(again.out)["tables"] == whole[1]["tables"]


def test_a_job_that_another_process_runs_is_skipped(tmp_path: Path) -> None:
    task = Task(quick=True, rounds=4, rates=(0.5,))
    asked = SweepPlan.of("table1", task, "graph=ring,method=dp-dpsgd,epsilon=2", 2)
    held, free = asked.tuning(replace(HERE, epsilon=0.1)).finals(0.5)
    (tmp_path / CELLS).mkdir()
    with FileLock(tmp_path / CELLS / f"{held.name}.lock"):
        assert run_job(held, tmp_path / CELLS) is None
        score = run_job(free, tmp_path / CELLS)
        assert score is not None
        assert cells(tmp_path) == {free.name}
    other = run_job(held, tmp_path / CELLS)
    assert other is not None
    assert other.failed is None
    assert run_job(free, tmp_path / CELLS) == score


def test_two_commands_share_the_work(tmp_path: Path) -> None:
    command = ("reproduce", "table1", "--quick", "--rounds", 4, "--only", "graph=ring,method=dp-dpsgd,epsilon=2")
    command = (*command, "--seeds", 4, "--grid", "0.5", "--processes", 1, "--out", tmp_path)
    said = tmp_path / "said"
    other = started(*command, err=said)
    outcome = pdsl(*command, "--json")
    other.join(PATIENCE)
    assert (outcome.code, other.exitcode) == (0, 0)
    (cell,) = [c for c in json.loads(outcome.out)["tables"]["table1"]["cells"] if c["ours"] is not None]
    assert cell["seeds"] == [0, 1, 2, 3]
    for name in cells(tmp_path):
        rows = (tmp_path / CELLS / name / "rows.jsonl").read_text().splitlines()
        assert [json.loads(row)["round"] for row in rows] == [1, 2, 3, 4]


def test_a_run_with_another_default_is_refused(tmp_path: Path) -> None:
    (cell,) = SweepPlan.of("table1", Task(quick=True, rounds=4, rates=(0.5,)), ONLY, 1).tuning(HERE).finals(0.5)
    other = cell.config.model_copy(update={"evaluate_every": 3})
    assert run_job(cell._replace(config=other), tmp_path) is not None
    with pytest.raises(PdslError, match="evaluate_every=3, which is now 2"):
        run_job(cell, tmp_path)


def test_a_run_from_before_a_setting_existed_is_refused(tmp_path: Path) -> None:
    (cell,) = SweepPlan.of("table1", Task(quick=True, rounds=4, rates=(0.5,)), ONLY, 1).tuning(HERE).finals(0.5)
    assert run_job(cell, tmp_path) is not None
    config = tmp_path / cell.name / "config.toml"
    config.write_text(config.read_text().replace("evaluate_every = 2\n", ""))
    with pytest.raises(PdslError, match="evaluate_every=not set, which is now 2"):
        run_job(cell, tmp_path)
