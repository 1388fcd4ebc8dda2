"""The experiment of one organisation, built from the plan and its folder; it owns one agent.

data.npz      x [n, ...] and y [n]: private records, which never leave the machine (the cache may have their features)
public.npz    x_validation, y_validation, x_test, y_test: the same for all members, verified by the hash in the plan
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from pdsl.data import Batches, Data, label_counts
from pdsl.data.files import load_public, load_records
from pdsl.data.validation import Records, check_classes, check_shapes
from pdsl.engine import Engine
from pdsl.models.network import Network
from pdsl.models.zoo import build as build_model
from pdsl.peer.identity import DATA, PUBLIC, Identity
from pdsl.peer.plan import TaskDescription, TrainingPlan, validate_section
from pdsl.privacy import Mechanism, epsilon, mechanisms
from pdsl.topology import Graph
from pdsl.training.experiment import Experiment, given_settings, make_seal, use_features, use_start
from pdsl.training.learning_rate import resolve_learning_rate
from pdsl.utils.errors import PdslError
from pdsl.utils.format import format_epsilon
from pdsl.utils.inputs import tensors_of
from pdsl.utils.random import SecretStreams, Streams
from pdsl.utils.types import JsonDict


def describe_task(path: Path, records: float, classes: int | None) -> TaskDescription:
    """Describe the task of a plan from the public file and the agreed number of records."""
    test, validation = load_public(path)
    values = {
        "records": records,
        "shape": _shape(test),
        **_describe_targets(test.y, validation.y, classes),
        "public_records": len(validation.y),
        "public": file_sha256(path),
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


def file_sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as e:
        raise PdslError(f"{path}: {e.strerror}; copy the public file that came with the plan there") from e


def build_network(plan: TrainingPlan, public: Tensor | None = None) -> Network:
    """Build the agreed model with its agreed initial parameters. `public`: targets of the public set, for the loss."""
    config, inputs, task = plan.config, torch.zeros(2, *plan.input_shape), plan.build_task(public)
    module = build_model(config.model, "npz", inputs, task.outputs, Streams(config.seed))
    network = Network(module, config.engine.device, task)
    network.check(inputs, torch.zeros(2, *plan.task.target_shape, dtype=torch.int64))
    return network


def load_data(own: Identity, plan: TrainingPlan) -> tuple[Records, Records, Records]:
    """Load private records, test set and Q; PdslError unless they match the plan."""
    records = load_records(own.folder / DATA)
    if file_sha256(own.folder / PUBLIC) != plan.task.public:
        raise PdslError(f"{own.folder / PUBLIC} is not the public file of the plan; request it again")
    test, validation = load_public(own.folder / PUBLIC)
    if _shape(records) != plan.task.shape:
        shape, planned = list(_shape(records)), list(plan.task.shape)
        raise PdslError(
            f"{own.folder / DATA}: records have shape {shape}, but the plan requires {planned}; convert them"
        )
    check_shapes([records, test, validation])
    _check_targets([records, test, validation], plan.task)
    return records, test, validation


def agreed_mechanisms(plan: TrainingPlan) -> list[Mechanism]:
    """Mechanism of each member in a round with all its neighbours, derived from the plan alone."""
    config, graph, d = plan.config, plan.graph, build_network(plan).num_parameters
    batches = Batches([1] * graph.agents, config.batch, Streams(config.seed), plan.task.records)
    releases = [config.algorithm.releases_in(graph, i) for i in range(graph.agents)]
    found = mechanisms(config.privacy, graph, batches, releases, config.rounds, config.share_floor, d)
    assert found is not None  # a plan always has noise
    return found


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
    config, graph, me = plan.config, plan.graph, plan.agent(own.card.name)
    records, test, validation = load_data(own, plan)
    none = torch.zeros(0, dtype=torch.int64)
    parts = [torch.arange(len(records.y)) if i == me else none for i in range(graph.agents)]
    q, held_out = (validation.x, validation.y), (test.x, test.y)
    data = Data("private data", records.x, records.y, *held_out, plan.task.classes, None, q)
    knowledge, _, data, q, held_out = use_features(config, data, q, held_out, None)
    network, knowledge, q = use_start(config, network, q, knowledge)
    planned = agreed_mechanisms(plan)
    given = given_settings(config)
    config = resolve_learning_rate(config, graph, network, q, planned)
    agreed = [mechanism if i == me else m for i, m in enumerate(planned)]
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
