"""State of an organisation's agent when an amendment changes the members.

Models, averages and the momentum of PDSL stay. The evidence on a neighbour stays with it, and a new neighbour starts
without evidence. Other algorithms keep their models only: their further variables add up to zero or to a mean over all
members, and do so again if all members start them anew in the same round.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pdsl.algorithms import pdsl
from pdsl.config import Config
from pdsl.topology import Graph
from pdsl.training.trainer import EMAState, RobustState, State


def carry_over(config: Config, state: State, before: Sequence[int], me: int, graph: Graph) -> State:
    """The state for the neighbourhood of `me` in a graph, from one for the neighbourhood `before`.

    The history of robust mixing starts again, because the number of mixing steps may change.
    """
    if isinstance(state, EMAState):
        return replace(state, state=carry_over(config, state.state, before, me, graph))
    if isinstance(state, RobustState):
        return RobustState(carry_over(config, state.state, before, me, graph), state.history[:, :0, :0])
    if not isinstance(state, pdsl.State):
        fresh: State = config.algorithm.init(state.x)
        return fresh
    after, size = graph.neighbourhood(me).tolist(), int(graph.degrees.max())
    evidence = _move(state.evidence, 1, before, after, size)
    return replace(state, evidence=evidence, sums=_move(state.sums, 2, before, after, size))


def _move(tensor: Tensor, axis: int, before: Sequence[int], after: Sequence[int], size: int) -> Tensor:
    """Move the entries of members on an axis to their places in another neighbourhood; zeros for new members."""
    if tensor.shape[axis] == 0:  # before round 1
        return tensor
    shape = list(tensor.shape)
    shape[axis] = size
    moved = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    for place, j in enumerate(after):
        if j in before:
            moved.select(axis, place).copy_(tensor.select(axis, before.index(j)))
    return moved
