"""Trial of a custom algorithm before round 1: one step on zero gradients, which reads no private record."""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

from pdsl.algorithms.base import Algorithm, Metrics, Round
from pdsl.engine import LocalEngine
from pdsl.models.network import Network
from pdsl.privacy import Noise, Release
from pdsl.privacy.metering import Meter, MeteredEngine, MeteredGradients, MeteredNoise
from pdsl.shapley.valuation import Validation
from pdsl.topology import Graph
from pdsl.utils.errors import PdslError
from pdsl.utils.inputs import Inputs
from pdsl.utils.random import Streams
from pdsl.utils.workers import Workers

TRIAL_ROUND = 0  # the round before round 1
TRIAL_RECORDS = 20  # records of the public set
BUILT_IN = "pdsl.algorithms."  # module prefix; the tests cover these algorithms


@dataclass(frozen=True)
class _ZeroGradients:
    def gradients(self, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None) -> Tensor:
        return torch.zeros_like(x, dtype=torch.float64)


def check_name(algorithm: Algorithm) -> None:
    """Raise PdslError if the algorithm's class has no name."""
    kind = type(algorithm)
    if not isinstance(getattr(kind, "name", None), str) or not kind.name:
        raise PdslError(
            f'algorithm: {kind.__name__} has no name; give the class one, like name: ClassVar[str] = "mine"'
        )


def check_algorithm(
    algorithm: Algorithm,
    graph: Graph,
    network: Network,
    public: tuple[Inputs, Tensor],
    releases: Sequence[Release],
) -> None:
    """Run one step; raise PdslError if it does not return (state, metrics), or sends other than the declared messages.

    `releases` is empty without noise; then messages are not counted.
    """
    if type(algorithm).__module__.startswith(BUILT_IN):
        return
    algorithm = copy.deepcopy(algorithm)  # so that the trial cannot change it
    where = f"algorithm {algorithm.name}"
    x0 = network.initial_parameters().repeat(graph.agents, 1)
    state = algorithm.init(x0)
    _check_state(where, "init", state, x0)
    declared = [algorithm.releases_in(graph.at(1), i) for i in range(graph.agents)] if releases else []
    meter = Meter(algorithm.name, TRIAL_ROUND, dict(enumerate(declared)))
    with Workers(1) as workers:
        inputs, labels = public[0][:TRIAL_RECORDS].to(network.device), public[1][:TRIAL_RECORDS].to(network.device)
        streams, engine = Streams(0), LocalEngine(graph)
        trial = Round(
            t=TRIAL_ROUND,
            engine=MeteredEngine.wrap(engine, meter) if releases else engine,
            local=MeteredGradients(_ZeroGradients(), meter) if releases else _ZeroGradients(),
            noise=MeteredNoise.wrap(Noise([1.0] * graph.agents, streams, workers), meter)
            if releases
            else Noise([0.0] * graph.agents, streams, workers),
            validation=Validation(network, inputs, labels, streams, workers),
            graph=graph,
            streams=streams,
            tensors=[shape.numel() for _, shape in network.shapes()],
            noise_multiplier=1.0 if releases else 0.0,
            learning_rate=1.0,
            peak_rate=1.0,
        )
        stepped = algorithm.step(state, trial)
    if not (isinstance(stepped, tuple) and len(stepped) == 2):
        raise PdslError(f"{where}: step returned a {type(stepped).__name__}; it must return (state, metrics)")
    after, metrics = stepped
    _check_state(where, "step", after, x0)
    if type(after) is not type(state):
        raise PdslError(f"{where}: step returned a {type(after).__name__} as state, but init a {type(state).__name__}")
    try:
        json.dumps(_as_mapping(metrics), allow_nan=False)
    except (TypeError, ValueError) as e:
        raise PdslError(f"{where}: the metrics that step returned are not JSON ({e}); return a plain dict") from e
    if releases:
        meter.finish()


def _as_mapping(metrics: object) -> Metrics:
    if not isinstance(metrics, dict):
        raise TypeError(f"a {type(metrics).__name__}")
    return metrics


def _check_state(where: str, method: str, state: object, x0: Tensor) -> None:
    if not is_dataclass(state) or isinstance(state, type):
        raise PdslError(
            f"{where}: {method} returned a {type(state).__name__} as state; make it a frozen dataclass of tensors"
        )
    for f in fields(state):
        value = getattr(state, f.name)
        if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != len(x0):
            raise PdslError(f"{where}: {method} returned a state whose {f.name} is not a tensor with a row per agent")
    x = getattr(state, "x", None)
    if not isinstance(x, Tensor) or x.shape != x0.shape or x.dtype != x0.dtype:
        raise PdslError(f"{where}: {method} returned a state without models x of shape {list(x0.shape)} and float32")
