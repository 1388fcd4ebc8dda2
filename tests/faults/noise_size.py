"""Planted faults: size of noise."""

import hashlib
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pdsl.algorithms import Round
from pdsl.privacy import Noise
from tests.faults.base import (
    ANY,
    DATA,
    EPSILON,
    EXACT,
    LOCAL_STEPS,
    ROWS,
    SHAPE,
    SIGMA,
    SIZE,
    SPARSE,
    STAR,
    TWO_ON_A_BATCH,
    Draw,
    Experiment,
    fault,
    noise_fault,
    trainer,
)

# 1 size of noise


@noise_fault(SIZE, SIGMA)
def noise_at_97_percent(d: Draw) -> Tensor:
    """All noise is 3 % too small."""
    return 0.97 * d.honest()


@noise_fault(SIZE, EXACT)
def noise_at_995_per_mille(d: Draw) -> Tensor:
    """All noise is half a percent too small, which so few messages do not show."""
    return 0.995 * d.honest()


@fault(SIZE, EPSILON)
def sigma_in_use_one_percent_low(monkeypatch: pytest.MonkeyPatch) -> None:
    """The σ in use is 1 % below the one that is charged."""
    honest = Noise.sigma_of
    monkeypatch.setattr(Noise, "sigma_of", lambda self, maker, peer: 0.99 * honest(self, maker, peer))


@fault(SIZE, ANY)
def sigma_in_use_a_ten_thousandth_low(monkeypatch: pytest.MonkeyPatch) -> None:
    """The σ in use is a ten-thousandth below the one that is charged."""
    honest = Noise.sigma_of
    monkeypatch.setattr(Noise, "sigma_of", lambda self, maker, peer: 0.9999 * honest(self, maker, peer))


@noise_fault(SIZE, SIGMA, rounds=12)
def noise_decays(d: Draw) -> Tensor:
    """Noise shrinks by 3 % in every round."""
    return 0.97**d.t * d.honest()


@noise_fault(SIZE, SIGMA, rounds=12)
def noise_grows(d: Draw) -> Tensor:
    """Noise grows by 5 % in every round, from too little to too much."""
    return 0.75 * 1.05**d.t * d.honest()


@noise_fault(SIZE, SIGMA, rounds=12)
def no_noise_in_late_rounds(d: Draw) -> Tensor:
    """No noise after half of the rounds."""
    return d.honest() if d.t <= 6 else torch.zeros_like(d.honest())


@noise_fault(SIZE, SIGMA, rounds=12)
def no_noise_in_one_round(d: Draw) -> Tensor:
    """No noise in one round in the middle, the ninth of twelve."""
    return d.honest() if d.t != 9 else torch.zeros_like(d.honest())


@noise_fault(SIZE, SIGMA, rounds=60, model={"name": "softmax"}, algorithm={"name": "d-psgd"})
def no_noise_in_one_round_of_sixty(d: Draw) -> Tensor:
    """No noise in round 37 of 60."""
    return d.honest() if d.t != 37 else torch.zeros_like(d.honest())


@noise_fault(SIZE, SIGMA)
def one_agent_has_less(d: Draw) -> Tensor:
    """Agent 2 has a tenth less noise."""
    return (0.9 if d.maker == 2 else 1.0) * d.honest()


@noise_fault(SIZE, SIGMA)
def one_edge_has_less(d: Draw) -> Tensor:
    """The messages of agent 1 to agent 2 have a fifth less noise."""
    return (0.8 if (d.maker, d.peer) == (1, 2) else 1.0) * d.honest()


@noise_fault(SIZE, SIGMA)
def one_layer_has_less(d: Draw) -> Tensor:
    """The last layer's weights have a tenth less noise."""
    z = d.honest()
    z[-130:-10] *= 0.9
    return z


@noise_fault(SIZE, SIGMA)
def one_coordinate_has_none(d: Draw) -> Tensor:
    """One number of every message has no noise."""
    z = d.honest()
    z[-200] = 0
    return z


@noise_fault(SIZE, SIGMA)
def one_coordinate_has_half(d: Draw) -> Tensor:
    """One number of every message has half the noise."""
    z = d.honest()
    z[-210] *= 0.5
    return z


@noise_fault(SIZE, SIGMA)
def last_bias_has_none(d: Draw) -> Tensor:
    """The last layer's bias has no noise."""
    z = d.honest()
    z[-10:] = 0
    return z


@noise_fault(SIZE, SIGMA)
def every_other_coordinate(d: Draw) -> Tensor:
    """Every other number of the last hundred has a fifth less noise."""
    z = d.honest()
    z[-100::2] *= 0.8
    return z


@noise_fault(SIZE, SIGMA)
def first_message_only(d: Draw) -> Tensor:
    """Only an agent's message to itself has noise."""
    return d.honest() if d.peer == d.maker else torch.zeros_like(d.honest())


@noise_fault(SIZE, DATA, **SPARSE)
def none_for_an_empty_batch(d: Draw) -> Tensor:
    """A message on an empty batch has no noise."""
    return d.honest() if d.g.any() else torch.zeros_like(d.honest())


@noise_fault(SIZE, DATA)
def none_where_the_gradient_is_zero(d: Draw) -> Tensor:
    """Numbers whose gradient is exactly zero have no noise."""
    return torch.where(d.g == 0, 0.0, d.honest())


@noise_fault(SIZE, SIGMA)
def scaled_by_the_norm(d: Draw) -> Tensor:
    """Noise is as large as the gradient asks for: less for a small one."""
    return min(1.0, 0.7 + 0.3 * float(d.g.norm())) * d.honest()


@noise_fault(SIZE, SHAPE)
def scaled_by_the_gradient_right_on_average(d: Draw) -> Tensor:
    """Noise is larger or smaller by what the gradient is, and right on average."""
    large = int(hashlib.sha256(d.g.numpy().tobytes()).hexdigest(), 16) % 2
    return (1.3 if large else math.sqrt(2 - 1.3**2)) * d.honest()


@noise_fault(SIZE, SIGMA, **LOCAL_STEPS)
def none_in_the_second_step(d: Draw) -> Tensor:
    """Only the first local step has noise."""
    return d.honest() if d.step == 0 else torch.zeros_like(d.honest())


@noise_fault(SIZE, SIGMA, **TWO_ON_A_BATCH)
def less_on_the_second_message(d: Draw) -> Tensor:
    """The second message on a batch has a tenth less noise."""
    return (1.0 if d.nth == 0 else 0.9) * d.honest()


@fault(SIZE, EPSILON)
def one_agents_sigma_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agent 0 is charged for its σ and uses half of it."""
    honest = Experiment.sigma.fget
    monkeypatch.setattr(Experiment, "sigma", property(lambda e: [honest(e)[0] / 2, *honest(e)[1:]]))


@fault(SIZE, EPSILON, **STAR)
def stretch_is_turned_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of large weight get the more noise, at the charge of the less."""
    honest = Experiment.sigma_scale.fget
    turned = property(lambda e: [{j: 1 / s for j, s in of.items()} for of in honest(e)])
    monkeypatch.setattr(Experiment, "sigma_scale", turned)


@fault(SIZE, EPSILON, **STAR)
def sigma_over_root_k(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent divides its σ by the root of the number of its messages."""
    honest = Experiment.sigma.fget
    roots = property(lambda e: [s / math.sqrt(m.messages) for s, m in zip(honest(e), e.mechanisms, strict=True)])
    monkeypatch.setattr(Experiment, "sigma", roots)


@noise_fault(SIZE, SIGMA)
def own_message_has_none(d: Draw) -> Tensor:
    """The message to oneself has no noise, since it is not sent: the momentum that holds it is."""
    return torch.zeros_like(d.honest()) if d.peer == d.maker else d.honest()


@fault(SIZE, SIGMA)
def one_agents_sigma_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agent 3 is charged for its σ and uses none."""
    honest = Experiment.sigma.fget
    monkeypatch.setattr(Experiment, "sigma", property(lambda e: [*honest(e)[:3], 0.0]))


@fault(SIZE, EPSILON, **STAR)
def sigma_of_the_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message has the σ that is charged to who gets it."""
    monkeypatch.setattr(Noise, "sigma_of", lambda self, maker, peer: self.sigma[peer])


def quieter_outside_the_audit(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """A round that is not given its noise, as an audit's is, has half of it."""
    honest = trainer.Trainer.round

    def made(self: Any, t: int, noise: Noise | None = None, *of: Any, **also: Any) -> Round:
        if noise is None and t > after:
            noise = replace(self.noise, sigma=[sigma / 2 for sigma in self.noise.sigma])
        return honest(self, t, noise, *of, **also)

    monkeypatch.setattr(trainer.Trainer, "round", made)


@fault(SIZE, ROWS)
def quieter_in_the_run_than_in_the_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has half of the noise that the same code shows to an audit."""
    quieter_outside_the_audit(monkeypatch, after=0)


@fault(SIZE, ROWS, rounds=8)
def quieter_in_later_rounds_than_in_the_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same from the fifth round on."""
    quieter_outside_the_audit(monkeypatch, after=4)
