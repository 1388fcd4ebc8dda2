"""`pdsl.train(out=...)`: the run directory, resuming by the same folder, and what is refused."""

import os
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdsl
from pdsl.training.records import RoundRecord
from tests.helpers.commands import files_of, forking, rows_on_disk, wait_for
from tests.helpers.commands import pdsl as command
from tests.helpers.refusals import refused

FEW: dict[str, Any] = {"graph": pdsl.ring(4), "batch": {"size": 16, "records": 20}, "engine": {"workers": 2}}
NOISE: dict[str, Any] = {"mode": "noise", "sigma": 0.01}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.tanh())  # type: ignore[no-any-return]


def model(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net()


def data(seed: int = 0) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(120) % 3
    x = torch.randn(120, 5, generator=generator) + 3 * torch.eye(5)[y]
    return (x[:90], y[:90]), (x[90:], y[90:])


def train(out: Path | None, rounds: int = 6, **settings: Any) -> pdsl.Result:
    arguments: dict[str, Any] = {"model": model(), "data": data(), **FEW, "privacy": NOISE, **settings}
    return pdsl.train(**arguments, rounds=rounds, out=out)


class StopAfter(pdsl.RunListener):
    """Interrupt a run after some rounds, as Ctrl-C would."""

    def __init__(self, rounds: int):
        self.rounds = rounds

    def on_round(self, record: RoundRecord) -> None:
        if record["round"] == self.rounds:
            raise KeyboardInterrupt


def train_in_process(out: Path, randomness: str, rounds: int) -> None:
    torch.set_num_threads(1)
    train(out, rounds, privacy={**NOISE, "randomness": randomness})


def killed(out: Path, randomness: str, rounds: int, at: int) -> None:
    """Train in a process of its own that is killed when a number of rounds are on disk."""
    process = forking.Process(target=train_in_process, args=(out, randomness, rounds))
    process.start()
    wait_for(lambda: ((out / "config.toml").exists() and rows_on_disk(out) >= at) or not process.is_alive())
    assert process.is_alive()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


ROUNDS = 60


def test_killed_and_called_again_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", ROUNDS)
    for at in (0, 3, 9):
        killed(tmp_path / "cut", "seeded", ROUNDS, at)
    assert 0 < rows_on_disk(tmp_path / "cut") < ROUNDS
    again = train(tmp_path / "cut", ROUNDS)
    assert again.rows == whole.rows
    assert torch.equal(again.state.x, whole.state.x)
    assert (tmp_path / "cut/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
    assert (tmp_path / "cut/ledger.json").read_bytes() == (tmp_path / "whole/ledger.json").read_bytes()
    in_memory = train(None, ROUNDS)
    assert in_memory.rows == whole.rows


def test_with_system_randomness_a_killed_run_keeps_its_noise(tmp_path: Path) -> None:
    killed(tmp_path / "a", "system", ROUNDS, 3)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    private = {**NOISE, "randomness": "system"}
    killed(tmp_path / "a", "system", ROUNDS, rows_on_disk(tmp_path / "a") + 3)
    first, second = (train(tmp_path / name, ROUNDS, privacy=private) for name in "ab")
    assert first.rows == second.rows
    assert first.summary["models_sha256"] == second.summary["models_sha256"]
    third = train(tmp_path / "c", ROUNDS, privacy=private)  # a new run has noise of its own
    assert third.summary["models_sha256"] != first.summary["models_sha256"]


@pytest.mark.parametrize("privacy", [NOISE, {"mode": "none"}], ids=["noise", "none"])
def test_a_model_built_again_has_the_first_initial_weights(privacy: dict[str, Any], tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 6, privacy=privacy)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", 6, privacy=privacy, callbacks=[StopAfter(3)])
    again = train(tmp_path / "cut", 6, privacy=privacy, model=model(seed=7))
    assert again.summary["models_sha256"] == whole.summary["models_sha256"]


@pytest.mark.parametrize("privacy", [NOISE, {"mode": "none"}], ids=["noise", "none"])
@pytest.mark.parametrize(
    ("other", "part"),
    [
        ({"model": nn.Linear(5, 3)}, "model"),
        ({"data": data(1)}, "data"),
        ({"graph": pdsl.full(4)}, "graph"),
        ({"seed": 1}, "seed"),
        ({"algorithm": {"name": "d-psgd"}}, "algorithm"),
    ],
    ids=["model", "data", "graph", "seed", "algorithm"],
)
def test_other_objects_and_settings_are_refused(
    privacy: dict[str, Any], other: dict[str, Any], part: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    first = train(out, 2, privacy=privacy)
    before = files_of(out)
    with refused(part):
        train(out, 2, privacy=privacy, **other)
    assert files_of(out) == before
    again = train(out, 2, privacy=privacy)
    assert again.summary["models_sha256"] == first.summary["models_sha256"]
    assert again.path == out


def test_the_directory_is_that_of_the_command(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rounds": 3, "graph": {"kind": "ring", "agents": 4}, "engine": {"workers": 2}}
    pdsl.train("softmax", "digits", out=tmp_path / "python", **settings)
    outcome = command(
        *("run", "--json", "--out", tmp_path / "cli", "--set", "rounds=3", "--set", "graph.agents=4"),
        *("--set", "model.name=softmax", "--set", "engine.workers=2"),
    )
    assert outcome.code == 0
    names = {file.name for file in (tmp_path / "cli").rglob("*")}
    assert {file.name for file in (tmp_path / "python").rglob("*")} == names
    for name in ("config.toml", "rows.jsonl", "ledger.json", "model.safetensors"):
        assert (tmp_path / "cli" / name).read_bytes() == (tmp_path / "python" / name).read_bytes()
    assert command("audit", tmp_path / "python", "--canaries", "0").code == 0
    assert command("run", "--json", "--resume", tmp_path / "python").code == 0


def test_commands_say_that_they_need_the_objects(tmp_path: Path) -> None:
    train(tmp_path / "run", 2)
    for words in (["audit"], ["theory", "--run"], ["run", "--resume"]):
        command(*words, tmp_path / "run").refused("given in Python", "pdsl.load")
    assert command("report", tmp_path / "run").code == 0
    report = pdsl.load(tmp_path / "run", model=model(), data=data(), graph=pdsl.ring(4)).audit(canaries=0)
    assert {finding.verdict.name for finding in report.findings} == {"PASS"}


def test_errors_speak_python(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").touch()
    with pytest.raises(pdsl.PdslError) as caught:
        train(tmp_path / "notes")
    assert "not empty" in str(caught.value)
    assert "--" not in str(caught.value)
    found = train(None, 1)
    found.save(tmp_path / "run")
    with pytest.raises(pdsl.PdslError) as caught:
        found.save(tmp_path / "run")
    assert "already holds a run" in str(caught.value)
    assert "--" not in str(caught.value)


def test_each_caveat_is_a_warning_once(tmp_path: Path) -> None:
    def caveats(**settings: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(None, 2, **settings)
        return [str(w.message) for w in caught if issubclass(w.category, pdsl.PrivacyWarning)]

    (seeded,) = caveats()
    assert "seeded" in seeded
    assert caveats(privacy={**NOISE, "randomness": "system"}) == []
    assert caveats(privacy={"mode": "none"}) == []
    (held_out,) = caveats(privacy={"mode": "none"}, data=data()[0])
    assert "become public" in held_out


def test_a_config_is_fully_resolved_and_repeats_the_run_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import json
    import tomllib

    import numpy as np

    (x, y), (test_x, test_y) = data()
    np.savez(tmp_path / "own.npz", x=x, y=y, x_test=test_x, y_test=test_y)
    monkeypatch.chdir(tmp_path)
    settings = ("data.name=npz", "data.path=own.npz", "graph.agents=3", "rounds=2", "engine.workers=2")
    options = [word for setting in settings for word in ("--set", setting)]
    assert command("run", "--json", "--out", "first", *options).code == 0
    stored = tomllib.loads(Path("first/config.toml").read_text())
    assert stored["data"]["path"] == str(tmp_path / "own.npz")
    assert stored["model"]["name"] == "mlp"
    assert stored["task"]["kind"] == "multiclass"
    assert stored["privacy"]["target_epsilon"] == 8.0
    setup = json.loads(Path("first/setup.json").read_text())
    assert setup["versions"]["pdsl"] == pdsl.__version__
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert command("run", "--json", "../first/config.toml", "--out", "again").code == 0
    for name in ("rows.jsonl", "model.safetensors", "config.toml"):
        assert Path("again", name).read_bytes() == Path("../first", name).read_bytes()
    assert command("audit", "../first", "--canaries", "0").code == 0
    date = setup["date"]
    assert command("run", "--json", "--resume", "../first", "--set", "rounds=3").code == 0
    assert json.loads(Path("../first/setup.json").read_text())["date"] == date
