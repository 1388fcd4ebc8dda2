"""From a configuration to a trained model: prepare what a run needs, then the round loop, which yields.

`rounds` is the loop; whoever calls it saves, draws and prints. Nothing here writes a file.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pdsl import graph as graphs
from pdsl import models
from pdsl.algorithms import Facts, Round
from pdsl.algorithms.base import Objectives
from pdsl.algorithms.check import check_algorithm, check_name
from pdsl.config import MAY_CHANGE, Config
from pdsl.data import Batches, Data, label_counts, load, partition, public_records, split_public
from pdsl.engine import Engine, Local
from pdsl.errors import PdslError
from pdsl.gradients import Owners, row_digests
from pdsl.graph import Graph
from pdsl.independence import choose_kernel
from pdsl.models import Network
from pdsl.parallel import Workers
from pdsl.per_example import RECORDS
from pdsl.privacy import Ledger, Mechanism, Noise, Release, mechanisms
from pdsl.privacy.bond import (
    Bond,
    code_digest,
    graph_digest,
    model_digest,
    noise_digest,
    settings_digest,
    software,
    tensors_digest,
)
from pdsl.privacy.metering import Declared, Meter, MeteredEngine, MeteredGradients, MeteredNoise
from pdsl.randomness import SecretStreams, Streams
from pdsl.rogues import Rogues, Spoiled, drawn, flipped
from pdsl.shapley import Validation

Row = dict[str, Any]
MEANS = "x.mean"  # under this name the means of models are stored


@dataclass(frozen=True)
class Experiment:
    """A run's ingredients, all checked: from here on nothing is the user's mistake."""

    config: Config
    data: Data
    graph: Graph
    network: Network
    parts: list[Tensor]  # the records of each agent, as indices into data.x; none for agents of other processes
    batches: Batches
    validation: tuple[Tensor, Tensor]  # Q
    test: tuple[Tensor, Tensor]
    mechanisms: list[Mechanism] | None  # what each agent releases in a round; None without noise
    streams: Streams = field(repr=False)
    engine: Engine = field(repr=False)
    labels: Tensor = field(repr=False)  # [M, classes] how many records of each class each agent has
    rogues: Rogues
    bond: Bond = field(repr=False)

    @property
    def sigma(self) -> list[float]:
        """Standard deviation of the noise on each agent's messages, before `stretch`."""
        return [m.sigma for m in self.mechanisms] if self.mechanisms else [0.0] * self.graph.agents

    @property
    def largest_sigma(self) -> float:
        """Of all messages; 0 without noise."""
        return max((sigma for m in self.mechanisms or () for sigma in m.sigmas), default=0.0)

    @property
    def stretch(self) -> list[dict[int, float]]:
        """What σ is multiplied with for each peer of each agent; nothing where an agent's messages are alike."""
        stretches = [m.stretch for m in self.mechanisms or ()]
        return [
            dict(zip(self.graph.neighbourhood(i).tolist(), s, strict=True)) if s else {}
            for i, s in enumerate(stretches)
        ]

    def open_ledger(self) -> Ledger | None:
        """A ledger with nothing in it; None without noise, when no number could stand in it."""
        if self.mechanisms is None:
            return None
        peers = [self.graph.neighbourhood(i).tolist() for i in range(self.graph.agents)]
        return Ledger.opened(self.config.privacy.delta, self.config.privacy.budget, peers)

    def owner_facts(self) -> dict[str, Any]:
        """Exact counts of records, for their owners' eyes."""
        return {"labels": self.labels.tolist()}

    def facts(self) -> dict[str, Any]:
        """What stays the same in all rounds, for the run directory and the report."""
        g = self.graph
        return {
            "agents": g.agents,
            "edges": [[int(i), int(j), float(w)] for i, j, w in zip(g.receiver, g.sender, g.omega, strict=True)],
            "parameters": self.network.d,
            "spectral_gap": g.spectral_gap,
            "graph": g.describe(),
            "data": self.data.name,
            "validation": len(self.validation[1]),
            "test": len(self.test[1]),
            "sigma": [max(m.sigmas) for m in self.mechanisms] if self.mechanisms else self.sigma,
            "rogues": [[agent, kind] for agent, kind in sorted(self.rogues.items())],
        }


def prepare(
    config: Config,
    *,
    model: nn.Module | None = None,
    data: Data | None = None,
    graph: Graph | None = None,
    key: bytes | None = None,
    agreed: list[Mechanism] | None = None,
    engine: Callable[[Graph], Engine] = Local,
) -> Experiment:
    """Load, partition and check everything that `config` names, or take the objects given instead.

    The records of agents that the engine does not own are let go of when everybody's part is known.
    A run that is taken up again brings its secret `key` and the noise `agreed` on when it started.
    """
    check_name(config.algorithm)
    check_device(config.engine.device)
    if config.engine.exact and config.engine.device != "cpu":
        raise PdslError(f"engine.exact is for engine.device=cpu (now {config.engine.device}); leave one of them out")
    streams = Streams(config.seed) if config.privacy.randomness == "seeded" else SecretStreams(config.seed, key)
    objects = (
        ("graph", graph, config.graph.kind),
        ("data", data, config.data.name),
        ("model", model, config.model.name),
    )
    for name, given, setting in objects:
        if setting == "python" and given is None:
            raise PdslError(
                f"this run's {name} was an object given in Python, and no config can name it; use pdsl.train"
            )
    agents = graph.agents if graph else config.graph.agents
    data = data or load(config.data, streams, agents)
    parts = partition(data.y, agents, config.partition, streams, data.owner)
    graph = graph or graphs.build(config.graph, streams)  # when it is known that there are records for so many agents
    config.algorithm.check(int(max(graph.degrees)))
    validation, test = split_public(data, config.data.validation, streams)
    if model is None:
        model = models.build(config.model, data.name, data.x.shape[1:], data.classes, streams)
    network = Network(model, config.engine.device)
    network.check(validation[0], data.classes)
    if network.mixes_records and (config.privacy.mode != "none" or config.privacy.clipping == "per-sample"):
        raise PdslError(
            f"the model's {network.mixes_records} mixes records, so one record's gradient is not its own and cannot be"
            " clipped or kept private; use GroupNorm, or privacy.mode=none with privacy.clipping=batch"
        )
    private = streams.secret and config.privacy.mode != "none"
    sizes = [len(part) for part in parts]
    batches = Batches(sizes, config.batch, streams, public_records(config.batch, data.published, sizes, private))
    releases = _releases(config, graph)
    check_algorithm(config.algorithm, graph, network, validation, releases)
    if agreed is None:
        agreed = mechanisms(config.privacy, graph, batches, releases, config.rounds, config.shapley.floor, network.d)
    rogues = drawn(config.rogue, agents, streams)
    owner = engine(graph)
    labels = label_counts(parts, data.y, data.classes)
    records = () if agreed is None else (data.x, data.y, *parts, *validation)
    bond = bond_of(config, streams, graph, network, agreed, records)
    streams = streams.bind(bond.context)
    batches = replace(batches, streams=streams)
    data, parts = _held(data, parts, owner.agents)
    return Experiment(
        config, data, graph, network, parts, batches, validation, test, agreed, streams, owner, labels, rogues, bond
    )


def bond_of(
    config: Config,
    streams: Streams,
    graph: Graph,
    network: Network,
    agreed: list[Mechanism] | None,
    records: Iterable[Tensor],
    besides: str = "",
) -> Bond:
    """The seal of a run: everything that shapes its messages. `besides`: what else tells it from another run."""
    paths = (*MAY_CHANGE, "data.path")  # the records count, not where they lie
    settings = settings_digest(config.as_dict(), paths) + code_digest([type(config.algorithm)]) + besides
    return Bond.of(
        streams.key if isinstance(streams, SecretStreams) else b"",
        settings=settings,
        records=tensors_digest(records),
        graph=graph_digest(graph),
        model=model_digest(network.module),
        noise=noise_digest(agreed),
        device=config.engine.device,
        software=software(),
    )


def _held(data: Data, parts: list[Tensor], agents: range) -> tuple[Data, list[Tensor]]:
    """The records of these agents only, and where each finds its own among them."""
    if len(agents) == len(parts):
        return data, parts
    kept = torch.cat([parts[i] for i in agents])
    places = iter(torch.split(torch.arange(len(kept)), [len(parts[i]) for i in agents]))
    none = torch.zeros(0, dtype=torch.int64)
    own = replace(data, x=data.x[kept], y=data.y[kept], owner=None)
    return own, [next(places) if i in agents else none for i in range(len(parts))]


def _releases(config: Config, graph: Graph) -> list[Release]:
    """What the algorithm says it releases, per agent; nobody asks where there is no noise."""
    if config.privacy.mode == "none":
        return []
    return [config.algorithm.releases_in(graph, i) for i in range(graph.agents)]


def check_device(name: str) -> None:
    """PdslError unless torch can compute there."""
    try:
        torch.ones(1, device=name).item()  # 'meta' can hold a number, but not tell it
    except (RuntimeError, AssertionError, ImportError) as e:
        raise PdslError(f"engine.device={name}: {str(e).splitlines()[0]}; try engine.device=cpu") from e


@dataclass(frozen=True)
class Step:
    """The end of a round: its row of facts, the state, and what has been spent so far.

    The state is the algorithm's own, or, with `averaging`, an `Averaged` around it; its x is what agents hand out.
    """

    row: Row
    state: Any
    ledger: Ledger | None

    @property
    def t(self) -> int:
        return int(self.row["round"])


@dataclass(frozen=True)
class Apparatus:
    """What the rounds of an experiment are run with."""

    engine: Engine
    owners: Owners
    noise: Noise
    validation: Validation
    experiment: Experiment

    def round(
        self,
        t: int,
        noise: Noise | None = None,
        owners: Objectives | None = None,
        declared: Mapping[int, Declared] | None = None,
    ) -> Round:
        """Round t; with another `noise` or `owners` in the place of the run's own, for an audit.

        `declared` is the release that each agent here is charged for, by default with all its neighbours.
        """
        e = self.experiment
        honest = replace(self.owners, repeated={})  # remembered gradients are forgotten with the round
        objectives = owners or (Spoiled(honest, e.rogues, e.streams) if e.rogues else honest)
        noise, engine, meter = noise or self.noise, self.engine, None
        if e.mechanisms is not None:
            of = e.mechanisms
            declared = declared or {i: Declared(of[i].messages, of[i].steps) for i in e.engine.agents}
            meter = Meter(e.config.algorithm.name, t, declared)
            objectives, noise = MeteredGradients(objectives, meter), MeteredNoise.counting(noise, meter)
            engine = MeteredEngine.guarding(engine, meter)
        return Round(
            t=t,
            engine=engine,
            owners=objectives,
            noise=noise,
            meter=meter,
            validation=self.validation,
            graph=e.graph,
            streams=Streams(e.config.seed),  # public: an algorithm has no use for the secret
            tensors=[shape.numel() for _, shape in e.network.shapes()],
            noise_multiplier=min(m.noise_multiplier for m in e.mechanisms) if e.mechanisms else 0.0,
        )


def apparatus(e: Experiment, workers: Workers) -> Apparatus:
    """The records of the agents here in place, ready for a round."""
    device, privacy = e.network.device, e.config.privacy
    shared = not e.config.engine.exact
    Q = Validation(e.network, e.validation[0].to(device), e.validation[1].to(device), e.streams, workers, shared)
    owners = Owners(
        e.network,
        [e.data.x[part].to(device) for part in e.parts],
        [_labels(e, agent).to(device) for agent in range(e.graph.agents)],
        e.batches,
        privacy.clipping,
        privacy.max_grad_norm,
        workers,
        RECORDS if e.network.mixes_records else choose_kernel(e.network, Q.inputs, Q.labels),
    )
    return Apparatus(e.engine, owners, Noise(e.sigma, e.streams, workers, stretch=e.stretch), Q, e)


def _labels(e: Experiment, agent: int) -> Tensor:
    """What the agent takes its records' labels to be."""
    labels = e.data.y[e.parts[agent]]
    return flipped(labels, e.data.classes) if e.rogues.get(agent) == "flipped" else labels


@dataclass(frozen=True)
class Averaged:
    """A state of an algorithm whose agents hand out the running mean of their models instead of the last one.

    That is post-processing: training does not know of it, and it costs no privacy. What is measured in a row (accuracy,
    loss, consensus) is measured on the means.
    """

    state: Any
    x: Tensor  # [m, d] the means


def first_models(e: Experiment) -> Tensor:
    """What the agents here begin with, [m, d]: all of them with the same model."""
    return e.network.start().repeat(len(e.engine.agents), 1)


def first_state(e: Experiment) -> Any:
    """The state before round 1."""
    return state_at(e.config, first_models(e))


def state_at(config: Config, x0: Tensor) -> Any:
    """The state of agents who begin with the models x0 [m, d]."""
    state = config.algorithm.init(x0)
    return Averaged(state, x0) if config.averaging else state


def advanced(config: Config, state: Any, r: Round) -> tuple[Any, Facts]:
    """The state after the round, and what there is to say about it."""
    new, facts = config.algorithm.step(state.state if config.averaging else state, r)
    if r.meter is not None:
        r.meter.finish()
    if not config.averaging:
        return new, facts
    old = min(config.averaging, (1 + r.t) / (10 + r.t))  # the first models are soon forgotten
    return Averaged(new, old * state.x + (1 - old) * new.x), facts


def rounds(
    experiment: Experiment,
    state: Any = None,
    ledger: Ledger | None = None,
    after: int = 0,
    announce: Callable[[Ledger], None] = lambda ledger: None,
) -> Iterator[Step]:
    """Rounds after+1, …, T, starting from `state` and `ledger` (those of a new run if None).

    Each round is charged to the ledger, and the ledger announced, before anything of that round could leave an agent.
    The rounds end early where another one would pass the budget. A row depends on the settings, the noise and the
    round alone: not on when the run was interrupted, on the workers, or, where σ is given, on T.
    """
    e, config = experiment, experiment.config
    count = config.engine.workers or (None if e.network.device.type == "cpu" else 1)
    with Workers(count) as workers:
        parts = apparatus(e, workers)
        e.engine.messages = e.engine.bytes = e.engine.across = 0
        state = first_state(e) if state is None else state
        if after and ledger is None and e.mechanisms is not None:
            raise PdslError(f"rounds after {after} need the ledger of the rounds before them; give it")
        ledger = e.open_ledger() if ledger is None else ledger
        for t in range(after + 1, config.rounds + 1):
            if ledger is not None and e.mechanisms is not None:
                ledger = ledger.charged(t, e.mechanisms)
                if not ledger.within_budget:
                    return
                announce(ledger)
            state, facts = advanced(config, state, parts.round(t))
            row = _row(e, t, state.x, workers)
            if not math.isfinite(row["consensus"]):
                raise PdslError(
                    f"diverged in round {t}: a model has infinite or undefined parameters; try a smaller"
                    f" algorithm.learning_rate (now {getattr(config.algorithm, 'learning_rate', '?')}) or less noise"
                )
            if ledger is not None:
                row["epsilon"] = finite(ledger.through(t).epsilon)
            step = Step(row | facts, state, ledger)
            with workers.resting():
                yield step


def distances(x: Tensor, mean: Tensor) -> list[float]:
    """How far each of these models is from the mean [d]; not finite where the model is not."""
    return [float((row - mean).norm()) for row in x]


def _row(e: Experiment, t: int, x: Tensor, workers: Workers) -> Row:
    engine, mean = e.engine, e.engine.mean(x)
    told = engine.gather([((engine.messages, engine.bytes, engine.across), distances(x, mean))])
    messages, size, across = (sum(sent) for sent in zip(*(sent for sent, _ in told), strict=True))
    consensus = fmean(distance for _, apart in told for distance in apart)
    engine.messages = engine.bytes = engine.across = 0
    row: Row = {"round": t, "consensus": consensus, "messages": messages, "bytes": size}
    if len(told) > 1:
        row["bytes_between_processes"] = across
    if t % e.config.evaluate_every == 0 and math.isfinite(consensus):
        row |= evaluate(e, x, mean, workers).as_row()
    return row


@dataclass(frozen=True)
class Evaluation:
    """How the agents' own models, and the mean of them, do on the test set."""

    accuracies: list[float]
    losses: list[float]
    accuracy_of_mean: float
    mean: Tensor = field(repr=False)  # [d] the mean model
    digests: list[str] = field(repr=False)  # of each agent's model

    @property
    def models_sha256(self) -> str:
        """One hash of all agents' models: of their digests, in the order of agents."""
        return hashlib.sha256(" ".join(self.digests).encode()).hexdigest()

    @property
    def accuracy(self) -> float:
        return sum(self.accuracies) / len(self.accuracies)

    @property
    def loss(self) -> float | None:
        """Mean over the agents; None where a model's scores overflow."""
        return finite(sum(self.losses) / len(self.losses))

    def as_row(self) -> Row:
        return {
            "accuracy": self.accuracy,
            "accuracy_min": min(self.accuracies),
            "accuracy_max": max(self.accuracies),
            "accuracy_of_mean": self.accuracy_of_mean,
            "loss": self.loss,
            "loss_min": finite(min(self.losses)),
            "loss_max": finite(max(self.losses)),
        }


def evaluate(e: Experiment, x: Tensor, mean: Tensor, workers: Workers) -> Evaluation:
    """Every agent's model x_i and the mean model [d], on the test records that are not in Q; equal models once."""
    inputs, labels = (tensor.to(x.device) for tensor in e.test)
    everyone = torch.cat([x, mean.to(x.dtype)[None]])
    digests = row_digests(everyone)
    distinct = {digest: row for row, digest in enumerate(digests)}

    def one(row: int) -> tuple[float, float]:
        logits = e.network.logits(everyone[row], inputs)
        return models.accuracy(logits, labels), cross_entropy(logits.double(), labels).item()

    of = dict(zip(distinct, workers.map(one, distinct.values()), strict=True))
    told = e.engine.gather([(*of[digest], digest.hex()) for digest in digests[:-1]])
    accuracies, losses, names = (list(column) for column in zip(*told, strict=True))
    return Evaluation(accuracies, losses, of[digests[-1]][0], everyone[-1], names)


def final_evaluation(e: Experiment, x: Tensor) -> Evaluation:
    """`evaluate` after the loop has ended."""
    with Workers(e.config.engine.workers) as workers:
        return evaluate(e, x, e.engine.mean(x), workers)


def finite(value: float) -> float | None:
    """JSON has no infinity and no NaN: null says that there is no number."""
    return value if math.isfinite(value) else None


def state_tensors(state: Any) -> dict[str, Tensor]:
    """A state's tensors by name; `state_from` makes it again."""
    if isinstance(state, Averaged):
        return {MEANS: state.x, **state_tensors(state.state)}
    return {f.name: getattr(state, f.name) for f in fields(state)}


def state_from(config: Config, tensors: dict[str, Tensor]) -> Any:
    """The state of `config`'s algorithm from its tensors."""
    kind: Callable[..., Any] = type(config.algorithm.init(torch.zeros(1, 1)))
    here = {name: tensor.to(config.engine.device) for name, tensor in tensors.items()}
    if not config.averaging:
        return kind(**here)
    means = here.pop(MEANS)
    return Averaged(kind(**here), means)
