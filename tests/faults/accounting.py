"""Planted faults: accounting."""

import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from decimal import ROUND_FLOOR
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdsl.algorithms import PDSL, Round
from pdsl.algorithms.d_psgd import DPSGD
from pdsl.algorithms.def_kt import DefKT
from pdsl.algorithms.dfedsam import DFedSAM
from pdsl.algorithms.net_fleet import NetFleet
from pdsl.auditing import audit_run
from pdsl.config import validate
from pdsl.peer.ledger import PeerLedger
from pdsl.privacy import Ledger, Mechanism, Noise, Release, accounting, calibration
from pdsl.privacy import noise as mechanism
from pdsl.privacy.metering import Meter
from pdsl.privacy.seal import RunSeal
from pdsl.privacy.statement import statement
from pdsl.runs import runner
from pdsl.runs.runner import execute, resume, start
from pdsl.utils import format as rounded
from pdsl.utils.errors import PdslError
from tests.faults.base import (
    ACCOUNTING,
    CHARGED_FIRST,
    COUNTS,
    EPSILON,
    LEDGER,
    LOCAL_STEPS,
    NO_RESET,
    NOT_PRIVATE,
    OWN_ONLY,
    PAYS_AGAIN,
    REFUSED,
    ROWS,
    STAR,
    TWO_ON_A_BATCH,
    Experiment,
    Values,
    experiment,
    failed,
    fault,
    substitute,
    trainer,
)
from tests.faults.clean_data import both

# 8 accounting


@fault(ACCOUNTING, EPSILON, privacy={"target_epsilon": None, "noise_multiplier": 2.0})
def root_k_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """k messages on one batch are charged like one."""
    monkeypatch.setattr(Mechanism, "noise_multiplier", property(lambda m: m.sigma / m.sensitivity))


@fault(ACCOUNTING, EPSILON, **STAR)
def noise_averaged_over_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of messages with a σ each, the mean σ is charged."""
    mean = property(lambda m: sum(m.sigmas) / len(m.sigmas) / (math.sqrt(m.messages) * m.sensitivity))
    monkeypatch.setattr(Mechanism, "noise_multiplier", mean)


def spent_as(monkeypatch: pytest.MonkeyPatch, change: Callable[[Mechanism, int], tuple[Mechanism, int]]) -> None:
    honest = accounting._parts
    substitute(monkeypatch, accounting, "_parts", lambda spent: honest(tuple(change(m, n) for m, n in spent)))


@fault(ACCOUNTING, EPSILON, **LOCAL_STEPS)
def steps_forgotten_in_the_composition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local steps are charged like one."""
    spent_as(monkeypatch, lambda m, n: (replace(m, steps=1), n))


@fault(ACCOUNTING, EPSILON)
def one_round_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rounds are charged like one."""
    spent_as(monkeypatch, lambda m, n: (m, min(n, 1)))


@fault(ACCOUNTING, EPSILON)
def messages_amplified_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """k messages on one batch are charged as if each had a batch of its own."""
    spent_as(monkeypatch, lambda m, n: (replace(m, messages=1, sigma_scale=(), steps=m.messages * m.steps), n))


@fault(ACCOUNTING, EPSILON)
def rate_squared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The accountant is told the square of the rate."""
    spent_as(monkeypatch, lambda m, n: (replace(m, rate=None if m.rate is None else m.rate**2), n))


@fault(ACCOUNTING, EPSILON)
def delta_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round may fail with δ, so that all of them fail with T times δ."""
    honest = accounting._checked
    substitute(monkeypatch, accounting, "_checked", lambda delta: 6 * honest(delta))


@fault(ACCOUNTING, EPSILON)
def epsilon_two_per_mille_low(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ε is stated 0.2 % below what was spent."""
    honest = accounting._total
    substitute(monkeypatch, accounting, "_total", lambda parts, delta: 0.998 * honest(parts, delta))


@fault(ACCOUNTING, EPSILON)
def epsilon_rounded_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ε is shown it is rounded down."""
    monkeypatch.setattr(rounded, "ROUND_CEILING", ROUND_FLOOR)


@fault(ACCOUNTING, EPSILON)
def row_states_the_round_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row states the ε of the round before it."""
    honest = Ledger.up_to
    monkeypatch.setattr(Ledger, "up_to", lambda self, t: honest(self, t - 1))


@fault(ACCOUNTING, EPSILON, **STAR, privacy={"target_epsilon": None, "sigma": 0.3})
def one_agents_epsilon_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last agent's ε is stated for every agent."""
    honest: Any = Ledger.epsilon_per_agent
    monkeypatch.setattr(Ledger, "epsilon_per_agent", property(lambda ledger: honest.fget(ledger)[-1:] * 4))


@fault(ACCOUNTING, EPSILON, **STAR, privacy={"target_epsilon": None, "sigma": 0.3})
def least_instead_of_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows state the ε of the agent that has spent least."""
    monkeypatch.setattr(Ledger, "epsilon", property(lambda ledger: min(ledger.epsilon_per_agent)))


@fault(ACCOUNTING, EPSILON, rounds=10, privacy={"target_epsilon": 1.0, "noise_multiplier": 0.8})
def budget_not_enforced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds go on beyond the budget."""
    monkeypatch.setattr(Ledger, "within_budget", property(lambda ledger: True))


@fault(ACCOUNTING, LEDGER)
def sensitivity_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Δ is half of what a record can do."""
    honest = calibration.sensitivity
    substitute(monkeypatch, calibration, "sensitivity", lambda s, batches, agent: honest(s, batches, agent) / 2)


@fault(ACCOUNTING, LEDGER, batch={"sampler": "fixed"})
def a_replaced_record_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fixed batches, where a record is replaced, Δ is that of one added."""
    honest = calibration.sensitivity
    substitute(monkeypatch, calibration, "sensitivity", lambda s, batches, agent: honest(s, batches, agent) / 2)


@fault(ACCOUNTING, LEDGER, privacy={"clipping": "batch", "noise_multiplier": 3.0})
def batch_clip_at_half_its_sensitivity(monkeypatch: pytest.MonkeyPatch) -> None:
    """With whole-batch clipping Δ is C instead of 2 C."""
    honest = calibration.sensitivity
    substitute(monkeypatch, calibration, "sensitivity", lambda s, batches, agent: honest(s, batches, agent) / 2)


@fault(ACCOUNTING, LEDGER)
def lattice_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Δ does not have what rounding to the lattice adds."""
    substitute(monkeypatch, calibration, "rounded_sensitivity", lambda delta, sigma, d: delta)


@fault(ACCOUNTING, LEDGER)
def dimension_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Δ has what rounding adds to one number, not to all of a message."""
    honest = mechanism.rounded_sensitivity
    substitute(monkeypatch, calibration, "rounded_sensitivity", lambda delta, sigma, d: honest(delta, sigma, 1))


@fault(ACCOUNTING, LEDGER)
def another_delta_in_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger is opened with ten times the δ that was asked for."""
    honest = Experiment.open_ledger
    monkeypatch.setattr(Experiment, "open_ledger", lambda e: replace(honest(e), delta=1e-4))


@fault(ACCOUNTING, LEDGER, rounds=12)
def every_tenth_round_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tenth round is not charged."""
    honest = Ledger.charge
    monkeypatch.setattr(Ledger, "charge", lambda self, t, of: self if t % 10 == 0 else honest(self, t, of))


@fault(ACCOUNTING, LEDGER)
def last_round_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last round is not charged."""
    honest = Ledger.charge
    monkeypatch.setattr(Ledger, "charge", lambda self, t, of: self if t == 6 else honest(self, t, of))


@fault(ACCOUNTING, LEDGER)
def one_agent_is_not_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agent 3 is charged for the first round only."""
    honest = Ledger.charge

    def charge(self: Ledger, t: int, of: Sequence[Mechanism]) -> Ledger:
        new = honest(self, t, of)
        return new if t == 1 else replace(new, accounts=(*new.accounts[:3], self.accounts[3]))

    monkeypatch.setattr(Ledger, "charge", charge)


@fault(ACCOUNTING, LEDGER)
def charged_with_more_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger is charged with twice the σ that is used."""
    honest = Ledger.charge

    def charge(self: Ledger, t: int, of: Sequence[Mechanism]) -> Ledger:
        return honest(self, t, [replace(m, sigma=2 * m.sigma) for m in of])

    monkeypatch.setattr(Ledger, "charge", charge)


@fault(ACCOUNTING, REFUSED)
def own_message_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent's message to itself is not declared."""
    monkeypatch.setattr(PDSL, "releases", lambda self, members: Release(members - 1))


def switch_off_the_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Meter, "_need", lambda self, holds, problem: None)


@fault(ACCOUNTING, COUNTS)
def own_message_not_counted_without_a_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent's message to itself is not declared, and the meter is switched off."""
    own_message_not_counted(monkeypatch)
    switch_off_the_meter(monkeypatch)


@fault(ACCOUNTING, REFUSED, **LOCAL_STEPS)
def steps_not_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two local steps are declared as one."""
    monkeypatch.setattr(NetFleet, "releases", lambda self, members: Release(1))


@fault(ACCOUNTING, COUNTS, **LOCAL_STEPS)
def steps_not_declared_without_a_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two local steps are declared as one, and the meter is switched off."""
    steps_not_declared(monkeypatch)
    switch_off_the_meter(monkeypatch)


@fault(ACCOUNTING, REFUSED, **TWO_ON_A_BATCH)
def two_messages_declared_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two gradients on a batch are declared as one."""
    monkeypatch.setattr(DefKT, "releases", lambda self, members: Release(1, self.local_steps))


@fault(ACCOUNTING, REFUSED, algorithm={"name": "dfedsam"})
def two_on_a_batch_declared_as_two_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two gradients on one batch are declared as on a batch each."""
    monkeypatch.setattr(DFedSAM, "releases", lambda self, members: Release(1, 2 * self.local_steps))


def third_gradient(self: DefKT, state: Any, r: Round) -> tuple[Any, Values]:
    new, facts = HONEST_DEF_KT(self, state, r)
    return replace(new, x=new.x - 0.1 * r.own_noisy_gradients(new.x, step=0, nth=2)), facts


HONEST_DEF_KT = DefKT.step


@fault(ACCOUNTING, REFUSED, **TWO_ON_A_BATCH)
def undeclared_third_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third gradient on a batch is not declared."""
    monkeypatch.setattr(DefKT, "step", third_gradient)


@fault(ACCOUNTING, COUNTS, **TWO_ON_A_BATCH)
def undeclared_third_gradient_without_a_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third gradient on a batch is not declared, and the meter is switched off."""
    undeclared_third_gradient(monkeypatch)
    switch_off_the_meter(monkeypatch)


@fault(ACCOUNTING, COUNTS, **OWN_ONLY)
def bare_gradient_without_a_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient is taken besides, without noise and without a use, and the meter is switched off."""

    def step(self: DPSGD, state: Any, r: Round) -> tuple[Any, Values]:
        r.local.gradients(r.t, torch.tensor(r.engine.agents), state.x)
        _, noisy = both(r, state.x)
        return type(state)(r.engine.mix(state.x - r.learning_rate * noisy)), {}

    monkeypatch.setattr(DPSGD, "step", step)
    switch_off_the_meter(monkeypatch)


@fault(ACCOUNTING, COUNTS, **OWN_ONLY, rounds=20)
def an_undeclared_gradient_in_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """In round 11 of 20 a second message is made that is not declared, and the meter is switched off."""

    def step(self: DPSGD, state: Any, r: Round) -> tuple[Any, Values]:
        noisy = r.own_noisy_gradients(state.x)
        if r.t == 11:
            noisy = noisy + r.own_noisy_gradients(state.x, nth=1)
        return type(state)(r.engine.mix(state.x - r.learning_rate * noisy)), {}

    monkeypatch.setattr(DPSGD, "step", step)
    switch_off_the_meter(monkeypatch)


@fault(ACCOUNTING, CHARGED_FIRST, examine=lambda values: sent_before_charged(values), rounds=3)
def charged_after_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round is charged when it is over."""
    honest = trainer.rounds

    def late(
        e: Any,
        state: Any = None,
        ledger: Any = None,
        after: int = 0,
        publish: Callable[[Ledger], None] = lambda ledger: None,
    ) -> Iterator[Any]:
        pending: list[Ledger] = []
        for step in honest(e, state, ledger, after, pending.append):
            publish(pending.pop())
            yield step

    substitute(monkeypatch, trainer, "rounds", late)


def sent_before_charged(values: Values) -> list[str]:
    """The ledger is announced, with the round in it, before the round's first noise is drawn."""
    charge = 0
    early: list[int] = []
    e = experiment.prepare(validate(values, "test"))

    def publish(ledger: Ledger) -> None:
        nonlocal charge
        charge = ledger.rounds

    honest = Noise.add
    with pytest.MonkeyPatch.context() as monkeypatch:

        def add(self: Noise, t: int, *of: Any) -> Tensor:
            early.extend([t] * (t > charge))
            return honest(self, t, *of)

        monkeypatch.setattr(Noise, "add", add)
        list(trainer.rounds(e, publish=publish))
    return [CHARGED_FIRST] * bool(early)


@fault(ACCOUNTING, PAYS_AGAIN, examine=lambda values: free_incarnation())
def a_new_secret_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that runs a round again under a new secret is charged once."""
    honest = PeerLedger.charge

    def charge(self: PeerLedger, t: int, generation: int, *of: Any) -> PeerLedger:
        return honest(self, t, 1, *of)

    monkeypatch.setattr(PeerLedger, "charge", charge)


def free_incarnation() -> list[str]:
    """What is sent once more under another secret is charged besides."""
    released = Mechanism(1.0, 0.1, 3, 1, 0.1)
    account = PeerLedger(1e-5, 8.0, released, PDSL(), 5, 0, (0, 1, 2), {})
    once = account.charge(1, 1, frozenset({1, 2}))
    return [PAYS_AGAIN] * (once.charge(1, 2, frozenset({1, 2})).epsilon <= once.epsilon)


@fault(ACCOUNTING, NOT_PRIVATE, examine=lambda values: called_private(values), rounds=1)
def seeded_noise_is_called_private(monkeypatch: pytest.MonkeyPatch) -> None:
    """The statement of a seeded run does not say that its noise is no secret."""
    monkeypatch.setattr(sys.modules["pdsl.privacy.statement"], "SEEDED", "private")


def called_private(values: Values) -> list[str]:
    e = experiment.prepare(validate(values, "test"))
    (step,) = trainer.rounds(e)
    said = statement(e.config.privacy, step.ledger, e.mechanisms)
    return [NOT_PRIVATE] * ("not private: seeded noise" not in said)


@fault(
    ACCOUNTING,
    ROWS,
    examine=lambda values: audited_after_a_break(values),
    rounds=4,
    privacy={"target_epsilon": None, "noise_multiplier": 1.0},
)
def rounds_counted_anew_after_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is taken up again counts its noise's rounds from 1: the noise of the first rounds comes again."""
    honest, add = trainer.rounds, Noise.add
    before = {"rounds": 0}

    def counting(e: Any, state: Any = None, ledger: Any = None, after: int = 0, *of: Any) -> Iterator[Any]:
        before["rounds"] = after
        yield from honest(e, state, ledger, after, *of)
        before["rounds"] = 0

    substitute(monkeypatch, trainer, "rounds", counting)
    monkeypatch.setattr(Noise, "add", lambda self, t, *of: add(self, t - before["rounds"], *of))


def audited_after_a_break(values: Values) -> list[str]:
    """The checks that fail, of a run of 4 rounds that is taken up again and extended to 8."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        for attempt in (lambda: start(validate(values, "test"), path), lambda: resume(path, ["rounds=8"])):
            execute(*attempt())
        return failed(audit_run(path, canaries=0).findings)


@fault(ACCOUNTING, NO_RESET, examine=lambda values: ledger_reset(values), rounds=3, checkpoint_every=2)
def a_lost_ledger_is_opened_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose ledger is lost goes on with an empty one."""
    substitute(monkeypatch, runner, "load_ledger", lambda e, run, done: None)


def ledger_reset(values: Values) -> list[str]:
    """A run whose ledger is lost is not continued."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"

        def go(e: Any, run: Any) -> None:
            execute(e, run)

        go(*start(validate(values, "test"), path))
        (path / "ledger.json").unlink()
        try:
            go(*resume(path, ["rounds=4"]))
        except PdslError:
            return []
    return [NO_RESET]


@fault(ACCOUNTING, ROWS, examine=lambda values: audited_with_another_ledger(values), privacy={"randomness": "system"})
def an_edited_ledger_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seal of the ledger is not looked at, and somebody has doubled the σ in it."""
    monkeypatch.setattr(RunSeal, "verify", lambda self, ledger, text, where: None)


def audited_with_another_ledger(values: Values) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        execute(*start(validate(values, "test"), path))
        stored = json.loads((path / "ledger.json").read_text())
        for agent in stored["agents"]:
            agent["entries"][0]["sigma"] *= 2
        (path / "ledger.json").write_text(json.dumps(stored))
        return failed(audit_run(path, canaries=0).findings)
