"""Clipped cross-gradients g[i,j] = ∇F_i(x_j; ξ_i): agent i's gradient on its own batch, at neighbour j's model.

There are two kinds of clipping:

- `batch` (equations 9 and 12 of the paper): the gradient of the whole batch is scaled down to norm C. One record can
  move it by up to 2C.
- `per-sample`: each record's gradient is scaled down to norm C before summation. One record moves the result by at
  most C/B, so far less noise is needed.

In both, the sum over records is computed in float64 and divided by a public constant, never by the number of records
drawn. With `per-sample`, the constant divides each record's factor. The stated sensitivity includes the rounding error
of the sum (`privacy.noise.ARITHMETIC`).
"""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pdsl.data.sampling import Batches
from pdsl.gradients.per_example import LAYERS, Kernel
from pdsl.models.network import Network
from pdsl.utils.inputs import AugmentedFields, Inputs, channels_last, split
from pdsl.utils.random import purpose
from pdsl.utils.workers import Workers


def clip_factors(squared_norms: Tensor, C: float) -> Tensor:
    """1 / max(1, ‖g‖/C) for each squared norm (float64).

    Guarantee: factor · ‖g‖ ≤ C for every finite norm, up to float64 rounding. A non-finite norm gives 0.
    """
    return (C / squared_norms.sqrt().clamp(min=C)).nan_to_num_(nan=0.0)  # C/∞ is 0


def sum_gradients(network: Network, x: Tensor, inputs: Inputs, labels: Tensor) -> Tensor:
    """Unclipped gradient [d] of the sum of the records' losses."""
    replica = network.replica()
    loss = network.losses(replica.load(x), inputs, labels).sum()
    by_parameter = torch.autograd.grad(loss, replica.parameters, materialize_grads=True)  # zero for unused parameters
    return torch.cat([p.reshape(-1) for p in by_parameter])


def clip_batch(network: Network, x: Tensor, inputs: Inputs, labels: Tensor, C: float, divisor: float) -> Tensor:
    """Gradient [d] of the batch's summed loss over `divisor`, clipped as a whole to norm C; float64.

    Guarantee: finite, norm at most C. The result is zero for an empty batch, for a gradient with a non-finite entry,
    and for a single record under BatchNorm, because one record has no batch statistics.
    """
    zero = torch.zeros_like(x, dtype=torch.float64)
    if len(labels) == 0 or (len(labels) == 1 and network.mixes_records):
        return zero
    g = sum_gradients(network, x, inputs, labels).double() / divisor
    squared_norm = g.square().sum()
    return g * clip_factors(squared_norm, C) if torch.isfinite(squared_norm) else zero


def clip_per_sample(
    network: Network, x: Tensor, inputs: Inputs, labels: Tensor, C: float, divisor: float, kernel: Kernel
) -> Tensor:
    """Sum of the records' gradients, each clipped to norm C, over `divisor`, at one model x [d] or several [k, d].

    The result is float64, of the shape of x. Several models share the conversions of the records.

    Guarantee: adding or removing one record moves the result by at most C/divisor. An empty batch gives zero. A
    record whose gradient has a non-finite entry counts as zero and takes the same operations as any other.
    """
    total = torch.zeros_like(x, dtype=torch.float64)
    models, sums = x.view(-1, x.shape[-1]), total.view(-1, x.shape[-1])
    for a, b in zip(split(inputs, kernel.block), torch.split(labels, kernel.block), strict=True):
        if len(b):
            records = kernel.pad_block(a, b)
            for model, of_model in zip(models, sums, strict=True):
                of_block = kernel.gradients(network, model, records)
                of_model += of_block.weighted_sum(clip_factors(of_block.squared_norms, C) / divisor)
    if kernel is not LAYERS:
        network.check_state()
    return total


GradientKey = tuple[int, int, int, bytes]  # round, local step, agent, digest of the model


@dataclass(frozen=True)
class LocalGradients:
    """The agents' private records, and clipped gradients on batches of them."""

    network: Network
    inputs: list[Inputs]  # per agent [n_i, ...]
    labels: list[Tensor]  # per agent [n_i]
    batches: Batches
    clipping: str
    C: float
    workers: Workers
    kernel: Kernel
    repeated: dict[GradientKey, Tensor] = field(default_factory=dict)  # gradients requested twice in the last call

    def __repr__(self) -> str:  # records must not be printed
        return f"LocalGradients({len(self.inputs)} agents, {self.clipping} clipping)"

    def gradients(self, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None) -> Tensor:
        """Clipped gradients [rows, d] float64: row e is agents[e]'s, on its batch ξ of round t, at the model x[e].

        Each local step of a round has its own batch. With teachers[e], the distance to that model's output for a
        record is added to the record's loss. Equal requests (all models are equal on a full graph) are computed once,
        in this call and the next.
        """
        models = x if teachers is None else torch.cat([x, teachers], dim=1)
        keys = [(t, step, agent, digest) for agent, digest in zip(agents.tolist(), row_digests(models), strict=True)]
        first = {key: row for row, key in reversed(list(enumerate(keys)))}

        def compute(rows: list[int]) -> list[Tensor]:
            """Gradients of rows of one agent; of a single row, if there are teachers."""
            agent = int(agents[rows[0]])
            batch = self.batches.draw(agent, t, step)
            inputs, targets = self.read(agent, batch, t, step), self.labels[agent][batch]
            if teachers is not None and len(batch):
                targets = distillation_targets(targets, self.kernel.outputs(self.network, teachers[rows[0]], inputs))
            return list(self.on(x[rows], inputs, targets, self.batches.divisor(agent)))

        known = {key: self.repeated[key] for key in first if key in self.repeated}
        new = [key for key in first if key not in known]
        groups = _group_by_agent(new, self.workers.count) if teachers is None else [[key] for key in new]
        found = self.workers.map(compute, [[first[key] for key in group] for group in groups])
        g = known | dict(zip(chain.from_iterable(groups), chain.from_iterable(found), strict=True))
        self.repeated.clear()
        self.repeated.update({key: g[key] for key, count in Counter(keys).items() if count > 1})
        return torch.stack([g[key] for key in keys])

    def read(self, agent: int, batch: Tensor, t: int, step: int = 0) -> Inputs:
        """Inputs of a batch. Random transforms of a record have a stream of its own, so records do not mix."""
        own = self.inputs[agent]
        if not isinstance(own, AugmentedFields):
            return own if len(batch) == len(own) else own[batch]
        seeds = self.batches.streams.bits(purpose("augment", step), agent, t).read(len(own))
        return own.at(batch, seeds[batch.numpy()])

    def on(self, x: Tensor, inputs: Inputs, labels: Tensor, divisor: float) -> Tensor:
        """Clipped gradients of these records at one model x [d] or several [k, d], of the shape of x."""
        if self.clipping == "batch" and x.ndim == 2:
            return torch.stack([self.on(model, inputs, labels, divisor) for model in x])
        if self.clipping == "batch":
            return clip_batch(self.network, x, channels_last(inputs), labels, self.C, divisor)
        return clip_per_sample(self.network, x, channels_last(inputs), labels, self.C, divisor, self.kernel)


def _group_by_agent(keys: Sequence[GradientKey], workers: int) -> list[list[GradientKey]]:
    """Group the keys by agent; few agents are divided, so that every worker has a group."""
    by_agent: dict[int, list[GradientKey]] = {}
    for key in keys:
        by_agent.setdefault(key[2], []).append(key)
    parts = math.ceil(workers / max(1, len(by_agent)))
    sizes = {agent: math.ceil(len(own) / parts) for agent, own in by_agent.items()}
    return [own[n : n + sizes[a]] for a, own in by_agent.items() for n in range(0, len(own), sizes[a])]


def distillation_targets(labels: Tensor, teacher: Tensor) -> Tensor:
    """Targets [n, classes] that make cross-entropy −log p(label) + KL(teacher ‖ p), up to a constant.

    Both terms depend on one record only, so clipping its gradient bounds both together.
    """
    probabilities = teacher.softmax(-1)
    return probabilities + one_hot(labels, probabilities.shape[-1])


def row_digests(x: Tensor) -> list[bytes]:
    """One digest per row; equal digests mean equal rows."""
    rows = x.detach().cpu().contiguous().numpy()
    return [hashlib.blake2b(row, digest_size=16).digest() for row in rows]
