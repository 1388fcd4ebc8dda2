"""Prepare a run: load, partition and check everything that a config names."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import isroutine

import torch
from torch import Tensor, nn

from pdsl import topology
from pdsl.algorithms.base import charged_release
from pdsl.algorithms.schedule import AUTO
from pdsl.algorithms.trial import check_algorithm, check_name
from pdsl.attacks import Attackers, draw_attackers
from pdsl.config import MAY_CHANGE, Config, take_agents
from pdsl.data import Batches, Data, label_counts, load, partition, public_records, split_public, standardise
from pdsl.engine import Engine, LocalEngine
from pdsl.models.network import Network
from pdsl.models.zoo import build as build_model
from pdsl.privacy import Ledger, Mechanism, Release, mechanisms
from pdsl.privacy.ledger import Calendar
from pdsl.privacy.seal import (
    RunSeal,
    code_digest,
    graph_digest,
    model_digest,
    noise_digest,
    settings_digest,
    software,
)
from pdsl.public.features import MODEL
from pdsl.public.knowledge import PublicKnowledge, Records, apply_features, learn_features, start_from_public
from pdsl.tasks import Loss, Metric, Task, build_task, infer_kind
from pdsl.topology import Graph, Schedule, describe_schedule
from pdsl.training.learning_rate import resolve_learning_rate
from pdsl.utils.errors import PdslError
from pdsl.utils.imports import import_object
from pdsl.utils.inputs import Inputs, tensors_digest
from pdsl.utils.random import SecretStreams, Streams
from pdsl.utils.types import JsonDict


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that a run needs, checked: no later error is the user's mistake."""

    config: Config
    data: Data
    graph: Graph
    network: Network
    parts: list[Tensor]  # indices of each agent's records in data.x; empty for agents of other processes
    batches: Batches
    validation: tuple[Inputs, Tensor]  # public set Q
    test: tuple[Inputs, Tensor]
    mechanisms: list[Mechanism] | None  # release of each agent in a round; None without noise
    learning_rates: tuple[float, ...]  # γ of each round
    streams: Streams = field(repr=False)
    engine: Engine = field(repr=False)
    labels: Tensor = field(repr=False)  # [M, classes] number of records per agent and class
    attackers: Attackers
    seal: RunSeal = field(repr=False)
    public: PublicKnowledge = field(default_factory=PublicKnowledge)
    given: Mapping[str, str] = field(default_factory=dict)  # settings that were chosen for this run, as they were given

    def __repr__(self) -> str:  # records must not be printed
        return f"Experiment({self.config.algorithm.name} on {self.data.name}, {self.graph.describe()})"

    @property
    def sigma(self) -> list[float]:
        """Standard deviation of the noise on each agent's messages, before `sigma_scale`."""
        return [m.sigma for m in self.mechanisms] if self.mechanisms else [0.0] * self.graph.agents

    @property
    def largest_sigma(self) -> float:
        """Largest σ of all messages; 0 without noise."""
        return max((sigma for m in self.mechanisms or () for sigma in m.sigmas), default=0.0)

    @property
    def sigma_scale(self) -> list[dict[int, float]]:
        """Factor of σ for each neighbour of each agent; empty where an agent's messages are alike."""
        scales = [m.sigma_scale for m in self.mechanisms or ()]
        return [
            dict(zip(self.graph.neighbourhood(i).tolist(), s, strict=True)) if s else {} for i, s in enumerate(scales)
        ]

    @property
    def public_set(self) -> tuple[Inputs, Tensor]:
        """All of Q: `validation`, and the records that a start was trained on."""
        return self.public.public or self.validation

    def training_labels(self, agent: int) -> Tensor:
        """The targets that an agent trains on: flipped for label-flip attackers."""
        labels = self.data.y[self.parts[agent]]
        return self.task.flip(labels) if self.attackers.get(agent) == "label-flip" else labels

    @property
    def task(self) -> Task:
        return self.network.task

    @property
    def agent_names(self) -> tuple[str, ...]:
        """Names of the agents; their numbers if they have none."""
        return self.data.agent_names or self.graph.names or tuple(str(i) for i in range(self.graph.agents))

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes or labels; their numbers if they have none."""
        return self.data.class_names or tuple(str(c) for c in range(self.data.classes))

    def to_module(self, x: Tensor) -> nn.Module:
        """The model with parameters x [d]; with a feature map, its layers come first."""
        head = self.network.to_module(x, self.validation[0])
        return head if self.public.features is None else self.public.features.join(head)

    def open_ledger(self) -> Ledger | None:
        """An empty ledger; None without noise, because no ε can be stated then."""
        if self.mechanisms is None:
            return None
        peers = [self.graph.neighbourhood(i).tolist() for i in range(self.graph.agents)]
        return Ledger.empty(self.config.privacy.delta, self.config.privacy.budget, peers, make_calendar(self.graph))

    def declared_release(self, t: int, agent: int) -> Release:
        """Messages and steps of an agent in round t, which its mechanism covers."""
        assert self.mechanisms is not None
        charged = self.mechanisms[agent]
        if not isinstance(self.graph, Schedule):
            return Release(charged.messages, charged.steps)
        return self.config.algorithm.releases_in(self.graph.at(t), agent)._replace(sigma_scale=())

    def owner_metadata(self) -> JsonDict:
        """Exact record counts, for the data owners only."""
        return {"labels": self.labels.tolist()}

    def metadata(self) -> JsonDict:
        """Graph, sizes and noise, which stay the same in all rounds: setup.json."""
        g = self.graph
        return {
            "agents": g.agents,
            "edges": [list(edge) for edge in g.edges()],  # of all rounds
            **describe_schedule(g),
            "graph_name": g.name,
            "parameters": self.network.num_parameters,
            "spectral_gap": g.spectral_gap,
            "graph": g.describe(),
            "data": self.data.name,
            "validation": len(self.validation[1]),
            "test": len(self.test[1]),
            "sigma": [max(m.sigmas) for m in self.mechanisms] if self.mechanisms else self.sigma,
            "attackers": [[agent, kind] for agent, kind in sorted(self.attackers.items())],
            "task": {
                "kind": self.task.kind,
                "metric": self.task.metric,
                "higher_is_better": self.task.higher_is_better,
            },
            **({"names": list(names)} if (names := self.data.agent_names or g.names) else {}),
            **({"classes": list(self.data.class_names)} if self.data.class_names else {}),
            **({"public": self.public.as_dict()} if self.public.uses else {}),
            "given": dict(self.given),
        }


def prepare(
    config: Config,
    *,
    model: nn.Module | None = None,
    data: Data | None = None,
    graph: Graph | None = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    key: bytes | None = None,
    agreed: list[Mechanism] | None = None,
    given: Mapping[str, str] | None = None,
    engine: Callable[[Graph], Engine] = LocalEngine,
) -> Experiment:
    """Load, partition and check everything that `config` names, or use the objects given instead.

    The process keeps the records of the agents that its engine owns. A resumed run passes its secret `key`, the
    mechanisms `agreed` on when it started, and the settings `given` as "auto" then, which its config has as numbers.
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
    for name, passed, setting in objects:
        if setting == "python" and passed is None:
            raise PdslError(
                f"this run's {name} was an object given in Python, which a config cannot name; use pdsl.train, or"
                f" pdsl.load(run, {name}=...) to audit it"
            )
    private = streams.secret and config.privacy.mode != "none"
    asked = graph.agents if graph else config.graph.agents if "agents" in config.graph.model_fields_set else None
    data = _match_names(data or load(config.data, streams, asked, config.task.kind, private), graph)
    config = take_agents(config, data.agents)
    agents = graph.agents if graph else config.graph.agents
    config = config.resolve(data.name)
    parts = partition(data.y, agents, config.partition, streams, data.owner, data.agent_names)
    graph = graph or topology.build(
        config.graph, streams
    )  # after partition, which checks that there are enough records
    if isinstance(graph, Schedule):
        graph.at(config.rounds)  # refuses rounds for which there is no graph
    config.algorithm.check(graph.max_members)
    q_streams = streams if config.data.public_seed is None else Streams(config.data.public_seed)
    raw = data
    data, validation, test = standardise(data, *split_public(data, config.data.validation, q_streams), config.data)
    if model is None and config.model.layers is not None and config.public.features == MODEL:
        model = build_model(config.model, data.name, validation[0], 0, streams)  # its frozen layers are the features
    knowledge, model, data, validation, test = use_features(config, data, validation, test, model)
    if knowledge.features is not None or knowledge.scaling is not None:
        knowledge = replace(knowledge, raw=raw)
    network = build_network(config, data, validation, model, streams, loss, metric)
    network, knowledge, validation = use_start(config, network, validation, knowledge)
    config = config.model_copy(update={"task": config.task.model_copy(update={"kind": network.task.kind})})
    if network.mixes_records and (config.privacy.mode != "none" or config.privacy.clipping == "per-sample"):
        raise PdslError(
            f"the model's {network.mixes_records} mixes records, so one record's gradient is not its own and cannot be"
            " clipped or kept private; use GroupNorm (pdsl.make_private(model) replaces it), or privacy.mode=none with"
            " privacy.clipping=batch"
        )
    sizes = [len(part) for part in parts]
    batches = Batches(sizes, config.batch, streams, public_records(config.batch, data.published, sizes, private))
    releases = _releases(config, graph)
    if agreed is None:
        agreed = mechanisms(
            config.privacy, graph, batches, releases, config.rounds, config.share_floor, network.num_parameters
        )
    given = given_settings(config) if given is None else given
    config = resolve_learning_rate(config, graph, network, validation, agreed)
    check_algorithm(config.algorithm, graph, network, validation, releases)
    attackers = draw_attackers(config.attack, agents, streams)
    owner = engine(graph)
    labels = label_counts(parts, data.y, data.classes)
    records = () if agreed is None else (data.x, data.y, *parts, *validation)
    rates = config.algorithm.learning_rates(config.rounds)
    seal = make_seal(config, streams, graph, network, agreed, rates, records)
    streams = streams.bind(seal.context)
    batches = replace(batches, streams=streams)
    data, parts = _own_records(data, parts, owner.agents)
    return Experiment(
        config=config,
        data=data,
        graph=graph,
        network=network,
        parts=parts,
        batches=batches,
        validation=validation,
        test=test,
        mechanisms=agreed,
        learning_rates=rates,
        streams=streams,
        engine=owner,
        labels=labels,
        attackers=attackers,
        seal=seal,
        public=knowledge,
        given=given,
    )


def use_features(
    config: Config, data: Data, q: Records, test: Records, model: nn.Module | None
) -> tuple[PublicKnowledge, nn.Module | None, Data, Records, Records]:
    """Fit the feature map of the settings to Q, and replace all inputs by features; the model is that of the rest."""
    given, engine, shape = model, config.engine, tuple(q[0].shape[1:]) if isinstance(q[0], Tensor) else None
    code = _code_of_map(config.public.features, model)
    features, model = learn_features(config.public, q[0], model, code, engine.device, engine.workers)
    knowledge = PublicKnowledge(features, shape, data.scaling if data.standardised else None, model=given)
    if features is not None:
        data, q, test = apply_features(features, data, q, test, engine.device, engine.workers)
    return knowledge, model, data, q, test


def _code_of_map(features: str, model: nn.Module | None) -> str:
    """Digest of the user's code that may be the feature map: the model, or the object at an import path."""
    if ":" not in features:
        return "" if model is None else model_digest(model)
    found = import_object(features, "public.features")
    if isinstance(found, nn.Module):
        return model_digest(found)
    return code_digest([found if isroutine(found) or isinstance(found, type) else type(found)])


def use_start(
    config: Config, network: Network, public: Records, knowledge: PublicKnowledge
) -> tuple[Network, PublicKnowledge, Records]:
    """The network with the initial parameters that `public.start` says, and the public records that value messages."""
    knowledge = replace(knowledge, public=public)
    return start_from_public(config.public, network, public, knowledge, model_digest(network.module))


def build_network(
    config: Config,
    data: Data,
    public: tuple[Inputs, Tensor],
    model: nn.Module | None,
    streams: Streams,
    loss: Loss | None = None,
    metric: Metric | None = None,
) -> Network:
    """The model with its task, checked on public records."""
    (inputs, targets), device = public, config.engine.device
    kind: str = config.task.kind
    if kind == "auto":
        outputs = None if model is None else Network(model, device).count_outputs(inputs)
        kind = infer_kind(data.y, outputs)
        if config.task.loss is not None and not _fits(kind, data.classes, outputs):
            kind = "custom"
    task = build_task(config.task, kind, data.classes, targets, data.class_names, loss, metric)
    if model is None:
        name = data.name if data.published is not None else config.data.name  # a user's file may be called mnist.npz
        model = build_model(config.model, name, inputs, task.outputs, streams)
    network = Network(model, device, task)
    network.check(inputs, targets)
    config.algorithm.check_task(task)
    return network


def given_settings(config: Config) -> dict[str, str]:
    """Settings given as "auto" that an experiment's config has as numbers."""
    return {"algorithm.learning_rate": AUTO} if config.algorithm.learning_rate == AUTO else {}


def _fits(kind: str, classes: int, outputs: int | None) -> bool:
    """Whether outputs of a model for a user's loss are scores or logits of the classes."""
    return kind == "binary" or (kind in ("multiclass", "multilabel") and outputs == classes)


def make_seal(
    config: Config,
    streams: Streams,
    graph: Graph,
    network: Network,
    agreed: list[Mechanism] | None,
    learning_rates: Sequence[float],
    records: Iterable[Inputs],
    besides: str = "",
) -> RunSeal:
    """The seal of a run: digests of everything that shapes its messages. `besides`: further identification."""
    files = ("data.path", "data.test_path", "graph.path", "model.weights_path")  # their contents are sealed
    loss = network.task.loss
    code = code_digest([type(config.algorithm), *([] if loss is None else [loss])])
    settings = settings_digest(config.as_dict(), (*MAY_CHANGE, *files)) + code + besides
    if config.algorithm.rates_need_rounds:
        settings += json.dumps(learning_rates)
    return RunSeal.of(
        streams.key if isinstance(streams, SecretStreams) else b"",
        settings=settings,
        records=tensors_digest(records),
        graph=graph_digest(graph),
        model=model_digest(network.module),
        noise=noise_digest(agreed),
        device=config.engine.device,
        software=software(),
    )


def _match_names(data: Data, graph: Graph | None) -> Data:
    """Put the owners of the records in the order of the graph's names, if both have names."""
    names = None if graph is None else graph.names
    if names is None or not data.agent_names or data.owner is None:
        return data
    if set(names) != set(data.agent_names):
        odd = sorted(set(names) ^ set(data.agent_names))[0]
        raise PdslError(f"graph and data name different agents: {odd!r} is in one of them only; use the same names")
    place = torch.tensor([names.index(name) for name in data.agent_names])
    return replace(data, owner=place[data.owner], agent_names=names)


def _own_records(data: Data, parts: list[Tensor], agents: range) -> tuple[Data, list[Tensor]]:
    """The records of these agents, and the indices of each agent's records among them."""
    if len(agents) == len(parts):
        return data, parts
    kept = torch.cat([parts[i] for i in agents])
    places = iter(torch.split(torch.arange(len(kept)), [len(parts[i]) for i in agents]))
    none = torch.zeros(0, dtype=torch.int64)
    own = replace(data, x=data.x[kept], y=data.y[kept], owner=None)
    return own, [next(places) if i in agents else none for i in range(len(parts))]


def _releases(config: Config, graph: Graph) -> list[Release]:
    """The algorithm's declared release of each agent; none without noise."""
    if config.privacy.mode == "none":
        return []
    return [charged_release(config.algorithm, graph, i) for i in range(graph.agents)]


def make_calendar(graph: Graph) -> Calendar | None:
    """Rounds of a period in which each agent sends to each of its neighbours; None for a fixed graph."""
    if not isinstance(graph, Schedule):
        return None
    rounds = tuple(
        tuple(
            tuple(t for t, of_round in enumerate(graph.graphs, start=1) if of_round.W[i, j])
            for j in graph.neighbourhood(i).tolist()
        )
        for i in range(graph.agents)
    )
    return Calendar(graph.period, rounds)


def check_device(name: str) -> None:
    """Raise PdslError unless torch can compute on the device."""
    try:
        torch.ones(1, device=name).item()  # 'meta' can hold a tensor, but not read it
    except (RuntimeError, AssertionError, ImportError) as e:
        raise PdslError(f"engine.device={name}: {str(e).splitlines()[0]}; try engine.device=cpu") from e
