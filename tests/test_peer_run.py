"""Whole runs of several peers in one process: the same models as one process, and what faults do not cost."""

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from pdsl.peer import secrets
from pdsl.peer.identity import Identity
from pdsl.peer.join import join
from pdsl.peer.plan import Conduct, Plan
from pdsl.peer.run import run
from pdsl.peer.transport import Loop
from pdsl.settings import EngineSettings
from pdsl.train import final_evaluation, prepare, rounds
from tests.neighbourhood import agreed, organisations, with_data

KEY = bytes(range(32))
QUICK = Conduct(silence=2.0, deadline=20.0, start=20.0)


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def everybody(members: list[Identity], loop: Loop) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(lambda member: run(member, loop), members))


def all_joined(members: list[Identity], plan: Plan) -> None:
    for member in members:
        join(member, plan)


@pytest.mark.parametrize("algorithm", ["pdsl", "muffliato"])
def test_peers_end_with_the_models_of_one_process(
    tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    monkeypatch.setattr(secrets.system, "token_bytes", lambda n: KEY)  # the test key
    members = organisations(tmp_path)
    data, task = with_data(members)
    plan = agreed(members, task, QUICK, algorithm={"name": algorithm})
    all_joined(members, plan)
    summaries = everybody(members, loop)

    exactly = plan.config.model_copy(update={"engine": EngineSettings(exact=True)})
    e = prepare(exactly, data=data, graph=plan.graph, key=KEY)
    *_, last = rounds(e)
    alone = final_evaluation(e, last.state.x)
    digests = " ".join(summary["model_sha256"] for summary in summaries)
    assert hashlib.sha256(digests.encode()).hexdigest() == alone.models_sha256
    assert [summary["accuracy"] for summary in summaries] == alone.accuracies
    assert last.ledger is not None
    assert [summary["epsilon"] for summary in summaries] == pytest.approx(last.ledger.epsilon_per_agent, rel=1e-12)
    assert sum(summary["bytes"] for summary in summaries) == 3 * last.row["bytes"]
    for member in members:
        folder = member.folder / "run"
        assert set(load_file(folder / "model.safetensors")) == {name for name, _ in e.network.shapes()}
        assert (folder / "report.html").exists()
        assert json.loads((folder / "ledger.json").read_text())["messages"][member.card.name] == 3
