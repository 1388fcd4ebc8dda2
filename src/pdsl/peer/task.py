"""From a plan and an organisation's own folder to an experiment of which it owns one agent.

data.npz      x [n, ...] and y [n]: its records, which never leave the folder
public.npz    x_validation, y_validation, x_test, y_test: the same for everybody, by their hash in the plan
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

from pdsl import models
from pdsl.config import Config
from pdsl.data import Batches, Data, label_counts
from pdsl.data.own import load_public, load_records
from pdsl.data.records import Records, check_classes, check_shapes
from pdsl.engine import Engine
from pdsl.errors import PdslError
from pdsl.graph import Graph
from pdsl.models import Network
from pdsl.peer.identity import Identity
from pdsl.peer.plan import Plan, Task, section
from pdsl.privacy import Mechanism, mechanisms
from pdsl.randomness import SecretStreams, Streams
from pdsl.train import Experiment, bond_of

OWN, PUBLIC = "data.npz", "public.npz"


def public_task(path: Path, records: float, classes: int | None) -> Task:
    """What a plan says of the data, from the public file and the number that was agreed on."""
    test, validation = load_public(path)
    most = 1 + max(int(part.y.max()) for part in (test, validation))
    shape = tuple(test.x.shape[1:])
    said = {"records": records, "shape": shape, "classes": classes or most, "public": digest(path)}
    task = section(Task, said, "the plan's task")
    check_shapes([test, validation])
    check_classes([test, validation], task.classes)
    return task


def digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as e:
        raise PdslError(f"{path}: {e.strerror}; put the public file there that came with the plan") from e


def network(config: Config, task: Task) -> Network:
    """The agreed model at its agreed start."""
    shape = torch.Size(task.shape)
    module = models.build(config.model, "npz", shape, task.classes, Streams(config.seed))
    made = Network(module, config.engine.device)
    made.check(torch.zeros(2, *shape), task.classes)
    return made


def check_folder(own: Identity, plan: Plan) -> tuple[Records, Records, Records]:
    """Own records, test set and Q; PdslError unless they are what the plan says."""
    records = load_records(own.folder / OWN)
    if digest(own.folder / PUBLIC) != plan.task.public:
        raise PdslError(f"{own.folder / PUBLIC} is not the one that the plan is about; ask for it again")
    test, validation = load_public(own.folder / PUBLIC)
    if tuple(records.x.shape[1:]) != plan.task.shape:
        shape = list(records.x.shape[1:])
        raise PdslError(f"{own.folder / OWN}: records have shape {shape}, but the plan says {list(plan.task.shape)}")
    check_shapes([records, test, validation])
    check_classes([records, test, validation], plan.task.classes)
    return records, test, validation


def agreed_mechanisms(plan: Plan) -> list[Mechanism]:
    """What each member releases in a round with all its neighbours: a matter of the plan alone."""
    config, graph, d = plan.config, plan.graph, network(plan.config, plan.task).d
    batches = Batches([1] * graph.agents, config.batch, Streams(config.seed), plan.task.records)
    releases = [config.algorithm.releases_in(graph, i) for i in range(graph.agents)]
    found = mechanisms(config.privacy, graph, batches, releases, config.rounds, config.shapley.floor, d)
    assert found is not None  # a plan's mode is sound
    return found


def experiment(
    own: Identity,
    plan: Plan,
    net: Network,
    key: bytes,
    incarnation: int,
    released: Mechanism,
    engine: Callable[[Graph], Engine],
) -> Experiment:
    """This organisation's part of the training. Of the others it knows what the plan says.

    Noise and batches are derived from the key, the incarnation, the plan and the records.
    """
    config, graph, me = plan.config, plan.graph, plan.agent(own.card.name)
    records, test, validation = check_folder(own, plan)
    none = torch.zeros(0, dtype=torch.int64)
    parts = [torch.arange(len(records.y)) if i == me else none for i in range(graph.agents)]
    q, held_out = (validation.x, validation.y), (test.x, test.y)
    data = Data("their own data", records.x, records.y, *held_out, plan.task.classes, None, q)
    agreed = [released if i == me else m for i, m in enumerate(agreed_mechanisms(plan))]
    secret = SecretStreams(config.seed, key)
    tensors = (records.x, records.y, *q)
    bond = bond_of(config, secret, graph, net, agreed, tensors, f"{plan.hash}/{me}/{incarnation}")
    streams = secret.bind(bond.context)
    return Experiment(
        config,
        data,
        graph,
        net,
        parts,
        Batches([len(part) for part in parts], config.batch, streams, plan.task.records),
        q,
        held_out,
        agreed,
        streams,
        engine(graph),
        label_counts(parts, data.y, data.classes),
        {},
        bond,
    )
