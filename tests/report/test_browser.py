"""Reports in a real browser: complete, no requests, no errors; tabs, tips, keys and live updates work."""

import os
import shutil
import signal
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from pdsl.report import write_report
from pdsl.report.comparison import name_runs, write_comparison
from pdsl.report.glossary import GLOSSARY
from pdsl.report.run_data import read_run
from pdsl.reproduce import SweepPlan, Task, collect
from pdsl.reproduce.page import figure_page
from pdsl.reproduce.paper import settings_of
from tests.helpers.accounts import HOSPITALS, POINTS, hospital_account, write_account
from tests.helpers.commands import PATIENCE, SMALL, rows_on_disk, settings, started, wait_for
from tests.report.test_report import change_setup, make_run, read_rows, write_rows
from tests.report.test_tasks import named_run, regression_run

pytestmark = pytest.mark.browser

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("Chromium is not installed", allow_module_level=True)

QUIET = [
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
Place = tuple[float, float]
SCREENS = [(1280, "light"), (390, "dark")]


class Tab:
    """A tab in the browser that records requests and console messages."""

    def __init__(self, browser: "sync_api.Browser", width: int = 1280, scheme: str = "light", scripts: bool = True):
        self.page = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme=scheme, java_script_enabled=scripts
        )
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda message: self.complaints.append(message.text))

    def show(self, file: Path) -> "sync_api.Page":
        self.page.goto(file.as_uri())
        assert self.requests == [file.as_uri()]
        assert self.complaints == []
        return self.page

    def fits(self) -> bool:
        """Whether the report is not wider than the screen."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth <= innerWidth"))

    def drawn(self) -> list[str]:
        """Labels of the visible figures; each must have marks and a size."""
        labels = []
        for figure in self.page.locator('svg[role="img"]:visible').all():
            box = figure.bounding_box()
            assert box is not None
            assert box["width"] > 100
            assert box["height"] > 50
            assert figure.locator("path, rect, circle").count() > 2
            labels.append(figure.get_attribute("aria-label") or "")
        return labels


@pytest.fixture(scope="module")
def browser() -> Iterator["sync_api.Browser"]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten agents with ε, and enough rounds that columns of the heat map are means."""
    run = make_run(tmp_path_factory.mktemp("runs") / "a", M=10, T=70, name="a-ring")
    write_rows(run, [{**row, "epsilon": row["round"] / 10} for row in read_rows(run)])
    return run


def test_every_figure_of_a_run_is_drawn_and_nothing_is_loaded(browser: "sync_api.Browser", run: Path) -> None:
    every_figure_is_drawn(browser, run, {"learning": 4, "privacy": 1, "graph": 4, "settings": 0})


@pytest.mark.parametrize(
    ("M", "valued", "end", "helping"), [(4, False, True, 2), (20, True, False, 5), (250, True, True, 4)]
)
def test_and_of_any_other(
    browser: "sync_api.Browser", tmp_path: Path, M: int, valued: bool, end: bool, helping: int
) -> None:
    run = make_run(tmp_path / "run", M=M, T=3, valued=valued, end=end)  # without noise
    every_figure_is_drawn(browser, run, {"learning": 4, "privacy": 0, "graph": helping, "settings": 0})


def every_figure_is_drawn(browser: "sync_api.Browser", run: Path, expected: dict[str, int]) -> None:
    """Check the number of figures in each tab."""
    file = write_report(run)
    for width, scheme in SCREENS:
        tab = Tab(browser, width, scheme)
        page = tab.show(file)
        seen = {}
        assert page.locator('[role="tab"]').count() == len(expected)
        for name in expected:
            page.locator(f'[role="tab"][data-part="{name}"]').click()
            assert page.locator(".panel:visible").get_attribute("id") == f"part-{name}"
            assert page.locator("section:visible").count() > 0
            assert tab.fits(), (width, name)
            seen[name] = len(tab.drawn())
        assert seen == expected
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 26)"
        assert dark == (scheme == "dark")
        assert tab.complaints == []
        page.close()


def test_values_are_told_under_the_pointer_and_by_keys(browser: "sync_api.Browser", run: Path) -> None:
    tab = Tab(browser)
    page = tab.show(write_report(run))
    tip = page.locator("#tip")
    assert not tip.is_visible()
    rows = read_rows(run)
    accuracy = page.locator('svg[aria-label^="mean over agents and mean model"]')
    accuracy.locator(".hit path").nth(34).hover()
    assert tip.inner_text().startswith(f"round 35\nmean over agents {100 * rows[34]['accuracy']:.3g}")

    page.keyboard.press("Escape")
    assert not tip.is_visible()
    accuracy.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert tip.inner_text().startswith("round 2\n")
    page.keyboard.press("End")
    assert tip.inner_text().startswith("round 70\n")

    page.locator('[data-part="learning"]').focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".panel:visible").get_attribute("id") == "part-privacy"
    page.keyboard.press("ArrowRight")
    heat = page.locator('svg[aria-label^="Shapley values"]')
    heat.focus()
    page.keyboard.press("Home")
    assert tip.inner_text().startswith("0 ← 0\nround 1–2: ")
    page.keyboard.press("ArrowDown")
    assert tip.inner_text().startswith("0 ← 1\nround 1–2: ")
    page.reload()
    assert page.locator(".panel:visible").get_attribute("id") == "part-graph"
    assert tab.complaints == []
    page.close()


def box_of(chart: "sync_api.Locator") -> tuple[float, float, float, float]:
    """The plot area of a chart on the screen: left, right, top, bottom."""
    box = chart.bounding_box()
    assert box is not None
    scale = box["width"] / 520
    left, right, top, bottom = (scale * float(part) for part in (chart.get_attribute("data-box") or "").split())
    return box["x"] + left, box["x"] + right, box["y"] + top, box["y"] + bottom


def drag(
    page: "sync_api.Page", chart: "sync_api.Locator", start: tuple[float, float], end: tuple[float, float]
) -> None:
    """Drag between two places of a chart, given as fractions of its width and height."""
    left, right, top, bottom = box_of(chart)

    def place(at: Place) -> Place:
        return left + (right - left) * at[0], top + (bottom - top) * at[1]

    page.mouse.move(*place(start))
    page.mouse.down()
    page.mouse.move(*place(((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)))
    page.mouse.move(*place(end))
    assert page.locator(".selection").count() == 1
    assert not page.locator("#tip").is_visible()
    page.mouse.up()
    assert page.locator(".selection").count() == 0


def view_of(chart: "sync_api.Locator") -> list[float]:
    return [float(part) for part in (chart.get_attribute("data-now") or chart.get_attribute("data-view") or "").split()]


def test_dragging_zooms_and_a_double_click_returns(browser: "sync_api.Browser", run: Path) -> None:
    tab = Tab(browser)
    page = tab.show(write_report(run))
    chart = page.locator('svg[aria-label^="mean over agents and mean model"]')
    first = view_of(chart)
    assert first[:2] == [1, 70]
    before = chart.locator(".axes text").all_text_contents()
    drag(page, chart, (0.25, 0.25), (0.75, 0.75))
    x0, x1, y0, y1 = view_of(chart)
    assert [x0, x1] == pytest.approx([1 + 69 / 4, 1 + 3 * 69 / 4], abs=0.4)
    assert [y0, y1] == pytest.approx([first[2] + (first[3] - first[2]) * part for part in (0.25, 0.75)], abs=0.01)

    ticks = [int(text) for text in chart.locator(".axes .middle").all_text_contents()]
    assert ticks == [20, 30, 40, 50]
    percents = [float(text.rstrip("%")) / 100 for text in chart.locator(".axes .end").all_text_contents()]
    assert len(percents) >= 3
    assert all(y0 - 1e-6 <= value <= y1 + 1e-6 for value in percents)
    left, right, top, bottom = box_of(chart)  # shapes moved with the axes: the strip of a round is at its place
    strip = chart.locator(".hit path").nth(34).bounding_box()
    assert strip is not None
    assert strip["x"] + strip["width"] / 2 == pytest.approx(left + (right - left) * (35 - x0) / (x1 - x0), abs=1)
    page.mouse.move(strip["x"] + strip["width"] / 2, (top + bottom) / 2)
    assert page.locator("#tip").inner_text().startswith("round 35\n")

    drag(page, chart, (0.2, 0.5), (0.6, 0.52))  # a flat drag keeps the values
    assert view_of(chart)[2:] == [y0, y1]
    assert view_of(chart)[1] - view_of(chart)[0] == pytest.approx(0.4 * (x1 - x0), abs=0.4)
    page.mouse.dblclick((left + right) / 2, (top + bottom) / 2)
    assert view_of(chart) == first
    assert chart.locator(".axes text").all_text_contents() == before  # page and script write the same
    chart.focus()
    page.keyboard.press("+")
    assert view_of(chart)[1] - view_of(chart)[0] == pytest.approx(69 / 2)
    page.keyboard.press("-")
    assert view_of(chart) == first
    assert tab.complaints == []
    page.close()


def test_values_outside_of_the_axis_are_shown_by_a_double_click(browser: "sync_api.Browser", tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", T=70)
    rows = read_rows(run)
    for row in rows:
        value = 0.1 if row["round"] < 4 else 0.9
        row |= {name: value for name in row if name.startswith("accuracy")}
    write_rows(run, rows)
    page = Tab(browser).show(write_report(run))
    chart = page.locator('svg[aria-label^="mean over agents and mean model"]')
    assert view_of(chart)[2] > 0.8
    assert "double-click to show all" in page.locator('figure[data-name="accuracy"]').inner_text()
    chart.dblclick()
    assert view_of(chart)[2] <= 0.1
    chart.dblclick()
    assert view_of(chart)[2] > 0.8
    page.close()


def test_every_figure_with_names_fits_any_screen(browser: "sync_api.Browser", tmp_path: Path) -> None:
    named, numbers = named_run(tmp_path / "named", T=30), regression_run(tmp_path / "numbers")
    every_figure_is_drawn(browser, named, {"learning": 6, "privacy": 0, "graph": 4, "settings": 0})
    every_figure_is_drawn(browser, numbers, {"learning": 6, "privacy": 0, "graph": 4, "settings": 0})


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_contributions_have_bars_a_conclusion_and_a_table_on_any_screen(
    browser: "sync_api.Browser", tmp_path: Path, width: int, scheme: str
) -> None:
    run = make_run(tmp_path / "run", M=len(HOSPITALS))
    change_setup(run, names=list(HOSPITALS))
    tab = Tab(browser, width, scheme)
    page = tab.show(write_report(write_account(run, hospital_account())))
    page.locator('[role="tab"][data-part="contributions"]').click()
    assert page.locator(".panel:visible").get_attribute("id") == "part-contributions"
    assert tab.fits()
    assert tab.drawn() == ["contributions of 6 parties"]
    assert page.locator(".panel:visible .conclusion").inner_text().startswith("Aachen has the largest contribution")
    assert page.locator(".panel:visible tbody th").all_inner_texts() == sorted(
        HOSPITALS, key=lambda name: -POINTS[HOSPITALS.index(name)]
    )
    tops = [box["y"] for button in page.locator('[role="tab"]').all() if (box := button.bounding_box())]
    assert len(tops) == 5
    assert len(set(tops)) == 1  # all tabs in one line

    chart = page.locator('svg[aria-label^="contributions of"]')
    texts, bars, whiskers = chart.evaluate(
        """svg => ["text.end", "rect[data-tip]", ".whisker"].map((marks) =>
          [...svg.querySelectorAll(marks)].map((mark) => mark.getBoundingClientRect()))"""
    )
    names, values = texts[::2], texts[1::2]
    assert len(names) == len(values) == len(bars) == len(whiskers) == 6
    assert max(box["right"] for box in names) <= min(box["left"] for box in [*bars, *whiskers])
    assert max(box["right"] for box in [*bars, *whiskers]) <= min(box["left"] for box in values)
    assert min(box["left"] for box in names) >= 0
    assert max(box["right"] for box in values) <= width
    chart.focus()
    page.keyboard.press("Home")
    assert page.locator("#tip").inner_text() == "Aachen\n21.3 points\ninterval 19.3 to 23.3"
    assert tab.complaints == []
    page.close()


def test_a_finger_is_told_the_meaning_of_a_term(browser: "sync_api.Browser", run: Path) -> None:
    page = browser.new_context(has_touch=True, viewport={"width": 390, "height": 800}).new_page()
    page.goto(write_report(run).as_uri())
    term = page.locator("header abbr", has_text="ε")
    assert term.get_attribute("title") == GLOSSARY["ε"]
    term.tap()
    assert page.locator("#tip").inner_text() == GLOSSARY["ε"]
    page.close()


def test_without_scripts_all_parts_stand_one_below_another(browser: "sync_api.Browser", run: Path) -> None:
    tab = Tab(browser, scripts=False)
    page = tab.show(write_report(run))
    assert page.locator(".part:visible").all_inner_texts() == ["Learning", "Privacy", "Graph", "Settings"]
    assert page.locator('svg[role="img"]:visible').count() == 9
    assert not page.locator('[role="tablist"]').is_visible()
    page.close()


def test_runs_beside_each_other(browser: "sync_api.Browser", run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", M=4, T=30, name="the other run, whose name is long", valued=False)
    runs = name_runs([(path, read_run(path)) for path in (run, other)])
    file = write_comparison(runs, tmp_path / "comparison.html")
    for width, scheme in SCREENS:
        tab = Tab(browser, width, scheme)
        page = tab.show(file)
        assert len(tab.drawn()) == 4
        assert tab.fits()
        page.locator(".hit path").nth(9).hover()
        told = page.locator("#tip").inner_text().splitlines()
        assert told[0] == "round 10"
        assert [line.rsplit(maxsplit=2)[0] for line in told[1:]] == ["a-ring", "the other run, whose name is long"]
        page.close()


def test_on_a_narrow_screen_nothing_covers_another_and_names_stay(browser: "sync_api.Browser", tmp_path: Path) -> None:
    made = [make_run(tmp_path / name, M=12, T=30, name=name) for name in ("one", "two")]
    page = Tab(browser, 390).show(write_report(made[0]))
    titles = page.locator("section:visible h2").all()
    assert [title.inner_text() for title in titles] == ["Accuracy", "Loss", "Consensus distance", "Sent between agents"]
    tops = [box["y"] for title in titles if (box := title.bounding_box())]
    assert tops == sorted(set(tops))  # one below another, in this order
    page.locator('[data-part="graph"]').click()
    names, cells, means = page.locator('svg[aria-label^="Shapley values"]').evaluate(
        """svg => {
          const boxes = (marks) => [...marks].map((mark) => mark.getBoundingClientRect());
          const texts = [...svg.querySelectorAll(".end.small")], named = (text) => text.textContent.includes("←");
          const cells = svg.querySelectorAll("[data-tip]");
          return [boxes(texts.filter(named)), boxes(cells), boxes(texts.filter((text) => !named(text)))];
        }"""
    )
    assert len(names) == len(means) == 36
    assert max(box["right"] for box in names) <= min(box["left"] for box in cells)
    assert max(box["right"] for box in cells) <= min(box["left"] for box in means)
    page.close()
    page = Tab(browser, 390).show(
        write_comparison(name_runs([(path, read_run(path)) for path in made]), tmp_path / "comparison.html")
    )
    name, wide = page.locator(".wide tbody th").first, page.locator(".wide").first
    before = name.bounding_box()
    wide.evaluate("table => { table.scrollLeft = 150; }")
    assert wide.evaluate("table => table.scrollLeft") == 150
    assert name.bounding_box() == before
    page.close()


def test_the_nine_panels_of_a_figure_lie_as_in_the_paper(browser: "sync_api.Browser", tmp_path: Path) -> None:
    plan = SweepPlan(Task(), ("fig3",), tuple(settings_of("fig3")), (0,), "pdsl reproduce fig3")
    file = tmp_path / "fig3.html"
    file.write_text(figure_page(collect("fig3", plan, tmp_path / "none", {})), encoding="utf-8")
    for width, columns in ((1280, 3), (390, 1)):
        tab = Tab(browser, width)
        panels = tab.show(file).locator(".three section").all()
        boxes = [box for panel in panels if (box := panel.bounding_box())]
        assert len(boxes) == 9
        assert len({box["x"] for box in boxes}) == columns
        assert len({box["y"] for box in boxes}) == 9 // columns
        assert tab.fits()
        tab.page.close()


def test_a_run_is_watched_while_it_goes_on(browser: "sync_api.Browser", tmp_path: Path) -> None:
    run, said, complained = tmp_path / "run", tmp_path / "said", tmp_path / "complained"
    running = started("run", *settings(*SMALL, "rounds=120"), "--out", run)
    wait_for(lambda: rows_on_disk(run) > 2)
    signal_to(running, signal.SIGSTOP)
    watching = started("watch", run, out=said, err=complained)
    try:
        wait_for(lambda: said.exists() and said.read_text().endswith("/\n"))
        tab = Tab(browser)
        page = tab.page
        page.goto(said.read_text().strip())
        page.locator('[data-part="graph"]').click()
        page.evaluate("scrollTo(0, 300)")
        before = rows_on_disk(run)
        assert page.locator("progress").get_attribute("value") == str(before)

        signal_to(running, signal.SIGCONT)
        wait_for(lambda: rows_on_disk(run) > before + 5)
        signal_to(running, signal.SIGSTOP)
        page.locator(f'progress[value="{rows_on_disk(run)}"]').wait_for(timeout=PATIENCE * 1000)
        assert page.locator(".panel:visible").get_attribute("id") == "part-graph"
        assert page.evaluate("scrollY") == 300

        signal_to(running, signal.SIGCONT)
        page.get_by_text("Finished.").wait_for(timeout=PATIENCE * 1000)
        assert "in 120 rounds" in page.locator("header").inner_text()
        assert tab.complaints == []
        assert {url.partition("#")[0] for url in tab.requests} == {said.read_text().strip()}

        signal_to(watching, signal.SIGINT)
        watching.join(PATIENCE)
        assert watching.exitcode == 130
        assert complained.read_text() == ""
        page.get_by_text("pdsl watch has stopped").wait_for(timeout=PATIENCE * 1000)
        page.close()
    finally:
        running.kill()
        watching.kill()


def signal_to(process: ForkServerProcess, number: signal.Signals) -> None:
    assert process.pid is not None
    os.kill(process.pid, number)
