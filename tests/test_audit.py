"""The audit passes what is honest and refutes every fault that is planted."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pdsl.algorithms import PDSL, Round
from pdsl.algorithms.d_psgd import DPSGD
from pdsl.config import validated
from pdsl.data import Batches
from pdsl.models import Network
from pdsl.privacy import Mechanism, Noise, Release
from pdsl.privacy.audit import Finding, Verdict, audit, audit_run, canary_finding
from pdsl.privacy.canaries import canaries, lower_bound
from pdsl.randomness import Streams
from pdsl.runner import execute, start
from pdsl.train import prepare, rounds

Values = dict[str, Any]


def settings(**changes: Any) -> Values:
    values: Values = {
        "rounds": 5,
        "graph": {"kind": "ring", "agents": 4},
        "model": {"name": "mlp", "hidden": 12},
        "partition": {"kind": "iid"},
        "data": {"validation": 40},
        "shapley": {"weighting": "uniform"},
        "privacy": {"target_epsilon": 2.0},
    }
    for name, change in changes.items():
        values[name] = {**values[name], **change} if isinstance(values.get(name), dict) else change
    return values


def findings(**changes: Any) -> list[Finding]:
    """Run and audit with the same code, faults and all."""
    e = prepare(validated(settings(**changes), "test"))
    steps = list(rounds(e))
    ledger = steps[-1].ledger
    assert ledger is not None
    return audit(e, ledger, [step.row for step in steps], ledger.epsilon_per_agent)


def failed(found: list[Finding]) -> set[str]:
    return {finding.check for finding in found if finding.verdict is Verdict.FAIL}


@pytest.mark.parametrize("seed", range(20))
def test_an_honest_run_passes(seed: int) -> None:
    assert not failed(findings(seed=seed))


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": {"sampler": "fixed"}},
        {"privacy": {"clipping": "batch", "noise_multiplier": 3.0}},
        {"graph": {"kind": "star"}},
        {"privacy": {"randomness": "system"}},
        {"privacy": {"sigma": 0.3}, "graph": {"kind": "star"}},
        {"batch": {"size": 10_000}},
    ],
    ids=str,
)
def test_other_honest_runs_pass(changes: Values) -> None:
    assert not failed(findings(**changes))


def test_too_little_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Noise.add
    monkeypatch.setattr(Noise, "add", lambda self, t, i, j, g, *at: g + 0.97 * (honest(self, t, i, j, g, *at) - g))
    assert "σ of the noise" in failed(findings())


@pytest.mark.parametrize("forgotten", ["peer", "round", "agent"])
def test_noise_used_twice(monkeypatch: pytest.MonkeyPatch, forgotten: str) -> None:
    honest = Streams.normals

    def reused(self: Streams, n: int, purpose: str, agent: int, round: int, peer: int = -1) -> Any:
        key = {"agent": agent, "round": round, "peer": peer} | {forgotten: 0}
        return honest(self, n, purpose, **key)

    monkeypatch.setattr(Streams, "normals", reused)
    assert "noise is never shared" in failed(findings())


def test_root_k_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mechanism, "noise_multiplier", property(lambda m: m.sigma / m.sensitivity))
    assert "ε computed again" in failed(findings(privacy={"noise_multiplier": 2.0}))


def per_record(clip: Callable[[list[Tensor], float], list[Tensor]]) -> Callable[..., Tensor]:
    """A clipped sum with a clip of one's own."""

    def clipped_sum(network: Network, x: Tensor, inputs: Tensor, labels: Tensor, C: float) -> Tensor:
        replica = network.replica()
        total = torch.zeros_like(x)
        for n in range(len(labels)):
            loss = cross_entropy(replica.load(x)(inputs[n : n + 1]), labels[n : n + 1])
            gradients = list(torch.autograd.grad(loss, replica.parameters))
            total += torch.cat([g.reshape(-1) for g in clip(gradients, C)])
        return total

    return clipped_sum


def norm(gradients: list[Tensor]) -> float:
    return float(torch.cat([g.reshape(-1) for g in gradients]).double().norm())


def clip_that_misses_nan(gradients: list[Tensor], C: float) -> list[Tensor]:
    return [g / max(1.0, norm(gradients) / C) for g in gradients]  # max(1.0, nan) is 1.0


def clip_that_misses_a_layer(gradients: list[Tensor], C: float) -> list[Tensor]:
    factor = 1 / max(1.0, norm(gradients[2:]) / C)
    return [*gradients[:2], *(g * factor for g in gradients[2:])]


@pytest.mark.parametrize("clip", [clip_that_misses_nan, clip_that_misses_a_layer])
def test_clip_with_a_hole(monkeypatch: pytest.MonkeyPatch, clip: Any) -> None:
    module = sys.modules["pdsl.train"]  # `pdsl.train` by name is the function
    monkeypatch.setattr(module, "choose_per_sample", lambda *_: per_record(clip))
    assert "sensitivity" in failed(findings())


def test_fixed_batches_accounted_as_poisson(monkeypatch: pytest.MonkeyPatch) -> None:
    def fixed(self: Batches, agent: int, round: int, step: int = 0) -> Tensor:
        draws = self.streams.uniforms(self.sizes[agent], "batch", agent, round)
        return torch.from_numpy(np.sort(np.argsort(draws)[: self.settings.size]))

    monkeypatch.setattr(Batches, "draw", fixed)
    assert "sampler" in failed(findings())


def test_own_message_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PDSL, "releases", lambda self, members: Release(members - 1))
    assert {"messages counted", "ε computed again"} <= failed(findings())


def edit(path: Path, change: Callable[[Values], None]) -> None:
    stored = json.loads(path.read_text())
    change(stored)
    path.write_text(json.dumps(stored))


def set_sigma(stored: Values) -> None:
    for agent in stored["agents"]:
        agent["entries"][0]["sigma"] *= 2


EDITS: dict[str, Callable[[Values], None]] = {
    "less spent": lambda s: s["agents"][1].update(epsilon=0.1),
    "more noise": set_sigma,
    "fewer rounds": lambda s: s["agents"][0]["entries"][0].update(last=3),
    "fewer messages": lambda s: s["agents"][0]["entries"][0].update(messages=1),
    "smaller sensitivity": lambda s: s["agents"][0]["entries"][0].update(sensitivity=1e-3),
    "smaller rate": lambda s: s["agents"][0]["entries"][0].update(rate=0.01),
    "other peers": lambda s: s["agents"][2]["edges"].pop(),
    "larger budget spent": lambda s: s.update(budget=0.5),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audit") / "run"
    execute(*start(validated(settings(), "test"), path), lambda: None, lambda row: None, lambda text: None)
    return path


def test_a_run_directory_passes(run: Path) -> None:
    report = audit_run(run, count=0, rounds=1)
    assert report.verdict is Verdict.PASS, report.findings
    assert "total ε" in report.claim


@pytest.mark.parametrize("change", EDITS.values(), ids=EDITS.keys())
def test_ledger_edited_by_hand(run: Path, change: Callable[[Values], None]) -> None:
    ledger = run / "ledger.json"
    original = ledger.read_bytes()
    try:
        edit(ledger, change)
        assert audit_run(run, count=0, rounds=1).verdict is Verdict.FAIL
    finally:
        ledger.write_bytes(original)


def test_without_noise_nothing_can_be_said() -> None:
    e = prepare(validated(settings(privacy={"mode": "none", "target_epsilon": None}), "test"))
    assert audit(e, None, [], [])[0].verdict is Verdict.INCONCLUSIVE


def test_canaries_tell_and_do_not_tell_too_much(run: Path) -> None:
    report = audit_run(run, count=40, rounds=30)
    (finding,) = (f for f in report.findings if f.check == "canaries")
    assert finding.verdict is Verdict.PASS, finding.detail


def test_canaries_refute_a_false_claim() -> None:
    """With next to no noise every guess is right, which no run with ε = 2 admits."""
    e = prepare(validated(settings(privacy={"sigma": 1e-6}), "test"))
    found = canaries(e, agent=0, count=90, rounds=25)
    assert found.epsilon > 2
    assert canary_finding(found, claimed=2.0).verdict is Verdict.FAIL


def test_lower_bound_of_guesses() -> None:
    """All 2·20 guesses right refute ε when (e^ε/(1+e^ε))^40 < 0.05: ε < 2.55."""
    coins = np.arange(60) >= 30
    assert lower_bound(coins.astype(float), coins) == pytest.approx(
        np.log(0.05 ** (1 / 40) / (1 - 0.05 ** (1 / 40))), abs=0.02
    )
    assert lower_bound(np.random.default_rng(0).random(60), coins) < 0.6


class TwoOnOneBatch(DPSGD):
    """Two gradients on one batch, said to be on a batch each."""

    def step(self, state: Any, r: Round) -> Any:
        half = r.own_noisy_gradients(state.x) + r.own_noisy_gradients(state.x, nth=1)
        return type(state)(r.engine.mix(state.x - half / 2)), {}

    def releases(self, members: int) -> Release:
        return Release(messages=1, steps=2)


class Bare(DPSGD):
    """Makes a noisy gradient, and uses another."""

    def step(self, state: Any, r: Round) -> Any:
        r.own_noisy_gradients(state.x)
        bare = r.owners.gradients(r.t, torch.arange(len(state.x)), state.x)
        return type(state)(r.engine.mix(state.x - bare)), {}


def test_messages_on_one_batch_claimed_to_be_on_two() -> None:
    assert failed(findings(algorithm=TwoOnOneBatch())) == {"messages counted", "ε computed again"}


def test_a_gradient_used_without_its_noise() -> None:
    assert failed(findings(algorithm=Bare())) == {"every gradient gets noise"}
