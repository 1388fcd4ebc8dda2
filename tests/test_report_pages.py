"""The pages of `pdsl compare` and `pdsl reproduce`: what they say is enough to repeat them and to know what was run."""

import re
import shlex
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pdsl.cells import Score
from pdsl.compare import Plan, compared
from pdsl.compare.page import command, write_page
from pdsl.compare.shown import rates
from pdsl.config import load, validated
from pdsl.report.lines import Points, overlaid
from pdsl.report.numbers import plain
from pdsl.reproduce import Plan as Reproduction
from pdsl.reproduce import Task, collected
from pdsl.reproduce.layout import Shown
from pdsl.reproduce.page import _cell, figure_page
from pdsl.reproduce.paper import settings_of

TASKS: list[dict[str, Any]] = [
    {},
    {"rounds": 7, "seed": 3, "graph": {"kind": "k-regular", "agents": 6, "degree": 3}, "model": {"channels": (4, 8)}},
    {"partition": {"kind": "shards"}, "privacy": {"target_epsilon": 2.5, "delta": 1e-6}, "rogue": {"noise": 2}},
    {"data": {"name": "npz", "path": "my files/x.npz"}, "privacy": {"mode": "none"}, "engine": {"exact": True}},
]


def options(words: list[str], name: str) -> list[str]:
    return [value for key, value in pairwise(words) if key == name]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("own", [[], ["algorithm.momentum=0.75", "algorithm.gossip_steps=3"]])
def test_the_command_on_a_page_asks_for_the_same_plan(task: dict[str, Any], own: list[str]) -> None:
    plan = Plan.of(validated(task, "test"), ("pdsl", "dmsgd", "muffliato"), (0.5, 0.125), 2, own)
    words = shlex.split(command(plan))
    assert words[:2] == ["pdsl", "compare"]
    [algorithms], [grid], [seeds] = (options(words, f"--{name}") for name in ("algorithms", "grid", "seeds"))
    given = {name: [a for a in options(words, "--set") if a.startswith("algorithm.") == name] for name in (True, False)}
    again = Plan.of(load(None, given[False]), algorithms.split(","), rates(grid), int(seeds), given[True])
    assert again == plan


def test_a_comparison_has_its_task_and_its_command(tmp_path: Path) -> None:
    plan = Plan.of(validated(TASKS[2], "test"), ("pdsl", "muffliato"), (1.0,), 1, ["algorithm.momentum=0.75"])
    scores = {cell.name: Score(cell.name, failed="diverged") for name in plan.algorithms for cell in plan.trials(name)}
    html = write_page(compared(plan, scores, tmp_path)).read_text(encoding="utf-8")
    text = " ".join(re.sub(r"<[^>]*>", " ", html).split())
    assert escape(command(plan)) in html
    told = ("partition shards, 2 classes each", "agents 10", "rounds 100", "total ε 2.5", "δ 1e-06", "rogues 2 noise")
    assert [said for said in (*told, "algorithm.momentum 0.75") if said not in text] == []


@pytest.mark.parametrize(
    ("reading", "said"),
    [("total", "ε = 0.08; ours: total 1; M = 10"), ("none", "ε = 0.08; ours: noise off; M = 10")],
)
def test_a_panel_says_the_papers_epsilon_and_ours(tmp_path: Path, reading: str, said: str) -> None:
    plan = Reproduction(Task(reading), ("fig3",), tuple(settings_of("fig3")), (0,), "pdsl reproduce fig3")
    assert said in figure_page(collected("fig3", plan, tmp_path, {}))


def test_a_cell_without_a_number_of_the_papers_is_one_line() -> None:
    assert _cell(Shown("", "0.950", "", False)) == "<td><span>0.950</span></td>"
    assert _cell(Shown("0.817", "—", "", False)).count("<br/>") == 2


def test_a_chart_leaves_no_more_room_than_its_names_need() -> None:
    points: Points = [(1, 0.5), (2, 0.7)]

    def room(name: str) -> float:
        picture = overlaid({name: points}, "accuracy", plain)
        assert picture is not None
        return picture.width - float(picture.marks.partition("H")[2].partition("M")[0].partition('"')[0])

    assert room("ra") < 60
    assert room("ra") < room("dp-net-fleet") < room("DP-NET-FLEET") < room("x" * 19) == room("y" * 19) < 220
