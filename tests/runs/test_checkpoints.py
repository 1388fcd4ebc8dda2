"""Checkpoints of several processes: whole when every agent is there, and the same rows for any number of readers."""

from pathlib import Path

import pytest
import torch

from pdsl.runs.checkpoints import Checkpoint, complete, file_name, files_in
from pdsl.runs.directory import RunDirectory

M, D = 10, 3
X = torch.arange(float(M * D)).reshape(M, D)
CUTS = [range(4), range(4, 7), range(7, 10)]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", "", {})


def save(run: RunDirectory, t: int, *blocks: range) -> None:
    for agents in blocks:
        run.save(Checkpoint(t, {"x": t * X[agents.start : agents.stop]}, 0.5 * t), agents, M)


@pytest.mark.parametrize("agents", [None, range(10), range(4), range(4, 10), range(3, 8), range(5, 6)])
def test_any_reader_gets_its_rows_from_any_files(agents: range | None, run: RunDirectory) -> None:
    save(run, 1, range(10))
    save(run, 2, *CUTS)
    rows = slice(None) if agents is None else slice(agents.start, agents.stop)
    found, complaints = run.newest(agents)
    assert found is not None
    assert (found.round, complaints) == (2, [])
    assert torch.equal(found.tensors["x"], 2 * X[rows])
    for file in (run.path / "checkpoint").glob("round-000002*"):
        file.unlink()
    found, _ = run.newest(agents)
    assert found is not None
    assert torch.equal(found.tensors["x"], X[rows])


@pytest.mark.parametrize("missing", range(3))
def test_a_round_of_which_an_agent_is_missing_is_none(missing: int, run: RunDirectory) -> None:
    save(run, 1, *CUTS)
    save(run, 2, *(cut for n, cut in enumerate(CUTS) if n != missing))
    found, complaints = run.newest(range(4))
    assert found is not None
    assert (found.round, complaints) == (1, [])
    assert [file.round for file in files_in(run.path / "checkpoint")] == [2, 2, 1, 1, 1]
    assert list(complete(files_in(run.path / "checkpoint"))) == [1]


def test_readers_agree_on_the_newest_that_all_find_whole(run: RunDirectory) -> None:
    """Another process says that it has rounds 1 and 2 only, and then that its part of 2 is damaged."""
    for t in (1, 2, 3):
        save(run, t, *CUTS)
    others = iter([[1, 2]]), iter(["its file is damaged", None])
    asked: list[object] = []

    def gather(values: list[object]) -> list[object]:
        asked.append(values)
        return [*values, next(others[0] if len(asked) == 1 else others[1])]

    found, complaints = run.newest(range(4), gather)
    assert found is not None
    assert (found.round, complaints) == (1, ["its file is damaged; using the one before it"])
    assert asked == [[[3, 2, 1]], [None], [None]]


def test_a_damaged_part_is_noticed_by_who_needs_it(run: RunDirectory) -> None:
    save(run, 1, *CUTS)
    save(run, 2, *CUTS)
    damaged = run.path / "checkpoint" / file_name(2, CUTS[1], M)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    found, (complaint,) = run.newest(range(5, 6))
    assert found is not None
    assert found.round == 1
    assert str(damaged) in complaint
    found, complaints = run.newest(range(4))
    assert found is not None
    assert (found.round, complaints) == (2, [])


def test_pruning_keeps_two_rounds_of_every_part(run: RunDirectory) -> None:
    for t in (1, 2, 3):
        save(run, t, *CUTS)
    run.prune()
    assert [file.round for file in files_in(run.path / "checkpoint")] == [3, 3, 3, 2, 2, 2]
