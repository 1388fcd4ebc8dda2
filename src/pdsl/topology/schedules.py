"""Built-in schedules: graphs with few neighbours per round that reach exact consensus within a period."""

import math

import numpy as np

from pdsl.settings import GraphSettings
from pdsl.topology.graph import Floats, Graph, Integers, Schedule, check_size
from pdsl.utils.errors import PdslError

Groups = list[Integers]  # disjoint sets of agents; the members of a set average their models


def one_peer_exponential(agents: int) -> Schedule:
    """One-peer exponential schedule: in round t agent i averages with agent i XOR 2^(t−1 mod log₂ M).

    Each agent has one neighbour per round, and after log₂ M rounds all agents have the exact mean. M must be a power of
    two: this is the symmetric form of the schedule, because cross-gradients are requests with replies, so messages go
    both ways. The directed form has exact consensus for powers of two only, too.

    Args:
        agents: number of agents, a power of two.
    """
    check_size("one-peer-exponential", agents)
    if agents.bit_count() != 1:
        raise PdslError(
            f"graph 'one-peer-exponential' cannot have {agents} agents: pairs that reach consensus need a power of two;"
            " try kind=base-k (pdsl.base_k), which has exact consensus for any number of agents"
        )
    number = np.arange(agents)
    rounds = []
    for bit in range(agents.bit_length() - 1):
        W = np.eye(agents) / 2
        W[number, number ^ 1 << bit] = 1 / 2
        rounds.append(W)
    return _schedule(rounds, GraphSettings(kind="one-peer-exponential", agents=agents))


def base_k(agents: int, k: int = 1) -> Schedule:
    """Base-(k+1) schedule: at most k neighbours per round, and exact consensus after a period, for any M.

    Takezawa et al., "Beyond exponential graph", NeurIPS 2023.

    Args:
        agents: number of agents.
        k: most neighbours of an agent in a round, itself not counted.
    """
    check_size("base-k", agents)
    if k < 1:
        raise PdslError(f"graph 'base-k' cannot have k={k}: each agent needs a neighbour; try k=1 or more")
    number = np.arange(agents)
    rounds = _split_by_base(number, k)
    smooth = _smooth_part(agents, k)
    if 1 < smooth < agents:  # M = p·q: p sets of q agents reach consensus each, then q sets with one agent of each
        table = number.reshape(smooth, agents // smooth)
        inside = [_split_by_base(row, k, agents) for row in table]
        across = _average_groups(agents, [_split_by_factors(column, k) for column in table.T])
        two_stages = [*_merge(agents, inside), *across]
        if len(two_stages) < len(rounds):
            rounds = two_stages
    return _schedule(rounds, GraphSettings(kind="base-k", agents=agents, k=k))


def _schedule(rounds: list[Floats], settings: GraphSettings) -> Schedule:
    graphs = [Graph(settings.kind, W, connected=False) for W in rounds]
    return Schedule.of(settings.kind, graphs, settings=settings)


def _smooth_part(n: int, k: int) -> int:
    """Largest divisor of n whose prime factors are at most k + 1."""
    rest = n
    for factor in range(2, k + 2):
        while rest % factor == 0:
            rest //= factor
    return n // rest


def _fewest_factors(n: int, k: int) -> list[int]:
    """n as a product of as few factors of at most k + 1 as possible; n must have one."""
    best: dict[int, list[int]] = {1: []}
    for product in range(2, n + 1):
        if n % product:
            continue
        shorter = [[*best[product // f], f] for f in range(2, k + 2) if product % f == 0 and product // f in best]
        if shorter:
            best[product] = min(shorter, key=len)
    return best[n]


def _split_by_factors(members: Integers, k: int) -> list[Groups]:
    """Hyper-hypercube: the sets that average in each round until all members agree. Their number must be smooth.

    Members are the points of a grid with one axis per factor; round l averages along axis l.
    """
    shape = _fewest_factors(len(members), k)
    grid = members.reshape(shape)
    return [list(np.moveaxis(grid, axis, -1).reshape(-1, length)) for axis, length in enumerate(shape)]


def _average_groups(agents: int, sets: list[list[Groups]]) -> list[Floats]:
    """Matrices of rounds in which disjoint sets run their own lists of groups; a set that is done is idle."""
    rounds = []
    for t in range(max(map(len, sets), default=0)):
        W = np.eye(agents)
        for groups in (own[t] for own in sets if t < len(own)):
            for group in groups:
                W[np.ix_(group, group)] = 1 / len(group)
        rounds.append(W)
    return rounds


def _merge(agents: int, parallel: list[list[Floats]]) -> list[Floats]:
    """Run schedules of disjoint agents at the same time. Each changes only the rows of its own agents."""
    rounds = []
    for t in range(max(map(len, parallel))):
        rounds.append(np.eye(agents) + sum(own[t] - np.eye(agents) for own in parallel if t < len(own)))
    return rounds


def _split_by_base(members: Integers, k: int, agents: int | None = None) -> list[Floats]:
    """Simple Base-(k+1) graph of `members`, as matrices [agents, agents]; other agents are idle.

    n = Σ_l a_l (k+1)^(p_l) with falling p_l. The members are cut into sets V_l of a_l (k+1)^(p_l), and V_l into a_l
    parts of (k+1)^(p_l).

    1. Each V_l agrees on its own mean.
    2. Round l: each member of the later sets V_{l+1} ∪ … (r members) meets one member of each part of V_l, with weight
       ω = N/(a_l N + r), N = (k+1)^(p_l). V_l had one common value v and the others the mean u, so the mean of a part
       becomes v + ω r (u − v)/N, which is the mean of V_l and the others together: the mean of all. So does theirs.
    3. Each part of V_l averages; this starts right after round l.
    """
    M, n = agents or len(members), len(members)
    if _smooth_part(n, k) == n:
        return _average_groups(M, [_split_by_factors(members, k)])
    parts: list[list[Integers]] = []  # parts[l]: the parts of V_l
    start = 0
    for power in range(int(math.log(n, k + 1)) + 1, -1, -1):
        size = (k + 1) ** power
        if count := (n - start) // size:
            parts.append([members[start + c * size : start + (c + 1) * size] for c in range(count)])
            start += count * size
    sets = [np.concatenate(of) for of in parts]
    rounds = _average_groups(M, [_split_by_factors(own, k) for own in sets])
    later: list[list[Floats]] = []
    for number, of in enumerate(parts):
        others = np.concatenate(sets[number + 1 :]) if number + 1 < len(sets) else members[:0]
        inside = [_split_by_factors(part, k) for part in of] if len(others) else []
        later.append([np.eye(M)] * number + [_meet(M, of, others)] + _average_groups(M, inside))
    return rounds + [W for W in _merge(M, later) if not np.array_equal(W, np.eye(M))]


def _meet(agents: int, parts: list[Integers], others: Integers) -> Floats:
    """Matrix of a round in which each of the others meets one member of each part."""
    weight = len(parts[0]) / (len(parts) * len(parts[0]) + len(others))
    W = np.eye(agents)
    for part in parts:
        met = part[: len(others)]
        W[others, met] = W[met, others] = weight
        W[met, met] -= weight
        W[others, others] -= weight
    return W
