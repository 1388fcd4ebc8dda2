"""The round loop: charge, run one round, evaluate. Nothing here writes a file."""

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from pdsl.algorithms import Metrics, Round
from pdsl.algorithms.base import Objectives
from pdsl.algorithms.rehearsal import rehearse
from pdsl.attacks import AttackedEngine, AttackedGradients, shift_models
from pdsl.config import Config
from pdsl.engine import Engine
from pdsl.engine.robust import Limits, RobustEngine
from pdsl.gradients.clipping import LocalGradients
from pdsl.gradients.independence import choose_kernel
from pdsl.gradients.per_example import RECORDS, Kernel
from pdsl.privacy import Ledger, Noise, Release
from pdsl.privacy.metering import Meter, MeteredEngine, MeteredGradients, MeteredNoise
from pdsl.shapley.masses import PublicGradients
from pdsl.shapley.valuation import Validation
from pdsl.training.evaluation import distances, evaluate, finite
from pdsl.training.experiment import Experiment
from pdsl.training.public_groups import find_groups
from pdsl.training.records import RoundRecord
from pdsl.utils.errors import PdslError, warn_user
from pdsl.utils.random import Streams
from pdsl.utils.workers import Workers

EMA_NAME = "x.mean"  # name of the averaged models in checkpoints
HISTORY_NAME = "mixing.history"  # name of the history of robust mixing in checkpoints


class State(Protocol):
    """State of an algorithm, or an `EMAState`: a dataclass of tensors."""

    @property
    def x(self) -> Tensor: ...  # [m, d] the agents' models


@dataclass(frozen=True)
class CompletedRound:
    """A round: its record, the state after it and the ledger. `state.x` has the agents' released models."""

    row: RoundRecord
    state: State
    ledger: Ledger | None

    @property
    def t(self) -> int:
        return self.row["round"]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(t={self.t})"


@dataclass(frozen=True)
class Trainer:
    """Everything that the rounds of an experiment need: engine, gradients, noise and public set."""

    engine: Engine
    local: LocalGradients
    noise: Noise
    validation: Validation
    experiment: Experiment
    public_gradients: PublicGradients | None = None
    limits: tuple[Limits, ...] = ()  # of robust mixing; empty: plain mixing
    absence_limits: tuple[Limits, ...] = ()  # the same for rounds with absent neighbours; empty: there are none

    def round(
        self,
        t: int,
        noise: Noise | None = None,
        local: Objectives | None = None,
        declared: Mapping[int, Release] | None = None,
    ) -> Round:
        """Round t, metered. An audit may pass other `noise` or `local` gradients.

        `declared`: the release that each agent is charged for; default: with all its neighbours in this round.
        """
        e = self.experiment
        self.engine.enter_round(t)
        honest = replace(self.local, repeated={})  # the cache of gradients lasts one round
        noise, engine, meter = noise or self.noise, self.engine, None
        attacked = AttackedGradients(honest, e.attackers, e.streams, noise, e.graph)
        objectives = local or (attacked if e.attackers else honest)
        if e.attackers:
            engine = AttackedEngine.wrap(engine, e.attackers, e.streams)
        if e.mechanisms is not None:
            declared = declared or {i: e.declared_release(t, i) for i in e.engine.agents}
            meter = Meter(e.config.algorithm.name, t, declared)
            objectives, noise = MeteredGradients(objectives, meter), MeteredNoise.wrap(noise, meter)
            engine = MeteredEngine.wrap(engine, meter)
        limits = self.absence_limits if self.absence_limits and self._has_absences() else self.limits
        robust = RobustEngine(engine, e.graph, limits) if limits else None
        return Round(
            t=t,
            engine=engine if robust is None else cast(Engine, robust),
            robust=robust,
            local=objectives,
            noise=noise,
            meter=meter,
            validation=self.validation,
            graph=e.graph,
            streams=Streams(e.config.seed),  # public streams: an algorithm must not know the secret
            tensors=[shape.numel() for _, shape in e.network.shapes()],
            noise_multiplier=_noise_multiplier(e),
            learning_rate=e.learning_rates[t - 1],
            peak_rate=max(e.learning_rates),
            public_gradients=self.public_gradients,
        )

    def _has_absences(self) -> bool:
        """Whether a neighbour of this process's agents is absent in this round."""
        planned = sum(len(self.experiment.graph.neighbourhood(i)) for i in self.engine.agents)
        return len(self.engine.sender) < planned


def build_trainer(e: Experiment, workers: Workers) -> Trainer:
    """Move the agents' records to the device and assemble a trainer."""
    device = e.network.device
    shared = not e.config.engine.exact
    Q = Validation(e.network, e.validation[0].to(device), e.validation[1].to(device), e.streams, workers, shared)
    local = build_gradients(e, workers)
    if local.kernel.note:
        warn_user(local.kernel.note)
    noise = Noise(e.sigma, e.streams, workers, sigma_scale=e.sigma_scale)
    limits = mixing_limits(e, noise) if e.config.mixing.robust else ()
    return Trainer(e.engine, local, noise, Q, e, build_public_gradients(e, local.kernel, workers), limits)


def build_public_gradients(e: Experiment, kernel: Kernel, workers: Workers) -> PublicGradients | None:
    """Gradients of groups of public records.

    None if whole batches are clipped, which hides numbers of records, or if no linear layer makes the model's output.
    """
    privacy = e.config.privacy
    public = None if privacy.clipping == "batch" else find_groups(e)
    if public is None:
        return None
    messages = e.config.rounds * float(e.graph.degrees.mean())  # of a sender, over the run
    variance = float(np.mean(np.square(e.sigma))) / messages
    return PublicGradients(public, privacy.max_grad_norm, e.batches.records, variance, kernel, workers)


def _noise_multiplier(e: Experiment) -> float:
    """Smallest noise multiplier over the agents; 0 without noise."""
    return min((m.noise_multiplier for m in e.mechanisms or ()), default=0.0)


def mixing_limits(e: Experiment, noise: Noise, weight: float = 1.0) -> tuple[Limits, ...]:
    """Limits of robust mixing, for each mixing step of a round. `weight`: factor on all neighbours' weights."""
    limits = rehearse(
        e.config.algorithm,
        e.graph,
        noise,
        e.config.privacy.max_grad_norm,
        e.network.num_parameters,
        _noise_multiplier(e),
        max(e.learning_rates),
        e.config.seed,
        weight,
    )
    if not limits:
        raise PdslError(
            f"algorithm {e.config.algorithm.name} does not mix models by gossip, so mixing.robust has no effect on it;"
            " set mixing.robust=false"
        )
    return limits


def build_gradients(e: Experiment, workers: Workers) -> LocalGradients:
    """The agents' records on the device, and the fastest kernel for their gradients."""
    device, privacy = e.network.device, e.config.privacy
    inputs, labels = e.validation[0].to(device), e.validation[1].to(device)
    kernel = RECORDS if e.network.mixes_records else choose_kernel(e.network, inputs, labels)
    return LocalGradients(
        e.network,
        [e.data.x[part].to(device) for part in e.parts],
        [e.training_labels(agent).to(device) for agent in range(e.graph.agents)],
        e.batches,
        privacy.clipping,
        privacy.max_grad_norm,
        workers,
        kernel,
    )


@dataclass(frozen=True)
class EMAState:
    """State of an algorithm with an exponential moving average (EMA) of its models, which agents release instead.

    Averaging is post-processing: it changes no training and costs no privacy. Records measure the averaged models.
    """

    state: State
    x: Tensor  # [m, d] the averages


@dataclass(frozen=True)
class RobustState:
    """State of an algorithm with the history of robust mixing."""

    state: State
    history: Tensor  # [m, members, mixing steps, d]: see `engine.robust`; no members before round 1

    @property
    def x(self) -> Tensor:
        return self.state.x


def algorithm_state(state: State) -> State:
    """The algorithm's own state, without averages and the history of robust mixing."""
    while isinstance(state, EMAState | RobustState):
        state = state.state
    return state


def initial_models(e: Experiment) -> Tensor:
    """Initial models of this process's agents [m, d]: the same for all."""
    return e.network.initial_parameters().repeat(len(e.engine.agents), 1)


def initial_state(e: Experiment) -> State:
    """The state before round 1."""
    return make_state(e.config, initial_models(e))


def make_state(config: Config, x0: Tensor) -> State:
    """The state before round 1 of agents with the models x0 [m, d]."""
    state: State = config.algorithm.init(x0)
    if config.mixing.robust:
        state = RobustState(state, torch.zeros(len(x0), 0, 0, x0.shape[1], device=x0.device))
    return EMAState(state, x0) if config.ema_decay else state


def run_round(config: Config, state: State, r: Round) -> tuple[State, Metrics]:
    """Run one step of the algorithm. Returns the new state and the algorithm's metrics."""
    new, metrics = _step(config, state.state if isinstance(state, EMAState) else state, r)
    if r.meter is not None:
        r.meter.finish()
    if not config.ema_decay:
        return new, metrics
    decay = min(config.ema_decay, (1 + r.t) / (10 + r.t))  # smaller at first: early models are soon forgotten
    return EMAState(new, decay * state.x + (1 - decay) * new.x), metrics


def _step(config: Config, state: State, r: Round) -> tuple[State, Metrics]:
    """The algorithm's step, with the history of robust mixing before and after it."""
    new: State
    if r.robust is None or not isinstance(state, RobustState):
        new, metrics = config.algorithm.step(state, r)
        return new, metrics
    r.robust.begin(state.history, r.validation.loss_gradients(state.x))
    new, metrics = config.algorithm.step(state.state, r)
    far = sorted({agent for found in r.engine.gather([r.robust.implausible]) for agent in found})
    return RobustState(new, r.robust.history), {**metrics, **({"implausible": far} if far else {})}


def rounds(
    experiment: Experiment,
    state: State | None = None,
    ledger: Ledger | None = None,
    after: int = 0,
    publish: Callable[[Ledger], None] = lambda ledger: None,
) -> Generator[CompletedRound]:
    """Run rounds after+1, …, T from `state` and `ledger` (None: those of a new run).

    Each round is charged and the ledger published before any message of the round is sent. The loop ends early if
    another round would exceed the budget. A record depends on settings, noise and round only: not on interruptions or
    on the number of workers.
    """
    e, config = experiment, experiment.config
    count = config.engine.workers or (None if e.network.device.type == "cpu" else 1)
    with Workers(count) as workers:
        trainer = build_trainer(e, workers)
        e.engine.messages = e.engine.bytes = e.engine.bytes_between_processes = 0
        state = initial_state(e) if state is None else state
        if after and ledger is None and e.mechanisms is not None:
            raise PdslError(f"rounds after {after} need the ledger of the earlier rounds; pass it")
        ledger = e.open_ledger() if ledger is None else ledger
        for t in range(after + 1, config.rounds + 1):
            if ledger is not None and e.mechanisms is not None:
                ledger = ledger.charge(t, e.mechanisms)
                if not ledger.within_budget:
                    return
                publish(ledger)
            state, metrics = run_round(config, state, trainer.round(t))
            if "drifting-model" in e.attackers.values():
                state = _shift(e, state)
            row = _measure(e, t, state.x, workers)
            if not math.isfinite(row["consensus"]):
                raise PdslError(
                    f"diverged in round {t}: a model has infinite or undefined parameters; try a smaller"
                    f" algorithm.learning_rate (now {e.learning_rates[t - 1]:g}) or less noise"
                )
            if ledger is not None:
                row["epsilon"] = finite(ledger.up_to(t).epsilon)
            result = CompletedRound(cast(RoundRecord, {**row, **metrics}), state, ledger)
            with workers.release_threads():
                yield result


def _shift(e: Experiment, state: State) -> State:
    """The state with the models of drifting attackers shifted."""
    if isinstance(state, EMAState | RobustState):
        return replace(state, state=_shift(e, state.state))
    x = shift_models(state.x, e.engine.agents, e.attackers, e.config.attack.drift, e.streams)
    return cast(State, replace(cast(Any, state), x=x))


def _measure(e: Experiment, t: int, x: Tensor, workers: Workers) -> RoundRecord:
    """Traffic, consensus and, in rounds that are evaluated, accuracy and loss."""
    engine, mean = e.engine, e.engine.mean(x)
    parts = engine.gather([((engine.messages, engine.bytes, engine.bytes_between_processes), distances(x, mean))])
    messages, size, across = (sum(sent) for sent in zip(*(sent for sent, _ in parts), strict=True))
    consensus = fmean(distance for _, apart in parts for distance in apart)
    engine.messages = engine.bytes = engine.bytes_between_processes = 0
    row: RoundRecord = {"round": t, "consensus": consensus, "messages": messages, "bytes": size}
    if len(parts) > 1:
        row["bytes_between_processes"] = across
    if t % e.config.evaluate_every == 0 and math.isfinite(consensus):
        row.update(cast(RoundRecord, evaluate(e, x, mean, workers).as_row()))
    return row


def state_tensors(state: Any) -> dict[str, Tensor]:
    """A state's tensors by name; inverse of `restore_state`."""
    if isinstance(state, EMAState):
        return {EMA_NAME: state.x, **state_tensors(state.state)}
    if isinstance(state, RobustState):
        return {HISTORY_NAME: state.history, **state_tensors(state.state)}
    return {f.name: getattr(state, f.name) for f in fields(state)}


def restore_state(config: Config, tensors: dict[str, Tensor]) -> State:
    """The state of the config's algorithm from its tensors."""
    kind: Callable[..., State] = type(config.algorithm.init(torch.zeros(1, 1)))
    here = {name: tensor.to(config.engine.device) for name, tensor in tensors.items()}
    means, history = here.pop(EMA_NAME, None), here.pop(HISTORY_NAME, None)
    state = kind(**here)
    if history is not None:
        state = RobustState(state, history)
    return state if means is None else EMAState(state, means)
