"""Runs on several gloo ranks against the same runs in one process: the same bits, for every algorithm.

Real processes, real sockets. What they send is compared with the edges of the graph that cross from rank to rank.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdsl import topology
from pdsl.algorithms import ALGORITHMS, PDSL
from pdsl.engine.distributed import block
from pdsl.engine.launch import place
from pdsl.settings import GraphSettings
from pdsl.shapley.account import Account
from pdsl.utils.random import Streams
from tests.helpers.commands import pdsl, rows_on_disk, settings, wait_for
from tests.helpers.ranks import LONG_PATIENCE, Settings, ended, launched, outcomes

pytestmark = pytest.mark.slow

AGENTS, T, D = 7, 2, 650
GRAPH = {"kind": "erdos-renyi", "agents": AGENTS, "probability": 0.5}
BASE: Settings = {
    "rounds": T,
    "graph": GRAPH,
    "model": {"name": "softmax"},
    "data": {"validation": 40},
    "batch": {"size": 16},
    "privacy": {"mode": "noise", "sigma": 0.01},
    "engine": {"workers": 1, "exact": True},
}
DENSE: Settings = {  # equal models ask for equal games, and twelve members for coalitions by lot
    **BASE,
    "graph": {"kind": "full", "agents": 12},
    "privacy": {"mode": "none"},
}
IN_TURNS: Settings = {
    **DENSE,
    "most_bytes": 60 * D * 4,
}  # answers to five agents of twelve at once, on all ranks together
UNEVEN: Settings = {
    **BASE,
    "most_bytes": 1,
}  # agents and numbers one by one, and more agents on one rank than on another
STALE: Settings = {**BASE, "algorithm": {"name": "dp-dpsgd", "staleness": 2}}
EMA_NAME: Settings = {**BASE, "ema_decay": 0.5}
EVERY = [{**BASE, "algorithm": {"name": name}} for name in ALGORITHMS]
CHANGING: list[Settings] = [  # each round has its own edges between ranks, and some agents have no neighbour
    {**BASE, "rounds": 6, "graph": {"kind": "base-k", "agents": AGENTS}, "algorithm": {"name": name}}
    for name in ("pdsl", "def-kt", "ngc", "soft-dsgd", "dp-dpsgd", "muffliato", "mspd")
]

ROBUST: Settings = {
    **BASE,
    "rounds": 4,
    "mixing": {"robust": True},
    "attack": {"reversed_model": 1, "copied_model": 1, "drifting_model": 1},
}

RUNS = [*EVERY, *CHANGING, STALE, ROBUST, EMA_NAME, IN_TURNS, UNEVEN, DENSE]


def alike(runs: list[Settings]) -> list[tuple[str, list[Any]]]:
    """All that must not depend on the ranks."""
    return [(r["sha256"], [{**row, "bytes_between_processes": None} for row in r["rows"]]) for r in runs]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Settings]:
    return outcomes(0, RUNS, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module", params=[2, 3])
def several(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Settings]:
    return outcomes(request.param, RUNS, tmp_path_factory.mktemp("several"))


def test_every_algorithm_has_the_same_bits_on_several_ranks(alone: list[Settings], several: list[Settings]) -> None:
    """Rows too: what is measured over all agents is measured alike."""
    assert alike(several) == alike(alone)


def test_answers_in_turns_are_the_answers_at_once(several: list[Settings]) -> None:
    assert several[RUNS.index(IN_TURNS)] == several[RUNS.index(DENSE)]
    assert several[RUNS.index(UNEVEN)] == several[0]


@pytest.mark.parametrize("size", [1, 4])
def test_pdsl_on_other_numbers_of_ranks(size: int, alone: list[Settings], tmp_path: Path) -> None:
    assert alike(outcomes(size, [EVERY[0], DENSE], tmp_path)) == alike([alone[0], alone[-1]])


def test_what_crosses_is_the_edges_between_ranks_and_nothing_else(several: list[Settings]) -> None:
    blocks = [range(first, end) for first, end, _ in several[0]["held"]]
    rank_of = {agent: rank for rank, agents in enumerate(blocks) for agent in agents}
    graph = topology.build(GraphSettings.model_validate(GRAPH), Streams(0))
    W = graph.W
    links = [(i, j) for i in range(AGENTS) for j in range(AGENTS) if i != j and W[i, j] > 0]
    crossing = sum(rank_of[i] != rank_of[j] for i, j in links)
    phases = PDSL().sends(graph, noise_multiplier=0.0)
    assert crossing > 0
    for row in several[0]["rows"]:
        assert row["bytes_between_processes"] == phases * crossing * D * 4
        assert row["bytes"] == phases * len(links) * D * 4


def test_a_rank_holds_the_records_of_its_own_agents(alone: list[Settings], several: list[Settings]) -> None:
    ((_, _, everything),) = alone[0]["held"]
    held = several[0]["held"]
    assert [agent for first, end, _ in held for agent in range(first, end)] == list(range(AGENTS))
    assert sum(n for *_, n in held) == everything
    assert max(n for *_, n in held) < everything


@pytest.mark.parametrize("agents", [1, 2, 7, 1000])
def test_blocks_are_even_and_leave_nobody_out(agents: int) -> None:
    for size in range(1, min(agents, 9) + 1):
        blocks = [block(agents, rank, size) for rank in range(size)]
        assert [i for b in blocks for i in b] == list(range(agents))
        assert max(map(len, blocks)) - min(map(len, blocks)) <= 1


# The command

SMALL = settings(
    "graph.agents=5", "model.name=softmax", "data.validation=40", "batch.size=16", "engine.workers=1",
    "engine.exact=true", "privacy.mode=noise", "privacy.sigma=0.01",
)  # fmt: skip
LONG = settings("rounds=12")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return summary_of(pdsl("run", "--json", *SMALL, *LONG, "--out", tmp_path_factory.mktemp("runs") / "a").out)


def summary_of(text: str) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(text)
    return {name: summary[name] for name in ("models_sha256", "accuracy_per_agent", "rounds", "bytes", "epsilon")}


def test_killed_and_taken_up_on_other_numbers_of_ranks(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    ranks = launched(2, "run", "--json", *SMALL, *LONG, "--out", run, said=tmp_path)
    wait_for(lambda: rows_on_disk(run) >= 3)
    for rank in ranks:
        rank.kill()
        rank.join()
    again = launched(3, "run", "--json", "--resume", run, said=tmp_path)
    wait_for(lambda: rows_on_disk(run) >= 6)
    again[1].kill()  # the others notice, and end
    for rank in again:
        rank.join(LONG_PATIENCE)
    assert [rank.exitcode for rank in again] == [1, -signal.SIGKILL, 1]
    assert (tmp_path / "0.err").read_text().splitlines()[-1].startswith("pdsl: lost contact with another rank")
    assert (tmp_path / "2.err").read_text() == ""
    assert rows_on_disk(run) < 12
    outcome = pdsl("run", "--json", "--resume", run)  # in one process
    assert summary_of(outcome.out) == undisturbed


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != PDSL.name])
def test_every_algorithm_goes_on_where_its_ranks_were_killed(name: str, tmp_path: Path) -> None:
    chosen = [*SMALL, *settings("rounds=12", "evaluate_every=4", f"algorithm.name={name}")]
    run = tmp_path / "run"
    ranks = launched(2, "run", "--json", *chosen, "--out", run, said=tmp_path)
    wait_for(lambda: rows_on_disk(run) >= 2)
    for rank in ranks:
        rank.kill()
        rank.join()
    assert rows_on_disk(run) < 12
    ended(launched(3, "run", "--json", "--resume", run, said=tmp_path))
    undisturbed = pdsl("run", "--json", *chosen, "--out", tmp_path / "undisturbed")  # in one process
    assert summary_of((tmp_path / "0.out").read_text()) == summary_of(undisturbed.out)


def test_secret_noise_is_the_same_when_rounds_are_run_again_elsewhere(tmp_path: Path) -> None:
    """The ranks share the run's secret: whoever owns an agent draws the noise that it drew before."""
    run = tmp_path / "run"
    secret = settings("rounds=3", "privacy.randomness=system")
    ended(launched(2, "run", "--json", *SMALL, *secret, "--out", run, said=tmp_path))
    first = json.loads((tmp_path / "0.out").read_text())["models_sha256"]
    for file in (run / "checkpoint").iterdir():
        file.unlink()
    assert json.loads(pdsl("run", "--json", "--resume", run).out)["models_sha256"] == first


def test_the_account_of_several_ranks_is_that_of_one_process(tmp_path: Path) -> None:
    chosen = [*SMALL, *settings("rounds=10", "ema_decay=0.5", "mixing.robust=true")]
    ended(launched(2, "run", "--json", *chosen, "--out", tmp_path / "ranks", said=tmp_path))
    assert pdsl("run", "--json", *chosen, "--out", tmp_path / "alone").code == 0
    ranks, alone = (
        Account.from_json((tmp_path / run / "contributions.json").read_text()) for run in ("ranks", "alone")
    )
    assert ranks.names == alone.names
    assert ranks.values == pytest.approx(alone.values, rel=1e-9, abs=1e-12)
    assert ranks.margins == pytest.approx(alone.margins, rel=1e-9)


def test_a_mistake_is_told_once(tmp_path: Path) -> None:
    ended(launched(2, "run", "--set", "graph.agents=many", "--out", tmp_path / "run", said=tmp_path), code=2)
    assert len((tmp_path / "0.err").read_text().splitlines()) == 1
    assert (tmp_path / "0.err").read_text().startswith("pdsl: settings: graph.agents=many")
    assert (tmp_path / "1.err").read_text() == ""
    ended(launched(3, "run", *SMALL, "--set", "graph.agents=2", "--out", tmp_path / "run", said=tmp_path), code=2)
    assert "3 ranks for 2 agents" in (tmp_path / "0.err").read_text()
    assert not (tmp_path / "run").exists()


def test_torchrun_restarts_a_run_whose_rank_was_killed(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    """The same command line, started again by torchrun, finds the run that it began."""
    run = tmp_path / "run"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
        "-m", "pdsl", "run", "--json", *SMALL, *LONG, "--out", str(run),
    ]  # fmt: skip
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    torchrun = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: rows_on_disk(run) >= 2, LONG_PATIENCE)
        os.kill(_worker(torchrun.pid, rank=1), signal.SIGKILL)
        out, err = torchrun.communicate(timeout=LONG_PATIENCE)
    finally:
        torchrun.terminate()  # it ends its ranks
    assert torchrun.returncode == 0, err
    assert summary_of(out) == undisturbed


def _worker(torchrun: int, rank: int) -> int:
    """The process that torchrun started with this rank."""
    for child in Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split():
        if f"\0RANK={rank}\0" in Path(f"/proc/{child}/environ").read_text():
            return int(child)
    raise AssertionError("no such rank")


def test_places() -> None:
    assert place({}) is None
    assert place({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None  # a batch script's own shell
    told = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77", "MASTER_ADDR": "n1"}
    found = place(told)
    assert found is not None
    assert (found.rank, found.size, found.local_rank) == (3, 4, 1)
    found = place({"RANK": "1", "WORLD_SIZE": "2"})
    assert found is not None
    assert (found.rank, found.size, found.local_rank) == (1, 2, 0)
