"""Copies and resumed runs never use noise twice (finding D8)."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from pdsl.config import validate
from pdsl.runs import checkpoints
from pdsl.runs.runner import execute, resume, start
from pdsl.training.experiment import Experiment, prepare
from pdsl.training.trainer import build_trainer, initial_state, rounds
from pdsl.utils.random import SecretStreams
from pdsl.utils.workers import Workers
from tests.helpers.commands import Warnings
from tests.helpers.commands import pdsl as command
from tests.helpers.refusals import refused

MODEL = """
import torch
def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), Scaled(), torch.nn.Linear(64, 10))
class Scaled(torch.nn.Module):
    def forward(self, x):
        return x * {scale}
"""


def small(**changes: object) -> dict[str, object]:
    values: dict[str, object] = {
        "rounds": 4,
        "checkpoint_every": 2,
        "graph": {"agents": 4},
        "partition": {"kind": "iid"},
        "algorithm": {"name": "d-psgd"},
        "privacy": {"target_epsilon": 2.0, "randomness": "system"},
    }
    return values | changes


def messages(e: Experiment, t: int) -> torch.Tensor:
    """Noisy gradients of round t at the initial model."""
    with Workers(1) as workers:
        parts = build_trainer(e, workers)
        return parts.round(t).own_noisy_gradients(initial_state(e).x)


@pytest.mark.parametrize(
    "change",
    [
        {"rounds": 6},
        {"privacy": {"target_epsilon": 3.0, "randomness": "system"}},
        {"privacy": {"target_epsilon": 2.0, "randomness": "system", "max_grad_norm": 2.0}},
        {"algorithm": {"name": "d-psgd", "learning_rate": 0.3}},
        {"algorithm": {"name": "muffliato"}},
        {"graph": {"kind": "full", "agents": 4}},
        {"model": {"name": "mlp"}},
        {"seed": 1},
    ],
    ids=str,
)
def test_a_copy_with_other_settings_draws_other_noise(change: dict[str, object]) -> None:
    """With the same key before round 1, the difference of two messages is not that of clean gradients."""
    key = bytes(range(32))
    one, other = (prepare(validate(small(**more), "test"), key=key) for more in ({}, change))
    a, b = (e.streams.bits("noise", 0, 1, 0).read(4).tolist() for e in (one, other))
    assert a != b
    assert not torch.equal(one.batches.draw(0, 1), other.batches.draw(0, 1))


def test_a_copy_with_the_same_settings_sends_the_same_bytes() -> None:
    key = bytes(range(32))
    one, other = (prepare(validate(small(), "test"), key=key) for _ in range(2))
    assert torch.equal(messages(one, 1), messages(other, 1))


def test_a_copy_with_one_record_more_draws_other_noise(tmp_path: Path) -> None:
    key = bytes(range(32))
    e = prepare(validate(small(), "test"), key=key)
    data = e.data
    fewer = prepare(
        validate(small(), "test"), key=key, data=type(data)(**{**vars(data), "x": data.x[1:], "y": data.y[1:]})
    )
    assert e.streams.bits("noise", 0, 1, 0).key != fewer.streams.bits("noise", 0, 1, 0).key


def started(path: Path, **changes: object) -> None:
    execute(*start(validate(small(**changes), "test"), path))


def cut(run: Path) -> None:
    """Remove the last checkpoint and the summary: the last rounds were charged and will be repeated."""
    for checkpoint in (run / "checkpoint").glob("*000004*"):
        checkpoint.unlink()
    (run / "summary.json").unlink()


@pytest.mark.slow
def test_an_edited_model_file_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_d8.py").write_text(MODEL.format(scale="1.0"))
    run = tmp_path / "run"
    name = ("--set", "model.name=mine_d8:network", "--set", "privacy.randomness=system", "--set", "rounds=4")
    assert (
        command("run", "--json", "--out", run, "--set", "checkpoint_every=2", "--set", "graph.agents=4", *name).code
        == 0
    )
    cut(run)
    again = Path(shutil.copytree(run, tmp_path / "again"))
    assert command("run", "--json", "--resume", again).code == 0
    (tmp_path / "mine_d8.py").write_text(MODEL.format(scale="1.5"))
    command("run", "--resume", run).refused("the model's code or initial weights changed since the run started")


def test_an_edited_checkpoint_is_passed_over(tmp_path: Path) -> None:
    run = tmp_path / "run"
    started(run)
    cut(run)
    (file,) = (run / "checkpoint").glob("*.safetensors")
    with safe_open(file, framework="pt") as stored:
        facts, tensors = stored.metadata(), {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    changed = checkpoints.Checkpoint(int(facts["round"]), {n: t + 0.1 for n, t in tensors.items()}, 1.0)
    file.write_bytes(checkpoints.pack(changed))  # whole, with a checksum, but not sealed
    warnings = Warnings()
    execute(*resume(run), warnings)
    assert any("not sealed by this run" in line for line in warnings.texts)


def test_rounds_after_some_need_their_ledger() -> None:
    e = prepare(validate(small(), "test"))
    with refused("need the ledger"):
        next(rounds(e, initial_state(e), None, after=2))


def test_streams_of_another_context_share_nothing() -> None:
    one, other = SecretStreams(0, bytes(32), b"a"), SecretStreams(0, bytes(32)).bind(b"b")
    assert one.bits("noise", 0, 1).read(8).tolist() != other.bits("noise", 0, 1).read(8).tolist()
    assert one.bits("noise", 0, 1).extension(0) != other.bits("noise", 0, 1).extension(0)
    assert one.bind(b"b").bits("noise", 0, 1).read(8).tolist() == other.bits("noise", 0, 1).read(8).tolist()
