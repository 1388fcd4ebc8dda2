"""Cross-gradients g[i,j] = ∇F_i(x_j; ξ_i), clipped: agent i's gradient on its own batch, for neighbour j.

Two ways to clip (equations 9 and 12 of the paper, and the one that makes privacy cheap):

- `batch`: the whole batch's gradient is scaled down to norm C. One record can move it by up to 2C.
- `per-sample`: each record's gradient is scaled down to norm C before they are summed. One record moves the result
  by at most C/B.

In both, the sum over records is divided by a public constant, never by the number drawn, and is taken in float64: what
rounding could add to the bounds is part of the stated sensitivity (`privacy.mechanism.ARITHMETIC`).
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from pdsl.data.batches import Batches
from pdsl.models import Network, channels_last
from pdsl.parallel import Workers
from pdsl.per_example import LAYERS, Kernel


def clip_factors(squared_norms: Tensor, C: float) -> Tensor:
    """1 / max(1, ‖g‖/C) for each squared norm (float64).

    Guarantee: factor · ‖g‖ ≤ C for every finite norm, but for rounding in float64. A non-finite norm gives 0.
    """
    factors = C / squared_norms.sqrt().clamp(min=C)
    return torch.where(torch.isfinite(squared_norms), factors, 0.0)


def summed_gradient(network: Network, x: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
    """The gradient [d] of the sum of the records' losses, as it is."""
    replica = network.replica()
    loss = cross_entropy(replica.load(x)(inputs), labels, reduction="sum")
    by_parameter = torch.autograd.grad(loss, replica.parameters, materialize_grads=True)  # zero where not used
    return torch.cat([p.reshape(-1) for p in by_parameter])


def batch_clipped(network: Network, x: Tensor, inputs: Tensor, labels: Tensor, C: float, divisor: float) -> Tensor:
    """The gradient [d] of the batch's loss sum over `divisor`, as a whole clipped to norm C; float64.

    Guarantee: finite, norm at most C. An empty batch or a gradient with a non-finite entry gives zero; so does a
    batch of one record under BatchNorm, which has no statistics.
    """
    zero = torch.zeros_like(x, dtype=torch.float64)
    if len(labels) == 0 or (len(labels) == 1 and network.mixes_records):
        return zero
    g = summed_gradient(network, x, inputs, labels).double() / divisor
    squared_norm = g.square().sum()
    return g * clip_factors(squared_norm, C) if torch.isfinite(squared_norm) else zero


def per_sample_clipped(
    network: Network, x: Tensor, inputs: Tensor, labels: Tensor, C: float, divisor: float, kernel: Kernel
) -> Tensor:
    """The sum of the records' gradients, each clipped to norm C, over `divisor`: [d] float64.

    Guarantee: adding or removing one record moves the result by at most C/divisor. An empty batch gives zero; a
    record whose gradient has a non-finite entry counts as zero, at the same cost as any other.
    """
    total = torch.zeros_like(x, dtype=torch.float64)
    for a, b in zip(torch.split(inputs, kernel.block), torch.split(labels, kernel.block), strict=True):
        if len(b):
            of_block = kernel.gradients(network, x, a, b)
            total += of_block.weighted_sum(clip_factors(of_block.squared_norms, C))
    if kernel is not LAYERS:
        network.check_state()
    return total / divisor


Asked = tuple[int, int, int, bytes]  # round, local step, agent, digest of the model


@dataclass(frozen=True)
class Owners:
    """The agents' own side: their records, which nobody else sees, and clipped gradients on a batch of them."""

    network: Network
    inputs: list[Tensor]  # per agent [n_i, ...]
    labels: list[Tensor]  # per agent [n_i]
    batches: Batches
    clipping: str
    C: float
    workers: Workers
    kernel: Kernel
    repeated: dict[Asked, Tensor] = field(default_factory=dict)  # what the last call was asked for more than once

    def gradients(self, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None) -> Tensor:
        """Clipped gradients [rows, d] float64: row e is agents[e]'s, on its batch ξ of round t, at the model x[e].

        Each local step of a round has a batch of its own. With teachers[e], a record's loss has the distance to that
        model's output for the record added to it. A row that asks an agent for the same model again (all models are
        equal on a full graph) is computed once, in this call and the next.
        """
        asked = x if teachers is None else torch.cat([x, teachers], dim=1)
        keys = [(t, step, agent, digest) for agent, digest in zip(agents.tolist(), row_digests(asked), strict=True)]
        first = {key: row for row, key in reversed(list(enumerate(keys)))}

        def one(row: int) -> Tensor:
            agent = int(agents[row])
            batch = self.batches.draw(agent, t, step)
            inputs, targets = self.inputs[agent][batch], self.labels[agent][batch]
            if teachers is not None and len(batch):
                targets = taught(targets, self.kernel.logits(self.network, teachers[row], inputs))
            return self.on(x[row], inputs, targets, self.batches.divisor(agent))

        known = {key: self.repeated[key] for key in first if key in self.repeated}
        new = [key for key in first if key not in known]
        g = known | dict(zip(new, self.workers.map(one, [first[key] for key in new]), strict=True))
        self.repeated.clear()
        self.repeated.update({key: g[key] for key, count in Counter(keys).items() if count > 1})
        return torch.stack([g[key] for key in keys])

    def on(self, x: Tensor, inputs: Tensor, labels: Tensor, divisor: float) -> Tensor:
        """The clipped gradient [d] of these records at the model x [d]."""
        if self.clipping == "batch":
            return batch_clipped(self.network, x, channels_last(inputs), labels, self.C, divisor)
        return per_sample_clipped(self.network, x, channels_last(inputs), labels, self.C, divisor, self.kernel)


def taught(labels: Tensor, teacher: Tensor) -> Tensor:
    """Targets [n, classes] with which cross-entropy is, up to a constant, −log p(label) + KL(teacher ‖ p).

    Both terms are a record's own, so clipping its gradient bounds both together.
    """
    said = teacher.softmax(-1)
    return said + one_hot(labels, said.shape[-1])


def row_digests(x: Tensor) -> list[bytes]:
    """A digest per row; equal digests mean equal rows."""
    rows = x.detach().cpu().contiguous().numpy()
    return [hashlib.blake2b(row, digest_size=16).digest() for row in rows]
