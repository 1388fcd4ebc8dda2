"""The command line: one JSON object, help that is complete, and one line for every mistake."""

import gzip
import json
import os
import pty
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pdsl.config import describe, load
from pdsl.runs import runner
from tests.helpers.commands import PATIENCE, SMALL, pdsl, result_of, rows_on_disk, settings, started, wait_for

COMMAND = Path(sys.executable).parent / "pdsl"


@pytest.fixture(autouse=True)
def perturbed_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test in a directory of its own, without data sets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PDSL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "300")
    return tmp_path


def test_json_is_one_object_and_progress_goes_to_stderr() -> None:
    outcome = pdsl("run", "--json", "--out", "a", *settings(*SMALL, "rounds=12"))
    assert outcome.code == 0
    assert len(outcome.out.splitlines()) == 1
    summary = json.loads(outcome.out)
    assert summary == json.loads(Path("a/summary.json").read_text())
    known = {"rounds": 12, "agents": 4, "algorithm": "pdsl", "run": "a", "epsilon": None, "notes": []}
    assert known.items() <= summary.items()
    assert 0 < summary["accuracy"] <= 1
    assert 0 < summary["accuracy_of_mean"] <= 1
    assert summary["loss"] > 0
    assert summary["seconds"] > 0
    lines = outcome.err.splitlines()
    assert 1 < len(lines) <= 12
    assert all(line.startswith("round ") for line in lines)
    assert lines[-1].startswith("round 12/12  loss ")
    assert f"accuracy {summary['accuracy']:.4f}" in lines[-1]
    assert "\x1b" not in outcome.err


def test_without_json_people_read_it(tmp_path: Path) -> None:
    outcome = pdsl("run", "--out", "[bold]/a", *settings(*SMALL, "rounds=2"))  # brackets are no markup
    summary = json.loads(Path("[bold]/a/summary.json").read_text())
    assert outcome.code == 0
    assert outcome.out.startswith("pdsl on digits: ring of 4 agents")
    for shown in (f"{summary['accuracy']:.4f}", f"{summary['accuracy_of_mean']:.4f}", "[bold]/a/report.html"):
        assert shown in outcome.out
    assert "\x1b" not in outcome.out


@pytest.mark.slow
def test_in_a_terminal_there_is_a_bar_on_stderr(tmp_path: Path) -> None:
    main, terminal = pty.openpty()
    process = started(
        "run",
        "--json",
        "--out",
        "a",
        *settings(*SMALL, "rounds=3", "baselines=none"),
        out=tmp_path / "out",
        err=os.ttyname(terminal),
    )
    process.join()
    os.set_blocking(main, False)
    shown = os.read(main, 100_000).decode()
    os.close(main)
    os.close(terminal)
    assert process.exitcode == 0
    assert "\x1b[" in shown
    assert "3/3" in shown
    assert json.loads(Path("out").read_text())["rounds"] == 3


def test_help_shows_every_setting() -> None:
    outcome = pdsl("run", "--help")
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    for name, default, text in describe():
        (line,) = (line for line in lines if line.split()[:1] == [name])
        assert text in line
        assert default is None or str(default) in line
    for option in ("--set", "--out", "--resume", "--json"):
        assert option in outcome.out


@pytest.mark.parametrize("args", [[], ["--help"], ["data", "--help"], ["config", "--help"], ["report", "--help"]])
def test_there_is_help(args: list[str]) -> None:
    outcome = pdsl(*args)
    assert (outcome.code, outcome.err) == (0, "")
    assert "Usage: pdsl" in outcome.out


def test_config_prints_what_run_reads() -> None:
    changes = ["rounds=3", "privacy.mode=noise", "privacy.sigma=0.01", "algorithm.shapley.estimator=montecarlo"]
    outcome = pdsl("config", *settings(*SMALL, *changes))
    assert (outcome.code, outcome.err) == (0, "")
    for name, _, text in describe():
        assert f"{name.rpartition('.')[2]} =" in outcome.out
        assert f"  # {text}\n" in outcome.out
    Path("a.toml").write_text(outcome.out)
    assert load(Path("a.toml")) == load(None, [*SMALL, *changes])
    assert pdsl("config", "a.toml").out == outcome.out
    assert pdsl("run", "a.toml", "--json", "--out", "from-file").code == 0
    assert pdsl("run", "--json", "--out", "from-set", *settings(*SMALL, *changes)).code == 0
    assert result_of(Path("from-file")) == result_of(Path("from-set"))


def test_the_saved_config_repeats_the_run() -> None:
    assert pdsl("run", "--out", "a", *settings(*SMALL, "rounds=2", "seed=5")).code == 0
    assert pdsl("run", "a/config.toml", "--out", "b").code == 0
    assert result_of(Path("a")) == result_of(Path("b"))


def test_the_defaults_are_a_run_of_their_own() -> None:
    assert tomllib.loads(pdsl("config").out) == load(None).as_dict()


def test_report_is_written_again() -> None:
    assert pdsl("run", "--out", "a", *settings(*SMALL, "rounds=2")).code == 0
    page = Path("a/report.html").read_bytes()
    Path("a/report.html").unlink()
    outcome = pdsl("report", "a")
    assert (outcome.code, outcome.out) == (0, "a/report.html\n")
    assert Path("a/report.html").read_bytes() == page


def test_data_list_says_what_is_missing() -> None:
    outcome = pdsl("data", "list")
    assert (outcome.code, outcome.err) == (0, "")
    found = {line.split()[0]: line.split()[1] for line in outcome.out.splitlines()[1:]}
    assert found == {"digits": "yes", "mnist": "no", "fashion-mnist": "no", "cifar10": "no"}


# Mistakes

X, Y = np.arange(60.0).reshape(20, 3), np.arange(20) % 4


def own(name: str, **arrays: object) -> list[str]:
    """Settings for an .npz of one's own."""
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    np.savez(name, **{"x": X, "y": Y, **arrays})
    return ["data.name=npz", f"data.path={name}", "graph.agents=2", "batch.size=4"]


def changed(array: np.ndarray, index: object, value: float) -> np.ndarray:
    array = array.astype(np.float64)
    array[index] = value
    return array


def folder(*names: str) -> list[str]:
    for name in names:
        own(f"holders/{name}.npz")
    return ["data.name=npz", "data.path=holders"]


def text(name: str, content: str | bytes) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    return name


def mnist(content: bytes) -> list[str]:
    text("data/MNIST/raw/train-images-idx3-ubyte.gz", content)
    return ["data.name=mnist"]


def edges(content: str, agents: int = 4) -> list[str]:
    return ["graph.kind=file", f"graph.path={text('edges.txt', content)}", f"graph.agents={agents}"]


IMAGES = b"\0\0\x08\x03" + bytes([0, 0, 0, 2, 0, 0, 0, 28, 0, 0, 0, 28]) + bytes(2 * 28 * 28)

SET: dict[str, tuple[Callable[[], list[str]], list[str]]] = {
    "unknown setting": (lambda: ["graph.agent=5"], ["graph.agent", "did you mean graph.agents?"]),
    "wrong type": (lambda: ["rounds=ten"], ["rounds=ten"]),
    "not key=value": (lambda: ["rounds"], ["--set rounds", "key=value"]),
    "two lines": (lambda: ["a\nb=3"], ["unknown setting"]),
    "μ of 0": (lambda: ["partition.mu=0"], ["partition.mu=0"]),
    "one agent": (lambda: ["graph.agents=1"], ["graph.agents=1"]),
    "more agents than records": (lambda: ["graph.agents=2000"], ["2000 agents", "1198 records", "fewer agents"]),
    "far more agents than memory": (lambda: ["graph.agents=1000000000"], ["1198 records"]),
    "too few agents for the classes": (
        lambda: ["partition.kind=shards", "partition.classes=1", "graph.agents=4"],
        ["partition.classes=3"],
    ),
    "prime grid": (lambda: ["graph.kind=grid", "graph.agents=7"], ["grid", "7 agents", "agents=6 or 8"]),
    "graph in two parts": (lambda: edges("0 1\n2 3\n"), ["edges.txt", "not connected", "adding edges"]),
    "isolated agent": (lambda: edges("0 1\n1 3\n"), ["edges.txt", "agent 2 is isolated"]),
    "not an edge": (lambda: edges("0 1\n1 two\n"), ["edges.txt", "line 2", "1 two"]),
    "edge to nobody": (lambda: edges("0 1\n1 7\n"), ["edges.txt", "line 2", "graph.agents=8"]),
    "no edge file": (lambda: ["graph.kind=file", "graph.path=nowhere.txt"], ["nowhere.txt", "graph.path"]),
    "edge file not named": (lambda: ["graph.kind=file"], ["graph.path"]),
    "degree too high": (lambda: ["graph.kind=k-regular", "graph.agents=4"], ["degree 4", "try degree=3"]),
    "graph from Python": (lambda: ["graph.kind=python"], ["graph", "pdsl.train"]),
    "data from Python": (lambda: ["data.name=python"], ["data", "pdsl.train"]),
    "unknown data set": (lambda: ["data.name=imagenet"], ["data.name=imagenet", "cifar10"]),
    "missing data set": (lambda: ["data.name=mnist"], ["data/MNIST/raw", "pdsl data fetch mnist", "PDSL_DATA"]),
    "missing CIFAR-10": (lambda: ["data.name=cifar10"], ["cifar-10-batches-bin", "pdsl data fetch cifar10"]),
    "wrong data file": (lambda: mnist(gzip.compress(IMAGES)), ["train-images-idx3-ubyte.gz", "md5", "fetch mnist"]),
    "truncated data file": (lambda: mnist(gzip.compress(IMAGES)[:40]), ["train-images-idx3-ubyte.gz", "damaged"]),
    "data file that is none": (lambda: mnist(b"hello"), ["train-images-idx3-ubyte.gz", "damaged"]),
    "no file of one's own": (lambda: ["data.name=npz", "data.path=nowhere.npz"], ["data.path", "nowhere.npz"]),
    "own file not named": (lambda: ["data.name=npz"], ["data.path", ".npz"]),
    "own file is none": (lambda: ["data.name=npz", f"data.path={text('a.npz', 'x,y')}"], ["a.npz", "numpy.savez"]),
    "own file without labels": (lambda: own("a.npz", y=Y[:0]), ["a.npz", "y is empty", "one target per record"]),
    "negative label": (lambda: own("a.npz", y=changed(Y, 3, -1).astype(int)), ["a.npz", "y[3]", "-1"]),
    "half a label": (
        lambda: [*own("a.npz", y=changed(Y, 3, 0.5)), "task.kind=multiclass"],
        ["a.npz", "y[3]", "0.5", "task=regression"],
    ),
    "label out of range": (
        lambda: own("a.npz", y=changed(Y, 3, 1e7).astype(int)),
        ["a.npz", "y[3]", "10000000", "task=regression"],
    ),
    "NaN": (lambda: own("a.npz", x=changed(X, (5, 1), np.nan)), ["a.npz", "x[5]", "NaN"]),
    "infinity": (lambda: own("a.npz", x=changed(X, (5, 1), np.inf)), ["a.npz", "x[5]", "inf"]),
    "Q as large as the test set": (lambda: ["data.validation=599"], ["data.validation", "598"]),
    "another number of holders": (
        lambda: [*folder("a", "b", "c"), "graph.agents=5"],
        ["graph.agents: 5", "holders", "graph.agents=3"],
    ),
    "natural without owners": (lambda: ["partition.kind=natural"], ["partition.kind", "dirichlet"]),
    "unknown model": (lambda: ["model.name=resnet"], ["model.name", "resnet", "softmax"]),
    "model that cannot be imported": (lambda: ["model.name=nowhere:model"], ["model.name=nowhere:model"]),
    "model without a module": (lambda: ["model.name=:model"], ["model.name=:model"]),
    "model that is none": (lambda: ["model.name=builtins:dict"], ["model.name=builtins:dict", "dict"]),
    "model for images": (lambda: [*own("a.npz"), "model.name=mnist-cnn"], ["mnist-cnn", "model.name=mlp"]),
    "unknown algorithm": (lambda: ["algorithm.name=fedavg"], ["fedavg", "pdsl"]),
    "algorithm that is a list": (lambda: ["algorithm.name=[1]"], ["algorithm"]),
    "unknown device": (lambda: ["engine.device=abacus"], ["engine.device=abacus", "engine.device=cpu"]),
    "device that computes nothing": (lambda: ["engine.device=meta"], ["engine.device=meta", "engine.device=cpu"]),
    "noise without an amount": (lambda: ["privacy.mode=noise"], ["privacy", "sigma"]),
    "an amount for the paper": (lambda: ["privacy.epsilon_per_round=1"], ["privacy", "paper", "target_epsilon"]),
    "two amounts": (lambda: ["privacy.mode=noise", "privacy.sigma=1", "privacy.noise_multiplier=1"], ["exactly one"]),
    "infinite noise": (
        lambda: ["privacy.mode=noise", "privacy.epsilon_per_round=1", "algorithm.shapley.floor=0"],
        ["Theorem 1", "algorithm.shapley.floor"],
    ),
    "exact values for too many": (
        lambda: ["algorithm.shapley.estimator=exact", "graph.kind=full", "graph.agents=15"],
        ["algorithm.shapley.estimator=exact", "15 members", "montecarlo"],
    ),
}  # fmt: skip


def everything() -> set[Path]:
    return set(Path.cwd().rglob("*"))


@pytest.mark.parametrize("case", SET)
def test_a_wrong_setting_is_one_line_and_leaves_nothing_behind(case: str) -> None:
    prepare, parts = SET[case]
    assignments = prepare()
    before = everything()
    pdsl("run", *settings(*assignments)).refused(*parts)
    pdsl("run", "--json", "--out", "a", *settings(*assignments)).refused(*parts)
    assert everything() == before


ARGUMENTS: dict[str, tuple[Callable[[], list[str]], list[str]]] = {
    "missing config": (lambda: ["run", "nowhere.toml"], ["nowhere.toml", "pdsl config"]),
    "config that is a directory": (lambda: ["run", "."], ["directory"]),
    "broken TOML": (lambda: ["run", text("a.toml", "rounds = = 3\n")], ["a.toml", "line 1"]),
    "unknown setting in a config": (lambda: ["run", text("a.toml", "roundz = 3")], ["a.toml", "did you mean rounds?"]),
    "unknown setting to print": (lambda: ["config", "--set", "roundz=3"], ["did you mean rounds?"]),
    "below a file": (lambda: ["run", "--out", text("a", "") + "/b"], ["a/b", "Not a directory", "another folder"]),
    "in place of a file": (lambda: ["run", "--out", text("a", "")], ["cannot write to a", "another folder"]),
    "where nobody writes": (lambda: ["run", "--out", "/proc/pdsl/a"], ["/proc/pdsl/a", "another folder"]),
    "name too long": (lambda: ["run", "--out", "a" * 300], ["too long", "another folder"]),
    "no room in runs": (lambda: ["run", "--set", f"seed={len(text('runs', ''))}"], ["runs/", "another folder"]),
    "resume of nothing": (lambda: ["run", "--resume", "nowhere"], ["nowhere", "not a run directory"]),
    "resume with a config": (lambda: ["run", text("a.toml", ""), "--resume", "a"], ["--resume", "leave out"]),
    "report of nothing": (lambda: ["report", "nowhere"], ["nowhere"]),
    "unknown option": (lambda: ["run", "--rounds", "3"], ["--rounds", "--set rounds=3"]),
    "option without its value": (lambda: ["run", "--out"], ["--out", "--help"]),
    "one argument too many": (lambda: ["run", "a.toml", "b.toml"], ["b.toml", "--help"]),
    "unknown command": (lambda: ["rnu"], ["rnu", "run"]),
    "part of a command": (lambda: ["data"], ["command", "--help"]),
    "unknown data set to fetch": (lambda: ["data", "fetch", "imagenet"], ["imagenet", "mnist"]),
}  # fmt: skip


@pytest.mark.parametrize("case", ARGUMENTS)
def test_a_wrong_argument_is_one_line_and_leaves_nothing_behind(case: str) -> None:
    prepare, parts = ARGUMENTS[case]
    args = prepare()
    before = everything()
    pdsl(*args).refused(*parts)
    assert everything() == before


def test_a_model_of_ones_own_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    text("small.py", "import torch\n\ndef model():\n    return torch.nn.Linear(7, 10)\n")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    pdsl("run", *settings("model.name=small:model")).refused("(1, 8, 8)")
    assert not Path("runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rate", [3e37, 1e39])  # the models' mean overflows, and the models themselves
def test_a_run_that_diverges_says_so(rate: float) -> None:
    noise = ["privacy.mode=noise", "privacy.sigma=1", f"algorithm.learning_rate={rate}", "rounds=60"]
    outcome = pdsl("run", "--json", "--out", "a", *settings(*SMALL, *noise))
    *progress, said = outcome.err.splitlines()
    assert (outcome.code, outcome.out) == (2, "")
    assert said.startswith("pdsl: diverged in round ")
    assert "algorithm.learning_rate" in said
    assert all(line.startswith("round ") for line in progress)


@pytest.mark.slow
def test_the_installed_command_refuses_in_one_line() -> None:
    found = subprocess.run([COMMAND, "run", "--set", "graph.agents=1"], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("pdsl: settings: graph.agents=1")
    assert found.stderr.count("\n") == 1
    assert not everything()


@pytest.mark.slow
@pytest.mark.parametrize("args", [["config"], ["run", "--json", "--out", "a", *settings(*SMALL, "rounds=1")]])
def test_output_that_cannot_be_written(args: list[str], tmp_path: Path) -> None:
    process = started(*args, out="/dev/full", err=tmp_path / "err")
    process.join()
    said = Path("err").read_text().splitlines()
    assert process.exitcode == 2
    assert [line for line in said if not line.startswith("round ")] == [
        "pdsl: cannot write to standard output: No space left on device; free some space or choose another place"
    ]


# Interrupted


@pytest.mark.slow
def test_ctrl_c_tells_how_to_go_on(tmp_path: Path) -> None:
    process = started("run", "--json", "--out", "my run", *settings(*SMALL, "rounds=100000"), err=tmp_path / "err")
    wait_for(lambda: rows_on_disk(Path("my run")) > 3)
    assert process.pid is not None
    for _ in range(3):  # Python ignores an interrupt within a destructor; then a user presses again
        os.kill(process.pid, signal.SIGINT)
        process.join(PATIENCE / 3)
        if process.exitcode is not None:
            break
    process.kill()
    assert process.exitcode == 130
    said = [line for line in Path("err").read_text().splitlines() if not line.startswith("round ")]
    assert said == ["pdsl: interrupted; continue with: pdsl run --resume 'my run'"]
    rounds = rows_on_disk(Path("my run")) + 2
    assert pdsl("run", "--resume", "my run", *settings(f"rounds={rounds}")).code == 0
    assert pdsl("run", "--out", "whole", *settings(*SMALL, f"rounds={rounds}")).code == 0
    assert result_of(Path("my run")) == result_of(Path("whole"))


def test_ctrl_c_before_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "start", interrupted)
    outcome = pdsl("run", *settings(*SMALL))
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "pdsl: interrupted\n")
