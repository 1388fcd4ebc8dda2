"""Partition of records across agents.

Each kind of partition returns the owner of every record, so each record has exactly one owner. `partition` turns owners
into index lists.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdsl.settings import PartitionSettings
from pdsl.utils.errors import PdslError
from pdsl.utils.random import Streams

TARGET_GROUPS = 10  # groups of records with similar targets, in regression
MAX_DRAWS = 50  # draws of a Dirichlet partition before the last one is repaired
MAX_NAMES = 8  # agents named in a message

Ints = NDArray[np.int64]


def partition(
    y: Tensor,  # [n, ...] targets
    agents: int,
    settings: PartitionSettings,
    streams: Streams,
    owner: Tensor | None = None,  # [n] agent of each record, if the data has a natural partition
    names: Sequence[str] = (),  # of the owners, for messages
) -> list[Tensor]:  # per agent: [n_i] int64
    """Ascending indices of each agent's records. Every record is in exactly one part, and no part is empty.

    Records that have an owner stay with it, whatever `partition.kind` is.
    """
    labels = strata(y)
    if agents > len(labels):
        raise PdslError(f"graph.agents: {agents} agents but only {len(labels)} records; try fewer agents or more data")
    if owner is not None or settings.kind == "natural":
        local = _natural(owner, agents, names)
    else:
        local = KINDS[settings.kind](labels, agents, settings, streams.generator("partition"))
    return [torch.from_numpy(np.flatnonzero(local == agent)) for agent in range(agents)]


def strata(y: Tensor) -> Ints:  # [n]
    """Group of each record, by which heterogeneous partitions split: its class, its first label, or a decile of y."""
    if y.is_floating_point():
        values = y.reshape(len(y), -1)[:, 0].double().numpy()
        cuts = np.quantile(values, np.arange(1, TARGET_GROUPS) / TARGET_GROUPS)
        return np.searchsorted(cuts, values).astype(np.int64)
    return (y if y.ndim == 1 else torch.cat([y, torch.ones_like(y[:, :1])], dim=1).argmax(1)).numpy()


def label_counts(parts: list[Tensor], y: Tensor, classes: int) -> Tensor:  # [M, classes] int64
    """Number of records per agent and class; per agent only, if the targets are not classes."""
    if y.ndim != 1 or y.is_floating_point():
        return torch.tensor([[len(part)] for part in parts])
    return torch.stack([torch.bincount(y[part], minlength=classes) for part in parts])


def _natural(owner: Tensor | None, agents: int, names: Sequence[str]) -> Ints:
    if owner is None:
        raise PdslError(
            "partition.kind: natural needs data with an owner for each record; give an npz with an array 'agent',"
            " a folder with one npz per agent or a list with one data set per agent, or try partition.kind=dirichlet"
        )
    local: Ints = owner.numpy()
    present = np.unique(local)
    if names and len(names) != agents:
        shown = ", ".join(names[:MAX_NAMES]) + (", …" if len(names) > MAX_NAMES else "")
        raise PdslError(
            f"graph.agents: {agents}, but the data belong to {len(names)} agents ({shown}); give a graph of"
            f" {len(names)} agents, like pdsl.ring({len(names)}) or graph.agents={len(names)}, or leave the number out"
        )
    if not np.array_equal(present, np.arange(agents)):
        raise PdslError(
            f"graph.agents: {agents}, but the data belong to {len(present)} agents, {present.min()} to {present.max()};"
            f" try graph.agents={len(present)}, with agents numbered from 0"
        )
    return local


def _iid(y: Ints, agents: int, settings: PartitionSettings, generator: np.random.Generator) -> Ints:
    """Random parts of equal size, to one record."""
    return generator.permutation(np.arange(len(y)) % agents)


def _dirichlet(y: Ints, agents: int, settings: PartitionSettings, generator: np.random.Generator) -> Ints:
    """The paper's partition: the agents' shares of each label are drawn from Dir(μ·1)."""

    def draw() -> Ints:
        local = np.empty(len(y), dtype=np.int64)
        for label in np.unique(y):
            records = generator.permutation(np.flatnonzero(y == label))
            local[records] = _split_by_shares(len(records), agents, settings.mu, generator)
        return local

    return _draw_with_minimum(draw, agents, min(settings.minimum, len(y) // agents), generator)


def _quantity(y: Ints, agents: int, settings: PartitionSettings, generator: np.random.Generator) -> Ints:
    """Labels as in iid; the agents' shares of all records are drawn from Dir(μ·1)."""

    def draw() -> Ints:
        return generator.permutation(_split_by_shares(len(y), agents, settings.mu, generator))

    return _draw_with_minimum(draw, agents, min(settings.minimum, len(y) // agents), generator)


def _shards(y: Ints, agents: int, settings: PartitionSettings, generator: np.random.Generator) -> Ints:
    """Split each class into shards of similar size; each agent gets at most `classes` shards.

    `partition.minimum` is not used, because more records could mean more classes.
    """
    labels, counts = np.unique(y, return_counts=True)
    if agents * settings.classes < len(labels):
        raise PdslError(
            f"partition.classes: {agents} agents with {settings.classes} classes each cannot hold all {len(labels)}"
            f" classes; try partition.classes={-(-len(labels) // agents)}"
        )
    # Add each shard to the class with the largest shards. No shard is empty, as there are no more shards than records.
    shards = np.ones(len(labels), dtype=np.int64)
    for _ in range(min(agents * settings.classes, len(y)) - len(labels)):
        shards[np.argmax(counts / shards)] += 1
    owners = iter(generator.permutation(np.arange(shards.sum()) % agents))
    local = np.empty(len(y), dtype=np.int64)
    for label, cuts in zip(labels, shards, strict=True):
        for shard in np.array_split(generator.permutation(np.flatnonzero(y == label)), cuts):
            local[shard] = next(owners)
    return local


Kind = Callable[[Ints, int, PartitionSettings, np.random.Generator], Ints]
KINDS: dict[str, Kind] = {"dirichlet": _dirichlet, "iid": _iid, "shards": _shards, "quantity": _quantity}


def _split_by_shares(n: int, agents: int, mu: float, generator: np.random.Generator) -> Ints:
    """Owners of n records, agent by agent, with shares drawn from Dir(μ·1)."""
    shares = generator.dirichlet(np.full(agents, mu))
    ends = np.rint(n * np.cumsum(shares)).astype(np.int64)
    ends[-1] = n
    return np.repeat(np.arange(agents), np.diff(ends, prepend=0))


def _draw_with_minimum(draw: Callable[[], Ints], agents: int, minimum: int, generator: np.random.Generator) -> Ints:
    """Draw until every agent has `minimum` records; after MAX_DRAWS draws, repair the last one.

    With a small μ and many agents no draw succeeds: at μ = 0.01 most records of a label go to one agent.
    """
    for _ in range(MAX_DRAWS):
        local = draw()
        if np.bincount(local, minlength=agents).min() >= minimum:
            return local
    return _repair(local, agents, minimum, generator)


def _repair(local: Ints, agents: int, minimum: int, generator: np.random.Generator) -> Ints:
    """Move records from the largest to the smallest part until all have `minimum`, which is at most n // agents."""
    local = local.copy()
    while True:
        sizes = np.bincount(local, minlength=agents)
        smallest, largest = int(sizes.argmin()), int(sizes.argmax())
        if sizes[smallest] >= minimum:
            return local
        # Take at most half of the surplus, so that one part does not supply all others.
        moved = min(minimum - sizes[smallest], -(-(sizes[largest] - minimum) // 2))
        local[generator.choice(np.flatnonzero(local == largest), moved, replace=False)] = smallest
