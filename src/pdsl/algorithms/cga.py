"""CGA: cross-gradient aggregation (Esfandiari et al., ICML 2021); with noise on the cross-gradients, DP-CGA.

Each agent gets the gradients of its model on its neighbours' data and finds a direction that hurts no neighbour.
"""

import math
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from pdsl.algorithms.base import Algorithm, Metrics, Round
from pdsl.algorithms.base import ModelsAndMomenta as State
from pdsl.privacy import Release
from pdsl.topology import Graph

MIN_WEIGHT = 0.5  # lower bound of every v_l, so that no neighbour is ignored
RIDGE = 1e-12  # relative to the largest entry squared, so that the scale of the loss does not matter

Floats = NDArray[np.float64]


class CGA(Algorithm[State]):
    """The agent's own gradient, projected by a quadratic program so that it agrees with its neighbours'."""

    name: ClassVar[str] = "cga"
    paper: ClassVar[str] = "Esfandiari et al., ICML 2021"
    rule: ClassVar[str] = "x_i ← Σ_j ω_ij (x_j − γ u_j),  u_i ← α u_i + ĝ_ii + Σ_l v_l ω_il ĝ_li,  v by a QP, v ≥ 1/2"
    base_rate: ClassVar[float] = 0.5

    momentum: float = Field(0.5, ge=0, lt=1, description="α")
    projection: Literal["tensor", "vector"] = Field(
        "tensor", description="one quadratic program per parameter tensor, or one for the whole vector"
    )

    def init(self, x0: Tensor) -> State:
        return State(x0, torch.zeros_like(x0))

    def step(self, state: State, r: Round) -> tuple[State, Metrics]:
        x, u, engine = state.x, state.u, r.engine
        sizes = list(r.tensors) if self.projection == "tensor" else [x.shape[1]]
        projections = []
        for at in r.cross_gradients(x):  # chunks of agents i
            g_hat = at.values  # ĝ_li
            m = at.split_by_agent(g_hat * engine.omega[at.edges].to(g_hat)[:, None])  # rows m_l = ω_il ĝ_li
            own = g_hat[(engine.receiver == engine.sender)[at.edges]]  # ĝ_ii
            projections += [project(m_i, g_ii, sizes) for m_i, g_ii in zip(m, own, strict=True)]
        u = self.momentum * u + torch.stack([g for g, _ in projections])
        x = engine.mix(x - r.learning_rate * u)
        return State(x, u), {"fallbacks": sum(engine.gather([fallbacks for _, fallbacks in projections]))}

    def noise_gain(self, graph: Graph) -> float:
        own = math.sqrt(graph.degrees.mean())  # the own message is not averaged
        return own * (1 + MIN_WEIGHT) / (1 - self.momentum)

    def sends(self, graph: Graph, noise_multiplier: float) -> int:
        return 3  # x, ĝ, x̂

    def releases(self, members: int) -> Release:
        return Release(messages=members)


class DPCGA(CGA):
    """CGA with noisy cross-gradients, as in the PDSL paper. The update is the same."""

    name: ClassVar[str] = "dp-cga"
    paper: ClassVar[str] = "Esfandiari et al., ICML 2021, with noise"


def project(rows: Tensor, g: Tensor, sizes: list[int]) -> tuple[Tensor, int]:
    """g + Σ_l v_l m_l, tensor by tensor, and the number of programs solved by the fallback."""
    parts, fallbacks = [], 0
    for M, part in zip(torch.split(rows, sizes, dim=1), torch.split(g, sizes), strict=True):
        v, fell_back = solve_weights(M.double().cpu().numpy(), part.double().cpu().numpy())
        fallbacks += fell_back
        parts.append(part + torch.from_numpy(v).to(M) @ M)
    return torch.cat(parts), fallbacks


def solve_weights(M: Floats, g: Floats) -> tuple[Floats, bool]:
    """argmin ½ vᵀ(MMᵀ + 1e-12 I)v + (Mg)ᵀv subject to v ≥ 1/2, and whether the fallback was used.

    quadprog needs a matrix that is positive definite in floating point, so it fails on zero or parallel rows. The same
    v minimises ‖Mᵀv + g‖² + 1e-12 ‖v‖² over v ≥ 1/2, and non-negative least squares finds it for any M.
    """
    import quadprog

    scale = max(float(np.abs(M).max(initial=0.0)), float(np.abs(g).max(initial=0.0)))
    if scale == 0:
        return np.full(len(M), MIN_WEIGHT), True
    M, g = M / scale, g / scale  # the minimiser is the same
    P = M @ M.T + RIDGE * np.eye(len(M))
    if np.linalg.cond(P) < 1e10:
        try:
            v: Floats = quadprog.solve_qp(P, -(M @ g), np.eye(len(M)), np.full(len(M), MIN_WEIGHT))[0]
            return v, False
        except ValueError:
            pass
    return _solve_least_squares(M, g), True


def _solve_least_squares(M: Floats, g: Floats) -> Floats:
    """v = 1/2 + u, where u ≥ 0 solves Mᵀu = −(g + Mᵀ1/2) in the least-squares sense, with rows for the ridge."""
    from scipy.optimize import nnls

    root = math.sqrt(RIDGE)
    tall = np.vstack([M.T, root * np.eye(len(M))])
    target = -np.concatenate([g + MIN_WEIGHT * M.sum(0), np.full(len(M), root * MIN_WEIGHT)])
    R = np.asarray(np.linalg.qr(np.column_stack([tall, target]), mode="r"))  # same distances, fewer rows
    v: Floats = MIN_WEIGHT + nnls(R[:, :-1], R[:, -1])[0]
    return v
