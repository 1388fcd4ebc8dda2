"""A trial of a user's own algorithm before round 1: one step on gradients of zero, without anybody's records."""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from pdsl.algorithms.base import Algorithm, Round
from pdsl.engine import Local
from pdsl.errors import PdslError
from pdsl.graph import Graph
from pdsl.models import Network
from pdsl.parallel import Workers
from pdsl.privacy import Noise, Release
from pdsl.privacy.metering import Declared, Meter, MeteredEngine, MeteredGradients, MeteredNoise
from pdsl.randomness import Streams
from pdsl.shapley import Validation

TRIAL_ROUND = 0  # before the first
TRIAL_RECORDS = 20  # of the public set
OURS = "pdsl.algorithms."  # these have tests of their own


@dataclass(frozen=True)
class _Zeros:
    def gradients(self, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None) -> Tensor:
        return torch.zeros_like(x, dtype=torch.float64)


def check_name(algorithm: Algorithm) -> None:
    """PdslError if the algorithm's class has no name."""
    kind = type(algorithm)
    if not isinstance(getattr(kind, "name", None), str) or not kind.name:
        raise PdslError(
            f'algorithm: {kind.__name__} has no name; give the class one, like name: ClassVar[str] = "mine"'
        )


def check_algorithm(
    algorithm: Algorithm,
    graph: Graph,
    network: Network,
    public: tuple[Tensor, Tensor],
    releases: Sequence[Release],
) -> None:
    """PdslError if the algorithm's step does not give (state, facts), or makes another number than it declares.

    `releases` is empty where there is no noise: then nothing is counted.
    """
    if type(algorithm).__module__.startswith(OURS):
        return
    algorithm = copy.deepcopy(algorithm)  # a trial leaves no trace in it
    where = f"algorithm {algorithm.name}"
    x0 = network.start().repeat(graph.agents, 1)
    state = algorithm.init(x0)
    _check_state(where, "init", state, x0)
    meter = Meter(algorithm.name, TRIAL_ROUND, {i: Declared(r.messages, r.steps) for i, r in enumerate(releases)})
    with Workers(1) as workers:
        inputs, labels = (tensor[:TRIAL_RECORDS].to(network.device) for tensor in public)
        streams, engine = Streams(0), Local(graph)
        trial = Round(
            t=TRIAL_ROUND,
            engine=MeteredEngine.guarding(engine, meter) if releases else engine,
            owners=MeteredGradients(_Zeros(), meter) if releases else _Zeros(),
            noise=MeteredNoise.counting(Noise([1.0] * graph.agents, streams, workers), meter)
            if releases
            else Noise([0.0] * graph.agents, streams, workers),
            validation=Validation(network, inputs, labels, streams, workers),
            graph=graph,
            streams=streams,
            tensors=[shape.numel() for _, shape in network.shapes()],
            noise_multiplier=1.0 if releases else 0.0,
        )
        stepped = algorithm.step(state, trial)
    if not (isinstance(stepped, tuple) and len(stepped) == 2):
        raise PdslError(f"{where}: step gave a {type(stepped).__name__}; it must return (state, facts)")
    after, facts = stepped
    _check_state(where, "step", after, x0)
    if type(after) is not type(state):
        raise PdslError(f"{where}: step gave a {type(after).__name__} as state, but init a {type(state).__name__}")
    try:
        json.dumps(_as_mapping(facts), allow_nan=False)
    except (TypeError, ValueError) as e:
        raise PdslError(
            f"{where}: the facts that step gave cannot be written as JSON ({e}); return a plain dict"
        ) from e
    if releases:
        meter.finish()


def _as_mapping(facts: object) -> dict[str, Any]:
    if not isinstance(facts, dict):
        raise TypeError(f"a {type(facts).__name__}")
    return facts


def _check_state(where: str, method: str, state: object, x0: Tensor) -> None:
    if not is_dataclass(state) or isinstance(state, type):
        raise PdslError(
            f"{where}: {method} gave a {type(state).__name__} as state; make it a frozen dataclass of tensors"
        )
    for f in fields(state):
        value = getattr(state, f.name)
        if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != len(x0):
            raise PdslError(f"{where}: {method} gave a state whose {f.name} is no tensor with a row per agent")
    x = getattr(state, "x", None)
    if not isinstance(x, Tensor) or x.shape != x0.shape or x.dtype != x0.dtype:
        raise PdslError(f"{where}: {method} gave a state without models x of shape {list(x0.shape)} and float32")
