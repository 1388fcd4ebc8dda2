"""The report of a run: it agrees with the run directory, and it is self-contained."""

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from pdsl.report import write_report
from pdsl.report.comparison import name_runs, write_comparison
from pdsl.report.figures import graph_figures
from pdsl.report.line_chart import BOTTOM, LEFT, RIGHT, TOP
from pdsl.report.run_data import read_run
from pdsl.report.tables import summary_table
from pdsl.utils.errors import PdslError
from pdsl.utils.format import chunks, duration, format_epsilon, nice, plain, signed, size, ticks_between, ticks_to

LEARNING = ["Accuracy", "Loss", "Consensus distance", "Sent between agents"]  # left column, right column
HELPING = [
    "Communication graph",
    "Records per agent",
    "Average weight received (1 = equal share)",
    "Shapley value φ of each message",
]
PRIVACY = "ε is not stated: the noise came from a seed."

Fields = dict[str, Any]


def ring(M: int) -> list[list[float]]:
    return [[i, j, 1 / 3] for i in range(M) for j in sorted({(i - 1) % M, i, (i + 1) % M})]


def a_row(t: int, edges: int, valued: bool = True) -> Fields:
    row: Fields = {"round": t, "consensus": 0.4 / t, "bytes": 1500, "messages": 4}
    accuracy = min(0.9, 0.5 + t / 100)
    row |= {"accuracy": accuracy, "accuracy_min": 0.4, "accuracy_max": 1, "accuracy_of_mean": accuracy + 0.1}
    row |= {"loss": 2.0 / t, "loss_min": 1.5 / t, "loss_max": 3.0 / t}
    if valued:
        phi = [0.01 * (e % 5 - 2) * t for e in range(edges)]
        row["shapley"] = {"estimator": "exact", "coalitions": 8, "spread": 0.02, "phi": phi, "share": [1 / 3] * edges}
    return row


def make_run(
    path: Path, M: int = 4, T: int = 5, valued: bool = True, name: str = "digits-ring", end: bool = True
) -> Path:
    path.mkdir()
    edges = ring(M)
    labels = [[10 * i + 1, 0, 7] for i in range(M)]
    setup = {"agents": M, "edges": edges, "parameters": 4810, "spectral_gap": 0.3}
    setup |= {"graph": f"ring of {M} agents, 3 members each", "data": "digits", "validation": 299, "test": 300}
    (path / "setup.json").write_text(json.dumps(setup))
    (path / "owner.json").write_text(json.dumps({"labels": labels}))
    (path / "config.toml").write_text(
        f"name = {json.dumps(name)}\nrounds = {T}\nseed = 7\n[graph]\nkind = 'ring'\n[engine]\n"
    )
    write_rows(path, [a_row(t, len(edges), valued) for t in range(1, T + 1)])
    if end:
        summary: Fields = {"accuracy": 0.9414, "accuracy_of_mean": 0.9521, "loss": 0.2345, "rounds": T, "agents": M}
        summary |= {"seconds": 41.37, "epsilon": None, "sigma": 0.0596, "privacy": PRIVACY, "notes": ["A <note>."]}
        summary["accuracy_per_agent"] = [0.9 + i / 10000 for i in range(M)]
        (path / "summary.json").write_text(json.dumps(summary))
    return path


def read_rows(run: Path) -> list[Fields]:
    return [json.loads(line) for line in (run / "rows.jsonl").read_text().splitlines()]


def write_rows(run: Path, rows: list[Fields]) -> None:
    (run / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class Page(HTMLParser):
    """A parsed report: tags with attributes, text outside of <style> and <script>, drawings and tips."""

    def __init__(self, run: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.code = False
        self.html = write_report(run).read_text(encoding="utf-8")
        self.feed(self.html)
        self.text = " ".join(self.text.split())  # no-break spaces too
        self.svgs = [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", self.html, re.DOTALL)]
        marks = [
            (parent, mark) for svg in self.svgs for parent in svg.iter() for mark in parent if mark.get("data-tip")
        ]
        said = [f"{parent.get('data-of', '')} {mark.get('data-tip')}" for parent, mark in marks]
        self.tips = {" ".join(text.split()) for text in said}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.code = tag in ("style", "script")
        self.text += " " * (tag != "abbr")  # a term within a sentence

    def handle_endtag(self, tag: str) -> None:
        self.code = False
        self.text += " " * (tag != "abbr")

    def handle_data(self, data: str) -> None:
        self.text += "" if self.code else data

    def titles(self) -> list[str]:
        return [re.sub("<.*?>", "", title) for title in re.findall(r"<h2>(.*?)</h2>", self.html)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "a")


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    return Page(run)


def test_the_page_is_in_the_run_directory_and_nothing_is_left_aside(run: Path, page: Page) -> None:
    assert write_report(run) == run / "report.html"
    assert sorted(p.name for p in run.iterdir()) == [
        "config.toml",
        "owner.json",
        "report.html",
        "rows.jsonl",
        "setup.json",
        "summary.json",
    ]


def test_every_figure_is_there(page: Page) -> None:
    assert page.titles() == [*LEARNING, "Privacy statement", "Notes", *HELPING, "Settings", "Run it again"]
    assert sum(svg.get("role") == "img" for svg in page.svgs) == 8


def test_nothing_is_loaded(page: Page) -> None:
    assert not [tag for tag, attributes in page.tags if {"src", "href", "xlink:href", "srcset"} & set(attributes)]
    assert not [tag for tag, _ in page.tags if tag in ("link", "iframe", "img", "object")]
    assert "@import" not in page.html
    assert "://" not in page.html
    used = set(re.findall(r"url\((.*?)\)", page.html))
    assert used == {f"#{name}" for name in re.findall(r' id="(head|clip-\w+)"', page.html)}
    assert "default-src 'none'" in page.html


def test_the_verdict_and_the_tiles_are_the_summary(page: Page) -> None:
    assert "4 agents on a ring reached 94.1 % test accuracy on digits in 5 rounds, with no bound on ε." in page.text
    tiles = [
        "accuracy, mean over agents 94.1 %",
        "accuracy of the mean model 95.2 %",
        "loss, mean over agents 0.234",
    ]
    tiles += ["total ε —", "sent between agents 7.5 kB", "for 5 rounds 41.4 s"]
    for tile in [*tiles, PRIVACY, "σ = 0.0596", "A <note>."]:
        assert tile in page.text


def test_what_was_spent_of_the_budget(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_rows(run, [{**row, "epsilon": 0.5 * row["round"]} for row in read_rows(run)])
    summary = json.loads((run / "summary.json").read_text())
    adversaries = {"one intercepted message": 0.36, "all neighbours colluding": None}
    said = "total ε = 2.5 at δ = 1e-05; not private: seeded noise, for simulation only"
    summary |= {"epsilon": 2.5, "delta": 1e-5, "privacy": said, "adversaries": adversaries}
    (run / "summary.json").write_text(json.dumps(summary))
    page = Page(run)
    assert "in 5 rounds, with total ε = 2.5 (budget 8)." in page.text  # 8 is the default
    assert page.text.count("not private: seeded noise ") == 5  # verdict, tile, statement, adversaries, and figure
    assert "round 3 ε spent 1.5 budget 8" in page.tips
    assert "one intercepted message 0.36 all neighbours colluding —" in page.text
    with (run / "config.toml").open("a") as config:
        config.write("[privacy]\nmode = 'noise'\nsigma = 1.0\n")
    page = Page(run)
    assert "with total ε = 2.5. not private: seeded noise" in page.text
    assert "round 3 ε spent 1.5" in page.tips


def test_no_epsilon_is_shown_below_what_was_spent(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_rows(run, [{**row, "epsilon": 7.99301} for row in read_rows(run)])
    summary = json.loads((run / "summary.json").read_text())
    summary |= {"epsilon": 7.99301, "delta": 1e-5, "adversaries": {"one intercepted message": 0.12341}}
    (run / "summary.json").write_text(json.dumps(summary))
    page = Page(run)
    totals = ("with total ε = 7.994 (budget 8)", "total ε (budget 8) not private: seeded noise 7.994", "ε = 7.994, δ")
    for said in (*totals, "one intercepted message 0.1235"):
        assert said in page.text
    assert "round 3 ε spent 7.994 budget 8" in page.tips
    table = summary_table(read_run(run))
    assert "| total ε | 7.994 |" in table.markdown()
    assert r"total $\varepsilon$ & 7.994 \\" in table.latex()
    assert "total ε,7.99301" in table.csv()  # every digit


@pytest.mark.parametrize("value", [8.0, 7.9961, 0.1, 1e-5, 0.0, 12.345678, 999.96, 1234.01, 99999.5, 3.2e11, 1 / 3])
def test_an_epsilon_has_four_digits_and_is_rounded_up(value: float) -> None:
    shown = float(format_epsilon(value).replace(",", ""))
    assert value <= shown <= value * 1.001 + 1e-300


def test_curves_say_and_draw_each_row(run: Path, page: Page) -> None:
    rows = read_rows(run)
    for row in rows:
        said = f"round {row['round']} mean over agents {100 * row['accuracy']:.5g} % mean model"
        assert any(tip.startswith(said) for tip in page.tips)
        ends = f"best agent {row['loss_min']:.5g} worst agent {row['loss_max']:.5g}"
        assert f"round {row['round']} mean over agents {row['loss']:.5g} {ends}" in page.tips
        assert f"round {row['round']} sent so far {1500 * row['round']:,} B" in page.tips
        assert f"round {row['round']} consensus distance {row['consensus']:.5g}" in page.tips
    accuracy = next(svg for svg in page.svgs if svg.get("aria-label", "").startswith("mean over agents and mean model"))
    [line] = [mark.get("d", "") for mark in accuracy.iter() if mark.get("class") == "line first"]
    drawn = [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", line)]
    expected = [LEFT + (RIGHT - LEFT) * (row["round"] - 1) / 4 for row in rows]
    assert [x for x, _ in drawn] == pytest.approx(expected, abs=0.06)
    low, high = 0.2, 1.0  # ticks around the worst and the best agent
    heights = [BOTTOM - (BOTTOM - TOP) * (row["accuracy"] - low) / (high - low) for row in rows]
    assert [y for _, y in drawn] == pytest.approx(heights, abs=0.06)


def test_bars_hold_each_agents_labels(page: Page) -> None:
    for i in range(4):
        assert {f"agent {i} class 0: {10 * i + 1}", f"agent {i} class 2: 7"} <= page.tips
        assert f"{i} {10 * i + 8} {100 * (0.9 + i / 10000):.1f} %" in page.text
    assert not [tip for tip in page.tips if "class 1" in tip]


def test_the_heat_map_has_every_value_and_every_mean(run: Path, page: Page) -> None:
    phi = [row["shapley"]["phi"] for row in read_rows(run)]
    for e, (i, j, _) in enumerate(ring(4)):
        for t, of_round in enumerate(phi, start=1):
            assert f"{i:.0f} ← {j:.0f} round {t}: {signed(of_round[e], 3)}" in page.tips
        assert f"{i:.0f} ← {j:.0f} {signed(fmean(of_round[e] for of_round in phi), 3)}" in page.text


def test_arrows_say_the_mean_share(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", T=2)
    rows = read_rows(run)
    for row, first in zip(rows, (0.1, 0.4), strict=True):
        row["shapley"]["share"][:3] = [first, 0.3, 0.7 - first]  # agent 0 hears 0, 1 and 3
    write_rows(run, rows)
    page = Page(run)
    assert {"0 ← 1: 30.0 %", "0 ← 3: 45.0 %", "2 ← 1: 33.3 %"} <= page.tips
    assert "agent 0 weight of its own message: 25.0 % 8 records by class 0: 1, 2: 7" in page.tips


ATTACKERS = [[0, "label-flip"], [2, "gaussian"]]


def change_setup(run: Path, **fields: object) -> None:
    setup = json.loads((run / "setup.json").read_text())
    (run / "setup.json").write_text(json.dumps(setup | fields))


@pytest.mark.parametrize("M", [4, 15, 24, 60])
def test_attackers_are_marked_wherever_agents_are_named(tmp_path: Path, M: int) -> None:
    run = make_run(tmp_path / "run", M=M)
    honest = Page(run)
    assert "*" not in honest.text
    assert "attack" not in honest.text
    change_setup(run, attackers=ATTACKERS)
    page = Page(run)
    assert f"{M} agents (2 attackers) on a ring" in page.text
    assert "(label flipping: 0; Gaussian noise: 2)" in page.text
    figures = {svg.get("aria-label", "").partition(" ")[0]: svg for svg in page.svgs}
    marked = {name: {text.text for text in svg.iter("text") if "*" in f"{text.text}"} for name, svg in figures.items()}
    assert {"0*"} <= marked["graph"]
    assert marked["records"] == marked["average"] == {"0*", "2*"}
    by_edge = 3 * M <= 60
    shapley = {f"{i} ← {j:.0f}*" for i, j, _ in ring(M) if j in (0, 2)} if by_edge else {"0*", "2*"}
    assert marked["Shapley"] == shapley
    assert marked.get("weights", {"0*", "2*"}) == {"0*", "2*"}
    rings = [mark for svg in page.svgs for mark in svg.iter("circle") if mark.get("class") == "attack"]
    assert len(rings) == 2
    assert any(tip.startswith("agent 2, attacker (Gaussian noise)") for tip in page.tips)


def test_weights_without_numbers_have_a_scale(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", M=24, T=1)
    rows = read_rows(run)
    rows[0]["shapley"]["share"] = [0.1 + 0.5 * e / 71 for e in range(72)]
    write_rows(run, rows)
    page = Page(run)
    assert "from 10.0 % from 20.0 % from 30.0 % from 40.0 % from 50.0 %" in page.text
    assert "Colours: average weight over the run; hover for the percentage" in page.text


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("accuracy", "raised the receiver's accuracy on"),
        ("loss", "lowered the receiver's loss on"),
        ("centred", "lowered the receiver's loss with centred logits on"),
    ],
)
def test_the_heat_map_says_what_messages_were_valued_by(tmp_path: Path, value: str, said: str) -> None:
    run = make_run(tmp_path / "run")
    with (run / "config.toml").open("a") as config:
        config.write(f"[algorithm.shapley]\nvalue = '{value}'\n")
    assert f"Blue: the message {said} the public set" in Page(run).text


def test_the_weight_received_is_relative_to_an_equal_share(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", T=2)
    rows = read_rows(run)
    for row in rows:
        row["shapley"]["share"] = [0.2 if j == 2 and i != 2 else 0.4 for i, j, _ in ring(4)]  # 2 is weighed down
    write_rows(run, rows)
    page = Page(run)
    assert {"agent 2 0.600 × equal share", "agent 0 1.200 × equal share"} <= page.tips  # 3 members: 0.2 · 3
    assert "Lowest: agent 2 (0.60)" in page.text


def test_equal_shares_are_said_to_be_equal(page: Page) -> None:
    assert "All agents received the same weight." in page.text
    assert "agent 3 1.000 × equal share" in page.tips


def test_settings_and_how_to_repeat_it(page: Page) -> None:
    assert "graph kind ring" in page.text
    assert "rounds 5 seed 7" in page.text
    assert "pdsl run config.toml" in page.text


def test_a_hostile_name_stays_text(tmp_path: Path) -> None:
    page = Page(make_run(tmp_path / "run", name='<script>alert("1")</script>&'))
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert '<script>alert("1")</script>&' in page.text


def test_hostile_text_stays_text_wherever_a_run_has_it(tmp_path: Path) -> None:
    hostile = "<img src=x onerror='alert(1)'>\"{{ 7 * 7 }}"
    run, other = make_run(tmp_path / "run", name=hostile), make_run(tmp_path / "other")
    change_setup(run, graph=hostile, data=hostile, attackers=[[0, hostile]])
    summary = json.loads((run / "summary.json").read_text())
    said = {"privacy": hostile, "stopped": hostile, "notes": [hostile], "adversaries": {hostile: 1.0}}
    (run / "summary.json").write_text(json.dumps(summary | said))
    with (run / "config.toml").open("a") as config:
        config.write(f"{json.dumps(hostile)} = {json.dumps(hostile)}\n[{json.dumps(hostile)}]\na = 1\n")
    page = Page(run)
    assert page.text.count(hostile) >= 10
    assert any(hostile in tip for tip in page.tips)
    runs = name_runs([(path, read_run(path)) for path in (run, other)])
    compared = write_comparison(runs, tmp_path / "c.html").read_text(encoding="utf-8")
    assert hostile in unescape(compared)
    assert "<img" not in page.html + compared
    figure = graph_figures(read_run(run))[0]
    assert figure.picture is not None
    assert ET.fromstring(figure.picture.svg(hostile))[0].text == hostile


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", T=5, end=False)
    write_rows(run, read_rows(run)[:3])
    with (run / "rows.jsonl").open("a") as rows:
        rows.write('{"round": 4, "acc')  # cut in the middle of a row
    page = Page(run)
    assert "Unfinished run: 4 agents on a ring reached 53.0 % test accuracy on digits after 3 of 5 rounds." in page.text
    assert "of 5 rounds 3" in page.text


def test_without_shapley_values_arrows_are_mixing_weights(tmp_path: Path) -> None:
    page = Page(make_run(tmp_path / "run", valued=False))
    assert "does not compute Shapley values" in page.text
    assert "mixing weight ω" in page.text
    assert "0 ← 1: 33.3 %" in page.tips


def test_one_row(tmp_path: Path) -> None:
    page = Page(make_run(tmp_path / "run", T=1))
    assert "in 1 round, with" in page.text
    assert "round 1 consensus distance 0.4" in page.tips


def test_rounds_without_evaluation_and_without_a_loss(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", end=False)
    rows = read_rows(run)
    for row in rows:
        row["loss"] = None
    for row in rows[:2] + rows[4:]:
        row.pop("accuracy")
        row.pop("loss")
    for row in rows:
        row.pop("loss_min")  # as in a run of an older version
    write_rows(run, rows)
    page = Page(run)
    assert "loss, mean over agents —" in page.text
    assert "Nothing was measured." in page.text
    assert sum("mean over agents" in tip for tip in page.tips) == 2  # rounds 3 and 4
    assert "reached 54.0 % test accuracy on digits" in page.text


def test_equal_values_and_numbers_that_are_not_finite(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    rows = read_rows(run)
    for row in rows:
        row |= {"accuracy": 1.0, "loss": float("nan"), "consensus": 0.0}
        row["shapley"]["phi"] = [0.0] * 12
    write_rows(run, rows)
    page = Page(run)
    assert "nan" not in page.text.lower()
    assert "0 ← 1 round 1: 0" in page.tips
    assert "round 5 consensus distance 0" in page.tips


@pytest.mark.parametrize("M", [2, 20, 40, 41, 250])
def test_any_number_of_agents(tmp_path: Path, M: int) -> None:
    run = make_run(tmp_path / "run", M=M, T=70)
    page = Page(run)
    weights = ["Weight of each edge"] if M in (20, 40) else []
    assert page.titles() == [
        *LEARNING,
        "Privacy statement",
        "Notes",
        *HELPING[:3],
        *weights,
        *HELPING[3:],
        "Settings",
        "Run it again",
    ]
    assert len(page.html.encode()) < 600_000


def test_a_hundred_agents_have_a_row_per_sender(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", M=100, T=70)
    rows = read_rows(run)
    for row in rows:
        row["shapley"]["phi"] = [0.001 * j * (1.5 - row["round"] % 2) for _, j, _ in ring(100)]  # ½ and 3/2 in turn
    write_rows(run, rows)
    page = Page(run)
    assert len(page.html.encode()) < 400_000
    assert {"99 round 1–2: +0.099", "40 round 69–70: +0.040"} <= page.tips
    assert "98 +0.098" in page.text


def test_many_rounds_and_many_classes_stay_small(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", T=2000)
    (run / "owner.json").write_text(json.dumps({"labels": [[1] * 62] * 4}))
    page = Page(run)
    assert len(page.html.encode()) < 400_000
    assert "agent 3 class 19: 43" in page.tips  # the classes from 19 on


def breaks(name: str, text: str | None) -> Callable[[Path], None]:
    def harm(run: Path) -> None:
        if text is None:
            (run / name).unlink()
        else:
            (run / name).write_text(text)

    return harm


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (breaks("config.toml", None), "config.toml"),
        (breaks("setup.json", None), "setup.json"),
        (breaks("rows.jsonl", None), "rows.jsonl"),
        (breaks("config.toml", "a = = 1"), "config.toml"),
        (breaks("config.toml", "[privacy]\nmode = 'loud'"), "config.toml"),
        (breaks("config.toml", "algorithm = 5"), "algorithm is not a section"),
        (breaks("config.toml", "[algorithm.shapley]\nvalue = 'beauty'"), "config.toml"),
        (breaks("setup.json", "{}"), "'agents' is missing"),
        (breaks("setup.json", "[1]"), "not a JSON object"),
        (breaks("setup.json", '{"agents": 2, "edges": [[0, 5, 1]], "labels": [[1], [1]]}'), "among the 2"),
        (breaks("owner.json", '{"labels": [[1]]}'), "each of 4 agents"),
        (breaks("owner.json", '{"labels": [[-1, 2], [1, 1], [1, 1], [1, 1]]}'), "not numbers of records"),
        (lambda run: change_setup(run, attackers=[[9, "noise"]]), "among the 4"),
        (breaks("rows.jsonl", ""), "no round has ended"),
        (breaks("rows.jsonl", '{"round": 1}\nnot json\n'), "line 2"),
        (breaks("rows.jsonl", '{"round": 1, "shapley": {"phi": [1], "share": [1]}}\n'), "each of 12 edges"),
        (breaks("rows.jsonl", '{"round": 1, "loss": "high"}\n'), "line 1"),
        (breaks("rows.jsonl", '{"round": 1, "accuracy": -0.5}\n'), "rows.jsonl' (line 1: accuracy cannot be -0.5"),
        (breaks("rows.jsonl", '{"round": 1, "consensus": -1}\n'), "consensus cannot be -1"),
        (breaks("rows.jsonl", '{"round": 2}\n{"round": 1}\n'), "line 2: round 1 comes after round 2"),
        (breaks("summary.json", "{"), "summary.json"),
    ],
)
def test_what_is_missing_or_broken_is_said_in_one_line(tmp_path: Path, harm: Callable[[Path], None], said: str) -> None:
    run = make_run(tmp_path / "run")
    harm(run)
    with pytest.raises(PdslError, match=re.escape(said)) as error:
        write_report(run)
    assert "\n" not in str(error.value)
    assert "pdsl run config.toml" in str(error.value)
    assert not (run / "report.html").exists()


def test_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(PdslError, match=r"there is no run directory .*pdsl run config\.toml"):
        write_report(tmp_path / "nowhere")


def test_numbers_are_round_where_people_look() -> None:
    assert [nice(v) for v in (0.011, 0.02, 3, 6, 10)] == pytest.approx([0.02, 0.02, 5, 10, 10])
    assert ticks_to(2.14) == pytest.approx([0, 0.5, 1, 1.5, 2, 2.5])
    assert ticks_between(1, 60) == [10, 20, 30, 40, 50, 60]
    assert ticks_between(7, 7) == [7]
    assert [list(part) for part in chunks(5, 2)] == [[0, 1, 2], [3, 4]]
    assert chunks(0, 3) == []
    assert [plain(v) for v in (None, 0.23456, 999.6, 1234567, -1e-7)] == ["—", "0.235", "1,000", "1,234,567", "−1e−07"]
    assert [signed(v, 2) for v in (0.126, -0.126, -0.001)] == ["+0.13", "−0.13", "0"]
    assert [size(v).split() for v in (0, 999, 1000, 138e6)] == [["0", "B"], ["999", "B"], ["1", "kB"], ["138", "MB"]]
    assert [" ".join(duration(v).split()) for v in (1.234, 185, 7500)] == ["1.23 s", "3 min", "2 h 5 min"]
