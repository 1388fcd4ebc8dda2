"""Reports of any task: names, metrics and their limits, per-agent lines, errors by class, conclusions, terms."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pdsl.report.comparison import name_runs, write_comparison
from pdsl.report.conclusions import compare_senders
from pdsl.report.confusion_chart import describe_residuals
from pdsl.report.glossary import FORMS, GLOSSARY, explain
from pdsl.report.line_chart import Scale, choose_range
from pdsl.report.run_data import read_run
from pdsl.report.run_schema import Residuals
from pdsl.report.tables import summary_table
from pdsl.utils.errors import PdslError
from pdsl.utils.format import ticks_in
from tests.report.test_report import Fields, Page, change_setup, make_run, read_rows, ring, write_rows

NAMES = ["charité", "hospital-a", "st-thomas-london-north", "aachen"]
CLASSES = ["malignant", "benign", "unclear"]
CONFUSION = [[40, 8, 2], [5, 44, 1], [0, 0, 50]]
BINARY = {"kind": "binary", "metric": "accuracy", "higher_is_better": True}
REGRESSION = {"kind": "regression", "metric": "rmse", "higher_is_better": False}


def change_summary(run: Path, **fields: object) -> None:
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | fields))


def named_run(path: Path, T: int = 5) -> Path:
    """A classification with names, per-agent accuracies, and all metrics."""
    run = make_run(path, T=T)
    change_setup(run, names=NAMES, classes=CLASSES, task=BINARY | {"kind": "multiclass"})
    rows = read_rows(run)
    for row in rows:
        row["per_agent"] = [row["accuracy"] + 0.01 * k for k in (0, 3, -2, 1)]
    write_rows(run, rows)
    metrics: Fields = {"accuracy": 134 / 150, "balanced_accuracy": 134 / 150, "macro_f1": 0.88, "auc": None}
    change_summary(run, metrics={**metrics, "recall": [0.8, 0.88, 1.0], "confusion": CONFUSION, "loss": 0.31})
    return run


def regression_run(path: Path, name: str = "numbers") -> Path:
    run = make_run(path, name=name)
    change_setup(run, task=REGRESSION, data="diabetes")
    rows = []
    for row in read_rows(run):
        kept = {key: value for key, value in row.items() if not key.startswith("accuracy")}
        t = row["round"]
        kept |= {"rmse": 60 - t, "rmse_min": 58 - t, "rmse_max": 63 - t, "rmse_of_mean": 59.5 - t}
        rows.append(kept | {"per_agent": [63 - t, 58 - t, 60 - t, 59 - t]})
    write_rows(run, rows)
    (run / "owner.json").write_text(json.dumps({"labels": [[10], [20], [30], [40]]}))
    residuals = {"bins": [-30.0, -10.0, 10.0, 30.0], "counts": [10, 60, 30]}
    change_summary(run, metric="rmse", rmse=55.0, rmse_of_mean=54.5, rmse_per_agent=[58.0, 53.0, 55.0, 54.0])
    change_summary(run, metrics={"rmse": 54.5, "mae": 43.2, "r2": -0.125, "loss": 0.9, "residuals": residuals})
    return run


def test_agents_and_classes_have_their_names_everywhere(tmp_path: Path) -> None:
    run = named_run(tmp_path / "run")
    page = Page(run)
    assert "charité malignant: 1" in page.tips
    assert "charité ← hospital-a: 33.3 %" in page.tips
    assert "hospital-a 1.000 × equal share" in page.tips
    assert any(tip.startswith("charité ← aachen round 1: ") for tip in page.tips)
    assert any(tip.startswith("st-thomas-london-north weight of its own message") for tip in page.tips)
    assert "by class malignant: 11, unclear: 7" in " ".join(page.tips)
    assert any("worst: st-thomas-london-north, best: hospital-a" in tip for tip in page.tips)
    assert not [tip for tip in page.tips if re.search(r"(?<!best )(?<!worst )\bagent \d|\bclass \d", tip)]
    assert "true: malignant predicted: benign 8 of 50 (16.0 %)" in page.tips
    assert "Most often confused: 8 of 50 records of malignant were taken for benign." in page.text
    assert "recall by class malignant 80.0 % benign 88.0 % unclear 100.0 %" in page.text
    assert "accuracy 89.3 % balanced accuracy 89.3 % macro F1 88.0 % AUC — loss 0.31" in page.text
    labels = {text.text for svg in page.svgs for text in svg.iter("text")}
    assert {"charité", "st-thomas-lon…", "st-thomas…", "malignant", "benign"} <= labels


def test_an_attacker_with_a_name_is_marked(tmp_path: Path) -> None:
    run = named_run(tmp_path / "run")
    change_setup(run, attackers=[[1, "label-flip"]])
    page = Page(run)
    assert "(label flipping: hospital-a)" in page.text
    assert {"hospital-a* 1.000 × equal share"} <= page.tips
    assert any(tip.startswith("hospital-a, attacker (label flipping)") for tip in page.tips)


def test_every_agent_has_its_line(tmp_path: Path) -> None:
    run = named_run(tmp_path / "run")
    page = Page(run)
    assert "Accuracy of each agent" in page.titles()
    for row in read_rows(run):
        values = dict(zip(NAMES, row["per_agent"], strict=True))
        ordered = sorted(NAMES, key=lambda name: -values[name])
        said = " ".join(f"{name} {100 * values[name]:.5g} %" for name in ordered)
        assert f"round {row['round']} {said}" in page.tips
    assert "Accuracy of each agent" not in Page(make_run(tmp_path / "old")).titles()


def test_of_many_agents_the_best_and_the_worst_are_drawn(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", M=30, T=3)
    write_rows(run, [row | {"per_agent": [i / 100 for i in range(30)]} for row in read_rows(run)])
    page = Page(run)
    assert "Test accuracy of the 6 best and the 6 worst of 30 agents." in page.text
    [chart] = [svg for svg in page.svgs if svg.get("aria-label", "").startswith("accuracy of agent 29")]
    assert {f"agent {i}" for i in (*range(6), *range(24, 30))} == {
        text.text for text in chart.iter("text") if text.get("class") == "name"
    }


def test_a_regression_has_its_metric_and_smaller_is_better(tmp_path: Path) -> None:
    page = Page(regression_run(tmp_path / "run"))
    assert "4 agents on a ring reached a test RMSE of 55 on diabetes in 5 rounds" in page.text
    assert "RMSE, mean over agents (53 to 58) 55 RMSE of the mean model 54.5" in page.text
    assert "accuracy" not in page.text.lower()
    tip = "round 1 mean over agents 59 mean model 58.5 best agent 57 worst agent 62 worst: agent 0, best: agent 1"
    assert tip in page.tips
    assert "best to worst agent" in page.text
    assert "RMSE 54.5 MAE 43.2 R² −0.125 loss 0.9" in page.text
    assert "error −10 to 10 60 records" in page.tips
    assert "On average, predictions are about 4 too high. Half of them are within ±10 of the target." in page.text
    assert "lowered the receiver's loss on" in page.text
    assert "agent 1 records: 20" in page.tips
    assert "class" not in page.text
    assert "| RMSE | 55 |" in summary_table(read_run(tmp_path / "run")).markdown()


def test_a_loss_of_ones_own_may_be_negative(tmp_path: Path) -> None:
    run = regression_run(tmp_path / "run")
    change_setup(run, task={"kind": "custom", "metric": "loss", "higher_is_better": False})
    write_rows(run, [row | {"loss": -2.0, "loss_min": -3.0, "loss_max": -1.0} for row in read_rows(run)])
    change_summary(run, loss=-2.0, loss_of_mean=-2.5, loss_per_agent=[-1.0, -2.0, -2.0, -3.0], metrics={"loss": -2.5})
    page = Page(run)
    assert "reached a test loss of −2 on" in page.text
    assert page.titles().count("Loss") == 1


def test_runs_are_compared_by_their_own_metric(tmp_path: Path) -> None:
    numbers = [regression_run(tmp_path / name, name) for name in ("one", "two")]
    change_summary(numbers[1], rmse=54.0)

    def compared(*paths: Path) -> str:
        runs = name_runs([(path, read_run(path)) for path in paths])
        html = write_comparison(runs, tmp_path / "c.html").read_text(encoding="utf-8")
        return " ".join(re.sub("<[^>]*>", "", html).split())

    assert "two has the lowest RMSE: 54." in compared(*numbers)
    mixed = compared(numbers[0], make_run(tmp_path / "classes", name="classes"))
    assert "The runs have different metrics: RMSE, accuracy." in mixed
    assert "Test RMSE, mean over agents." in mixed
    assert "Test accuracy, mean over agents." in mixed


BAD_SETUPS: list[tuple[Fields, str]] = [
    ({"names": NAMES[:3]}, "one for each of 4 agents"),
    ({"names": [*NAMES[:3], NAMES[0]]}, "distinct"),
    ({"names": [*NAMES[:3], "a\nb"]}, "printable"),
    ({"names": [*NAMES[:3], "x" * 201]}, "200 letters"),
    ({"names": [*NAMES[:3], 7]}, "not a list of names"),
    ({"names": "abcd"}, "not a list of names"),
    ({"classes": ["a", "a"]}, "distinct"),
    ({"task": "binary"}, "task is not one of"),
    ({"task": BINARY | {"kind": "ranking"}}, "task is not one of"),
    ({"task": BINARY | {"metric": "<b>"}}, "metric is not a name"),
    ({"task": BINARY | {"higher_is_better": 1}}, "higher_is_better"),
]


@pytest.mark.parametrize(("fields", "said"), BAD_SETUPS)
def test_a_hostile_setup_is_refused(tmp_path: Path, fields: Fields, said: str) -> None:
    run = make_run(tmp_path / "run")
    change_setup(run, **fields)
    with pytest.raises(PdslError, match=re.escape(said)):
        Page(run)


def in_metrics(**metrics: object) -> Callable[[Path], None]:
    return lambda run: change_summary(run, metrics=metrics)


def in_rows(**fields: object) -> Callable[[Path], None]:
    return lambda run: write_rows(run, [row | fields for row in read_rows(run)])


BAD_VALUES: list[tuple[Callable[[Path], None], str]] = [
    (in_rows(per_agent=[0.5, 0.5]), "each of 4 agents"),
    (in_rows(per_agent=[0.5, 0.5, 0.5, 1.5]), "per_agent cannot be 1.5"),
    (in_rows(per_agent="high"), "each of 4 agents"),
    (in_rows(accuracy=1.5), "accuracy cannot be 1.5"),
    (lambda run: change_summary(run, accuracy=2.0), "accuracy cannot be 2"),
    (lambda run: change_summary(run, metrics=[1]), "not a JSON object"),
    (in_metrics(auc=-0.5), "auc cannot be -0.5"),
    (in_metrics(r2=1.5), "r2 cannot be 1.5"),
    (in_metrics(rmse=-1.0), "rmse cannot be -1"),
    (in_metrics(recall=[0.5, 0.5]), "one number for each class"),
    (in_metrics(recall=[0.5, 0.5, 7]), "recall cannot be 7"),
    (in_metrics(recall={"malignant": 1.0}), "one number for each class"),
    (in_metrics(confusion=[[1, 2], [3, 4]]), "one row for each class"),
    (in_metrics(confusion=[[1, 2, 3], [4, 5, 6], [7, 8]]), "one row for each class"),
    (in_metrics(confusion=[[1, 2, 3], [4, 5, 6], [7, 8, -9]]), "whole numbers"),
    (in_metrics(confusion=[[1, 2, 3], [4, 5, 6], [7, 8, 0.5]]), "whole numbers"),
    (in_metrics(residuals={"bins": [0, 1], "counts": [1, 2]}), "increasing edges"),
    (in_metrics(residuals={"bins": [0, 1, 0], "counts": [1, 2]}), "increasing edges"),
    (in_metrics(residuals={"bins": [0, 1, 1e200], "counts": [1, 2]}), "increasing edges"),
    (in_metrics(residuals=[1]), "not a JSON object"),
]


@pytest.mark.parametrize(("harm", "said"), BAD_VALUES)
def test_a_value_that_is_not_possible_is_refused(tmp_path: Path, harm: Callable[[Path], None], said: str) -> None:
    run = named_run(tmp_path / "run")
    harm(run)
    with pytest.raises(PdslError, match=re.escape(said)):
        Page(run)


def test_limits_follow_the_task(tmp_path: Path) -> None:
    run = regression_run(tmp_path / "run")
    Page(run)
    write_rows(run, [row | {"rmse": -1.0} for row in read_rows(run)])
    with pytest.raises(PdslError, match="rmse cannot be -1"):
        Page(run)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    run, hostile = named_run(tmp_path / "run"), "<img src=x onerror='alert(1)'>"
    change_setup(run, names=[hostile, *NAMES[1:]], classes=[hostile, *CLASSES[1:]])
    change_summary(run, metrics={hostile: 1.0, "recall": [0.8, 0.88, 1.0], "confusion": CONFUSION})
    page = Page(run)
    assert "<img" not in page.html
    assert page.text.count("<img src=x onerror='alert(1)'>") >= 2
    assert any(hostile in tip for tip in page.tips)


def test_a_peer_that_knows_its_own_accuracy_only(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    in_rows(per_agent=[0.5])(run)
    change_summary(run, accuracy_per_agent=[0.5])
    assert "Accuracy of each agent" not in Page(run).titles()


def test_many_classes_are_not_drawn_but_described(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    confusion = [[9 if i == j else int(j == i + 1) for j in range(60)] for i in range(60)]
    change_summary(run, metrics={"confusion": confusion, "recall": [k / 60 for k in range(60)]})
    page = Page(run)
    assert "A matrix of more than 40 classes is not drawn." in page.text
    assert "1 of 10 records of class 0 were taken for class 1." in page.text
    assert "class 19 31.7 %" in page.text
    assert "class 20 " not in page.text


@pytest.mark.parametrize(
    ("values", "cut", "low", "high"),
    [
        ([0.1, 0.5, *[0.9 + 0.001 * k for k in range(40)]], "below", 0.85, 0.95),  # nine tenths are a flat line
        ([2.3, 1.0, *[0.3 - 0.001 * k for k in range(40)]], "above", 0.2, 0.4),
        ([k / 50 for k in range(50)], "below", -0.1, 1.1),  # a steady climb is shown as a whole
        ([0.5], "below", 0.4, 0.6),
        ([1.0, 1.0, 1.0], "below", 0.9, 1.0),
    ],
)
def test_the_axis_shows_the_interesting_range(values: list[float], cut: str, low: float, high: float) -> None:
    upper = 1.0 if cut == "below" else float("inf")
    shown = choose_range(Scale(lowest=None, low=0.0, high=upper, cut=cut), values, values)
    assert low <= shown.low <= shown.high <= high
    assert shown.whole[0] <= min(values) <= max(values) <= shown.whole[1]
    inside = [value for value in values if shown.low <= value <= shown.high]
    assert len(inside) >= 0.85 * len(values)
    ticks = ticks_in(shown.low, shown.high)
    assert ticks[0] <= shown.low + 1e-9
    assert ticks[-1] >= shown.high - 1e-9


def test_an_axis_from_zero_stays_so() -> None:
    shown = choose_range(Scale(), [0.5, 0.4], [0.8, 0.9])
    assert (shown.low, shown.high) == (0.0, 0.9)
    assert choose_range(Scale(), [0.0], [0.0]).high == 1.0


def with_phi(run: Path, phi: Callable[[int, int, random.Random], float], seed: int = 0, M: int = 4) -> Path:
    draw, rows = random.Random(seed), read_rows(run)
    for row in rows:
        row["shapley"]["phi"] = [phi(int(i), int(j), draw) / row["round"] for i, j, _ in ring(M)]
    write_rows(run, rows)
    return run


def test_the_heat_map_says_who_helps_and_who_does_not(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", M=8, T=60)

    def phi(i: int, j: int, draw: random.Random) -> float:
        return {2: 1.0, 5: -1.0}.get(j, 0.0) + draw.gauss(0, 0.4)

    with_phi(run, phi, M=8)
    said = "Conclusion: agent 2 helped the others most, and agent 5 helped least. The other 6 do not differ"
    assert said in Page(run).text
    change_setup(run, names=[f"clinic-{k}" for k in range(8)], attackers=[[5, "gaussian"]])
    assert "clinic-2 helped the others most, and clinic-5* helped least." in Page(run).text


def test_noise_is_rarely_taken_for_a_difference(tmp_path: Path) -> None:
    run, wrong = make_run(tmp_path / "run", M=8, T=60), 0
    for seed in range(60):
        with_phi(run, lambda i, j, draw: draw.gauss(0.1, 1.0), seed, M=8)
        wrong += any(c.is_significant for c in compare_senders(read_run(run)))
    assert wrong <= 8  # 5 % of 60 are 3
    with_phi(run, lambda i, j, draw: draw.gauss(0.1, 1.0), 1, M=8)
    assert "Conclusion: no agent helps more or less than the others beyond noise." in Page(run).text


def test_few_rounds_and_equal_values_conclude_nothing(tmp_path: Path) -> None:
    assert "too few rounds to tell" in Page(make_run(tmp_path / "few", T=3)).text
    run = with_phi(make_run(tmp_path / "equal", T=30), lambda i, j, draw: 0.0)
    assert "no agent helps more or less" in Page(run).text
    steady = with_phi(make_run(tmp_path / "steady", T=30), lambda i, j, draw: 1e-300 * (j == 1))
    assert "agent 1 helped the others most" in Page(steady).text


def test_weights_are_bars_around_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", T=2)
    rows = read_rows(run)
    for row in rows:
        row["shapley"]["share"] = [0.2 if j == 2 and i != 2 else 0.4 for i, j, _ in ring(4)]
    write_rows(run, rows)
    page = Page(run)
    [chart] = [svg for svg in page.svgs if svg.get("aria-label", "").startswith("average weight")]
    [one] = [float(re.findall(r"M([\d.]+)", m.get("d", ""))[0]) for m in chart.iter() if m.get("class") == "even-share"]
    bars = {bar.get("data-tip", "")[: len("agent 0")]: bar for bar in chart.iter("rect")}
    for name, bar in bars.items():
        start, width = float(bar.get("x", "")), float(bar.get("width", ""))
        assert (start + width if name == "agent 2" else start) == pytest.approx(one, abs=0.11)
        assert ("less" in bar.get("class", "")) == (name == "agent 2")
    widths = {name: float(bar.get("width", "")) for name, bar in bars.items()}
    assert widths["agent 2"] == pytest.approx(2 * widths["agent 0"], abs=0.2)  # 0.6 and 1.2


def test_the_badge_is_there_if_and_only_if_an_epsilon_protects_nobody(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    badge = 'class="badge"'
    assert badge not in Page(run).html  # no ε
    write_rows(run, [row | {"epsilon": 1.0} for row in read_rows(run)])
    change_summary(run, epsilon=1.0, adversaries={"one intercepted message": 1.0})
    assert Page(run).html.count(badge) == 5
    (run / "summary.json").unlink()
    assert Page(run).html.count(badge) == 4  # of an unfinished run too
    with (run / "config.toml").open("a") as config:
        config.write("[privacy]\nrandomness = 'system'\n")
    assert badge not in Page(run).html


def documented_terms() -> dict[str, str]:
    text = (Path(__file__).parents[2] / "docs/architecture.md").read_text(encoding="utf-8").partition("## Glossary")[2]
    return dict(re.findall(r"^\| (.+?) \| (.+?) \|$", text, re.MULTILINE))


def test_terms_have_the_sentences_of_the_glossary() -> None:
    documented = documented_terms()
    assert {term: documented.get(term) for term in GLOSSARY} == GLOSSARY
    assert set(FORMS) <= set(GLOSSARY)


def test_a_term_is_explained_once_in_a_text() -> None:
    said = explain("ε of a message; messages, ε & <b>φ</b>, phi, mean-models and R²")
    assert said.count("<abbr") == 4
    assert said.count(f'title="{GLOSSARY["ε"]}"') == 1
    assert "<b>" not in said
    assert "&amp;" in said
    assert (
        re.sub("<[^>]*>", "", said) == "ε of a message; messages, ε &amp; &lt;b&gt;φ&lt;/b&gt;, phi, mean-models and R²"
    )


def test_every_term_and_setting_of_a_report_is_explained(tmp_path: Path) -> None:
    run = named_run(tmp_path / "run")
    write_rows(run, [row | {"epsilon": 1.0} for row in read_rows(run)])
    change_summary(run, epsilon=1.0, delta=1e-5)
    page = Page(run)
    explained = {str(attributes.get("title")) for tag, attributes in page.tags if tag == "abbr"}
    wanted = ("ε", "δ", "σ", "Shapley value φ", "consensus distance", "public set Q", "recall", "macro F1", "accuracy")
    assert [term for term in wanted if GLOSSARY[term] not in explained] == []
    assert "rounds T" in explained  # the meaning of a setting


def test_half_of_the_residuals() -> None:
    values = [-2.5, -1.5, -0.5, -0.5, 0.5, 0.5, 1.5, 2.5]
    bins = [-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0]
    counts = [sum(low <= value < low + 1 for value in values) for low in bins[:-1]]
    assert "Half of them are within ±1 of" in describe_residuals(Residuals(bins, counts))
    assert describe_residuals(Residuals([0.0, 1.0], [0])) == "There are no test records."


def test_edges_of_some_rounds_only_are_concluded_from_too(tmp_path: Path) -> None:
    """A graph that changes: each edge between two agents is there in every other round."""
    run = make_run(tmp_path / "run", M=8, T=80)

    def phi(i: int, j: int, draw: random.Random) -> float:
        return float(j == 3) + draw.gauss(0, 0.3)

    with_phi(run, phi, M=8)
    rows = read_rows(run)
    for row in rows:
        for e, (i, j, _) in enumerate(ring(8)):
            if i != j and (i + j + row["round"]) % 4 < 2:
                row["shapley"]["phi"][e] = row["shapley"]["share"][e] = None
    write_rows(run, rows)
    assert "Conclusion: agent 3 helped the others most. The other 7 do not differ beyond noise." in Page(run).text
