"""Who holds which record.

A kind returns the owner of every record, so that each record has exactly one; `partition` turns owners into index
lists and checks that nobody is left without.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdsl.errors import PdslError
from pdsl.randomness import Streams
from pdsl.settings import PartitionSettings

MOST_DRAWS = 50  # of a Dirichlet partition, before it is repaired

Ints = NDArray[np.int64]


def partition(
    y: Tensor,  # [n] labels
    agents: int,
    settings: PartitionSettings,
    streams: Streams,
    owner: Tensor | None = None,  # [n] the agent of each record, where the data say
) -> list[Tensor]:  # per agent: [n_i] int64
    """Ascending indices of each agent's records. Every record is in exactly one part, and no part is empty.

    Records that have an owner stay with it, whatever kind the settings name: they are not ours to deal to others.
    """
    labels: Ints = y.numpy()
    if agents > len(labels):
        raise PdslError(f"graph.agents: {agents} agents but only {len(labels)} records; try fewer agents or more data")
    if owner is not None or settings.kind == "natural":
        owners = _natural(owner, agents)
    else:
        owners = KINDS[settings.kind](labels, agents, settings, streams.generator("partition"))
    return [torch.from_numpy(np.flatnonzero(owners == agent)) for agent in range(agents)]


def label_counts(parts: list[Tensor], y: Tensor, classes: int) -> Tensor:  # [M, classes] int64
    """How many records of each class each agent has."""
    return torch.stack([torch.bincount(y[part], minlength=classes) for part in parts])


def _natural(owner: Tensor | None, agents: int) -> Ints:
    if owner is None:
        raise PdslError(
            "partition.kind: natural needs data that say whose each record is; give an npz with an array 'agent',"
            " a folder with one npz per agent or a list with one data set per agent, or try partition.kind=dirichlet"
        )
    owners: Ints = owner.numpy()
    present = np.unique(owners)
    if not np.array_equal(present, np.arange(agents)):
        raise PdslError(
            f"graph.agents: {agents}, but the data belong to {len(present)} agents, {present.min()} to {present.max()};"
            f" try graph.agents={len(present)}, with agents numbered from 0"
        )
    return owners


def _iid(y: Ints, agents: int, settings: PartitionSettings, generator: np.random.Generator) -> Ints:
    """Equal parts (to one record) at random."""
    return generator.permutation(np.arange(len(y)) % agents)


def _dirichlet(y: Ints, agents: int, settings: PartitionSettings, generator: np.random.Generator) -> Ints:
    """The paper's: the shares of the agents in each label are drawn from Dir(μ·1)."""

    def draw() -> Ints:
        owners = np.empty(len(y), dtype=np.int64)
        for label in np.unique(y):
            records = generator.permutation(np.flatnonzero(y == label))
            owners[records] = _deal(len(records), agents, settings.mu, generator)
        return owners

    return _with_minimum(draw, agents, min(settings.minimum, len(y) // agents), generator)


def _quantity(y: Ints, agents: int, settings: PartitionSettings, generator: np.random.Generator) -> Ints:
    """Labels as in iid, the shares of the agents in all the records drawn from Dir(μ·1)."""

    def draw() -> Ints:
        return generator.permutation(_deal(len(y), agents, settings.mu, generator))

    return _with_minimum(draw, agents, min(settings.minimum, len(y) // agents), generator)


def _shards(y: Ints, agents: int, settings: PartitionSettings, generator: np.random.Generator) -> Ints:
    """Each class is cut into shards of about one size, and each agent gets at most `classes` of the shards.

    The least number of records is one: giving an agent more would give it more classes.
    """
    labels, counts = np.unique(y, return_counts=True)
    if agents * settings.classes < len(labels):
        raise PdslError(
            f"partition.classes: {agents} agents with {settings.classes} classes each cannot hold all {len(labels)}"
            f" classes; try partition.classes={-(-len(labels) // agents)}"
        )
    # The next shard goes where shards are largest, so none is empty as long as there are no more shards than records.
    shards = np.ones(len(labels), dtype=np.int64)
    for _ in range(min(agents * settings.classes, len(y)) - len(labels)):
        shards[np.argmax(counts / shards)] += 1
    holders = iter(generator.permutation(np.arange(shards.sum()) % agents))
    owners = np.empty(len(y), dtype=np.int64)
    for label, cuts in zip(labels, shards, strict=True):
        for shard in np.array_split(generator.permutation(np.flatnonzero(y == label)), cuts):
            owners[shard] = next(holders)
    return owners


Kind = Callable[[Ints, int, PartitionSettings, np.random.Generator], Ints]
KINDS: dict[str, Kind] = {"dirichlet": _dirichlet, "iid": _iid, "shards": _shards, "quantity": _quantity}


def _deal(n: int, agents: int, mu: float, generator: np.random.Generator) -> Ints:
    """Owners of n records in runs, agent by agent; the lengths have shares drawn from Dir(μ·1)."""
    shares = generator.dirichlet(np.full(agents, mu))
    ends = np.rint(n * np.cumsum(shares)).astype(np.int64)
    ends[-1] = n
    return np.repeat(np.arange(agents), np.diff(ends, prepend=0))


def _with_minimum(draw: Callable[[], Ints], agents: int, minimum: int, generator: np.random.Generator) -> Ints:
    """The first draw in which every agent has `minimum` records; after MOST_DRAWS, the last one repaired.

    With a small μ and many agents no draw will do: at μ = 0.01 most of a label goes to one agent.
    """
    for _ in range(MOST_DRAWS):
        owners = draw()
        if np.bincount(owners, minlength=agents).min() >= minimum:
            return owners
    return _repaired(owners, agents, minimum, generator)


def _repaired(owners: Ints, agents: int, minimum: int, generator: np.random.Generator) -> Ints:
    """Moves records from the largest part to the smallest until all have `minimum`, at most n // agents."""
    owners = owners.copy()
    while True:
        sizes = np.bincount(owners, minlength=agents)
        poorest, richest = int(sizes.argmin()), int(sizes.argmax())
        if sizes[poorest] >= minimum:
            return owners
        # At most half of what can be spared, so that one part does not pay for all.
        moved = min(minimum - sizes[poorest], -(-(sizes[richest] - minimum) // 2))
        owners[generator.choice(np.flatnonzero(owners == richest), moved, replace=False)] = poorest
