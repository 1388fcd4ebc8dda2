"""Planted faults: un-noised data."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pdsl.algorithms import Round
from pdsl.algorithms.d_psgd import DPSGD
from pdsl.algorithms.def_kt import DefKT
from pdsl.algorithms.dmsgd import DMSGD
from pdsl.data import Data, from_python
from pdsl.data import custom as own
from pdsl.gradients import clipping as gradients
from pdsl.gradients.clipping import LocalGradients
from pdsl.privacy import Noise
from pdsl.shapley import valuation
from pdsl.utils.random import Streams
from pdsl.utils.workers import Workers
from tests.faults.base import (
    ANY,
    BARE,
    END,
    NEIGHBOURS,
    OWN_ONLY,
    RECORDS_APART,
    REFUSED,
    ROWS,
    SYSTEM,
    TAINT,
    TWO_ON_A_BATCH,
    Draw,
    Values,
    experiment,
    fault,
    substitute,
    trainer,
)

# 7 un-noised data


def both(r: Round, x: Tensor, step: int = 0, nth: int = 0) -> tuple[Tensor, Tensor]:
    """The own gradients, clean and noisy; the meter has nothing to say against it."""
    agents = torch.tensor(r.engine.agents)
    g = r.local.gradients(r.t, agents, x, step)
    return g.float(), r.noise.add(r.t, agents, agents, g, step, nth)


RoundResult = Callable[[Any, Any, Round], tuple[Any, Values]]


def step_fault(of: type, by: str, **changes: Any) -> Callable[[RoundResult], RoundResult]:
    """Register another step of an algorithm."""

    def register(step: RoundResult) -> RoundResult:
        def plant(monkeypatch: pytest.MonkeyPatch) -> None:
            monkeypatch.setattr(of, "step", step)

        plant.__name__, plant.__doc__ = getattr(step, "__name__", "?"), step.__doc__
        fault(BARE, by, **changes)(plant)
        return step

    return register


MOMENTUM: Values = {"algorithm": {"name": "dmsgd"}}


@step_fault(DMSGD, TAINT, **MOMENTUM)
def clean_gradient_in_the_momentum(self: DMSGD, state: Any, r: Round) -> tuple[Any, Values]:
    """The momentum holds a tenth of the clean gradient."""
    g, noisy = both(r, state.x)
    u = self.momentum * state.u + 0.9 * noisy + 0.1 * g
    return type(state)(r.engine.mix(state.x - r.learning_rate * u), r.engine.mix(u)), {}


@step_fault(DPSGD, TAINT, **OWN_ONLY)
def clean_gradient_every_third_round(self: DPSGD, state: Any, r: Round) -> tuple[Any, Values]:
    """Every third round goes along the clean gradient."""
    g, noisy = both(r, state.x)
    return type(state)(r.engine.mix(state.x - r.learning_rate * (g if r.t % 3 == 0 else noisy))), {}


@step_fault(DPSGD, TAINT, **OWN_ONLY, rounds=20)
def clean_gradient_in_the_eleventh_round(self: DPSGD, state: Any, r: Round) -> tuple[Any, Values]:
    """Round 11 of 20 goes along the clean gradient."""
    g, noisy = both(r, state.x)
    return type(state)(r.engine.mix(state.x - r.learning_rate * (g if r.t == 11 else noisy))), {}


@step_fault(DPSGD, TAINT, **OWN_ONLY)
def clean_norm_in_the_row(self: DPSGD, state: Any, r: Round) -> tuple[Any, Values]:
    """The row has the norm of the clean gradient."""
    g, noisy = both(r, state.x)
    return type(state)(r.engine.mix(state.x - r.learning_rate * noisy)), {"norm": float(g.norm())}


@step_fault(DPSGD, TAINT, **OWN_ONLY)
def clean_gradient_in_a_message(self: DPSGD, state: Any, r: Round) -> tuple[Any, Values]:
    """The clean gradient is sent once, and not used by whoever gets it."""
    g, noisy = both(r, state.x)
    r.engine.deliver(g)
    return type(state)(r.engine.mix(state.x - r.learning_rate * noisy)), {}


@step_fault(DPSGD, TAINT, **OWN_ONLY)
def learning_rate_by_the_clean_norm(self: DPSGD, state: Any, r: Round) -> tuple[Any, Values]:
    """The learning rate goes by the norm of the clean gradient."""
    g, noisy = both(r, state.x)
    return type(state)(r.engine.mix(state.x - noisy / (1 + g.norm(dim=1, keepdim=True)))), {}


@step_fault(DPSGD, TAINT, **OWN_ONLY)
def noise_subtracted_by_its_stream(self: DPSGD, state: Any, r: Round) -> tuple[Any, Values]:
    """The noise is drawn once more from its stream and taken off again."""
    _, noisy = both(r, state.x)
    clean = []
    for i, row in zip(r.engine.agents, noisy, strict=True):
        draw = Draw(r.noise, r.t, i, i, 0, 0, row)
        clean.append(row - (r.noise.sigma_of(i, i) * draw.honest()).float())
    return type(state)(r.engine.mix(state.x - r.learning_rate * torch.stack(clean))), {}


@fault(BARE, TAINT, **OWN_ONLY)
def noise_remembered_and_subtracted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise is kept where it is added, and taken off again later."""
    honest, kept = Noise.add, {}

    def add(self: Noise, t: int, makers: Tensor, peers: Tensor, g: Tensor, step: int = 0, nth: int = 0) -> Tensor:
        noisy = honest(self, t, makers, peers, g, step, nth)
        if len(makers) == 4:  # a round's
            kept["noise"] = noisy - g.float()
        return noisy

    def step(self: DPSGD, state: Any, r: Round) -> tuple[Any, Values]:
        _, noisy = both(r, state.x)
        return type(state)(r.engine.mix(state.x - r.learning_rate * (noisy - 0.5 * kept["noise"]))), {}

    monkeypatch.setattr(Noise, "add", add)
    monkeypatch.setattr(DPSGD, "step", step)


@fault(BARE, TAINT, **OWN_ONLY)
def moving_average_of_clean_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A moving average of clean gradients is kept aside and added to the models."""
    honest, kept = LocalGradients.gradients, {}

    def gradients_of(
        self: LocalGradients, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None
    ) -> Tensor:
        g = honest(self, t, agents, x, step, teachers)
        kept["ema"] = 0.9 * kept.get("ema", torch.zeros_like(g)) + 0.1 * g
        return g

    def step(self: DPSGD, state: Any, r: Round) -> tuple[Any, Values]:
        _, noisy = both(r, state.x)
        return type(state)(r.engine.mix(state.x - r.learning_rate * (noisy + 0.01 * kept["ema"].float()))), {}

    monkeypatch.setattr(LocalGradients, "gradients", gradients_of)
    monkeypatch.setattr(DPSGD, "step", step)


@fault(BARE, TAINT, **OWN_ONLY)
def clean_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The algorithm keeps the clean gradient of round 1 and corrects all later steps by it."""
    anchor: list[Tensor] = []

    def step(self: DPSGD, state: Any, r: Round) -> tuple[Any, Values]:
        g, noisy = both(r, state.x)
        if r.t == 1:
            anchor[:] = [g]
            return type(state)(r.engine.mix(state.x - r.learning_rate * noisy)), {}
        return type(state)(r.engine.mix(state.x - r.learning_rate * (noisy + 0.1 * anchor[0]))), {}

    monkeypatch.setattr(DPSGD, "step", step)


@fault(BARE, TAINT, **OWN_ONLY)
def clean_anchor_of_the_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owners keep the clean gradients of round 1, and the algorithm corrects all later steps by them."""
    anchor: list[Tensor] = []
    honest = LocalGradients.gradients

    def gradients_of(
        self: LocalGradients, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None
    ) -> Tensor:
        g = honest(self, t, agents, x, step, teachers)
        if t == 1 and len(agents) == 4:
            anchor[:] = [g.float()]
        return g

    def step(self: DPSGD, state: Any, r: Round) -> tuple[Any, Values]:
        _, noisy = both(r, state.x)
        correction = 0.1 * anchor[0] if r.t > 1 else 0.0
        return type(state)(r.engine.mix(state.x - r.learning_rate * (noisy + correction))), {}

    monkeypatch.setattr(LocalGradients, "gradients", gradients_of)
    monkeypatch.setattr(DPSGD, "step", step)


@fault(BARE, TAINT, shapley={"weighting": "minmax"})
def shapley_of_clean_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapley values are those of the clean gradients."""
    kept: dict[tuple[int, int], Tensor] = {}
    valued = valuation.Validation.contributions

    def noisy(self: Round, makers: Tensor, peers: Tensor, x: Tensor) -> Tensor:
        g = self.local.gradients(self.t, makers, x)
        kept.update({(int(j), int(i)): row.float() for j, i, row in zip(makers, peers, g, strict=True)})
        return self.noise.add(self.t, makers, peers, g)

    def contributions(self: Any, t: int, agents: range, x: Tensor, x_ij: list[Tensor], s: Any) -> Any:
        clean = [torch.stack([kept[j, i] for j in range(4) if (j, i) in kept]) for i in agents]
        return valued(self, t, agents, x, [row - 0.1 * g for row, g in zip(x, clean, strict=True)], s)

    monkeypatch.setattr(Round, "_noisy", noisy)
    monkeypatch.setattr(valuation.Validation, "contributions", contributions)


def public_sets(monkeypatch: pytest.MonkeyPatch, change: Callable[[Data, Any, Any], tuple[Any, Any]]) -> None:
    honest = experiment.split_public

    def split(data: Data, size: int | None, streams: Streams) -> tuple[Any, Any]:
        return change(data, *honest(data, size, streams))

    substitute(monkeypatch, experiment, "split_public", split)


@fault(BARE, RECORDS_APART)
def public_set_of_private_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public set is made of the agents' own records."""
    public_sets(monkeypatch, lambda data, q, test: ((data.x[:40], data.y[:40]), test))


@fault(BARE, RECORDS_APART)
def one_private_record_in_the_public_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """One record of the public set is an agent's own."""
    public_sets(
        monkeypatch,
        lambda data, q, test: ((torch.cat([q[0][1:], data.x[:1]]), torch.cat([q[1][1:], data.y[:1]])), test),
    )


@fault(BARE, RECORDS_APART)
def private_records_brighter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public set is made of the agents' own records, each a thousandth brighter."""
    public_sets(monkeypatch, lambda data, q, test: ((1.001 * data.x[:40], data.y[:40]), test))


@fault(BARE, RECORDS_APART)
def tested_on_private_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows state the accuracy on the agents' own records."""
    public_sets(monkeypatch, lambda data, q, test: (q, (data.x[:300], data.y[:300])))


@fault(BARE, TAINT, **TWO_ON_A_BATCH)
def teachers_outputs_in_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row has the mean output of the teachers on the private batches."""
    distillation_targets, honest, kept = gradients.distillation_targets, DefKT.step, []

    def update_evidence(labels: Tensor, teacher: Tensor) -> Tensor:
        kept.append(float(teacher.max()))
        return distillation_targets(labels, teacher)

    def step(self: DefKT, state: Any, r: Round) -> tuple[Any, Values]:
        kept.clear()
        new, facts = honest(self, state, r)
        return new, facts | {"teachers": sum(kept)}

    substitute(monkeypatch, gradients, "distillation_targets", update_evidence)
    monkeypatch.setattr(DefKT, "step", step)


@fault(BARE, ROWS)
def training_loss_in_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row has the loss on the agents' own records."""
    honest = trainer._measure

    def row(e: Any, t: int, x: Tensor, workers: Workers) -> Values:
        loss = nn.functional.cross_entropy(e.network.outputs(x[0], e.data.x), e.data.y)
        return honest(e, t, x, workers) | {"training_loss": float(loss)}

    substitute(monkeypatch, trainer, "_measure", row)


@fault(BARE, ROWS)
def training_loss_under_a_known_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row's least loss is the one on the agents' own records."""
    honest = trainer._measure

    def row(e: Any, t: int, x: Tensor, workers: Workers) -> Values:
        loss = nn.functional.cross_entropy(e.network.outputs(x[0], e.data.x), e.data.y)
        return honest(e, t, x, workers) | {"loss_min": float(loss)}

    substitute(monkeypatch, trainer, "_measure", row)


@step_fault(DPSGD, TAINT, **OWN_ONLY, **SYSTEM)
def batches_in_the_row(self: DPSGD, state: Any, r: Round) -> tuple[Any, Values]:
    """The row says which records were drawn, found by drawing them again from the secret that the noise comes from."""
    streams = r.noise.streams
    drawn = [np.flatnonzero(streams.uniforms(200, "batch", i, r.t) < 0.053).tolist() for i in r.engine.agents]
    _, noisy = both(r, state.x)
    return type(state)(r.engine.mix(state.x - r.learning_rate * noisy)), {"drawn": drawn}


@step_fault(DPSGD, ANY, **OWN_ONLY)
def batch_sizes_in_the_row(self: DPSGD, state: Any, r: Round) -> tuple[Any, Values]:
    """The row has the sizes of the batches, found through the meter's wrapper."""
    local: Any = r.local
    drawn = [len(local.inner.batches.draw(i, r.t)) for i in r.engine.agents]
    _, noisy = both(r, state.x)
    return type(state)(r.engine.mix(state.x - r.learning_rate * noisy)), {"drawn": drawn}


@fault(BARE, END, rounds=12)
def stopped_by_the_private_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends when the loss on the agents' own records is small enough."""
    honest = trainer.rounds

    def stopping(e: Any, *of: Any, **also: Any) -> Iterator[Any]:
        for step in honest(e, *of, **also):
            yield step
            logits = e.network.outputs(step.state.x[0], e.data.x)
            if step.t >= 6 and float(nn.functional.cross_entropy(logits, e.data.y)) < 50:
                return

    substitute(monkeypatch, trainer, "rounds", stopping)


@fault(BARE, ANY)
def first_model_of_private_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first model's weights hold the mean of the agents' records."""
    honest = trainer.initial_models

    def first(e: Any) -> Tensor:
        x = honest(e).clone()
        x[:, :64] += 0.01 * e.data.x.mean(0).reshape(-1)
        return x

    substitute(monkeypatch, trainer, "initial_models", first)


def after_the_step(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """The round loop changes models after the algorithm's step; an audit's own loop does not."""
    honest = trainer.run_round

    def run_round(config: Any, state: Any, r: Round) -> tuple[Any, Values]:
        new, facts = honest(config, state, r)
        inner: Any = r.local
        g = inner.inner.gradients(r.t, torch.tensor(r.engine.agents), state.x)
        return replace(new, x=change(new.x, g.float())), facts

    monkeypatch.setattr(trainer, "run_round", run_round)


@fault(BARE, TAINT)
def clean_step_in_every_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round adds a clean gradient to the models after the algorithm's step, an audit's round too."""
    honest = trainer.run_round

    def run_round(config: Any, state: Any, r: Round) -> tuple[Any, Values]:
        new, facts = honest(config, state, r)
        inner: Any = r.local
        g = inner.inner.gradients(r.t, torch.tensor(r.engine.agents), state.x)
        return replace(new, x=new.x - 0.05 * g.float()), facts

    substitute(monkeypatch, trainer, "run_round", run_round)


@fault(BARE, ROWS)
def clean_step_in_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round loop adds a clean gradient to the models after the algorithm's step."""
    after_the_step(monkeypatch, lambda x, g: x - 0.05 * g)


@fault(BARE, ROWS)
def clean_mean_step_in_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round loop adds the mean of the clean gradients to all models alike, so that they agree as before."""
    after_the_step(monkeypatch, lambda x, g: x - g.mean(0))


@step_fault(DPSGD, REFUSED, **OWN_ONLY)
def no_noise_at_all(self: DPSGD, state: Any, r: Round) -> tuple[Any, Values]:
    """The algorithm takes a gradient and forgets the noise."""
    g = r.local.gradients(r.t, torch.tensor(r.engine.agents), state.x)
    return type(state)(r.engine.mix(state.x - r.learning_rate * g.float())), {}


@step_fault(DPSGD, REFUSED, **OWN_ONLY)
def noise_after_the_message(self: DPSGD, state: Any, r: Round) -> tuple[Any, Values]:
    """Clean gradients are mixed, and noise is added to the mean."""
    agents = torch.tensor(r.engine.agents)
    g = r.local.gradients(r.t, agents, state.x)
    mixed = r.engine.mix(g)
    return type(state)(state.x - r.noise.add(r.t, agents, agents, mixed)), {}


@step_fault(DPSGD, TAINT, **OWN_ONLY)
def gradient_behind_the_meters_back(self: DPSGD, state: Any, r: Round) -> tuple[Any, Values]:
    """A second gradient is taken from within the meter's wrapper, and used as it is."""
    _, noisy = both(r, state.x)
    inner: Any = r.local
    g = inner.inner.gradients(r.t, torch.tensor(r.engine.agents), state.x)
    return type(state)(r.engine.mix(state.x - r.learning_rate * (noisy + 0.1 * g.float()))), {}


@fault(BARE, NEIGHBOURS, examine=lambda values: neighbours_differ())
def held_out_by_a_permutation(monkeypatch: pytest.MonkeyPatch) -> None:
    """One record more exchanges others between training and testing."""

    def held_out(records: Any, owner: Tensor | None, fraction: float, streams: Streams) -> Tensor:
        order = streams.generator("held-out").permutation(len(records.y))
        held = torch.zeros(len(records.y), dtype=torch.bool)
        held[torch.from_numpy(order[: int(fraction * len(order))])] = True
        return held

    substitute(monkeypatch, own, "_choose_held_out", held_out)


@fault(BARE, NEIGHBOURS, examine=lambda values: neighbours_differ())
def standardised_by_private_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are standardised by the mean of all records: each of them changes all others."""
    honest = own._hold_out

    def held_out(data: Data, *of: Any) -> Data:
        return honest(replace(data, x=data.x - data.x.mean(0)), *of)

    substitute(monkeypatch, own, "_hold_out", held_out)


def neighbours_differ() -> list[str]:
    """With a record more, every other record is where and what it was."""
    random = np.random.default_rng(0)
    x, y = random.random((301, 5), dtype=np.float32), random.integers(0, 3, 301)

    def rows(n: int) -> tuple[set[bytes], set[bytes]]:
        data = from_python((x[:n], y[:n]), Streams(0))
        return {row.numpy().tobytes() for row in data.x}, {row.numpy().tobytes() for row in data.test_x}

    (train_, test), (more_train, more_test) = rows(300), rows(301)
    changed = len(train_ ^ more_train) + len(test ^ more_test)
    return [NEIGHBOURS] * (changed > 1)
