"""Accounts of contributions: stored, read from files of anybody, and handed to pyDVL."""

import copy
import csv
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pdsl.shapley.account import Account
from pdsl.utils.errors import PdslError
from tests.helpers.accounts import HOSPITALS, MARGINS, POINTS, hospital_account

Record = dict[str, Any]


def test_an_account_read_from_its_json_is_the_same() -> None:
    account = hospital_account()
    found = Account.from_json(account.to_json())
    assert found.names == ("Aachen", "Dresden", "Charité", "Essen", "Bonn", "Freiburg")  # largest first
    order = [HOSPITALS.index(name) for name in found.names]
    np.testing.assert_array_equal(found.values, account.values[order])
    np.testing.assert_allclose(found.margins, account.margins[order], rtol=0, atol=1e-15)
    np.testing.assert_allclose(found.pair_margins, account.pair_margins[np.ix_(order, order)], rtol=0, atol=1e-15)
    scalars = ("metric", "start", "end", "method", "coalitions", "notes")
    assert [getattr(found, name) for name in scalars] == [getattr(account, name) for name in scalars]
    assert found.gain == pytest.approx(0.84)
    again = Account.from_json(found.to_json())
    assert (again.names, again.values.tolist()) == (found.names, found.values.tolist())


@pytest.mark.parametrize("seed", range(5))
def test_any_account_is_read_again(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 12))
    values, margins = rng.normal(size=n) * 10.0 ** rng.integers(-9, 9), rng.exponential(size=n)
    account = hospital_account([f"party {j}" for j in range(n)], values.tolist(), margins.tolist(), "loss", 3.0, 2.0)
    found = Account.from_json(account.to_json())
    assert {name: c.value for name, c in found.by_agent().items()} == {
        name: c.value for name, c in account.by_agent().items()
    }
    decided = {(p.first, p.second): p.decided for p in account.pairs()}
    assert {(p.first, p.second): p.decided for p in found.pairs()} == decided


def test_pairs_are_decided_if_their_interval_excludes_zero() -> None:
    found = Account.from_json(hospital_account().to_json())
    assert found.compare("Aachen", "Bonn").decided  # 0.213 - 0.121 = 0.092 > 0.027
    assert not found.compare("Aachen", "Dresden").decided  # 0.011 < 0.032


def change(*path: str | int, to: object) -> Callable[[Record], object]:
    """Replace one value of a record."""

    def harm(record: Record) -> object:
        *parents, last = path
        place: Any = record
        for key in parents:
            place = place[key]
        place[last] = to
        return record

    return harm


def without(key: str, first: int) -> Callable[[Record], object]:
    return lambda record: record | {key: record[key][first:]}


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda record: [record], "not an account of format 1"),
        (change("format", to=2), "not an account of format 1"),
        (change("parties", to={}), "parties is not a list"),
        (change("parties", to=[1]), "parties is not a list of JSON objects"),
        (change("parties", to=[]), "no distinct names"),
        (change("start", to=None), "start is not a finite number"),
        (change("end", to=float("nan")), "end is not a finite number"),
        (change("end", to=10**400), "end is not a finite number"),
        (change("coalitions", to=2.5), "coalitions is not a whole number"),
        (change("coalitions", to=True), "coalitions is not a finite number"),
        (change("metric", to=7), "metric is not a printable text"),
        (change("notes", to="one"), "notes is not a list"),
        (change("notes", to=["\x1b[2J"]), "a note is not a printable text"),
        (change("notes", to=["a" * 2001]), "at most 2000 letters"),
        (change("confidence", to=0.5), "contradict"),
        (change("parties", 0, "name", to="Bonn"), "no distinct names"),
        (change("parties", 0, "name", to=""), "no distinct names"),
        (change("parties", 0, "name", to="a\nb"), "a name is not a printable text"),
        (change("parties", 0, "name", to=["Aachen"]), "a name is not a printable text"),
        (change("parties", 0, "name", to="Ulm"), "not of two parties"),
        (change("parties", 0, "value", to="much"), "value is not a finite number"),
        (change("parties", 0, "value", to=float("inf")), "value is not a finite number"),
        (change("parties", 0, "value", to=0.214), "contradict"),  # not the middle of its interval
        (change("parties", 0, "low", to=0.9), "ends before it starts"),
        (change("parties", 0, "part", to=0.9), "contradict"),
        (change("pairs", 0, "first", to="Bonn"), "twice"),
        (change("pairs", 0, "second", to={}), "second is not a printable text"),
        (change("pairs", 0, "second", to="Aachen"), "not of two parties"),
        (change("pairs", 0, "decided", to=True), "contradict"),
        (change("pairs", 0, "difference", to=0.0), "contradict"),
        (without("pairs", 1), "one for each two of the 6 parties"),
        (without("parties", 1), "not of two parties"),
        (lambda record: record | {"parties": record["parties"][::-1]}, "contradict"),  # not sorted
    ],
)
def test_a_record_that_is_no_account_is_refused(harm: Callable[[Record], object], said: str) -> None:
    record = json.loads(hospital_account().to_json())
    assert Account.from_record(copy.deepcopy(record)).names[0] == "Aachen"
    with pytest.raises(ValueError, match=said):
        Account.from_record(harm(record))


def test_the_csv_file_has_a_line_for_each_party() -> None:
    lines = list(csv.DictReader(hospital_account().to_csv().splitlines()))
    assert [line["name"] for line in lines] == ["Aachen", "Dresden", "Charité", "Essen", "Bonn", "Freiburg"]
    first = {key: float(value) for key, value in lines[0].items() if key != "name"}
    assert first == pytest.approx({"value": 0.213, "low": 0.193, "high": 0.233, "part": 0.213 / 0.84})


def test_pydvl_gets_values_names_and_standard_errors() -> None:
    pytest.importorskip("pydvl", reason="pyDVL is not installed: it needs numpy 1")
    result = hospital_account().to_pydvl()
    assert result.names.tolist() == list(HOSPITALS)
    assert result.values.tolist() == pytest.approx(list(POINTS))
    assert (1.959964 * result.stderr).tolist() == pytest.approx(list(MARGINS), rel=1e-6)
    result.sort(reverse=True, inplace=True)
    assert result.names[:2].tolist() == ["Aachen", "Dresden"]
    assert result.to_dataframe(column="value", use_names=True).loc["Bonn", "value"] == pytest.approx(0.121)


def test_without_pydvl_the_package_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pydvl", "pydvl.utils.status"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(PdslError, match="pip install pydvl"):
        hospital_account().to_pydvl()
