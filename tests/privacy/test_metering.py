"""Only declared messages are sent: a wrong `releases` is an error in the first round, on every engine."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import pdsl
from pdsl.algorithms.d_psgd import DPSGD
from pdsl.algorithms.pdsl import PDSL
from pdsl.config import validate
from pdsl.peer.membership import join
from pdsl.peer.plan import Timeouts
from pdsl.peer.runner import run as peer_run
from pdsl.peer.transport import Loop
from pdsl.privacy import Release
from pdsl.privacy.metering import Meter
from pdsl.training.experiment import prepare
from pdsl.training.trainer import rounds
from tests.helpers.commands import pdsl as command
from tests.helpers.organisations import make_organisations, make_plan, write_digits
from tests.helpers.ranks import ended, launched
from tests.helpers.refusals import refused

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class State:
    x: Tensor


class Own(pdsl.Algorithm):
    """D-PSGD with one gradient too many, or another fault."""

    name: ClassVar[str] = "own"

    def init(self, x0: Tensor) -> State:
        return State(x0)

    def step(self, state: State, r: pdsl.Round) -> tuple[Any, Any]:
        return State(r.engine.mix(state.x - self.direction(state.x, r))), {}

    def direction(self, x: Tensor, r: pdsl.Round) -> Tensor:
        return r.own_noisy_gradients(x)

    def releases(self, members: int) -> pdsl.Release:
        return pdsl.Release(messages=1)


class ThreeGradients(Own):
    def direction(self, x: Tensor, r: pdsl.Round) -> Tensor:
        return sum((r.own_noisy_gradients(x, nth=n) for n in range(3)), torch.zeros_like(x))


class TwoSteps(Own):
    def direction(self, x: Tensor, r: pdsl.Round) -> Tensor:
        return r.own_noisy_gradients(x, step=0) + r.own_noisy_gradients(x, step=1)


class OneNoiseTwice(Own):
    def direction(self, x: Tensor, r: pdsl.Round) -> Tensor:
        return r.own_noisy_gradients(x) - r.own_noisy_gradients(2 * x)

    def releases(self, members: int) -> pdsl.Release:
        return pdsl.Release(messages=2)


class Bare(Own):
    def direction(self, x: Tensor, r: pdsl.Round) -> Tensor:
        return r.local.gradients(r.t, torch.arange(len(x)), x).float()


class Doubled(Own):
    def direction(self, x: Tensor, r: pdsl.Round) -> Tensor:
        agents = torch.arange(len(x))
        return r.noise.add(r.t, agents, agents, 2 * r.local.gradients(r.t, agents, x))


class TooMuchDeclared(Own):
    def releases(self, members: int) -> pdsl.Release:
        return pdsl.Release(messages=2)


class WrongResult(Own):
    def step(self, state: State, r: pdsl.Round) -> Any:
        return state


class WrongState(Own):
    def step(self, state: State, r: pdsl.Round) -> Any:
        return State(state.x.double()), {}


class WrongFacts(Own):
    def step(self, state: State, r: pdsl.Round) -> Any:
        return State(r.engine.mix(state.x - r.own_noisy_gradients(state.x))), {"x": state.x}


class Nameless(pdsl.Algorithm):
    pass


FAULTS = {
    ThreeGradients: ["algorithm own makes 2 noisy messages", "declares 1"],
    TwoSteps: ["algorithm own makes 1 noisy messages on batch 2", "declares 1"],
    OneNoiseTwice: ["used the same noise twice"],
    Bare: ["without adding noise"],
    Doubled: ["something other than its latest gradients"],
    TooMuchDeclared: ["made 1 noisy messages", "declares 2"],
    WrongResult: ["step returned a State", "(state, metrics)"],
    WrongState: ["without models x of shape", "float32"],
    WrongFacts: ["metrics that step returned are not JSON"],
    Nameless: ["Nameless has no name"],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_train_refuses_a_wrong_algorithm_before_round_1(fault: type[pdsl.Algorithm]) -> None:
    with refused(*FAULTS[fault]):
        pdsl.train("softmax", "digits", graph=pdsl.ring(4), algorithm=fault(), rounds=3)


def test_an_honest_own_algorithm_runs() -> None:
    result = pdsl.train("softmax", "digits", graph=pdsl.ring(4), algorithm=Own(), rounds=2)
    assert len(result.rows) == 2


@pytest.mark.parametrize("fault", [ThreeGradients, TwoSteps], ids=lambda f: f.__name__)
def test_run_refuses_a_wrong_algorithm_by_import_path_and_leaves_nothing(fault: type, tmp_path: Path) -> None:
    name = f"algorithm.name=tests.privacy.test_metering:{fault.__name__}"
    out = tmp_path / "run"
    command("run", "--out", out, "--set", name, "--set", "rounds=2").refused(*FAULTS[fault])
    assert not out.exists()


@pytest.mark.slow
def test_ranks_refuse_a_wrong_algorithm_by_import_path_and_say_it_once(tmp_path: Path) -> None:
    name, out = "algorithm.name=tests.privacy.test_metering:ThreeGradients", tmp_path / "run"
    ended(launched(2, "run", "--out", out, "--set", name, "--set", "rounds=2", said=tmp_path), code=2)
    said = [(tmp_path / f"{rank}.err").read_text() for rank in range(2)]
    assert all(part in said[0] for part in FAULTS[ThreeGradients]), said
    assert said[1] == ""
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.parametrize("steps", [False, True], ids=["messages", "steps"])
def test_peers_refuse_a_round_with_more_than_the_plan_declares_and_send_nothing(
    steps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The algorithm of every organisation takes another gradient than the release in the plan has."""
    members = make_organisations(tmp_path, 3)
    _, task = write_digits(members)
    plan = make_plan(members, task, Timeouts(silence=1.0, deadline=5.0, start=20.0), algorithm={"name": "d-psgd"})
    honest = pdsl.Round.own_noisy_gradients

    def another(r: pdsl.Round, x: Tensor, *args: Any, **named: Any) -> Tensor:
        more = {"step": 1} if steps else {"nth": 1}
        return honest(r, x, *args, **named) + honest(r, x, *args, **{**named, **more})

    for member in members:
        join(member, plan)
    monkeypatch.setattr(pdsl.Round, "own_noisy_gradients", another)
    loop = Loop()
    try:
        with ThreadPoolExecutor(len(members)) as pool:
            runs = [pool.submit(peer_run, member, loop) for member in members]
            said = [str(run.exception()) for run in runs]
    finally:
        loop.close()
    assert all("algorithm d-psgd makes" in text and "in round 1" in text for text in said), said
    for member in members:
        assert (member.folder / "run" / "rows.jsonl").read_text() == ""


def test_run_takes_an_honest_algorithm_by_import_path_and_resumes_it(tmp_path: Path) -> None:
    out = tmp_path / "run"
    name = "algorithm.name=tests.privacy.test_metering:Own"
    assert command("run", "--json", "--out", out, "--set", name, "--set", "rounds=2").code == 0
    assert command("run", "--json", "--resume", out, "--set", "rounds=3").code == 0


@pytest.mark.parametrize("kind", [DPSGD, PDSL], ids=lambda kind: kind.name)
def test_built_in_algorithms_are_counted_in_every_round(kind: type[pdsl.Algorithm], monkeypatch: Any) -> None:
    """No trial: the meter of round 1 itself refuses it, before anything is sent."""
    uniform = {"shapley": {"weighting": "uniform"}} if kind is PDSL else {}
    values = {"rounds": 3, "graph": {"agents": 4}, "algorithm": {"name": kind.name, **uniform}}
    e = prepare(validate(values, "test"))
    less = kind.releases
    monkeypatch.setattr(kind, "releases", lambda self, members: pdsl.Release(less(self, members).messages + 1))
    wrong = prepare(validate(values, "test"))
    with refused(f"algorithm {kind.name} made", "in round 1", "declares"):
        list(rounds(wrong))
    assert len(list(rounds(e))) == 3


def test_the_meter_names_the_algorithm_and_the_count() -> None:
    meter = Meter("mine", 4, {0: Release(1)})
    rows, agents = torch.zeros(1, 3), torch.tensor([0])
    meter.take(rows, agents, 4, 0)
    meter.make_noisy(rows, agents, agents, 4, 0, 0)
    meter.finish()
    with refused("algorithm mine makes 2 noisy messages on batch 1 of agent 0 in round 4", "declares 1"):
        meter.make_noisy(rows, agents, agents, 4, 0, 1)
    with refused("requested gradients of round 5 in round 4"):
        meter.take(rows, agents, 5, 0)
