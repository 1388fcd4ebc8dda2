"""Whole runs of several peers in one process: the same models as one process, and what faults do not cost."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file
from torch import Tensor

from pdsl.data import Data
from pdsl.peer import secrets
from pdsl.peer.engine import Peer
from pdsl.peer.events import Events
from pdsl.peer.identity import Identity
from pdsl.peer.join import join
from pdsl.peer.plan import Conduct, Plan
from pdsl.peer.run import run
from pdsl.peer.transport import Loop
from pdsl.randomness import SecretStreams
from pdsl.settings import EngineSettings
from pdsl.train import Evaluation, Step, final_evaluation, prepare, rounds
from tests.neighbourhood import agreed, organisations, with_data
from tests.refusals import refused

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


class Alone(NamedTuple):
    """What one process that has all agents comes to, with the same key."""

    evaluation: Evaluation
    last: Step

    @property
    def models_sha256(self) -> str:
        return self.evaluation.models_sha256


def use_test_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """One key for all, and no context: else every peer, and the one process, would draw noise of its own."""
    monkeypatch.setattr(secrets.system, "token_bytes", lambda n: KEY)
    monkeypatch.setattr(SecretStreams, "bind", lambda self, context: self)


def in_one_process(plan: Plan, data: Data) -> Alone:
    batch = plan.config.batch.model_copy(update={"records": plan.task.records})
    exactly = plan.config.model_copy(update={"engine": EngineSettings(exact=True), "batch": batch})
    e = prepare(exactly, data=data, graph=plan.graph, key=KEY)
    *_, last = rounds(e)
    return Alone(final_evaluation(e, last.state.x), last)


def together(summaries: list[dict[str, Any]]) -> str:
    """The hash of all models, as a run of one process has it."""
    return hashlib.sha256(" ".join(summary["model_sha256"] for summary in summaries).encode()).hexdigest()


@pytest.mark.parametrize(("algorithm", "averaging"), [("pdsl", 0.0), ("pdsl", 0.5), ("muffliato", 0.0)])
def test_peers_end_with_the_models_of_one_process(
    tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch, algorithm: str, averaging: float
) -> None:
    use_test_key(monkeypatch)
    members = organisations(tmp_path)
    data, task = with_data(members)
    plan = agreed(members, task, QUICK, algorithm={"name": algorithm}, averaging=averaging)
    all_joined(members, plan)
    summaries = everybody(members, loop)

    alone = in_one_process(plan, data)
    assert together(summaries) == alone.models_sha256
    assert [summary["accuracy"] for summary in summaries] == alone.evaluation.accuracies
    assert alone.last.ledger is not None
    spent = alone.last.ledger.epsilon_per_agent
    assert [summary["epsilon"] for summary in summaries] == pytest.approx(spent, rel=1e-12)
    assert sum(summary["bytes"] for summary in summaries) == 3 * alone.last.row["bytes"]
    for member in members:
        folder = member.folder / "run"
        assert load_file(folder / "model.safetensors")
        assert (folder / "report.html").exists()
        assert json.loads((folder / "ledger.json").read_text())["messages"][member.card.name] == 3


def test_a_liar_is_shortened_and_named(tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    members = organisations(tmp_path, 3)
    _, task = with_data(members)
    all_joined(members, agreed(members, task, QUICK))
    reply = Peer.reply

    def replied(engine: Peer, v: Tensor) -> Tensor:
        return reply(engine, -1000 * v if engine.agents.start == 2 else v)

    monkeypatch.setattr(Peer, "reply", replied)
    everybody(members, loop)
    honest, liar = members[:2], members[2].card.name
    for member in honest:
        rows = [json.loads(line) for line in (member.folder / "run" / "rows.jsonl").read_text().splitlines()]
        assert [row["shortened"] for row in rows] == [[liar]] * 3
        events = [json.loads(line) for line in (member.folder / "run" / "events.jsonl").read_text().splitlines()]
        assert [(e["round"], e["who"]) for e in events if e["event"] == "shortened"] == [(t, liar) for t in (1, 2, 3)]


class CrashError(Exception):
    """What a test does to a peer."""


def crashed_and_back(members: list[Identity], loop: Loop, at: int, damage: Callable[[Path], None]) -> list[Any]:
    """Everybody runs; the last one crashes after a round, its folder is damaged, and it comes back at once."""

    def crash(row: dict[str, Any]) -> None:
        if row["round"] == at:
            raise CrashError

    def one(member: Identity) -> dict[str, Any]:
        if member is not members[-1]:
            return run(member, loop)
        with pytest.raises(CrashError):
            run(member, loop, watch=crash)
        damage(member.folder / "run")
        return run(member, loop)

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(one, members))


def test_a_crash_in_the_middle_of_a_round_changes_nothing(
    tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradients of round 2 are out when it crashes; run again, they are the same bytes, and so is the end."""
    use_test_key(monkeypatch)
    members = organisations(tmp_path, 3)
    data, task = with_data(members)
    plan = agreed(members, task, Conduct(silence=30, deadline=60, start=60), evaluate_every=3)
    all_joined(members, plan)
    mix, crashes = Peer.mix, iter([True])

    def mix_or_crash(engine: Peer, x: Tensor) -> Tensor:
        if engine.agents.start == 2 and engine._t == 2 and next(crashes, False):
            raise CrashError
        return mix(engine, x)

    monkeypatch.setattr(Peer, "mix", mix_or_crash)

    def one(member: Identity) -> dict[str, Any]:
        if member is members[-1]:
            with pytest.raises(CrashError):
                run(member, loop)
        return run(member, loop)

    with ThreadPoolExecutor(3) as pool:
        summaries = list(pool.map(one, members))
    assert together(summaries) == in_one_process(plan, data).models_sha256
    assert [summary["rounds_run"] for summary in summaries] == [3, 3, 3]
    charges = json.loads((members[-1].folder / "run" / "ledger.json").read_text())["charges"]
    assert charges == [[t, 1, [0, 1]] for t in (1, 2, 3)]  # each once


@pytest.fixture
def three(tmp_path: Path) -> list[Identity]:
    members = organisations(tmp_path, 3)
    _, task = with_data(members)
    all_joined(members, agreed(members, task, QUICK, rounds=6, evaluate_every=6))
    return members


def test_a_lost_log_is_charged_again_under_a_new_incarnation(three: list[Identity], loop: Loop) -> None:
    def lose(folder: Path) -> None:
        (folder / "sent-1.log").unlink()
        for file in (folder / "checkpoint").glob("round-000003*"):
            file.unlink()  # so that round 3 has to be run again

    *_, summary = crashed_and_back(three, loop, 3, lose)
    folder = three[-1].folder / "run"
    ledger = json.loads((folder / "ledger.json").read_text())
    assert summary["incarnation"] == 2
    assert [charge[1] for charge in ledger["charges"] if charge[0] <= 3][:3] == [1, 1, 1]
    assert {(t, n) for t, n, _ in ledger["charges"]} >= {(1, 1), (2, 1), (3, 1)}
    again = [t for t, *vector in map(json.loads, (folder / "sent-2.log").read_text().splitlines()) if vector]
    charged = [t for t, n, _ in ledger["charges"] if n == 2]
    assert sorted(set(again)) == charged and charged
    assert summary["epsilon"] <= summary["budget"]


def test_a_peer_without_a_checkpoint_comes_back_with_its_neighbours_average(three: list[Identity], loop: Loop) -> None:
    summaries = crashed_and_back(three, loop, 2, lambda folder: shutil.rmtree(folder / "checkpoint"))
    folder = three[-1].folder / "run"
    (restarted,) = [e for e in Events(folder / "events.jsonl").read() if e["event"] == "restarted"]
    assert restarted["models"] == 2
    assert summaries[-1]["rounds"] == 6 and summaries[-1]["incarnation"] == 1
    assert summaries[-1]["accuracy"] > 0.5


def test_what_is_missing_or_wrong_in_a_folder_is_said_before_anything_is_written(three: list[Identity]) -> None:
    member = three[0]
    loop = Loop()
    public = (member.folder / "public.npz").read_bytes()
    (member.folder / "public.npz").write_bytes(public + b" ")
    with refused("not the one that the plan is about"):
        run(member, loop)
    (member.folder / "public.npz").write_bytes(public)
    data = (member.folder / "data.npz").read_bytes()
    (member.folder / "data.npz").unlink()
    with refused("data.npz"):
        run(member, loop)
    assert not (member.folder / "run").exists()
    (member.folder / "data.npz").write_bytes(data)
    (member.folder / "key.pem").chmod(0o644)
    with refused("chmod 600"):
        Identity.load(member.folder)
    loop.close()


def test_a_folder_is_for_the_plan_that_was_begun_in_it(tmp_path: Path, loop: Loop) -> None:
    members = organisations(tmp_path, 3)
    _, task = with_data(members)
    plan = agreed(members, task, QUICK)
    looser = agreed(members, task, QUICK, rounds=6, privacy={"target_epsilon": 50.0, "max_grad_norm": 100.0})
    all_joined(members, looser)
    with refused("cannot listen"):
        run(members[0], loop, listen="192.0.2.1:1")  # came to nothing, so that another plan can still be joined
    all_joined(members, plan)
    spent = [summary["epsilon"] for summary in everybody(members, loop)]
    assert max(spent) <= 8

    own = members[0]
    with refused("has begun another plan"):
        join(own, looser)
    (own.folder / "plan.toml").unlink()
    with refused("has begun another plan"):
        join(own, looser)
    (own.folder / "plan.toml").write_text(looser.to_toml())
    with refused("has begun another plan"):
        run(own, loop)
    (own.folder / "begun").unlink()
    with refused("ledger.json", "another plan"):
        run(own, loop)
    join(own, plan)
    assert run(own, loop)["epsilon"] == spent[0]
    renewed = Identity.renew(own.folder)
    (own.folder / "plan.toml").unlink()
    join(renewed, plan)  # the same one again, with the key of today
    assert run(renewed, loop)["epsilon"] == spent[0]

    (own.folder / "run/config.toml").unlink()
    assert run(renewed, loop)["epsilon"] == spent[0]
    with (own.folder / "begun").open("a") as file:
        file.write("4\n")  # as if the whole of run/ were a copy from before round 4
    with refused("ledger.json is an older one", "round 4"):
        run(renewed, loop)
    shutil.rmtree(own.folder / "run")
    with refused("ledger.json is missing", "what was spent is not known"):
        run(renewed, loop)
    assert not (own.folder / "run").exists()


def test_a_device_that_is_not_there_leaves_nothing_behind(three: list[Identity], loop: Loop) -> None:
    with refused("engine.device=nowhere"):
        run(three[0], loop, engine=EngineSettings(device="nowhere"))
    assert not (three[0].folder / "run").exists()
