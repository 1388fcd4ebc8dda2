"""Every block of code in README.md and docs/ is run, in the order of its page and in a folder of the page's own.

What a block is, its language says, and a comment on the line before it may say more:

    ```python    executed; the blocks of a page share their names
    ```sh        `pdsl` lines are run here in this process; any other line must be one of KNOWN
    ```toml      a config; needs a file name
    ```output    must be in what the block before it printed
    ```text      a formula, nothing to run
    ```yaml      for another program; needs a skip

    <!-- test: file NAME -->      the block is a file of this name, which later blocks use
    <!-- test: whole -->          run as it is, not shortened
    <!-- test: skip, REASON -->   not run, and reported as skipped
    <!-- test: setup
    code in Python that readers need not see
    -->

Runs are shortened: `rounds=` to a tenth of what is written, and other commands by SMALLER. Lines that name a data set
which must be fetched are run where it is at hand, apart from the others.
"""

import io
import re
import shlex
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import pdsl, settings
from tests.helpers.real_data import real

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
QUOTES = {"algorithms.md"}  # its Python is compared with the source by test_docs_algorithms.py
LANGUAGES = {"python", "sh", "toml", "output", "text", "yaml"}
REAL = re.compile(r"fashion-mnist|mnist|cifar10")

# Lines of shell that are not ours to run here, and where what they do is tested.
KNOWN = {
    "make run": "the defaults of `pdsl run`, which README.md runs",
    "make test": "this",
    "make docs": "`mkdocs build`, below",
    "python3 -m venv .venv": "Python's own",
    ". .venv/bin/activate": "Python's own",
    "pip install --constraint constraints.txt .": "pip's own",
    "pip install 'pdsl[figures]'": "pip's own",
    "pip install 'pdsl[tensorboard]'": "pip's own",
    "tensorboard --logdir board": "TensorBoard's own",
}

# Arguments with which a command is quick.
ONE_CELL = "graph=ring,agents=10,epsilon=1,method=pdsl"
SMALLER = {
    "reproduce": ["--only", ONE_CELL, "--rounds", "1", "--grid", "1"],
    "audit": ["--canaries", "0"],
    "compare": ["--algorithms", "d-psgd", "--grid", "1", "--seeds", "1", *settings("rounds=1")],
}
SMALL_TASK = settings("graph.agents=3", "data.validation=50", "batch.size=20", "model.channels=[2, 3]")


@dataclass(frozen=True)
class Block:
    language: str  # of the fence, or "setup"
    text: str
    comment: str  # what follows `test:` on the line before
    line: int  # of its first line of text, from 1


PART = re.compile(
    r"^<!-- test: setup\n(?P<setup>.*?)^-->$"
    r"|^(?:<!-- test: (?P<comment>[^\n]*) -->\n)?^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$",
    flags=re.MULTILINE | re.DOTALL,
)


def blocks(page: Path) -> list[Block]:
    content = page.read_text(encoding="utf-8")
    found = []
    for m in PART.finditer(content):
        group = "setup" if m["setup"] is not None else "text"
        line = content.count("\n", 0, m.start(group)) + 1
        found.append(Block(m["language"] if group == "text" else "setup", m[group], m["comment"] or "", line))
    return found


def lines(block: Block) -> list[str]:
    """The commands of a shell block, without comments."""
    joined = block.text.replace("\\\n", " ").splitlines()
    return [shlex.join(words) for line in joined if (words := shlex.split(line, comments=True))]


def in_short(text: str) -> str:
    return re.sub(r"\brounds=(\d+)", lambda m: f"rounds={max(1, int(m[1]) // 10)}", text)


def arguments(line: str, whole: bool) -> list[str]:
    """A line's words after `pdsl`, with which it is quick."""
    words = shlex.split(line if whole else in_short(line))[1:]
    if whole:
        return words
    if words[0] == "run" and "--resume" not in words:
        few = [] if "rounds=" in line else settings("rounds=1" if REAL.search(line) else "rounds=2")
        return [*words, *few, *(SMALL_TASK if REAL.search(line) else [])]
    return [*words, *SMALLER.get(words[0], [])]


def bare(printed: str) -> str:
    """Words alone: a table's lines and the breaks in a cell are not part of what is said."""
    return " ".join(re.sub(r"[─-╿]", " ", printed).split())


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


SKIPPED = [(page, b) for page in PAGES for b in blocks(page) if b.comment.startswith("skip")]
WITH_REAL_DATA = [
    page for page in PAGES if any(b.language == "sh" and any(map(REAL.search, lines(b))) for b in blocks(page))
]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_has_a_way_to_be_run(page: Path) -> None:
    found = blocks(page)
    content = page.read_text(encoding="utf-8")
    fences = len(re.findall(r"^\s*(?:```|~~~)", content, flags=re.MULTILINE))
    assert fences == 2 * sum(b.language != "setup" for b in found)
    assert content.count("<!-- test:") == sum(b.language == "setup" or b.comment != "" for b in found)
    before = None
    for b in found:
        where = f"{name(page)}:{b.line}"
        assert b.language in {*LANGUAGES, "setup"}, where
        assert re.fullmatch(r"|whole|file \S+|skip, .+", b.comment), where
        assert b.language != "toml" or b.comment.startswith("file "), where
        assert b.language != "output" or before in ("sh", "python"), where
        if b.language == "sh" and not b.comment.startswith("skip"):
            assert [line for line in lines(b) if line not in KNOWN and not line.startswith("pdsl ")] == [], where
        before = b.language


@pytest.mark.parametrize(("page", "block"), SKIPPED, ids=lambda x: name(x) if isinstance(x, Path) else str(x.line))
def test_not_run(page: Path, block: Block) -> None:
    pytest.skip(f"{name(page)}:{block.line} {block.comment.removeprefix('skip, ')}")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a page is tried out: the repository's examples are there, and what it writes can be imported."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in QUOTES], ids=name)
def test_page(page: Path, folder: Path) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    printed = ""
    before = set(sys.modules)
    try:
        for b in blocks(page):
            where = f"{name(page)}:{b.line}"
            whole = b.comment == "whole"
            if b.comment.startswith("skip"):
                printed = ""
            elif b.comment.startswith("file "):
                (folder / b.comment.removeprefix("file ")).write_text(b.text, encoding="utf-8")
            elif b.language in ("python", "setup"):
                with redirect_stdout(io.StringIO()) as out:
                    exec(compile("\n" * (b.line - 1) + (b.text if whole else in_short(b.text)), where, "exec"), names)
                printed = out.getvalue()
            elif b.language == "sh":
                printed = ""
                for line in lines(b):
                    if line not in KNOWN and not REAL.search(line):
                        outcome = pdsl(*arguments(line, whole))
                        assert outcome.code == 0, f"{where} {line}: {outcome.err}"
                        printed += outcome.out
            elif b.language == "output":
                assert bare(b.text) in bare(printed), where
    finally:
        for module in set(sys.modules) - before:
            if str(folder) in (getattr(sys.modules[module], "__file__", None) or ""):
                del sys.modules[module]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_REAL_DATA, ids=name)
def test_lines_that_need_data_to_be_fetched(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for b in blocks(page):
        for line in lines(b) if b.language == "sh" else []:
            if found := REAL.search(line):
                monkeypatch.setenv("PDSL_DATA", str(real(found[0])))
                outcome = pdsl(*arguments(line, whole=False))
                assert outcome.code == 0, f"{name(page)}:{b.line} {line}: {outcome.err}"


def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower())).strip("-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = PART.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if page.parent != ROOT:
            assert file.resolve().is_relative_to(ROOT / "docs"), f"{target} is not on the site"
        assert not anchor or anchor in anchors(file), target


@pytest.mark.slow
def test_the_site_builds_and_asks_nobody_else_for_anything(tmp_path: Path) -> None:
    """Every page is on the site; links and headings are right (strict); fonts, scripts and styles are its own."""
    build = pytest.importorskip("mkdocs.commands.build", reason="mkdocs is not installed: pip install '.[docs]'")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: pip install '.[docs]'")
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True)
    build.build(config)
    for page in PAGES[1:]:
        html = (tmp_path / page.relative_to(ROOT / "docs")).with_suffix(".html").read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]+src=\"?([^\s\">]+)", html)
        loaded += re.findall(r"<link[^>]+rel=\"?(?:stylesheet|preconnect|icon)[^>]+href=\"?([^\s\">]+)", html)
        assert loaded
        assert [url for url in loaded if "//" in url] == []
