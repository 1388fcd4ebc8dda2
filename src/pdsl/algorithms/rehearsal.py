"""Rehearsal: how far honest neighbours' rows can differ, measured without records.

The algorithm runs for some rounds on the run's graph, with its noise and its largest learning rate. The gradient of
each agent is a fixed random vector. The limits of robust mixing are the largest values that occur, for each mixing step
of a round.

If neighbours are absent, their weight goes to the agent itself, so rows agree more slowly and honest ones differ by
more. A second rehearsal, with half the weight of all neighbours, gives the limits for such rounds. On a full graph it
covers rounds in which up to half of the agents are absent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from pdsl.algorithms.base import Algorithm, Round
from pdsl.engine import Engine, LocalEngine
from pdsl.engine.robust import MEMORY, Limits
from pdsl.privacy import Noise
from pdsl.settings import ShapleySettings
from pdsl.shapley.valuation import Validation, Valuation
from pdsl.topology import Graph
from pdsl.utils.random import Streams

ROUNDS = 20
GRADIENT_NORM = 0.5  # of an agent's mean gradient, in units of C
MAX_NUMBERS = 2**21  # in a tensor with a row per edge; larger models are rehearsed with fewer parameters
MIN_PARAMETERS = 256
ABSENCE_WEIGHT = 0.5  # weight of the neighbours in the rehearsal of rounds with absent ones
RADIUS_MARGIN, COMPONENT_MARGIN = 1.05, 1.25  # runs have more rounds: honest rows are hardly ever limited


def rehearse(
    algorithm: Algorithm,
    graph: Graph,
    noise: Noise,
    clip: float,
    d: int,
    noise_multiplier: float,
    peak_rate: float,
    seed: int,
    weight: float = 1.0,
) -> tuple[Limits, ...]:
    """Limits of each mixing step of a round, for models of d parameters. `weight`: factor on neighbours' weights."""
    size = min(d, max(MIN_PARAMETERS, MAX_NUMBERS // len(graph.sender)))
    streams = Streams(seed)
    random = streams.generator("rehearsal")
    directions = random.standard_normal((graph.agents, size))
    directions *= GRADIENT_NORM * clip / np.linalg.norm(directions, axis=1, keepdims=True)
    engine = _Recorder(LocalEngine(graph), weight)
    state = algorithm.init(torch.zeros(graph.agents, size))
    spread = [s * math.sqrt(d / size) for s in noise.sigma]  # noise of the same length with fewer parameters
    round_1 = Round(
        t=1,
        engine=cast(Engine, engine),
        local=_FixedGradients(torch.from_numpy(directions)),
        noise=_PlainNoise(spread, streams, noise.workers, sigma_scale=noise.sigma_scale, random=random),
        validation=cast(Validation, _RandomValues(random)),
        graph=graph,
        streams=streams,
        tensors=[size],
        noise_multiplier=noise_multiplier,
        learning_rate=peak_rate,
        peak_rate=peak_rate,
    )
    for t in range(1, ROUNDS + 1):
        engine.enter_round(t)
        state, _ = algorithm.step(state, replace(round_1, t=t))
    return tuple(
        Limits(RADIUS_MARGIN * radius, COMPONENT_MARGIN * component)
        for radius, component in zip(engine.radii, engine.components, strict=True)
    )


@dataclass(frozen=True)
class _FixedGradients:
    of: Tensor  # [M, d]

    def gradients(self, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None) -> Tensor:
        return self.of[agents]


@dataclass(frozen=True)
class _PlainNoise(Noise):
    """Gaussian noise in floating point, which is fast and protects no records."""

    random: np.random.Generator = field(kw_only=True)

    def add(self, t: int, makers: Tensor, peers: Tensor, g: Tensor, step: int = 0, nth: int = 0) -> Tensor:
        sigma = [self.sigma_of(maker, peer) for maker, peer in zip(makers.tolist(), peers.tolist(), strict=True)]
        draws = torch.from_numpy(self.random.standard_normal(g.shape, dtype=np.float32))
        return g.float() + torch.tensor(sigma)[:, None].float() * draws


@dataclass(frozen=True)
class _RandomValues:
    """Random Shapley values, as if no message were better than another."""

    random: np.random.Generator

    def contributions(
        self, t: int, agents: Sequence[int], x: Tensor, candidates: Sequence[Tensor], settings: ShapleySettings
    ) -> list[Valuation]:
        values = [self.random.standard_normal(len(of_agent)) for of_agent in candidates]
        return [Valuation(phi, phi, "rehearsal", 0) for phi in values]

    def fidelity(self, *_: object) -> None:
        return None


class _Recorder:
    """Wrap an engine and record the largest displacements between neighbours, for each mixing step of a round."""

    def __init__(self, engine: LocalEngine, weight: float):
        self._engine, self._weight = engine, weight
        self._step = 0
        self._history: list[Tensor] = []  # of each mixing step: [E, d]
        self.radii: list[float] = []
        self.components: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def enter_round(self, t: int) -> None:
        self._engine.enter_round(t)
        self._step = 0

    def mix(self, x: Tensor) -> Tensor:
        engine, step = self._engine, self._step
        self._step += 1
        v = x[engine.sender] - x[engine.receiver]
        if step == len(self.radii):
            self.radii.append(0.0)
            self.components.append(0.0)
            self._history.append(torch.zeros_like(v))
        self.radii[step] = max(self.radii[step], float(v.norm(dim=1).max()))
        past = self._history[step]
        if past.shape == v.shape:  # on a schedule edges change; then there is no history to compare with
            lengths = past.norm(dim=1).clamp_min(torch.finfo(past.dtype).tiny)
            along = (past * v).sum(1).abs() / lengths
            self.components[step] = max(self.components[step], float(along.max()))
            self._history[step] = MEMORY * past + v
        mixed = engine.mix(x)
        return mixed if self._weight == 1.0 else x + self._weight * (mixed - x)
