"""`pdsl report` with several runs, its figures and tables, and `pdsl run --tensorboard`."""

import csv
import json
import re
import struct
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from pdsl.report.export import SCALE, load_rasteriser
from pdsl.report.tables import Table
from pdsl.utils.errors import PdslError
from pdsl.utils.format import percent
from tests.helpers.commands import SMALL, pdsl, settings
from tests.report.test_report import make_run, read_rows, write_rows

FIGURES = {"accuracy", "loss", "consensus", "bytes", "epsilon", "graph", "labels", "received", "shapley"}
SVG = "{http://www.w3.org/2000/svg}"
COMPARED = {"comparison-accuracy", "comparison-loss", "comparison-epsilon", "comparison-consensus"}


def runs(folder: Path) -> tuple[Path, Path]:
    made = make_run(folder / "one", name="a & b"), make_run(folder / "two", T=3, name="two")
    for run in made:
        write_rows(run, [{**row, "epsilon": row["round"] / 10} for row in read_rows(run)])
    return made


def can_draw_png() -> bool:
    try:
        load_rasteriser()
    except PdslError:
        return False
    return True


def test_one_page_each_and_one_that_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one, two = runs(tmp_path)
    said = pdsl("report", one, two)
    assert said.code == 0, said.err
    assert said.out.split("\n") == [str(one / "report.html"), str(two / "report.html"), "comparison.html", ""]
    html = (tmp_path / "comparison.html").read_text(encoding="utf-8")
    for text in ("a &amp; b", "Accuracy", "ε spent", "Settings that differ", '<th scope="row">rounds</th>'):
        assert text in html
    assert "round 3\na &amp; b 53\N{NO-BREAK SPACE}%\ntwo 53\N{NO-BREAK SPACE}%" in html  # 0.5 + 3 / 100
    pdsl("report", one, "--out", tmp_path / "none.html").refused("--out is for a comparison of several runs")
    assert not (tmp_path / "none.html").exists()


def test_what_cannot_be_read_is_said_of_several_runs_too(tmp_path: Path) -> None:
    one, two = runs(tmp_path)
    (two / "config.toml").write_text("algorithm = 5\n")
    said = pdsl("report", one, two, "--out", tmp_path / "c.html")
    said.refused("two/config.toml", "algorithm is not a section")


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    made = [make_run(tmp_path / name, name="same") for name in ("x", "y")]
    assert pdsl("report", *made, "--out", tmp_path / "c.html").code == 0
    html = (tmp_path / "c.html").read_text(encoding="utf-8")
    assert all(f"same ({run})" in html for run in made)


@pytest.mark.slow
@pytest.mark.skipif(not can_draw_png(), reason="no resvg-py or no font here, so that no PNG can be drawn")
def test_every_figure_as_svg_and_png(tmp_path: Path) -> None:
    said = pdsl("report", *runs(tmp_path), "--out", tmp_path / "c.html", "--figures", tmp_path / "f")
    assert said.code == 0, said.err
    names = {f"{run}-{figure}" for run in ("a-b", "two") for figure in FIGURES} | COMPARED
    found = sorted((tmp_path / "f").iterdir())
    assert {path.name for path in found} == {f"{name}.{kind}" for name in names for kind in ("svg", "png")}
    assert {str(path) for path in found} <= set(said.out.splitlines())
    for svg in (path for path in found if path.suffix == ".svg"):
        text = svg.read_text(encoding="utf-8")
        root = ET.fromstring(text)
        assert not re.findall(r"var\(|calc\(|pathLength|@media", text)  # what not every program can draw
        head = svg.with_suffix(".png").read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", head[16:])
        sides = [SCALE * float(root.get(side, "0")) for side in ("width", "height")]
        assert [width, height] == pytest.approx(sides, abs=2)
    for name in ("comparison-accuracy", "two-accuracy"):
        assert any(text.text == "accuracy" for text in ET.parse(tmp_path / "f" / f"{name}.svg").iter(f"{SVG}text"))
    graph = ET.parse(tmp_path / "f" / "two-graph.svg").getroot()
    assert [text.text for text in graph.iter(f"{SVG}text")][:4] == ["class", "0", "1", "2"]
    arcs = [mark for mark in graph.iter() if "arc" in mark.get("class", "")]
    parts = [float(mark.get("stroke-dasharray", "").split()[0]) for mark in arcs]
    ring = float(arcs[0].get("stroke-dasharray", "").split()[1])
    held = [count / (10 * i + 8) for i in range(4) for count in (10 * i + 1, 7)]  # as make_run has them
    assert [part / ring for part in parts] == pytest.approx(held, abs=1e-3)


def test_every_table_in_three_languages(tmp_path: Path) -> None:
    one, two = runs(tmp_path)
    said = pdsl("report", one, two, "--out", tmp_path / "c.html", "--tables", tmp_path / "t")
    assert said.code == 0, said.err
    names = {f"{name}.{kind}" for name in ("a-b-summary", "two-summary", "comparison") for kind in ("md", "csv", "tex")}
    assert {path.name for path in (tmp_path / "t").iterdir()} == names
    with (tmp_path / "t" / "comparison.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for run, row in zip((one, two), rows, strict=True):
        summary = json.loads((run / "summary.json").read_text())
        assert float(row["accuracy"]) == summary["accuracy"]
        assert float(row["time (s)"]) == summary["seconds"]
        assert int(row["sent (bytes)"]) == sum(r["bytes"] for r in read_rows(run))
        assert row["total ε"] == ""
    lines = (tmp_path / "t" / "comparison.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0] for row in cells] == ["run", "---", "a & b", "two"]
    assert {len(row) for row in cells} == {13}
    latex = (tmp_path / "t" / "comparison.tex").read_text(encoding="utf-8")
    row = r"a \& b & --- & digits & ring & 4 & 5 & 94.1~\% & 95.2~\% & 0.234 & ---"
    row += r" & seeded: not private & 7.5~kB & 41.4~s \\"
    assert row in latex


def test_signs_that_mean_something_to_a_language_stay_signs() -> None:
    table = Table(["x_1", "50%"], [["a|b\\c", None]], [[str, percent]])
    assert table.markdown() == "| x_1 | 50% |\n| --- | --- |\n| a\\|b\\c | — |\n"
    assert r"x\_1 & 50\% \\" in table.latex()
    assert r"a|b\textbackslash{}c & --- \\" in table.latex()
    assert table.csv() == "x_1,50%\na|b\\c,\n"


def test_what_is_not_installed_or_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    said = pdsl("report", run, "--tables", tmp_path / "file" / "t")
    assert said.code == 2
    assert "cannot write" in said.err
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    said = pdsl("report", run, "--figures", tmp_path / "f")
    assert said.code == 2
    assert "pip install resvg-py" in said.err
    assert not (tmp_path / "f").exists()
    pdsl("run", "--out", tmp_path / "r", "--tensorboard", tmp_path / "file" / "tb").refused(
        "choose another --tensorboard"
    )
    pdsl("run", "--set", "foo=1", "--tensorboard", tmp_path / "tb").refused("unknown setting foo")
    assert not (tmp_path / "tb").exists()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    pdsl("run", "--out", tmp_path / "r", "--tensorboard", tmp_path / "tb").refused("pip install tensorboard")
    assert not (tmp_path / "r").exists()


def test_tensorboard_reads_every_row_once(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="not installed")
    run, folder = tmp_path / "run", tmp_path / "tb"
    assert pdsl("run", *settings(*SMALL, "rounds=2"), "--out", run, "--tensorboard", folder).code == 0
    assert pdsl("run", "--resume", run, "--set", "rounds=4", "--tensorboard", folder).code == 0
    read = accumulator.EventAccumulator(str(folder)).Reload()
    rows = read_rows(run)
    assert set(read.Tags()["scalars"]) == set(rows[0]) - {"round", "messages", "shapley", "per_agent"}
    for name in ("accuracy", "loss", "loss_max", "consensus", "bytes"):
        points = [(event.step, event.value) for event in read.Scalars(name)]
        assert points == [(row["round"], pytest.approx(row[name], rel=1e-6)) for row in rows]
        assert len(points) == 4
