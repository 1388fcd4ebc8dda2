"""The experiment of one organisation, built from the plan and its folder; it owns one agent.

data.npz      x [n, ...] and y [n]: private records, which never leave the machine (the cache may have their features)
public.npz    x_validation, y_validation, x_test, y_test: the same for all members, verified by the hash in the plan
weights.safetensors   initial weights of the model, if the plan has their hash
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from pdsl.data import Batches, Data, label_counts, standardise
from pdsl.data.files import load_public, load_records
from pdsl.data.validation import Records, check_classes, check_shapes
from pdsl.engine import Engine, LocalEngine
from pdsl.models.network import Network
from pdsl.models.zoo import build as build_model
from pdsl.models.zoo import build_random
from pdsl.peer.identity import DATA, PUBLIC, WEIGHTS, Identity
from pdsl.peer.ledger import PeerLedger
from pdsl.peer.model_check import count_ids, needs_integers
from pdsl.peer.plan import TaskDescription, TrainingPlan, file_sha256, validate_section
from pdsl.peer.source_check import check_sources
from pdsl.privacy import Mechanism, epsilon, mechanisms
from pdsl.public.features import BUILT_IN, MODEL, count_features, count_own_features, split_frozen
from pdsl.settings import DataSettings
from pdsl.topology import Graph
from pdsl.training.experiment import Experiment, given_settings, make_seal, use_features, use_start
from pdsl.training.learning_rate import resolve_learning_rate
from pdsl.utils.errors import PdslError
from pdsl.utils.format import format_epsilon
from pdsl.utils.inputs import tensors_of
from pdsl.utils.random import KEY_BYTES, SecretStreams, Streams
from pdsl.utils.types import JsonDict


def describe_task(path: Path, records: float, classes: int | None) -> TaskDescription:
    """Describe the task of a plan from the public file and the agreed number of records."""
    test, validation = load_public(path)
    values = {
        "records": records,
        "shape": _shape(test),
        **_describe_targets(test.y, validation.y, classes),
        "public_records": len(validation.y),
        "public": public_sha256(path),
    }
    task = validate_section(TaskDescription, "task", values, "the plan's task")
    check_shapes([test, validation])
    _check_targets([test, validation], task)
    return task


def _describe_targets(test: Tensor, public: Tensor, classes: int | None) -> JsonDict:
    shape = tuple(test.shape[1:])
    if test.is_floating_point():
        return {"targets": "numbers", "classes": 0, "target_shape": shape}
    if test.ndim == 2:
        return {"targets": "labels", "classes": test.shape[1], "target_shape": shape}
    return {"targets": "classes", "classes": classes or 1 + max(int(y.max()) for y in (test, public))}


def _check_targets(parts: list[Records], task: TaskDescription) -> None:
    """Raise PdslError unless the targets have the type and shape that the plan describes."""
    for part in parts:
        found = _describe_targets(part.y, part.y, None)
        if found["targets"] != task.targets or tuple(part.y.shape[1:]) != task.target_shape:
            raise PdslError(
                f"{part.where}: y holds {found['targets']} of shape {list(part.y.shape[1:])} per record, but the plan"
                f" requires {task.targets} of shape {list(task.target_shape)}; convert it"
            )
    if task.targets == "classes":
        check_classes(parts, task.classes)


def _shape(records: Records) -> tuple[int, ...]:
    return tuple(tensors_of(records.x)[0].shape[1:])


def public_sha256(path: Path) -> str:
    return file_sha256(path, "copy the public file that came with the plan there")


def build_network(plan: TrainingPlan, public: Tensor | None = None, folder: Path | None = None) -> Network:
    """Build the agreed model with its agreed initial parameters; code that the plan names runs only if it is intact.

    `public`: targets of the public set, for the loss. `folder`: of the organisation, with the file of weights; without
    it, weights that come from a file are random ones.
    """
    check_sources(plan.sources)
    task, records = plan.build_task(public), plan.task.public_records
    config, inputs, features = plan.config, plan.example_inputs, plan.config.public
    if features.features in BUILT_IN:
        inputs = torch.zeros(2, count_features(features, torch.Size(plan.task.shape), records))
    elif features.has_features and features.features != MODEL:
        inputs = torch.zeros(2, count_own_features(features, inputs, records, None))
    module = _build_module(plan, inputs, task.outputs, folder)
    if features.features == MODEL:
        backbone, module = split_frozen(module)
        inputs = torch.zeros(2, count_own_features(features, inputs, records, backbone))
    network = Network(module, config.engine.device, task)
    network.check(inputs, plan.example_targets)
    if network.mixes_records:
        raise PdslError(
            f"plan: the model's {network.mixes_records} mixes records, so one record's gradient cannot be clipped; use"
            " GroupNorm (pdsl.make_private(model) replaces it), or freeze it"
        )
    return network


def _build_module(plan: TrainingPlan, inputs: Tensor, outputs: int, folder: Path | None) -> nn.Module:
    """The whole model of the plan, its frozen first layers included, for records or features like `inputs`."""
    settings, streams = plan.config.model, Streams(plan.config.seed)
    if settings.weights_sha256 is None:
        module = build_model(settings, "npz", inputs, outputs, streams)
        frozen = [*module.buffers(), *(p for p in module.parameters() if not p.requires_grad)]
        if ":" in settings.name and frozen:
            raise PdslError(
                f"plan: the model {settings.name} has frozen weights or buffers, which members must agree on; set"
                " model.weights_path to a safetensors file with all its weights"
            )
        return module
    if folder is None:
        return build_random(settings, "npz", inputs, outputs, streams)
    located = settings.model_copy(update={"weights_path": str(folder / WEIGHTS)})
    return build_model(located, "npz", inputs, outputs, streams)


def load_data(own: Identity, plan: TrainingPlan) -> tuple[Records, Records, Records]:
    """Load private records, test set and Q; PdslError unless they match the plan."""
    integers = needs_integers(plan.config)
    records = load_records(own.folder / DATA, integers)
    test, validation = load_public_set(own.folder, plan)
    if _shape(records) != plan.task.shape:
        shape, planned = list(_shape(records)), list(plan.task.shape)
        raise PdslError(
            f"{own.folder / DATA}: records have shape {shape}, but the plan requires {planned}; convert them"
        )
    check_shapes([records, test, validation])
    _check_targets([records, test, validation], plan.task)
    if integers:
        _check_ids([records, test, validation], count_ids(plan.config))
    return records, test, validation


def load_public_set(folder: Path, plan: TrainingPlan) -> tuple[Records, Records]:
    """Load test set and Q; PdslError unless they are those of the plan."""
    if public_sha256(folder / PUBLIC) != plan.task.public:
        raise PdslError(f"{folder / PUBLIC} is not the public file of the plan; request it again")
    return load_public(folder / PUBLIC, needs_integers(plan.config))


def _check_ids(parts: list[Records], count: int) -> None:
    """Raise PdslError unless all inputs are rows of the model's embedding."""
    for part in parts:
        (x,) = tensors_of(part.x)
        if bool(((x < 0) | (x >= count)).any()):
            raise PdslError(f"{part.where}: x has numbers outside 0 to {count - 1}, the rows of the model's embedding")


def agreed_mechanisms(plan: TrainingPlan) -> list[Mechanism]:
    """Mechanism of each member in a round with all its neighbours, derived from the plan alone."""
    config, graph, d = plan.config, plan.graph, build_network(plan).num_parameters
    batches = Batches([1] * graph.agents, config.batch, Streams(config.seed), plan.task.records)
    releases = [config.algorithm.releases_in(graph, i) for i in range(graph.agents)]
    found = mechanisms(config.privacy, graph, batches, releases, config.rounds, config.share_floor, d)
    assert found is not None  # a plan always has noise
    return found


def empty_ledger(plan: TrainingPlan, me: int) -> PeerLedger:
    """Ledger of a member without charges."""
    config = plan.config
    assert config.privacy.budget is not None  # a plan always has a budget
    return PeerLedger(
        delta=config.privacy.delta,
        budget=config.privacy.budget,
        mechanism=agreed_mechanisms(plan)[me],
        algorithm=config.algorithm,
        planned_rounds=config.rounds,
        me=me,
        members=tuple(plan.graph.neighbourhood(me).tolist()),
        charges={},
        plan=plan.original_hash,
        stage=plan.hash,
    )


def check_budget(plan: TrainingPlan) -> None:
    """Refuse a plan whose target no noise can reach, or whose budget is exceeded by a single round.

    It takes a second or two, so it runs when a plan is written or joined, and not whenever one is read.
    """
    privacy = plan.config.privacy
    assert privacy.budget is not None  # a plan always has a budget
    for mechanism in set(agreed_mechanisms(plan)):
        if (spent := epsilon(((mechanism, 1),), privacy.delta)) > privacy.budget:
            raise PdslError(
                f"plan: one round spends ε = {format_epsilon(spent)}, more than"
                f" privacy.target_epsilon={privacy.budget:g}; add noise, or raise the target"
            )


def build_experiment(
    own: Identity,
    plan: TrainingPlan,
    network: Network,
    key: bytes,
    generation: int,
    mechanism: Mechanism,
    engine: Callable[[Graph], Engine],
) -> Experiment:
    """Build the experiment of this organisation. The other members are known from the plan only.

    Noise and batches are derived from the key, the generation, the plan and the records.
    """
    me = plan.agent(own.card.name)
    return _build(plan, me, own.folder, network, load_data(own, plan), key, generation, mechanism, engine)


def build_public_experiment(plan: TrainingPlan, folder: Path) -> Experiment:
    """The experiment of a plan without any private record: no agent has one. `folder`: of the public file."""
    test, q = load_public_set(folder, plan)
    some = Records(q.x[:1], q.y[:1], q.where)  # a public record, because a data set is not empty
    network = build_network(plan, q.y, folder)
    return _build(plan, None, folder, network, (some, test, q), bytes(KEY_BYTES), 0, None, LocalEngine)


def _build(
    plan: TrainingPlan,
    me: int | None,
    folder: Path,
    network: Network,
    loaded: tuple[Records, Records, Records],
    key: bytes,
    generation: int,
    mechanism: Mechanism | None,
    engine: Callable[[Graph], Engine],
) -> Experiment:
    """The experiment of agent `me`, or of none; `loaded`: its records, test set and Q."""
    config, graph, (records, test, validation) = plan.config, plan.graph, loaded
    none = torch.zeros(0, dtype=torch.int64)
    parts = [torch.arange(len(records.y)) if i == me else none for i in range(graph.agents)]
    q, held_out = (validation.x, validation.y), (test.x, test.y)
    data = Data("private data", records.x, records.y, *held_out, plan.task.classes, None, q)
    if plan.task.scale == "public":
        data, q, held_out = standardise(data, q, held_out, DataSettings(scale="public"))
    full = _build_module(plan, plan.example_inputs, 0, folder) if config.public.features == MODEL else None
    knowledge, _, data, q, held_out = use_features(config, data, q, held_out, full)
    network, knowledge, q = use_start(config, network, q, knowledge)
    planned = agreed_mechanisms(plan)
    given = given_settings(config)
    config = resolve_learning_rate(config, graph, network, q, [planned[i] for i in plan.active])
    agreed = [mechanism if mechanism is not None and i == me else m for i, m in enumerate(planned)]
    secret = SecretStreams(config.seed, key)
    rates = config.algorithm.learning_rates(config.rounds)
    tensors = (data.x, data.y, *q)
    seal = make_seal(config, secret, graph, network, agreed, rates, tensors, f"{plan.hash}/{me}/{generation}")
    streams = secret.bind(seal.context)
    return Experiment(
        config=config,
        data=data,
        graph=graph,
        network=network,
        parts=parts,
        batches=Batches([len(part) for part in parts], config.batch, streams, plan.task.records),
        validation=q,
        test=held_out,
        mechanisms=agreed,
        learning_rates=rates,
        streams=streams,
        engine=engine(graph),
        labels=label_counts(parts, data.y, data.classes),
        attackers={},
        seal=seal,
        public=knowledge,
        given=given,
    )


def bind_key(e: Experiment, plan: TrainingPlan, me: int, key: bytes, generation: int) -> Experiment:
    """The same experiment with noise and batches from another key."""
    secret = SecretStreams(e.config.seed, key)
    tensors = (e.data.x, e.data.y, *e.validation)
    besides = f"{plan.hash}/{me}/{generation}"
    seal = make_seal(e.config, secret, e.graph, e.network, e.mechanisms, e.learning_rates, tensors, besides)
    streams = secret.bind(seal.context)
    batches = Batches([len(part) for part in e.parts], e.config.batch, streams, plan.task.records)
    return replace(e, streams=streams, batches=batches, seal=seal)
