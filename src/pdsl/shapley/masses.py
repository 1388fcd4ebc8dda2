"""Record masses: a neighbour's messages explained as gradients of groups of public records.

A message is a sum of clipped gradients of the sender's records, with noise. The public set Q has records of the same
kinds. So on average a message is Σ_a m_a·B_a, where B_a is the mean clipped gradient of the public records of group a
(a class, or a decile of a number) at the same model. The mass m_a is the sender's number of records of this kind, in
units of the records of an average agent. Generalised least squares over all rounds estimate it: records of a group
differ from each other, and the covariance V of the differences of public records says in which directions a message
says little about masses. All that is kept are the products B·V⁻¹·Bᵀ and ĝ·V⁻¹·Bᵀ, which are functions of noisy messages
and of Q. This is post-processing and costs no privacy. Only the part of the last linear layer is used: its gradient is
the product of two vectors of each record, so that public gradients are cheap for large models, too.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls
from torch import Tensor
from torch.nn.functional import one_hot

from pdsl.gradients.clipping import clip_factors, row_digests
from pdsl.gradients.per_example import Kernel
from pdsl.shapley.coalitions import Values
from pdsl.shapley.last_layer import LastLayer
from pdsl.utils.inputs import Inputs, channels_last, split
from pdsl.utils.workers import Workers

MIN_RECORDS, MAX_RECORDS = 100, 500  # public records whose gradients are computed
MAX_WORK = 2**21  # records times parameters, between these numbers of records
ANCHOR_GROWTH = 1.5  # ratio of successive anchors, the rounds at which gradients of public records are computed
BLOCKS = 8  # sums are kept for every BLOCKS-th round separately, for standard errors
RIDGE = 1e-3  # relative to the mean diagonal of B·V⁻¹·Bᵀ, so that groups with equal gradients do not cancel
ISOTROPIC = 0.01  # variance of private records in every direction, relative to that of public records
GRAM_ROUNDING = 1e-5  # of sums of products, relative to the largest


@dataclass(frozen=True)
class PublicGroups:
    """The first public records, their groups, and the layer whose gradients they explain."""

    layer: LastLayer
    inputs: Inputs  # [n, ...] on the network's device
    labels: Tensor  # [n]
    groups: Tensor  # [n] group of each record: 0, …, G-1; every group has a record

    @property
    def count(self) -> int:
        """Number of groups G."""
        return int(self.groups.max()) + 1


@dataclass(frozen=True)
class PublicGradients:
    """Clipped gradients of groups of public records at any model."""

    public: PublicGroups
    C: float
    records: float  # private records of an average agent
    variance: float  # of the noise in each entry of the mean of all messages of a sender
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
        """The basis at one model x [d]."""
        layer = self.public.layer
        h = layer.features(x, self.public.inputs)
        outputs = (h @ layer.part(x[None])[0].T).requires_grad_()
        losses = layer.network.task.losses(outputs, self.public.labels).sum()
        (residuals,) = torch.autograd.grad(losses, outputs)
        residuals, h = residuals.double(), h.double().nan_to_num(0.0, 0.0, 0.0)  # training may have diverged
        own = (residuals.norm(dim=1) * h.norm(dim=1)).square()
        factors = clip_factors(own if layer.whole else self._squared_norms(x), self.C)
        clipped = (residuals * factors[:, None]).nan_to_num(0.0, 0.0, 0.0)
        spread = 1 / self.records + 1 / len(h)
        return make_basis(clipped, h, self.public.groups, spread, self.variance, layer)

    def _squared_norms(self, x: Tensor) -> Tensor:
        """Squared norm of each record's gradient with respect to all parameters, [n] float64."""
        public, kernel, norms = self.public, self.kernel, []
        for a, b in zip(split(public.inputs, kernel.block), torch.split(public.labels, kernel.block), strict=True):
            of_block = kernel.gradients(public.layer.network, x, kernel.pad_block(channels_last(a), b))
            norms.append(of_block.squared_norms[: len(b)])
        return torch.cat(norms)


def count_records(layer: LastLayer, labels: Tensor) -> int:
    """Number of public records whose gradients are computed: fewer for large models, which take longer."""
    if layer.whole:
        return min(len(labels), MAX_RECORDS)
    return min(len(labels), MAX_RECORDS, max(MIN_RECORDS, MAX_WORK // layer.network.num_parameters))


@dataclass(frozen=True)
class Basis:
    """Mean clipped gradients B of the groups of public records at one model, relative to the covariance V."""

    layer: LastLayer
    b: Tensor  # [G, part of the last layer] float64: B·V⁻¹
    gram: Values  # [G, G] B·V⁻¹·Bᵀ

    def products(self, messages: Tensor) -> Tensor:
        """Products ĝ·V⁻¹·Bᵀ [k, G] of messages [k, d], float64; 0 for a message that is not finite."""
        products = self.layer.part(messages).flatten(1).double() @ self.b.T
        return torch.where(torch.isfinite(products), products, 0.0).cpu()


def make_basis(r: Tensor, h: Tensor, groups: Tensor, spread: float, variance: float, layer: LastLayer) -> Basis:
    """The basis of records with gradients r_n ⊗ h_n, from r [n, c] and h [n, f].

    V = spread·S + variance·I, where S is the covariance of records within groups. S is known from few records, so a
    part ISOTROPIC of their mean square is added in all directions.
    """
    n, d = len(r), r.shape[1] * h.shape[1]
    gram = (r @ r.T) * (h @ h.T)  # products of the records' gradients
    member = one_hot(groups).to(r)
    mean = (member / member.sum(0)).T  # [G, n] gradients of groups as sums over records
    of_means = mean @ gram
    variance += spread * ISOTROPIC * float(gram.trace()) / (n * d)
    if variance == 0:
        return Basis(layer, torch.zeros(len(mean), d).to(r), np.zeros((len(mean), len(mean))))
    # S = Zᵀ·Z for deviations Z from the groups' means, and v·V⁻¹ = I − Zᵀ·(Z·Zᵀ + v/spread·I)⁻¹·Z
    scale = spread / max(1, n - len(mean))
    deviations = gram - member @ of_means
    deviations -= (deviations @ mean.T) @ member.T
    factor = torch.linalg.cholesky(scale * deviations + variance * torch.eye(n).to(r))
    along = scale * (of_means - (of_means @ mean.T) @ member.T)  # of the groups' means
    solved = torch.cholesky_solve(along.T, factor).T
    weights = (mean - solved + (solved @ member) @ mean) / variance
    b = torch.einsum("gn,nc,nf->gcf", weights, r, h).flatten(1)
    return Basis(layer, b, (weights @ of_means.T).cpu().numpy())


def is_anchor(t: int) -> bool:
    """Whether gradients of public records are computed in round t; later rounds up to the next anchor use the same."""
    anchor = 1
    while anchor < t:
        anchor = max(anchor + 1, int(anchor * ANCHOR_GROWTH))
    return anchor == t


def empty_sums(agents: int, members: int, groups: int) -> Tensor:
    """Sums of no rounds for each member, [agents, BLOCKS, members, G + 1, G]: B·V⁻¹·Bᵀ, then ĝ·V⁻¹·Bᵀ."""
    return torch.zeros(agents, BLOCKS, members, groups + 1, groups, dtype=torch.float64)


def add_round(sums: Tensor, t: int, basis: Basis, messages: Tensor, places: NDArray[np.intp]) -> None:
    """Add one agent's messages [k, d] of round t to its sums [BLOCKS, members, G + 1, G], in place.

    `places`: positions of the senders among the agent's members. A message that is not finite counts as zero.
    """
    gram = torch.from_numpy(basis.gram).expand(len(places), -1, -1)
    products = basis.products(messages)
    sums[t % BLOCKS, torch.from_numpy(places)] += torch.cat([gram, products[:, None]], dim=1)


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
    return Masses(masses, _standard_errors(_influences(gram, cross)))


def information(sums: Values) -> Values:
    """Trace of B·V⁻¹·Bᵀ in sums [..., G + 1, G]: the weight of their measurement."""
    found: Values = np.trace(sums[..., :-1, :], axis1=-2, axis2=-1)
    return found


def are_products(sums: Values) -> bool:
    """Whether B·V⁻¹·Bᵀ in sums [..., G + 1, G] is symmetric and positive semidefinite, up to a part of the ridge."""
    gram = sums[..., :-1, :]
    symmetric = np.abs(gram - gram.swapaxes(-1, -2)).max() <= GRAM_ROUNDING * np.abs(gram).max()
    tolerance = RIDGE / 2 * information(sums) / gram.shape[-1]
    return bool(symmetric and (np.linalg.eigvalsh(gram).min(-1) >= -tolerance).all())


def estimate_totals(sums: Values) -> tuple[Values, Values]:
    """Total mass of each sender [n], which may be negative, and its standard error, from sums [BLOCKS, n, G + 1, G].

    Errors are infinite before two blocks have a round.
    """
    gram, cross = sums[..., :-1, :], sums[..., -1, :]
    totals: Values = _solve(gram.sum(0), cross.sum(0)).sum(-1)
    return totals, _standard_errors(_influences(gram, cross).sum(-1, keepdims=True))[:, 0]


def estimate_signals(sums: Values) -> tuple[Values, Values]:
    """Signal of each sender [n] and its standard error, from sums [BLOCKS, n, G + 1, G].

    The signal is mᵀ·A·m for masses m and A = B·V⁻¹·Bᵀ, relative to that of a party with one average party's records,
    as many of each group. It is a sum of products of different blocks, whose noise is independent: a sender without
    records has zero on average. Errors are infinite until every block has a round.
    """
    gram, cross = sums[..., :-1, :], sums[..., -1, :]
    total = gram.sum(0)
    whitened = np.linalg.solve(np.linalg.cholesky(_regularise(total)), np.moveaxis(cross, 0, -1))  # [n, G, BLOCKS]
    products = np.moveaxis(whitened, -1, -2) @ whitened
    products[:, range(BLOCKS), range(BLOCKS)] = 0
    unit = np.trace(total, axis1=-2, axis2=-1) / total.shape[-1] ** 2
    unit = np.where(unit > 0, unit, 1.0)
    signals: Values = products.sum((-1, -2)) / unit
    errors = np.sqrt((products**2).sum((-1, -2))) / unit
    complete = (information(sums) > 0).all(0)
    return signals, np.where(complete, errors, np.inf)


def _influences(gram: Values, cross: Values) -> Values:
    """Influence A⁻¹·(c_k − A_k·m) of each block k on the masses m = A⁻¹·c, [BLOCKS, n, G]; NaN for an empty block."""
    total = gram.sum(0)
    residuals = cross - (gram @ _solve(total, cross.sum(0))[..., None])[..., 0]
    empty = np.trace(gram, axis1=-2, axis2=-1) == 0
    return np.where(empty[..., None], np.nan, _solve(np.broadcast_to(total, gram.shape), residuals))


def _standard_errors(influences: Values) -> Values:
    """Standard error of a sum of independent influences [BLOCKS, n, …]; infinite with fewer than two blocks."""
    count = np.isfinite(influences).sum(0)
    square = np.nansum(influences**2, axis=0)
    errors: Values = np.where(count > 1, np.sqrt(square * count / np.maximum(count - 1, 1)), np.inf)
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
