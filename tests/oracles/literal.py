"""Algorithms 1 and 2 of the PDSL paper, loop by loop: slow, and meant to be read beside the pseudo-code.

`# line n` is line n of Algorithm 1 as algorithm2e numbers it: line 1 is the loop over t, line 12 closes the loop over
neighbours. `# eq. (n)` counts every numbered display of the paper, so the gradient g_ii is (9), the unlabelled mean
x_{i,M'} is (17), and the Shapley value is (18).

Two-index names keep the paper's order: g_hat[i, j] is what agent i computes, on its own data, for agent j's model.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from math import comb

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

Examples = tuple[Tensor, Tensor]  # inputs [n, ...], labels [n]
Value = Callable[[frozenset[int]], Fraction | float]  # a characteristic function v


@dataclass(frozen=True)
class Hyper:
    gammas: Sequence[float]  # of each round
    alpha: float
    C: float
    clipping: str  # "batch", eq. (10) and (13), or "per-sample"
    R: int | None  # permutations for Algorithm 2; None is the exact value, eq. (18)
    empty: str = "zero"  # v(∅) is 0, or with "model" the accuracy of x_i^{t-1} on Q
    weighting: str = "minmax"  # or "uniform"
    floor: float = 0.0  # λ, the part of the weight that is shared equally
    probe: float = 1.0  # of the largest γ, for the models that are valued, eq. (15)
    step_scale: str = "paper"  # π_ij = share_j / ω_ij, eq. (20); "mean": share_j; "graph": ∝ share_j ω_ij

    def __post_init__(self) -> None:
        allowed = {
            "clipping": ("batch", "per-sample"),
            "empty": ("zero", "model"),
            "weighting": ("minmax", "uniform"),
            "step_scale": ("paper", "mean", "graph"),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be one of {values}")


@dataclass(frozen=True)
class Trace:
    """x[t] and u[t] are the state after round t, and x[0], u[0] the start; phi, pi, g_hat at t - 1 are round t's."""

    x: Tensor  # [T+1, M, d]
    u: Tensor  # [T+1, M, d]
    phi: list[dict[tuple[int, int], float]]
    pi: list[dict[tuple[int, int], float]]
    g_hat: list[dict[tuple[int, int], Tensor]]


def run(
    template: nn.Module,
    W: np.ndarray,
    data: Sequence[Examples],
    Q: Examples,
    T: int,
    hyper: Hyper,
    batch: Callable[[int, int], Tensor],
    noise: Callable[[int, int, int, int], Tensor],
    permutation: Callable[[int, int, int, int], Sequence[int]],
    divisor: Callable[[int, int, int], float],
) -> Trace:
    """Algorithm 1 for M agents in step; t runs over 1..T, and r, in `permutation(i, t, r, k)`, over 1..R.

    W must be symmetric, as in the paper: agent i uses a gradient from every j that i gives weight to.
    """
    M = len(data)
    members = [[j for j in range(M) if W[i, j] > 0] for i in range(M)]  # M_i
    model = [copy.deepcopy(template) for _ in range(M)]
    scratch = copy.deepcopy(template)  # holds x_{i,M'} while it is evaluated
    x = [flat(model[i]) for i in range(M)]
    u = [torch.zeros_like(x[i]) for i in range(M)]
    d = x[0].numel()
    x_trace, u_trace = [torch.stack(x)], [torch.stack(u)]
    phi_trace, pi_trace, g_hat_trace = [], [], []

    for t in range(1, T + 1):  # line 1
        g_hat: dict[tuple[int, int], Tensor] = {}
        for i in range(M):
            drawn = batch(i, t)
            xi = data[i][0][drawn], data[i][1][drawn]  # ξ_{i,t}, one draw for every model i is asked about
            B = divisor(i, t, len(drawn))
            g_tilde = clipped_gradient(model[i], xi, B, hyper)  # lines 2-3, eq. (9)-(10)
            g_hat[i, i] = g_tilde + noise(i, i, t, d)  # line 4, eq. (11)
            for j in members[i]:  # line 6
                if j == i:
                    continue
                g_tilde = clipped_gradient(model[j], xi, B, hyper)  # lines 8-9, eq. (12)-(13)
                g_hat[i, j] = g_tilde + noise(i, j, t, d)  # line 10, eq. (14)

        phi: dict[tuple[int, int], float] = {}
        pi: dict[tuple[int, int], float] = {}
        u_hat: list[Tensor] = []
        x_hat: list[Tensor] = []
        for i in range(M):
            x_i = {j: x[i] - hyper.probe * max(hyper.gammas) * g_hat[j, i] for j in members[i]}  # line 14, eq. (15)
            v = characteristic(x_i, model[i], scratch, Q, hyper.empty)
            if hyper.R is None:
                phi_i = exact_shapley(members[i], v)
            else:
                k = len(members[i])
                orders = [permutation(i, t, r, k) for r in range(1, hyper.R + 1)]
                phi_i = estimated_shapley(members[i], v, orders)  # line 15, Algorithm 2
            share = shares(phi_i, hyper)  # line 16
            g_bar = torch.zeros(d)
            for j in members[i]:
                omega = float(W[i, j])
                phi[i, j] = float(phi_i[j])
                by_graph = share[j] * omega / sum(share[m] * float(W[i, m]) for m in members[i])
                scaled = {"paper": share[j] / omega, "mean": share[j], "graph": by_graph}  # line 17, eq. (20)
                pi[i, j] = scaled[hyper.step_scale]
                g_bar = g_bar + pi[i, j] * g_hat[j, i]  # line 18, eq. (21)
            u_hat.append(hyper.alpha * u[i] + g_bar)  # line 19, eq. (22)
            x_hat.append(x[i] - hyper.gammas[t - 1] * u_hat[i])  # line 20, eq. (23)

        for i in range(M):
            u[i] = torch.zeros(d)
            x[i] = torch.zeros(d)
            for j in members[i]:
                omega = float(W[i, j])
                u[i] = u[i] + omega * u_hat[j]  # line 23, eq. (24)
                x[i] = x[i] + omega * x_hat[j]  # line 24, eq. (25)
            vector_to_parameters(x[i], model[i].parameters())

        x_trace.append(torch.stack(x))
        u_trace.append(torch.stack(u))
        phi_trace.append(phi)
        pi_trace.append(pi)
        g_hat_trace.append(g_hat)
    return Trace(torch.stack(x_trace), torch.stack(u_trace), phi_trace, pi_trace, g_hat_trace)


def flat(model: nn.Module) -> Tensor:  # [d]
    return parameters_to_vector(model.parameters()).detach().clone()


def gradient(model: nn.Module, xi: Examples) -> Tensor:  # [d]
    """The gradient of the cross-entropy summed over the records of ξ."""
    inputs, labels = xi
    loss = cross_entropy(model(inputs), labels, reduction="sum")
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([g.reshape(-1) for g in grads])


def clip(g: Tensor, C: float) -> Tensor:
    norm = float(torch.linalg.vector_norm(g.double()))
    return g / max(1.0, norm / C)


def clipped_gradient(model: nn.Module, xi: Examples, B: float, hyper: Hyper) -> Tensor:  # [d]
    inputs, labels = xi
    total = torch.zeros(sum(p.numel() for p in model.parameters()))
    if len(labels) == 0:
        return total
    if hyper.clipping == "batch":
        return clip(gradient(model, xi) / B, hyper.C)
    for n in range(len(labels)):
        total = total + clip(gradient(model, (inputs[n : n + 1], labels[n : n + 1])), hyper.C)
    return total / B


@torch.no_grad()
def accuracy(model: nn.Module, Q: Examples) -> Fraction:
    """Hits over |Q|, as a ratio of integers: φ is then exact, and the 0/0 of eq. (19) is not left to rounding."""
    inputs, labels = Q
    hits = (model(inputs).argmax(dim=1) == labels).sum().item()
    return Fraction(int(hits), len(labels))


def characteristic(x_i: dict[int, Tensor], model_i: nn.Module, scratch: nn.Module, Q: Examples, empty: str) -> Value:
    """v(M'; Q) of agent i, eq. (16); x_i[j] is x_{i,j} and model_i still holds x_i^{t-1}."""

    def v(coalition: frozenset[int]) -> Fraction:
        if not coalition:
            return Fraction(0) if empty == "zero" else accuracy(model_i, Q)
        mean = torch.stack([x_i[j] for j in sorted(coalition)]).mean(dim=0)  # eq. (17)
        vector_to_parameters(mean, scratch.parameters())
        return accuracy(scratch, Q)

    return v


def exact_shapley(members: Sequence[int], v: Value) -> dict[int, Fraction | float]:
    """Equation (18)."""
    phi: dict[int, Fraction | float] = {}
    for j in members:
        others = [m for m in members if m != j]
        phi[j] = Fraction(0)
        for size in range(len(others) + 1):
            for coalition in map(frozenset, combinations(others, size)):
                marginal = v(coalition | {j}) - v(coalition)
                phi[j] += marginal / (len(members) * comb(len(others), size))
    return phi


def estimated_shapley(members: Sequence[int], v: Value, orders: Sequence[Sequence[int]]) -> dict[int, Fraction | float]:
    """Algorithm 2; each order lists positions in `members`, the first to arrive first."""
    R = len(orders)
    phi: dict[int, Fraction | float] = {j: Fraction(0) for j in members}  # Algorithm 2, line 1
    for order in orders:  # lines 2-3
        location = {members[position]: arrival for arrival, position in enumerate(order)}
        for j in members:  # line 4
            Z_j = frozenset(m for m in members if location[m] < location[j])  # line 5
            phi[j] += (v(Z_j | {j}) - v(Z_j)) / R  # line 6, eq. (26)
    return phi


def shares(phi: dict[int, Fraction | float], hyper: Hyper) -> dict[int, float]:
    """What each member's gradient counts for, before ω: φ̂_j / Σ φ̂, with the floor λ; sums to 1."""
    k = len(phi)
    low, high = min(phi.values()), max(phi.values())
    if hyper.weighting == "uniform" or low == high:  # low == high is 0/0 in eq. (19)
        return dict.fromkeys(phi, 1 / k)
    phi_hat = {j: (phi[j] - low) / (high - low) for j in phi}  # eq. (19)
    total = sum(phi_hat.values())
    return {j: (1 - hyper.floor) * float(phi_hat[j] / total) + hyper.floor / k for j in phi}
