"""A run that is killed, damaged, resumed or extended ends bit for bit where one that was left alone does."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from pdsl.config import load
from pdsl.metrics import accuracy
from pdsl.models.zoo import build as build_model
from pdsl.runs import runner
from pdsl.runs.checkpoints import Checkpoint
from pdsl.runs.directory import PART, RunDirectory, unused
from pdsl.runs.listeners import RunListener
from pdsl.training.experiment import prepare
from pdsl.training.records import RoundRecord
from pdsl.utils.errors import PdslError
from pdsl.utils.random import Streams
from tests.helpers.commands import (
    PATIENCE,
    SMALL,
    Warnings,
    files_of,
    pdsl,
    result_of,
    rows_on_disk,
    settings,
    started,
    wait_for,
)
from tests.helpers.refusals import refused

T = 6
FILES = {
    "config.toml", "setup.json", "owner.json", "rows.jsonl", "checkpoint", "summary.json", "model.safetensors",
    "contributions.json", "report.html", "README.md",
}  # fmt: skip


def run(out: Path, *assignments: str) -> Path:
    outcome = pdsl("run", "--json", "--out", out, *settings(*SMALL, *assignments))
    assert outcome.code == 0, outcome.err
    return out


def resume(path: Path, *assignments: str) -> str:
    """Resumes and returns what was said on stderr."""
    outcome = pdsl("run", "--json", "--resume", path, *settings(*assignments))
    assert outcome.code == 0, outcome.err
    return outcome.err


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("runs") / "finished", f"rounds={T}")


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def test_what_a_run_leaves_behind(finished: Path) -> None:
    assert {path.name for path in finished.iterdir()} == FILES | {".lock"}
    assert not list(finished.rglob(f"*{PART}"))
    rows = [json.loads(line) for line in (finished / "rows.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == list(range(1, T + 1))
    assert sorted(file.name for file in (finished / "checkpoint").iterdir()) == [
        f"round-{t:06d}.safetensors" for t in (T - 1, T)
    ]
    experiment = prepare(load(None, [*SMALL, f"rounds={T}"]))
    assert load(finished / "config.toml") == experiment.config
    setup = json.loads((finished / "setup.json").read_text())
    assert setup == experiment.metadata() | {name: setup[name] for name in ("versions", "date")}


def test_the_saved_model_has_the_accuracy_of_the_summary(finished: Path) -> None:
    e = prepare(load(finished / "config.toml"))
    module = build_model(e.config.model, e.data.name, e.data.x, e.data.classes, Streams(99))
    module.load_state_dict(load_file(finished / "model.safetensors"))
    inputs, labels = e.test
    summary = json.loads((finished / "summary.json").read_text())
    assert accuracy(module(inputs).argmax(-1), labels) == summary["accuracy_of_mean"]
    x = load_file(finished / "checkpoint" / f"round-{T:06d}.safetensors")["x"]
    each = [accuracy(e.network.outputs(row, inputs).argmax(-1), labels) for row in x]
    assert each == summary["accuracy_per_agent"]
    assert sum(each) / len(each) == summary["accuracy"]


@pytest.mark.parametrize("assignment", ["engine.workers=1", "engine.workers=3", "checkpoint_every=4"])
def test_what_changes_no_row(assignment: str, finished: Path, tmp_path: Path) -> None:
    other = result_of(run(tmp_path / "other", f"rounds={T}", assignment))
    first = result_of(finished)
    for name in ("rows.jsonl", "model.safetensors", "summary", f"round-{T:06d}.safetensors x"):
        assert other[name] == first[name]


def test_same_seed_same_result_another_seed_another(finished: Path, tmp_path: Path) -> None:
    assert result_of(run(tmp_path / "again", f"rounds={T}")) == result_of(finished)
    other = result_of(run(tmp_path / "other", f"rounds={T}", "seed=1"))
    assert other["rows.jsonl"] != result_of(finished)["rows.jsonl"]


def test_a_shorter_run_is_the_beginning_of_a_longer_and_can_be_extended_to_it(finished: Path, tmp_path: Path) -> None:
    short = run(tmp_path / "short", "rounds=2")
    whole = (finished / "rows.jsonl").read_bytes()
    assert whole.startswith((short / "rows.jsonl").read_bytes())
    (short / "checkpoint" / f"round-000001.safetensors{PART}").touch()  # as if it had been killed once
    resume(short, f"rounds={T}")
    assert result_of(short) == result_of(finished)
    assert files_of(short).keys() == files_of(finished).keys()


def test_time_is_counted_over_all_sittings(copy: Path) -> None:
    directory = RunDirectory(copy)
    checkpoint, _ = directory.newest()
    assert checkpoint is not None
    directory.save(replace(checkpoint, seconds=1000.0))
    resume(copy, f"rounds={T + 1}")
    assert 1000 < json.loads((copy / "summary.json").read_text())["seconds"] < 1000 + PATIENCE


def test_resuming_a_finished_run_changes_nothing(copy: Path) -> None:
    resume(copy)  # the summary and the page now name this place
    before = files_of(copy)
    resume(copy)
    assert files_of(copy) == before


@pytest.mark.parametrize(
    ("assignment", "parts"),
    [
        ("seed=2", ["seed", "rounds"]),
        ("graph.agents=5", ["graph.agents"]),
        ("algorithm.learning_rate=0.1", ["algorithm.learning_rate"]),
        (f"rounds={T - 1}", [f"{T} rounds", f"rounds={T - 1}"]),
        ("rounds=many", ["rounds=many"]),
        ("rounds", ["key=value"]),
    ],
)
def test_what_would_change_rows_is_refused(assignment: str, parts: list[str], copy: Path) -> None:
    before = files_of(copy)
    pdsl("run", "--resume", copy, *settings(assignment)).refused(*parts)
    assert files_of(copy) == before


def test_a_directory_that_is_no_run_cannot_be_resumed(tmp_path: Path, copy: Path) -> None:
    pdsl("run", "--resume", tmp_path / "nowhere").refused("nowhere", "not a run directory")
    pdsl("run", "--resume", copy, "--out", tmp_path / "b").refused("--out")
    (copy / "config.toml").write_text("rounds = ")
    pdsl("run", "--resume", copy).refused(str(copy / "config.toml"), "damaged")
    (copy / "config.toml").write_text("rounds = 'x'")
    pdsl("run", "--resume", copy).refused("rounds=x")


def test_a_new_run_does_not_touch_an_old_one(copy: Path, tmp_path: Path) -> None:
    before = files_of(copy)
    pdsl("run", "--out", copy, *settings(*SMALL)).refused(str(copy), "--resume", "another folder")
    assert files_of(copy) == before
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").touch()
    pdsl("run", "--out", tmp_path / "notes", *settings(*SMALL)).refused("notes", "not empty", "another folder")


def test_runs_without_a_place_get_one_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert pdsl("run", *settings(*SMALL, "rounds=1")).code == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["digits-ring-pdsl", "digits-ring-pdsl-2"]
    assert unused(Path("runs"), "digits-ring-pdsl") == Path("runs/digits-ring-pdsl-3")


# Killed


def killed(at: Callable[[], bool], *args: object) -> None:
    """A `pdsl` that is killed as soon as `at` is true."""
    process = started(*args)
    wait_for(lambda: at() or not process.is_alive())
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 4])
def test_killed_and_resumed_again_and_again(every: int, tmp_path: Path) -> None:
    """SIGKILL when rows.jsonl has some number of lines, and a moment later."""
    config = ["rounds=30", "algorithm.shapley.estimator=montecarlo", "privacy.mode=noise", "privacy.sigma=0.01"]
    whole = run(tmp_path / "whole", *config, f"checkpoint_every={every}")
    cut = tmp_path / "cut"
    moments = random.Random(every)
    args: list[object] = ["run", "--out", cut, *settings(*SMALL, *config, f"checkpoint_every={every}")]
    for lines in [0, 1, 5, 9, 14, 18, 23, 27, 30]:
        later = moments.uniform(0, 0.03)

        def reached(lines: int = lines, later: float = later) -> bool:
            if not (cut / "config.toml").exists() or rows_on_disk(cut) < lines:
                return False
            time.sleep(later)
            return True

        killed(reached, *args)
        args = ["run", "--resume", cut]
    assert "damaged" not in resume(cut)
    assert result_of(cut) == result_of(whole)
    assert not list(cut.rglob(f"*{PART}"))


def test_the_same_folder_with_the_same_settings_resumes_and_with_others_is_refused(tmp_path: Path) -> None:
    out, few = tmp_path / "run", settings(*SMALL, "rounds=2")
    first = pdsl("run", "--json", "--out", out, *few)
    again = pdsl("run", "--json", "--out", out, *few)
    assert (first.code, again.code) == (0, 0)
    assert json.loads(first.out)["models_sha256"] == json.loads(again.out)["models_sha256"]
    pdsl("run", "--out", out, *few, "--set", "seed=7").refused("already holds a run with another seed", "--resume")
    assert rows_on_disk(out) == 2


def test_without_a_folder_an_unfinished_run_with_the_same_settings_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    few = settings(*SMALL, "rounds=3")
    assert pdsl("run", "--json", *few).code == 0
    (first,) = (tmp_path / "runs").iterdir()
    (first / "summary.json").unlink()
    assert json.loads(pdsl("run", "--json", *few).out)["run"] == f"runs/{first.name}"
    assert json.loads(pdsl("run", "--json", *few).out)["run"] == f"runs/{first.name}-2"
    (first / "summary.json").unlink()
    with runner.RunDirectory(first).lock():  # another process is at it
        assert json.loads(pdsl("run", "--json", *few).out)["run"] == f"runs/{first.name}-3"


@pytest.mark.slow
def test_the_installed_command_killed_and_resumed(finished: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    command = [Path(sys.executable).parent / "pdsl", "run", "--json"]
    new = [*command, "--out", cut, *settings(*SMALL, f"rounds={T}")]
    with subprocess.Popen(new, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        wait_for(lambda: rows_on_disk(cut) >= 2)
        process.kill()
    again = subprocess.run([*command, "--resume", cut], capture_output=True, text=True)
    assert again.returncode == 0
    assert json.loads(again.stdout)["rounds"] == T
    assert result_of(cut) == result_of(finished)


def test_two_processes_in_one_directory(copy: Path, finished: Path) -> None:
    process = started("run", "--resume", copy, *settings("rounds=100000"))
    try:
        wait_for(lambda: rows_on_disk(copy) > T)
        for options in ([], ["--json"]):
            pdsl("run", "--resume", copy, *options, *settings(f"rounds={T}")).refused(str(copy), "another process")
    finally:
        process.kill()
        process.join()
    assert not (copy / "summary.json").exists()  # it told of the shorter run
    with RunDirectory(copy).lock(), refused("another process"), RunDirectory(copy).lock():
        pass


class Killed(BaseException):
    """What nothing catches."""


class Faults:
    """Counts what changes the disk, and fails instead at the n-th: a write after half of it."""

    def __init__(self, n: int, error: Callable[[], BaseException]):
        self.left, self.error = n, error

    def _due(self) -> bool:
        self.left -= 1
        return self.left == 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*args: Any, **kwargs: Any) -> Any:
            if self._due():
                raise self.error()
            return function(*args, **kwargs)

        return faulty

    def opening(self, function: Callable[..., IO[Any]]) -> Callable[..., IO[Any]]:
        def faulty(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> IO[Any]:
            file = function(path, mode, *args, **kwargs)
            if mode != "r" and path.name != ".lock" and self._due():
                file = _Torn(file, self.error)  # type: ignore[assignment]
            return file

        return faulty

    @contextmanager
    def installed(self) -> Iterator[None]:
        with (
            patch.object(os, "fsync", self.around(os.fsync)),
            patch.object(Path, "replace", self.around(Path.replace)),
            patch.object(Path, "unlink", self.around(Path.unlink)),
            patch.object(Path, "mkdir", self.around(Path.mkdir)),
            patch.object(Path, "write_text", self.around(Path.write_text)),
            patch.object(Path, "open", self.opening(Path.open)),
        ):
            yield


class _Torn:
    def __init__(self, file: IO[Any], error: Callable[[], BaseException]):
        self.file, self.error = file, error

    def __enter__(self) -> "_Torn":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, content: str | bytes) -> None:
        self.file.write(content[: len(content) // 2])
        raise self.error()


def execute(experiment: Any, run: RunDirectory) -> list[str]:
    """Runs to the end; returns the complaints."""
    warnings = Warnings()
    runner.execute(experiment, run, warnings)
    return warnings.texts


FAULTS = {"killed": Killed, "disk full": lambda: OSError(28, "No space left on device")}


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "every"), [("killed", 1), ("disk full", 2)])
def test_a_fault_at_any_write(fault: str, every: int, tmp_path: Path) -> None:
    """Fails at the first write, then in another run at the second, and so on; after each a resumed run is whole."""
    rounds = ["rounds=3", f"checkpoint_every={every}", "evaluate_every=2", "baselines=none"]
    config = load(None, [*SMALL, *rounds])
    whole = result_of(run(tmp_path / "whole", *rounds))
    experiment = prepare(config)
    for n in range(1, 1000):
        path = tmp_path / str(n)
        faults = Faults(n, FAULTS[fault])
        try:
            with faults.installed():
                execute(experiment, RunDirectory.create(path, config.to_toml(), experiment.metadata()))
        except Killed:
            pass
        except PdslError as e:
            assert "No space left" in str(e)
        if faults.left > 0:
            break
        if not (path / "config.toml").exists():  # it was not a run yet, and can be started again
            RunDirectory.create(path, config.to_toml(), experiment.metadata())
        again, empty = runner.resume(path)
        assert execute(again, empty) == []
        assert result_of(path) == whole
        assert {file.name for file in path.iterdir()} == FILES | {".lock"}
        assert not list(path.rglob(f"*{PART}"))
    assert n > 40


def test_no_room_is_one_line_and_can_be_made(copy: Path, finished: Path) -> None:
    (copy / f"rows.jsonl{PART}").symlink_to("/dev/full")
    pdsl("run", "--resume", copy).refused(str(copy), "No space left on device", "--resume")
    (copy / f"rows.jsonl{PART}").unlink()
    resume(copy)
    assert result_of(copy) == result_of(finished)


# Damaged


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit flipped in a tensor": lambda file: flip(file, file.stat().st_size // 2),
    "a bit flipped at the end": lambda file: flip(file, -1),
    "cut in a tensor": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "cut in the header": lambda file: file.write_bytes(file.read_bytes()[:20]),
    "too long": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "empty": lambda file: file.write_bytes(b""),
    "garbage": lambda file: file.write_bytes(b"\xff" * 5000),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_used(
    damage: Callable[[Path], object], copy: Path, finished: Path
) -> None:
    newest = copy / "checkpoint" / f"round-{T:06d}.safetensors"
    damage(newest)
    said = [line for line in resume(copy).splitlines() if line.startswith("pdsl: ")]
    assert len(said) == 1
    assert str(newest) in said[0]
    assert "damaged" in said[0]
    assert "the one before" in said[0]
    assert result_of(copy) == result_of(finished)
    assert "damaged" not in resume(copy)


def test_two_damaged_checkpoints_are_reported_and_the_run_starts_from_the_beginning(copy: Path, finished: Path) -> None:
    for file in (copy / "checkpoint").iterdir():
        flip(file, -1)
    said = [line for line in resume(copy).splitlines() if line.startswith("pdsl: ")]
    assert len(said) == 2
    assert f"round-{T:06d}" in said[0]
    assert f"round-{T - 1:06d}" in said[1]
    assert "from the beginning" in said[1]
    assert result_of(copy) == result_of(finished)


def test_started_again_after_damage_and_killed_it_goes_on_where_it_was(copy: Path, finished: Path) -> None:
    for file in (copy / "checkpoint").iterdir():
        flip(file, -1)
    experiment, directory = runner.resume(copy)

    class Kill(RunListener):
        def on_round(self, record: RoundRecord) -> None:
            if record["round"] == 3:
                raise Killed

    with pytest.raises(Killed):
        runner.execute(experiment, directory, Kill())
    checkpoint, complaints = directory.newest()
    assert checkpoint is not None
    assert (checkpoint.round, complaints) == (3, [])
    assert "damaged" not in resume(copy)
    assert result_of(copy) == result_of(finished)


def test_no_flipped_bit_of_a_checkpoint_goes_unnoticed(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "a", "", {})
    tensors = {"x": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(7), "b": torch.tensor([True, False])}
    directory.save(Checkpoint(1, tensors, 0.5))
    directory.save(Checkpoint(2, {"x": torch.ones(2, 3)}, 0.75))
    newest, before = (file.path for file in directory._checkpoints())
    whole = newest.read_bytes()
    with safe_open(newest, framework="pt") as stored:
        assert stored.metadata()["round"] == "2"
    for at in range(len(whole)):
        for bit in (0, 1, 5):
            content = bytearray(whole)
            content[at] ^= 1 << bit
            newest.write_bytes(content)
            found, complaints = directory.newest()
            assert found is not None
            assert len(complaints) == 1, (at, bit)
            assert (found.round, found.seconds) == (1, 0.5)
    newest.unlink()
    before.chmod(0o600)
    found, _ = directory.newest()
    assert found is not None
    assert found.tensors.keys() == tensors.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in tensors.items())


def test_the_two_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "a", "", {})
    for t in (9, 10, 999_999, 1_000_000):
        directory.save(Checkpoint(t, {"x": torch.zeros(1)}, 0.0))
        directory.prune()
    (tmp_path / "a" / "checkpoint" / "round-1 (copy).safetensors").touch()  # somebody else's
    found, complaints = directory.newest()
    assert found is not None
    assert (found.round, complaints) == (1_000_000, [])
    assert [file.path.stem for file in directory._checkpoints()] == ["round-1000000", "round-999999"]


@pytest.mark.parametrize(
    "damage",
    [b"", b"\0\0\0\n", b"3\n", b'{"round": 7}\n', b"\xff\n", b'{"round": 3'],
    ids=["missing", "zeros", "a number", "another round", "not UTF-8", "cut off"],
)
def test_a_row_that_is_missing_or_damaged(damage: bytes, copy: Path, finished: Path) -> None:
    """Before the checkpoint it cannot be made again, and that is said; after it, it is."""
    file = copy / "rows.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:2], damage]))
    pdsl("run", "--resume", copy).refused(str(file), "row 3", "anew")
    file.write_bytes(b"".join([*lines, damage]))
    resume(copy)
    assert result_of(copy) == result_of(finished)


def test_of_several_processes_that_create_a_run_at_once_the_others_learn_why_they_cannot(tmp_path: Path) -> None:
    def create(path: Path) -> str:
        try:
            RunDirectory.create(path, "", {})
        except PdslError as e:
            return "used" if "already holds a run" in str(e) or "in use by another process" in str(e) else str(e)
        return "created"

    for i in range(10):
        with ThreadPoolExecutor(4) as pool:
            outcomes = list(pool.map(create, [tmp_path / str(i)] * 4))
        assert sorted(outcomes) == ["created", "used", "used", "used"]
