"""docs/algorithms.md against the code: what it quotes, what it counts, and what it promises about one's own."""

import inspect
import re
import runpy
import textwrap
from pathlib import Path

import pytest

import pdsl
from pdsl.algorithms import ALGORITHMS
from pdsl.algorithms.base import Algorithm, Metrics, Round
from pdsl.algorithms.catalogue import catalogue
from pdsl.algorithms.d_psgd import DPSGD, State
from pdsl.auditing import Verdict
from tests.helpers.refusals import refused

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"^([^\n]*)\n```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)  # (line before, block)
SECTIONS = re.findall(r"^### ([^\n]+)\n(.*?)(?=^##)", PAGE, flags=re.MULTILINE | re.DOTALL)  # (heading, text)


def names(heading: str) -> list[str]:
    return heading.split(" and ")


@pytest.mark.parametrize(("before", "block"), QUOTED, ids=lambda text: text.splitlines()[0][:60])
def test_every_block_of_python_is_in_the_file_that_the_line_before_it_names(before: str, block: str) -> None:
    (file,) = re.findall(r"`([^`]+\.py)`", before)
    source = "\n" + (ROOT / file).read_text(encoding="utf-8")
    assert any("\n" + textwrap.indent(block, " " * spaces) in source for spaces in (0, 4, 8))


def test_no_block_of_python_is_overlooked() -> None:
    assert len(QUOTED) == PAGE.count("```python") > len(SECTIONS)


def test_every_algorithm_has_a_heading_in_the_order_of_the_list() -> None:
    headings = [names(heading) for heading, _ in SECTIONS]
    assert sorted(name for heading in headings for name in heading) == sorted(ALGORITHMS)
    places = [list(ALGORITHMS).index(heading[0]) for heading in headings]
    assert places == sorted(places)


@pytest.mark.parametrize("kind", ALGORITHMS.values(), ids=lambda kind: kind.name)
def test_a_section_shows_the_whole_step(kind: type[Algorithm]) -> None:
    (text,) = (text for heading, text in SECTIONS if kind.name in names(heading))
    body = textwrap.dedent(inspect.getsource(kind.step).partition("\n")[2])
    assert f"```python\n{body}```" in text


def test_the_table_has_the_catalogues_numbers() -> None:
    rows = re.findall(r"^\| \[([a-z-]+)\]\(#([a-z-]+)\) \|[^|]+\| (\S+) \| (\S+) \| (\S+) \|", PAGE, flags=re.MULTILINE)
    section = {name: heading.replace(" ", "-") for heading, _ in SECTIONS for name in names(heading)}
    assert rows == [
        (
            entry["name"],
            section[entry["name"]],
            str(entry["messages_per_round"]),
            "members" if entry["k_is_neighbourhood"] else str(entry["k"]),
            str(entry["releases_per_round"]),
        )
        for entry in catalogue()
    ]


@pytest.mark.slow
def test_the_audit_finds_nothing_against_the_example() -> None:
    DSGD = runpy.run_path(str(ROOT / "examples" / "own_algorithm.py"))["DSGD"]
    result = pdsl.train(data="digits", graph=pdsl.ring(5), algorithm=DSGD(), rounds=20, privacy={"target_epsilon": 4})
    report = pdsl.audit(result)
    assert report.verdict == Verdict.PASS


class Twice(DPSGD):
    """Takes two gradients on one batch, and says that it is one."""

    def step(self, state: State, r: Round) -> tuple[State, Metrics]:
        g_hat = r.own_noisy_gradients(state.x) + r.own_noisy_gradients(state.x, nth=1)
        return State(r.engine.mix(state.x - r.learning_rate * g_hat / 2)), {}


def test_two_gradients_where_one_is_declared_are_refused_before_round_1() -> None:
    with refused("algorithm d-psgd makes 2 noisy messages", "declares 1"):
        pdsl.train(data="digits", graph=pdsl.ring(5), algorithm=Twice(), rounds=20, privacy={"target_epsilon": 4})
