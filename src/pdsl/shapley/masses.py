"""Record masses: a neighbour's messages explained as gradients of groups of public records.

A message is a sum of clipped gradients of the sender's records, with noise. The public set Q has records of the same
kinds. So on average a message is Σ_a m_a·B_a, where B_a is the mean clipped gradient of the public records of group a
(a class, or a decile of a number) at the same model. The mass m_a is the sender's number of records of this kind, in
units of the records of an average agent. Least squares over all rounds estimate it: all that is kept are the products
B·Bᵀ and ĝ·Bᵀ, which are functions of noisy messages and of Q. This is post-processing and costs no privacy.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls
from torch import Tensor

from pdsl.gradients.clipping import clip_per_sample, row_digests
from pdsl.gradients.per_example import Kernel
from pdsl.models.network import Network
from pdsl.shapley.coalitions import Values
from pdsl.utils.inputs import Inputs, channels_last
from pdsl.utils.workers import Workers

MIN_RECORDS, MAX_RECORDS = 100, 500  # public records whose gradients are computed
MAX_WORK = 2**21  # records times parameters, between these numbers of records
ANCHOR_GROWTH = 1.25  # ratio of successive anchors, the rounds at which gradients of public records are computed
BLOCKS = 8  # sums are kept for every BLOCKS-th round separately, for standard errors
GRAM_ROUNDING = 1e-5  # of sums of products of float32 numbers, relative to the largest
RIDGE = 1e-3  # relative to the mean diagonal of B·Bᵀ, so that groups with equal gradients do not cancel


@dataclass(frozen=True)
class PublicGradients:
    """Clipped gradients of groups of public records at any model."""

    network: Network
    inputs: Inputs
    labels: Tensor
    groups: Tensor  # [n] group of each record: 0, …, G-1
    C: float
    kernel: Kernel
    workers: Workers
    cache: dict[bytes, "Basis"] = field(default_factory=dict)  # by digest of the model, of the last call

    def at(self, x: Tensor) -> list["Basis"]:
        """The basis at each model x [m, d]; equal models share one."""
        digests = row_digests(x)
        first = {digest: row for row, digest in reversed(list(enumerate(digests)))}
        new = [digest for digest in first if digest not in self.cache]
        found = dict(zip(new, self.workers.map(lambda digest: self._basis(x[first[digest]]), new), strict=True))
        kept = {digest: found.get(digest) or self.cache[digest] for digest in first}
        self.cache.clear()
        self.cache.update(kept)
        return [kept[digest] for digest in digests]

    def _basis(self, x: Tensor) -> "Basis":
        means = [self._mean_gradient(x, group) for group in range(self.count)]
        b = torch.stack(means)
        return Basis(b.to(x.dtype), (b @ b.T).cpu().numpy())

    def _mean_gradient(self, x: Tensor, group: int) -> Tensor:
        rows = torch.nonzero(self.groups == group)[:, 0]
        inputs, labels = channels_last(self.inputs[rows]), self.labels[rows]
        return clip_per_sample(self.network, x, inputs, labels, self.C, max(1, len(rows)), self.kernel)

    @property
    def count(self) -> int:
        """Number of groups G."""
        return int(self.groups.max()) + 1


def public_gradients(
    network: Network,
    inputs: Inputs,
    labels: Tensor,
    groups: NDArray[np.int64],
    C: float,
    kernel: Kernel,
    workers: Workers,
) -> PublicGradients:
    """Gradients of the first public records; groups without records are left out."""
    n = count_records(network, labels)
    _, numbers = np.unique(groups[:n], return_inverse=True)
    return PublicGradients(network, inputs[:n], labels[:n], torch.from_numpy(numbers), C, kernel, workers)


def count_records(network: Network, labels: Tensor) -> int:
    """Number of public records whose gradients are computed: fewer for large models, which take longer."""
    return min(len(labels), MAX_RECORDS, max(MIN_RECORDS, MAX_WORK // network.num_parameters))


@dataclass(frozen=True)
class Basis:
    """Mean clipped gradient of each group of public records at one model."""

    b: Tensor  # [G, d]
    gram: Values  # [G, G] B·Bᵀ

    @property
    def weight(self) -> float:
        """Weight of a round: the mean squared norm. Large gradients of public records are known more exactly."""
        return float(np.trace(self.gram)) / len(self.gram)


def is_anchor(t: int) -> bool:
    """Whether gradients of public records are computed in round t; later rounds up to the next anchor use the same."""
    anchor = 1
    while anchor < t:
        anchor = max(anchor + 1, int(anchor * ANCHOR_GROWTH))
    return anchor == t


def empty_sums(agents: int, members: int, groups: int) -> Tensor:
    """Sums of no rounds for each member, [agents, BLOCKS, members, G + 1, G]: B·Bᵀ, and in the last row ĝ·Bᵀ."""
    return torch.zeros(agents, BLOCKS, members, groups + 1, groups, dtype=torch.float64)


def add_round(sums: Tensor, t: int, basis: Basis, messages: Tensor, places: NDArray[np.intp]) -> None:
    """Add one agent's messages [k, d] of round t to its sums [BLOCKS, members, G + 1, G], in place.

    `places`: positions of the senders among the agent's members. A message that is not finite counts as zero.
    """
    products = (messages @ basis.b.T).double().cpu()
    products = torch.where(torch.isfinite(products), products, 0.0)
    gram = torch.from_numpy(basis.gram).expand(len(places), -1, -1)
    sums[t % BLOCKS, torch.from_numpy(places)] += basis.weight * torch.cat([gram, products[:, None]], dim=1)


@dataclass(frozen=True)
class Masses:
    """Estimated masses of some senders."""

    masses: Values  # [n, G] at least 0
    errors: Values  # [n, G] standard errors


def estimate_masses(sums: Values) -> Masses:
    """Masses of the records of n senders from their sums [BLOCKS, n, G + 1, G]."""
    gram, cross = sums[..., :-1, :], sums[..., -1, :]
    pairs = zip(gram.sum(0), cross.sum(0), strict=True)
    masses = np.stack([_solve_nonnegative(a, b) for a, b in pairs])
    return Masses(masses, _standard_errors(_solve(gram, cross), gram))


def information(sums: Values) -> Values:
    """Trace of B·Bᵀ in sums [..., G + 1, G]: the weight of their measurement."""
    found: Values = np.trace(sums[..., :-1, :], axis1=-2, axis2=-1)
    return found


def are_products(sums: Values) -> bool:
    """Whether B·Bᵀ in sums [..., G + 1, G] is symmetric and positive semidefinite, up to a part of the ridge."""
    gram = sums[..., :-1, :]
    symmetric = np.abs(gram - gram.swapaxes(-1, -2)).max() <= GRAM_ROUNDING * np.abs(gram).max()
    tolerance = RIDGE / 2 * information(sums) / gram.shape[-1]
    return bool(symmetric and (np.linalg.eigvalsh(gram).min(-1) >= -tolerance).all())


def estimate_totals(sums: Values) -> tuple[Values, Values]:
    """Total mass of each sender [n], which may be negative, and its standard error, from sums [BLOCKS, n, G + 1, G].

    Errors are infinite before two blocks have a round.
    """
    gram, cross = sums[..., :-1, :], sums[..., -1, :]
    by_block = _solve(gram, cross).sum(-1, keepdims=True)
    totals: Values = _solve(gram.sum(0), cross.sum(0)).sum(-1)
    return totals, _standard_errors(by_block, gram)[:, 0]


def _standard_errors(by_block: Values, gram: Values) -> Values:
    """Standard error of the mean over the blocks that have any round, [n, …]; infinite with fewer than two."""
    there = (np.trace(gram, axis1=-2, axis2=-1) > 0)[..., None]  # [BLOCKS, n, 1]
    count = there.sum(0)
    mean = np.where(there, by_block, 0).sum(0) / np.maximum(count, 1)
    square = np.where(there, (by_block - mean) ** 2, 0).sum(0)
    errors: Values = np.where(count > 1, np.sqrt(square / np.maximum(count * (count - 1), 1)), np.inf)
    return errors


def _regularise(a: Values) -> Values:
    unit = np.trace(a, axis1=-2, axis2=-1)[..., None, None] / a.shape[-1]
    regular: Values = a + RIDGE * np.where(unit > 0, unit, 1.0) * np.eye(a.shape[-1])
    return regular


def _solve(a: Values, b: Values) -> Values:
    """A⁻¹b for stacks of matrices and vectors."""
    solution: Values = (np.linalg.inv(_regularise(a)) @ b[..., None])[..., 0]
    return solution


def _solve_nonnegative(a: Values, b: Values) -> Values:
    """Minimise mᵀAm − 2mᵀb over m ≥ 0, with A = L·Lᵀ: ‖Lᵀm − L⁻¹b‖²."""
    lower = np.linalg.cholesky(_regularise(a))
    solution: Values = nnls(lower.T, np.linalg.solve(lower, b))[0]
    return solution
