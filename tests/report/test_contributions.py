"""Contributions in reports: the tab, the chart, the table and the sentences."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

import pdsl
from pdsl.report.account_text import Unit, conclude_account, describe_gain, describe_parties
from pdsl.report.contribution_chart import MAX_BARS, contribution_bars
from pdsl.report.figures import run_figures
from pdsl.report.run_data import read_run
from pdsl.shapley.account import Account
from pdsl.shapley.account_fields import agree
from pdsl.utils.errors import PdslError
from tests.helpers.accounts import HOSPITALS, hospital_account, write_account
from tests.report.test_report import Page, change_setup, make_run

CONCLUSION = (
    "Aachen has the largest contribution: 21.3 of 84.0 points. It contributed more than Charité, Essen, Bonn and"
    " Freiburg; between Aachen and Dresden the order is not decided. Freiburg may have contributed nothing: the"
    " interval includes zero."
)


def hospital_run(path: Path, account: Account | None = None, end: bool = True) -> Path:
    run = make_run(path, M=6, end=end)
    change_setup(run, names=list(HOSPITALS))
    return write_account(run, account or hospital_account())


def two(first: float, second: float, margin: float, metric: str = "accuracy") -> Account:
    return hospital_account(("A", "B"), (first, second), (margin, margin), metric, 0.0, first + second, ())


def test_the_tab_has_conclusion_chart_table_meaning_and_notes(tmp_path: Path) -> None:
    page = Page(hospital_run(tmp_path / "run"))
    assert CONCLUSION in page.text
    assert "raised accuracy on the public set from 10.0 % to 94.0 %, by 84.0 points." in page.text
    assert "contribution is the average gain when it joins a group of the others" in page.text
    assert "Aachen 21.3 19.3 to 23.3 25.4 % Charité, Essen, Bonn, Freiburg Dresden" in page.text
    assert "Freiburg 0.0 −1.0 to 1.0 0.0 % — —" in page.text
    assert "Values are of this run's messages with their noise." in page.text
    assert "Bonn 12.1 points interval 10.3 to 13.9" in page.tips
    assert re.findall(r'role="tab" .*?>(\w+)</button>', page.html) == [
        "Learning",
        "Privacy",
        "Contributions",
        "Graph",
        "Settings",
    ]


def test_without_an_account_there_is_no_tab(tmp_path: Path) -> None:
    run = hospital_run(tmp_path / "run")
    (run / "contributions.json").unlink()
    assert "part-contributions" not in Page(run).html
    unfinished = hospital_run(tmp_path / "unfinished", end=False)  # a file of an earlier end of the run
    assert "part-contributions" not in Page(unfinished).html


def test_an_attacker_has_an_asterisk(tmp_path: Path) -> None:
    run = hospital_run(tmp_path / "run")
    change_setup(run, attackers=[[5, "free-rider"]])
    [chart] = [svg for svg in Page(run).svgs if svg.get("aria-label") == "contributions of 6 parties"]
    assert [text.text for text in chart.iter("text") if "*" in f"{text.text}"] == ["Freiburg*"]


def test_bars_and_whiskers_are_at_their_values() -> None:
    account = hospital_account()
    chart = ET.fromstring(contribution_bars(account).drawing)
    ticks = {
        float(str(text.text).replace("−", "-")): float(text.get("x", "nan"))
        for text in chart.iter("text")
        if text.get("class") == "middle"
    }
    assert sorted(ticks) == [-5, 0, 5, 10, 15, 20, 25]
    scale = (ticks[25] - ticks[0]) / 0.25  # by value
    bars = [rect for rect in chart.iter("rect") if rect.get("data-tip")]
    whiskers = [path.get("d", "") for path in chart.iter("path") if path.get("class") == "whisker"]
    for bar, whisker, c in zip(bars, whiskers, account.by_agent().values(), strict=True):
        if c.value:
            assert float(bar.get("x", "nan")) == pytest.approx(ticks[0], abs=0.15)
            assert float(bar.get("width", "nan")) == pytest.approx(scale * c.value, abs=0.15)
        low, high = (float(end) for end in re.findall(r"^M(\S+) \S+H([\d.]+)", whisker)[0])
        assert (low, high) == pytest.approx((ticks[0] + scale * c.low, ticks[0] + scale * c.high), abs=0.15)


def test_a_harmful_party_has_a_bar_to_the_left() -> None:
    account = hospital_account(("A", "B"), (0.5, -0.2), (0.1, 0.1), end=0.4)
    chart = ET.fromstring(contribution_bars(account).drawing)
    good, bad = (rect for rect in chart.iter("rect") if rect.get("data-tip"))
    assert (good.get("class"), bad.get("class")) == ("gain", "harm")
    end = float(bad.get("x", "nan")) + float(bad.get("width", "nan"))
    assert end == pytest.approx(float(good.get("x", "nan")), abs=0.15)


def test_of_many_parties_both_ends_are_drawn(tmp_path: Path) -> None:
    names = [str(i) for i in range(100)]
    account = hospital_account(names, [i / 10000 for i in range(100)], [0.001] * 100, end=0.1 + 0.495)
    run = write_account(make_run(tmp_path / "run", M=100), account)
    page = Page(run)
    [chart] = [svg for svg in page.svgs if svg.get("aria-label", "").startswith("contributions of")]
    drawn = [" ".join(rect.get("data-tip", "").split()[:2]) for rect in chart.iter("rect") if rect.get("data-tip")]
    expected = [*range(99, 79, -1), *range(19, -1, -1)]
    assert drawn == [f"agent {i}" for i in expected]
    assert len(drawn) == MAX_BARS
    assert "Drawn are the 20 largest and the 20 smallest of 100." in page.text
    assert "Agent 99 has the largest contribution" in page.text


@pytest.mark.parametrize(
    ("account", "said"),
    [
        (two(0.5, 0.2, 0.1), "A contributed most: 50.0 of 70.0 points. It contributed more than B."),
        (
            two(0.5, 0.45, 0.1),
            "A has the largest value, 50.0 of 95.0 points, but no order between two parties is decided.",
        ),
        (two(0.5, -0.2, 0.1), "A contributed most: 50.0 of 30.0 points. It contributed more than B. B made the model"),
        (
            two(0.01, 0.005, 0.1),
            "no order between two parties is decided. All intervals include zero: no party's contribution is shown.",
        ),
        (hospital_account(("A",), (0.5,), (0.1,), end=0.6), "A is the only party: 50.0 points."),
        (
            hospital_account(("0", "1", "2"), (0.5, 0.1, 0.2), (0.1,) * 3, end=0.9),
            "Agent 0 contributed most: 50.0 of 80.0 points. It contributed more than every other party.",
        ),
    ],
)
def test_the_conclusion_says_no_more_than_is_decided(account: Account, said: str) -> None:
    assert said in conclude_account(account)


def test_errors_are_in_units_of_the_metric() -> None:
    account = replace(two(4.1, 2.9, 0.5, "rmse"), start=67.0, end=60.0)
    assert describe_gain(account) == "Together the parties lowered RMSE on the public set from 67 to 60, by 7.00."
    assert conclude_account(account).startswith("A contributed most: 4.10 of 7.00.")
    assert Unit.of(account).label == "RMSE"


def test_without_a_gain_there_are_no_parts() -> None:
    account = replace(two(-0.1, -0.2, 0.01), start=0.9, end=0.6)
    assert describe_gain(account) == (
        "Training did not improve accuracy on the public set: 90.0\N{NO-BREAK SPACE}% before,"
        " 60.0\N{NO-BREAK SPACE}% after."
    )
    assert [party.part for party in describe_parties(account)] == ["—", "—"]
    assert " of " not in conclude_account(account).partition(".")[0]


@pytest.mark.parametrize("scale", [1e-12, 1e-5, 1.0, 1e7, 1e50])
def test_values_of_any_size_are_short(scale: float) -> None:
    account = two(2 * scale, scale, 0.1 * scale, "loss")
    for party in describe_parties(account):
        assert len(party.value) <= 12
        assert party.value not in ("0", "−0")
    assert contribution_bars(account).marks


def test_the_figure_is_exported(tmp_path: Path) -> None:
    figures = {figure.name: figure for figure in run_figures(read_run(hospital_run(tmp_path / "run")))}
    picture = figures["contributions"].picture
    assert picture is not None
    ET.fromstring(picture.svg("Contributions"))


def test_hostile_names_and_notes_stay_text(tmp_path: Path) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    names = [hostile, *HOSPITALS[1:]]
    run = make_run(tmp_path / "run", M=6)
    change_setup(run, names=names)
    page = Page(write_account(run, hospital_account(names, notes=[hostile])))
    assert page.text.count(hostile) >= 4
    assert "<img" not in page.html


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "contributions.json' (Expecting"),
        ("[]", "not an account of format 1"),
        ("[" * 100_000, "contributions.json"),
        (hospital_account().to_json().replace("0.213", "NaN", 1), "value is not a finite number"),
        (hospital_account(("X", "Y"), (0.5, 0.1), (0.1, 0.1), end=0.7).to_json(), "not agents of the run"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    run = hospital_run(tmp_path / "run")
    (run / "contributions.json").write_text(text)
    with pytest.raises(PdslError, match=re.escape(said)) as error:
        read_run(run)
    assert "\n" not in str(error.value)


def test_a_saved_run_has_its_contributions(tmp_path: Path) -> None:
    run = hospital_run(tmp_path / "run")
    found = pdsl.load(run).contributions
    assert found.by_agent()["Bonn"].value == pytest.approx(0.121)
    stored = json.loads((run / "contributions.json").read_text(encoding="utf-8"))
    assert agree(found.to_record(), stored, tolerance=1e-12)
    (run / "contributions.json").unlink()
    with pytest.raises(PdslError, match=r"has no contributions\.json"):
        _ = pdsl.load(run).contributions
