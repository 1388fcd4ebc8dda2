"""Complete runs of several peers in one process: equal to a simulation, and correct after faults."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pdsl.data import Data
from pdsl.peer import noise_log
from pdsl.peer.attendance import RollCallResult
from pdsl.peer.engine import PeerEngine
from pdsl.peer.experiment import describe_task
from pdsl.peer.identity import Identity
from pdsl.peer.membership import join
from pdsl.peer.plan import Timeouts, TrainingPlan
from pdsl.peer.runner import run
from pdsl.peer.status import Events
from pdsl.peer.transport import Loop, Transport
from pdsl.settings import EngineSettings
from pdsl.training.evaluation import Evaluation, final_evaluation
from pdsl.training.experiment import prepare
from pdsl.training.trainer import CompletedRound, rounds
from pdsl.utils.random import SecretStreams
from tests.helpers.organisations import make_organisations, make_plan, write_digits
from tests.helpers.refusals import refused

pytestmark = pytest.mark.peer

KEY = bytes(range(32))
QUICK = Timeouts(silence=2.0, deadline=20.0, start=20.0)


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def run_all(members: list[Identity], loop: Loop) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(lambda member: run(member, loop), members))


def join_all(members: list[Identity], plan: TrainingPlan) -> None:
    for member in members:
        join(member, plan)


class Simulation(NamedTuple):
    """Result of a simulation of all agents in one process, with the same key."""

    evaluation: Evaluation
    last: CompletedRound

    @property
    def models_sha256(self) -> str:
        return self.evaluation.models_sha256


def use_test_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all peers and the simulation the same key without a context, so that they draw the same noise."""
    monkeypatch.setattr(noise_log.secrets, "token_bytes", lambda n: KEY)
    monkeypatch.setattr(SecretStreams, "bind", lambda self, context: self)


def simulate(plan: TrainingPlan, data: Data) -> Simulation:
    batch = plan.config.batch.model_copy(update={"records": plan.task.records})
    exactly = plan.config.model_copy(update={"engine": EngineSettings(exact=True), "batch": batch})
    e = prepare(exactly, data=data, graph=plan.graph, key=KEY)
    *_, last = rounds(e)
    return Simulation(final_evaluation(e, last.state.x), last)


def combined_sha256(summaries: list[dict[str, Any]]) -> str:
    """Hash of all models, as in the result of a simulation."""
    return hashlib.sha256(" ".join(summary["model_sha256"] for summary in summaries).encode()).hexdigest()


@pytest.mark.parametrize(
    ("algorithm", "ema_decay", "robust"),
    [("pdsl", 0.0, False), ("pdsl", 0.5, True), ("muffliato", 0.0, False), ("muffliato", 0.0, True)],
)
def test_peers_have_the_models_of_a_simulation(
    tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch, algorithm: str, ema_decay: float, robust: bool
) -> None:
    use_test_key(monkeypatch)
    members = make_organisations(tmp_path)
    data, task = write_digits(members)
    mixing = {"robust": robust}
    plan = make_plan(members, task, QUICK, algorithm={"name": algorithm}, ema_decay=ema_decay, mixing=mixing)
    join_all(members, plan)
    summaries = run_all(members, loop)

    simulation = simulate(plan, data)
    assert combined_sha256(summaries) == simulation.models_sha256
    assert [summary["accuracy"] for summary in summaries] == simulation.evaluation.scores
    assert len({summary["baselines"]["public"] for summary in summaries}) == 1
    assert all(summary["baselines"].keys() == {"public"} for summary in summaries)
    assert all("over the public set alone" in summary["gain"] for summary in summaries)
    assert simulation.last.ledger is not None
    spent = simulation.last.ledger.epsilon_per_agent
    assert [summary["epsilon"] for summary in summaries] == pytest.approx(spent, rel=1e-12)
    assert sum(summary["bytes"] for summary in summaries) == 3 * simulation.last.row["bytes"]
    for member in members:
        folder = member.folder / "run"
        assert load_file(folder / "model.safetensors")
        assert (folder / "report.html").exists()
        assert json.loads((folder / "ledger.json").read_text())["messages"][member.card.name] == 3


@pytest.mark.parametrize("kind", ["regression", "multilabel"])
def test_peers_learn_numbers_and_labels(tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    use_test_key(monkeypatch)
    members = make_organisations(tmp_path, 3)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(340, 5, generator=generator)
    scores = x @ torch.randn(5, 2, generator=generator)
    y = 100 + 10 * scores[:, 0] if kind == "regression" else (scores > 0).long()
    public = {"x_test": x[:20], "y_test": y[:20], "x_validation": x[20:40], "y_validation": y[20:40]}
    for i, member in enumerate(members):
        np.savez(member.folder / "data.npz", x=x[40 + i :: 3].numpy(), y=y[40 + i :: 3].numpy())
        np.savez(member.folder / "public.npz", **{name: part.numpy() for name, part in public.items()})
    task = describe_task(members[0].folder / "public.npz", 100, None)
    plan = make_plan(members, task, QUICK, rounds=8, graph={"kind": "full"}, batch={"rate": 1.0, "size": 100})
    join_all(members, plan)
    summaries = run_all(members, loop)

    owner = torch.arange(300) % 3
    classes = 0 if kind == "regression" else 2
    everything = Data("npz", x[40:], y[40:], x[:20], y[:20], classes, owner, (x[20:40], y[20:40]))
    assert combined_sha256(summaries) == simulate(plan, everything).models_sha256
    metric = "rmse" if kind == "regression" else "accuracy"
    assert all(summary["metric"] == metric for summary in summaries)
    assert summaries[0][metric] < y[:20].std() if kind == "regression" else summaries[0][metric] > 0.6


def test_oversized_gradients_are_rescaled_and_their_sender_logged(
    tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = make_organisations(tmp_path, 3)
    _, task = write_digits(members)
    join_all(members, make_plan(members, task, QUICK))
    reply = PeerEngine.reply

    def reversed_reply(engine: PeerEngine, v: Tensor) -> Tensor:
        return reply(engine, -1000 * v if engine.agents.start == 2 else v)

    monkeypatch.setattr(PeerEngine, "reply", reversed_reply)
    run_all(members, loop)
    honest, liar = members[:2], members[2].card.name
    for member in honest:
        rows = [json.loads(line) for line in (member.folder / "run" / "rows.jsonl").read_text().splitlines()]
        assert [row["shortened"] for row in rows] == [[liar]] * 3
        events = [json.loads(line) for line in (member.folder / "run" / "events.jsonl").read_text().splitlines()]
        assert [(e["round"], e["who"]) for e in events if e["event"] == "shortened"] == [(t, liar) for t in (1, 2, 3)]


class CrashError(Exception):
    """Crash of a peer, raised by a test."""


def run_with_a_crash(members: list[Identity], loop: Loop, at: int, damage: Callable[[Path], None]) -> list[Any]:
    """Run all peers. The last one crashes after round `at`, its folder is damaged, and it restarts at once."""

    def crash(row: dict[str, Any]) -> None:
        if row["round"] == at:
            raise CrashError

    def one(member: Identity) -> dict[str, Any]:
        if member is not members[-1]:
            return run(member, loop)
        with pytest.raises(CrashError):
            run(member, loop, on_round=crash)
        damage(member.folder / "run")
        return run(member, loop)

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(one, members))


def test_a_crash_during_a_round_changes_nothing(tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients of round 2 were sent before the crash; repeated, they are the same bytes."""
    use_test_key(monkeypatch)
    members = make_organisations(tmp_path, 3)
    data, task = write_digits(members)
    plan = make_plan(members, task, Timeouts(silence=30, deadline=60, start=60), evaluate_every=3)
    join_all(members, plan)
    mix, crashes = PeerEngine.mix, iter([True])

    def mix_or_crash(engine: PeerEngine, x: Tensor) -> Tensor:
        if engine.agents.start == 2 and engine._t == 2 and next(crashes, False):
            raise CrashError
        return mix(engine, x)

    monkeypatch.setattr(PeerEngine, "mix", mix_or_crash)

    def one(member: Identity) -> dict[str, Any]:
        if member is members[-1]:
            with pytest.raises(CrashError):
                run(member, loop)
        return run(member, loop)

    with ThreadPoolExecutor(3) as pool:
        summaries = list(pool.map(one, members))
    assert combined_sha256(summaries) == simulate(plan, data).models_sha256
    assert [summary["rounds_run"] for summary in summaries] == [3, 3, 3]
    charges = json.loads((members[-1].folder / "run" / "ledger.json").read_text())["charges"]
    assert charges == [[1, 1, [0, 1]], [2, 1, [0, 1]], [3, 2, [0, 1]]]  # one per round, the last with a new key


@pytest.fixture
def three(tmp_path: Path) -> list[Identity]:
    members = make_organisations(tmp_path, 3)
    _, task = write_digits(members)
    join_all(members, make_plan(members, task, QUICK, rounds=6, evaluate_every=6))
    return members


def test_a_lost_log_is_charged_again_in_a_new_generation(three: list[Identity], loop: Loop) -> None:
    def lose(folder: Path) -> None:
        (folder / "sent-1.log").unlink()
        for file in (folder / "checkpoint").glob("round-000003*"):
            file.unlink()  # so that round 3 is repeated

    *_, summary = run_with_a_crash(three, loop, 3, lose)
    folder = three[-1].folder / "run"
    ledger = json.loads((folder / "ledger.json").read_text())
    assert summary["generation"] == 2
    assert [charge[1] for charge in ledger["charges"] if charge[0] <= 3][:3] == [1, 1, 1]
    assert {(t, n) for t, n, _ in ledger["charges"]} >= {(1, 1), (2, 1), (3, 1)}
    again = [t for t, *vector in map(json.loads, (folder / "sent-2.log").read_text().splitlines()) if vector]
    charged = [t for t, n, _ in ledger["charges"] if n == 2]
    assert sorted(set(again)) == charged and charged
    assert summary["epsilon"] <= summary["budget"]


def test_a_peer_without_a_checkpoint_resumes_from_the_mean_of_its_neighbours(three: list[Identity], loop: Loop) -> None:
    summaries = run_with_a_crash(three, loop, 2, lambda folder: shutil.rmtree(folder / "checkpoint"))
    folder = three[-1].folder / "run"
    (restarted,) = [e for e in Events(folder / "events.jsonl").read() if e["event"] == "restarted"]
    assert restarted["models"] == 2
    assert summaries[-1]["rounds"] == 6 and summaries[-1]["generation"] == 2
    assert summaries[-1]["accuracy"] > 0.5


def test_an_invalid_folder_is_refused_before_any_file_is_written(three: list[Identity]) -> None:
    member = three[0]
    loop = Loop()
    public = (member.folder / "public.npz").read_bytes()
    (member.folder / "public.npz").write_bytes(public + b" ")
    with refused("not the public file of the plan"):
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


def test_a_folder_is_bound_to_its_first_charged_plan(tmp_path: Path, loop: Loop) -> None:
    members = make_organisations(tmp_path, 3)
    _, task = write_digits(members)
    plan = make_plan(members, task, QUICK)
    looser = make_plan(members, task, QUICK, rounds=6, privacy={"target_epsilon": 50.0, "max_grad_norm": 100.0})
    join_all(members, looser)
    with refused("cannot listen"):
        run(members[0], loop, listen="192.0.2.1:1")  # no charge, so another plan can still be joined
    join_all(members, plan)
    spent = [summary["epsilon"] for summary in run_all(members, loop)]
    assert max(spent) <= 8

    own = members[0]
    with refused("is bound to another plan"):
        join(own, looser)
    (own.folder / "plan.toml").unlink()
    with refused("is bound to another plan"):
        join(own, looser)
    (own.folder / "plan.toml").write_text(looser.to_toml())
    with refused("is bound to another plan"):
        run(own, loop)
    (own.folder / "charged").unlink()
    with refused("ledger.json", "another plan"):
        run(own, loop)
    join(own, plan)
    assert run(own, loop)["epsilon"] == spent[0]
    renewed = Identity.renew(own.folder)
    (own.folder / "plan.toml").unlink()
    join(renewed, plan)  # the same plan again, with the renewed key
    assert run(renewed, loop)["epsilon"] == spent[0]

    (own.folder / "run/config.toml").unlink()
    assert run(renewed, loop)["epsilon"] == spent[0]
    with (own.folder / "charged").open("a") as file:
        file.write("4\n")  # as if run/ were a backup from before round 4
    with refused("ledger.json is outdated", "round 4"):
        run(renewed, loop)
    shutil.rmtree(own.folder / "run")
    with refused("ledger.json is missing", "the privacy spent is unknown"):
        run(renewed, loop)
    assert not (own.folder / "run").exists()


def test_an_unknown_device_leaves_no_files(three: list[Identity], loop: Loop) -> None:
    with refused("engine.device=nowhere"):
        run(three[0], loop, engine=EngineSettings(device="nowhere"))
    assert not (three[0].folder / "run").exists()


def test_an_older_copy_of_a_folder_is_recognised_by_receipts_of_its_neighbours(
    three: list[Identity], loop: Loop, tmp_path: Path
) -> None:
    """The folder after round 2 is put back after round 4. Honest neighbours return proof of round 4."""
    own, copy = three[-1].folder, tmp_path / "copy"

    def snapshot(row: dict[str, Any]) -> None:
        if row["round"] == 2:
            shutil.copytree(own, copy)
        if row["round"] == 4:
            raise CrashError

    def one(member: Identity) -> dict[str, Any]:
        if member is not three[-1]:
            return run(member, loop)
        with pytest.raises(CrashError):
            run(member, loop, on_round=snapshot)
        shutil.rmtree(own)
        shutil.copytree(copy, own)
        with refused("is an older copy", "round 4"):
            run(member, loop)
        return {}

    with ThreadPoolExecutor(len(three)) as pool:
        list(pool.map(one, three))


def test_a_run_that_skips_to_the_end_says_so(
    three: list[Identity], loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    roll_call = Transport.roll_call

    def finished_after_two(transport: Transport, t: int) -> RollCallResult:
        if transport.me == 2 and t == 3:
            return RollCallResult(frozenset(), 7)  # as if all neighbours had finished
        return roll_call(transport, t)

    monkeypatch.setattr(Transport, "roll_call", finished_after_two)
    *others, last = run_all(three, loop)
    assert last["stopped"] == "rounds 3 to 6 were skipped: the neighbours were ahead" and last["rounds_run"] == 2
    assert all(summary["stopped"] is None and summary["rounds_run"] == 6 for summary in others)


def test_honest_peers_do_not_call_each_other_implausible_while_a_member_is_absent(tmp_path: Path, loop: Loop) -> None:
    """With less weight on the neighbours present, models agree more slowly than with all of them."""
    members = make_organisations(tmp_path, 3)
    _, task = write_digits(members)
    privacy = {"noise_multiplier": 1.0, "target_epsilon": 1000.0}
    graph, timeouts = {"kind": "full", "agents": 3}, Timeouts(silence=2.0, deadline=20.0, start=3.0)
    mixing = {"robust": True}
    join_all(members, make_plan(members, task, timeouts, rounds=2000, graph=graph, privacy=privacy, mixing=mixing))

    def run_some(member: Identity) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []

        def stop(row: Any) -> None:
            rows.append(row)
            if len(rows) == 30:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(member, loop, on_round=stop)
        return rows

    with ThreadPoolExecutor(2) as pool:
        for rows in pool.map(run_some, members[:2]):
            assert all(len(row["present"]) == 1 for row in rows[:29])
            assert [row["round"] for row in rows if "implausible" in row] == []
