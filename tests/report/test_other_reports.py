"""The reports of `pdsl compare` and `pdsl reproduce`: they state the task and the command that repeats it."""

import re
import shlex
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pdsl.config import load, validate
from pdsl.report.document import TEMPLATES
from pdsl.report.line_chart import Points, Scale, line_chart
from pdsl.reproduce import SweepPlan, Task, collect
from pdsl.reproduce.page import figure_page
from pdsl.reproduce.paper import settings_of
from pdsl.reproduce.tables import TableCell
from pdsl.sweep.comparison import ComparisonPlan, summarise
from pdsl.sweep.job import Score
from pdsl.sweep.page import command, write_page
from pdsl.sweep.tuning import parse_grid

TASKS: list[dict[str, Any]] = [
    {},
    {"rounds": 7, "seed": 3, "graph": {"kind": "k-regular", "agents": 6, "degree": 3}, "model": {"channels": (4, 8)}},
    {"partition": {"kind": "shards"}, "privacy": {"target_epsilon": 2.5, "delta": 1e-6}, "attack": {"gaussian": 2}},
    {"data": {"name": "npz", "path": "my files/x.npz"}, "privacy": {"mode": "none"}, "engine": {"exact": True}},
]


def options(words: list[str], name: str) -> list[str]:
    return [value for key, value in pairwise(words) if key == name]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("own", [[], ["algorithm.momentum=0.75", "algorithm.gossip_steps=3"]])
def test_the_command_on_a_page_asks_for_the_same_plan(task: dict[str, Any], own: list[str]) -> None:
    plan = ComparisonPlan.of(validate(task, "test"), ("pdsl", "dmsgd", "muffliato"), (0.5, 0.125), 2, own)
    words = shlex.split(command(plan))
    assert words[:2] == ["pdsl", "compare"]
    [algorithms], [grid], [seeds] = (options(words, f"--{name}") for name in ("algorithms", "grid", "seeds"))
    given = {name: [a for a in options(words, "--set") if a.startswith("algorithm.") == name] for name in (True, False)}
    again = ComparisonPlan.of(
        load(None, given[False]), algorithms.split(","), parse_grid(grid), int(seeds), given[True]
    )
    assert again == plan


def test_a_comparison_has_its_task_and_its_command(tmp_path: Path) -> None:
    plan = ComparisonPlan.of(validate(TASKS[2], "test"), ("pdsl", "muffliato"), (1.0,), 1, ["algorithm.momentum=0.75"])
    jobs = [job for tuning in plan.tunings for job in tuning.trials.values()]
    scores = {job.name: Score(job.name, failed="diverged") for job in jobs}
    html = write_page(summarise(plan, scores, tmp_path)).read_text(encoding="utf-8")
    text = " ".join(re.sub(r"<[^>]*>", " ", html).split())
    assert command(plan) in unescape(html)
    told = ("partition shards, 2 classes each", "agents 10", "rounds 100", "total ε 2.5", "δ 1e-06")
    assert [said for said in (*told, "attackers 2 gaussian", "algorithm.momentum 0.75") if said not in text] == []


@pytest.mark.parametrize(
    ("reading", "said"),
    [("total", "ε = 0.08; ours: total 1; M = 10"), ("none", "ε = 0.08; ours: noise off; M = 10")],
)
def test_a_panel_says_the_papers_epsilon_and_ours(tmp_path: Path, reading: str, said: str) -> None:
    plan = SweepPlan(Task(reading), ("fig3",), tuple(settings_of("fig3")), (0,), "pdsl reproduce fig3")
    assert said in re.sub("<[^>]*>", "", figure_page(collect("fig3", plan, tmp_path, {})))


def test_a_cell_without_a_number_of_the_papers_is_one_line() -> None:
    cell = TEMPLATES.get_template("macros.html.j2").module.paper_cell  # type: ignore[attr-defined]
    assert cell(TableCell("", "0.950", "", False)) == "<td><span>0.950</span></td>"
    assert cell(TableCell("0.817", "—", "", False)).count("<br/>") == 2


def test_a_chart_leaves_no_more_room_than_its_names_need() -> None:
    points: Points = [(1, 0.5), (2, 0.7)]

    def room(name: str) -> float:
        picture = line_chart({name: points}, "accuracy", Scale())
        assert picture is not None
        return picture.width - float(picture.marks.partition("H")[2].partition("M")[0].partition('"')[0])

    assert room("ra") < 60
    assert room("ra") < room("dp-net-fleet") < room("DP-NET-FLEET") < room("x" * 19) == room("y" * 19) < 220
