"""Runs with poisoned models: attacks, robust mixing, and the state that a resumed run needs."""

import numpy as np
import pytest
import torch

from pdsl.attacks import AttackedEngine, shift_models
from pdsl.config import Config, load
from pdsl.engine import LocalEngine
from pdsl.training.evaluation import evaluate
from pdsl.training.experiment import prepare
from pdsl.training.trainer import CompletedRound, restore_state, rounds, state_tensors
from pdsl.utils.errors import PdslError
from pdsl.utils.random import Streams
from pdsl.utils.workers import Workers

DIGITS = ["data.name=digits", "graph.kind=full", "graph.agents=6", "engine.workers=1", "evaluate_every=50"]


def run(*assignments: str, rounds_run: int = 12) -> tuple[list[float], CompletedRound]:
    """Accuracy of each agent that is honest, or honest in the attacked runs, and the last round."""
    e = prepare(load(None, [*DIGITS, f"rounds={rounds_run}", *assignments]))
    *_, last = rounds(e)
    with Workers(1) as workers:
        scores = evaluate(e, last.state.x, e.engine.mean(last.state.x), workers).scores
    liars = prepare(load(None, [*DIGITS, "attack.reversed_model=1"])).attackers
    return [score for agent, score in enumerate(scores) if agent not in liars], last


def test_attackers_send_false_rows_and_keep_their_own() -> None:
    e = prepare(load(None, [*DIGITS, "attack.reversed_model=1", "attack.constant_model=1", "attack.copied_model=1"]))
    kinds = {kind: agent for agent, kind in e.attackers.items()}
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((6, 5), dtype=np.float32))
    engine = AttackedEngine.wrap(LocalEngine(e.graph), e.attackers, Streams(0))
    sent = engine.deliver(x)[:6]  # to agent 0, by sender
    assert torch.equal(sent[kinds["reversed-model"]], -1000 * x[kinds["reversed-model"]])
    constant = sent[kinds["constant-model"]]
    assert constant.norm().item() == pytest.approx(100, rel=1e-5)
    assert torch.equal(engine.deliver(2 * x)[kinds["constant-model"]], constant)
    first = 0 if kinds["copied-model"] else 1
    assert torch.equal(sent[kinds["copied-model"]], x[first])
    mixed, honest = engine.mix(x), [agent for agent in range(6) if agent not in e.attackers]
    for agent in honest:
        torch.testing.assert_close(mixed[agent], sent.mean(0), rtol=1e-4, atol=1e-3)
    assert torch.equal(mixed[kinds["reversed-model"]], x[kinds["reversed-model"]])


def test_drifting_models_are_shifted_by_the_same_vector_in_every_round() -> None:
    x = torch.zeros(3, 50)
    once = shift_models(x, range(3), {1: "drifting-model"}, 0.7, Streams(1))
    assert once[[0, 2]].eq(0).all()
    assert once[1].norm().item() == pytest.approx(0.7, rel=1e-5)
    torch.testing.assert_close(shift_models(once, range(3), {1: "drifting-model"}, 0.7, Streams(1)), 2 * once)


def test_robust_mixing_without_liars_has_the_models_of_plain_mixing() -> None:
    assert torch.equal(run()[1].state.x, run("mixing.robust=true")[1].state.x)


@pytest.mark.parametrize("attack", ["reversed_model", "constant_model"])
def test_a_poisoned_model_ruins_plain_mixing_and_not_robust_mixing(attack: str) -> None:
    clean, _ = run()
    plain, _ = run(f"attack.{attack}=1")
    robust, last = run(f"attack.{attack}=1", "mixing.robust=true")
    assert np.mean(plain) < 0.5 < np.mean(clean)
    assert np.mean(robust) > np.mean(clean) - 0.05
    assert last.row["implausible"]


def resumed(config: Config, stop: int) -> CompletedRound:
    """The last round of a run that was stopped and continued from its checkpoint."""
    first = next(r for r in rounds(prepare(config)) if r.t == stop)
    state = restore_state(config, state_tensors(first.state))
    *_, last = rounds(prepare(config), state, first.ledger, after=stop)
    return last


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_a_resumed_run_has_the_same_bits(decay: float) -> None:
    settings = ["mixing.robust=true", "attack.drifting_model=2", "attack.drift=2", "graph.kind=ring", "rounds=6"]
    config = load(None, [*DIGITS, *settings, f"ema_decay={decay}"])
    *_, last = rounds(prepare(config))
    again = resumed(config, 3)
    expected, found = state_tensors(last.state), state_tensors(again.state)
    assert expected.keys() == found.keys() >= {"x", "mixing.history"}
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_an_algorithm_without_gossip_is_refused() -> None:
    e = prepare(load(None, [*DIGITS, "algorithm.name=def-kt", "mixing.robust=true"]))
    with pytest.raises(PdslError, match=r"does not mix models by gossip.*set mixing\.robust=false"):
        next(rounds(e))
