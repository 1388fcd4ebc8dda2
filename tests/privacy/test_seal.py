"""A private run can be resumed only with everything it started with."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pdsl import ring, train
from pdsl.privacy import Ledger
from pdsl.runs.directory import RunDirectory
from pdsl.runs.runner import execute, resume
from tests.helpers.commands import SMALL, settings
from tests.helpers.commands import pdsl as command
from tests.helpers.refusals import refused

T = 4
PRIVATE = [*SMALL, "privacy.mode=total", "privacy.target_epsilon=2", f"rounds={T}", "checkpoint_every=2"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a data file, so that the test can change it."""
    folder = tmp_path_factory.mktemp("tied")
    random = np.random.default_rng(0)
    x, y = random.random((400, 12), dtype=np.float32), random.integers(0, 3, 400)
    np.savez(folder / "records.npz", x=x, y=y)
    own = ("data.name=npz", f"data.path={folder / 'records.npz'}", "data.validation=20")
    data = (*own, "privacy.randomness=system", "batch.records=100")
    outcome = command("run", "--json", "--out", folder / "run", *settings(*PRIVATE, *data))
    assert outcome.code == 0, outcome.err
    return folder


@pytest.fixture
def cut(finished: Path, tmp_path: Path) -> Path:
    """The same run, interrupted: its last rounds were charged and will be repeated."""
    copy = Path(shutil.copytree(finished, tmp_path / "copy"))
    config = copy / "run" / "config.toml"
    config.write_text(config.read_text().replace(str(finished), str(copy)))
    for checkpoint in (copy / "run/checkpoint").glob(f"*{T:06d}*"):
        checkpoint.unlink()
    (copy / "run/summary.json").unlink()
    return copy / "run"


def without_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoint")
    (run / "rows.jsonl").unlink()


def edited(name: str, old: str, new: str) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        text = (run / name).read_text()
        assert old in text
        (run / name).write_text(text.replace(old, new))

    return edit


def other_records(run: Path) -> None:
    file = run.parent / "records.npz"
    arrays = dict(np.load(file))
    np.savez(file, x=arrays["x"][:200], y=arrays["y"][:200])


def one_other_label(run: Path) -> None:
    file = run.parent / "records.npz"
    arrays = dict(np.load(file))
    arrays["y"][7] = (arrays["y"][7] + 1) % 3
    np.savez(file, **arrays)


def lost_ledger(run: Path) -> None:
    without_checkpoints(run)
    (run / "ledger.json").unlink()


def forgetful_ledger(run: Path) -> None:
    """Remove rounds 1 to 3 from every account."""
    edited("ledger.json", '"first": 1,', f'"first": {T},')(run)


def emptied_account(run: Path) -> None:
    stored = json.loads((run / "ledger.json").read_text())
    stored["agents"][1]["entries"] = []
    (run / "ledger.json").write_text(json.dumps(stored))


def untied(run: Path) -> None:
    stored = json.loads((run / "ledger.json").read_text())
    del stored["tied_to"]
    (run / "ledger.json").write_text(json.dumps(stored))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no ledger": (lost_ledger, "the spent budget is unknown"),
    "empty key": (lambda run: (run / "secret.key").write_bytes(b""), "secret.key is damaged"),
    "long key": (lambda run: (run / "secret.key").write_bytes(bytes(100)), "secret.key is damaged"),
    "another key": (lambda run: (run / "secret.key").write_bytes(bytes(32)), "secret.key changed since the run"),
    "open key": (lambda run: (run / "secret.key").chmod(0o644), "open to others"),
    "other records": (other_records, "the data changed since the run started"),
    "another label": (one_other_label, "the data changed since the run started"),
    "another norm": (edited("config.toml", "max_grad_norm = 1.0", "max_grad_norm = 100.0"), "config.toml"),
    "another rate": (edited("config.toml", "learning_rate = ", "learning_rate = 1"), "config.toml"),
    "no budget": (edited("ledger.json", '"budget": 2.0', '"budget": null'), "was changed"),
    "no number": (edited("ledger.json", '"budget": 2.0', '"budget": "x"'), "is damaged"),
    "less sensitive": (edited("ledger.json", '"sensitivity": 0.', '"sensitivity": 0.000'), "the noise changed"),
    "rounds gone": (forgetful_ledger, "was changed"),
    "an account gone": (emptied_account, "is damaged"),
    "untied": (untied, "no digests of its run"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_another_run_is_refused(cut: Path, damage: str) -> None:
    spoil, told = DAMAGE[damage]
    spoil(cut)
    before = (cut / "rows.jsonl").read_bytes() if (cut / "rows.jsonl").exists() else None
    command("run", "--resume", cut, "--set", "rounds=8").refused(told)
    assert (None if before is None else (cut / "rows.jsonl").read_bytes()) == before


def test_untouched_it_goes_on_to_the_same_models(finished: Path, cut: Path) -> None:
    outcome = command("run", "--json", "--resume", cut)
    assert outcome.code == 0, outcome.err
    whole = json.loads((finished / "run/summary.json").read_text())
    assert json.loads(outcome.out)["models_sha256"] == whole["models_sha256"]
    assert (
        json.loads((cut / "ledger.json").read_text())["agents"]
        == json.loads((finished / "run/ledger.json").read_text())["agents"]
    )


@pytest.mark.parametrize("there", ["nothing", "ledger", "ledger and key"])
def test_cut_before_its_first_round_it_can_begin_again(cut: Path, there: str) -> None:
    """A crash before, between and after writing the ledger and the key."""
    without_checkpoints(cut)
    early, directory = resume(cut)
    key = (cut / "secret.key").read_bytes()
    (cut / "ledger.json").unlink()
    (cut / "secret.key").unlink()
    ledger = early.open_ledger()
    assert ledger is not None
    if there != "nothing":
        directory.write("ledger.json", early.seal.sign(ledger).encode())
    if there == "ledger and key":
        directory.write("secret.key", key, 0o600)
    assert command("run", "--json", "--resume", cut).code == 0


def test_a_process_that_looked_too_early_does_not_go_on(finished: Path, cut: Path) -> None:
    without_checkpoints(cut)
    ledger, key = (cut / "ledger.json").read_bytes(), (cut / "secret.key").read_bytes()
    (cut / "ledger.json").unlink()
    (cut / "secret.key").unlink()
    early, directory = resume(cut)
    directory.write("secret.key", key, 0o600)  # another process was faster
    directory.write("ledger.json", ledger)
    with refused("another process has continued"):
        execute(early, directory)


def test_a_private_run_stays_on_its_device(cut: Path) -> None:
    directory = RunDirectory(cut)
    seal = resume(cut)[0].seal
    elsewhere = replace(seal, digests={**seal.digests, "device": "another"})
    text = (directory.read("ledger.json") or b"").decode()
    with refused("engine.device changed since the run started"):
        elsewhere.verify(Ledger.from_json(text, "here"), text, "here")


def test_a_run_saved_from_python_is_tied_too(tmp_path: Path) -> None:
    result = train("softmax", "digits", graph=ring(4), rounds=2, privacy={"target_epsilon": 4.0})
    text = (result.save(tmp_path / "saved") / "ledger.json").read_text()
    result.experiment.seal.verify(Ledger.from_json(text, "here"), text, "here")
