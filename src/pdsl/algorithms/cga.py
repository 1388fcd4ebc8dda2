"""CGA: cross-gradient aggregation (Esfandiari et al., ICML 2021); with noise on the cross-gradients, DP-CGA.

Each agent gets its model's gradients on its neighbours' data and looks for a direction that hurts none of them.
"""

import math
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from pdsl.algorithms.base import Algorithm, Facts, Round
from pdsl.algorithms.states import ModelsAndMomenta as State
from pdsl.graph import Graph
from pdsl.privacy import Release

LEAST = 0.5  # every v_l: no neighbour is left out
RIDGE = 1e-12  # relative to the largest number squared, so that the unit of the loss does not matter

Floats = NDArray[np.float64]


class CGA(Algorithm):
    """The own gradient, projected by a quadratic program so that it agrees with the neighbours'."""

    name: ClassVar[str] = "cga"
    paper: ClassVar[str] = "Esfandiari et al., ICML 2021"
    rule: ClassVar[str] = "x_i ← Σ_j ω_ij (x_j − γ u_j),  u_i ← α u_i + ĝ_ii + Σ_l v_l ω_il ĝ_li,  v by a QP, v ≥ 1/2"

    learning_rate: float = Field(0.5, gt=0, description="γ")
    momentum: float = Field(0.5, ge=0, lt=1, description="α")
    projection: Literal["tensor", "vector"] = Field(
        "tensor", description="one quadratic program per parameter tensor, or one for the whole vector"
    )

    def init(self, x0: Tensor) -> State:
        return State(x0, torch.zeros_like(x0))

    def step(self, state: State, r: Round) -> tuple[State, Facts]:
        x, u, engine = state.x, state.u, r.engine
        sizes = list(r.tensors) if self.projection == "tensor" else [x.shape[1]]
        found = []
        for at in r.cross_gradients(x):  # ĝ_li, at some of the i
            weighted = at.v * engine.omega[at.edges].to(at.v)[:, None]  # rows m_l = ω_il ĝ_li
            own = at.v[(engine.receiver == engine.sender)[at.edges]]
            found += [project(m, g, sizes) for m, g in zip(at.by_agent(weighted), own, strict=True)]
        u = self.momentum * u + torch.stack([g for g, _ in found])
        x = engine.mix(x - self.learning_rate * u)
        return State(x, u), {"fallbacks": sum(engine.gather([fallbacks for _, fallbacks in found]))}

    def sends(self, graph: Graph, noise_multiplier: float) -> int:
        return 3  # x, ĝ, x̂

    def releases(self, members: int) -> Release:
        return Release(messages=members)


class DPCGA(CGA):
    """CGA as the PDSL paper compares it: cross-gradients carry noise. The update is the same."""

    name: ClassVar[str] = "dp-cga"
    paper: ClassVar[str] = "Esfandiari et al., ICML 2021, with noise"


def project(rows: Tensor, g: Tensor, sizes: list[int]) -> tuple[Tensor, int]:
    """g + Σ_l v_l m_l, tensor by tensor, and how often quadprog had to be helped out."""
    parts, fallbacks = [], 0
    for M, part in zip(torch.split(rows, sizes, dim=1), torch.split(g, sizes), strict=True):
        v, fell_back = weights(M.double().cpu().numpy(), part.double().cpu().numpy())
        fallbacks += fell_back
        parts.append(part + torch.from_numpy(v).to(M) @ M)
    return torch.cat(parts), fallbacks


def weights(M: Floats, g: Floats) -> tuple[Floats, bool]:
    """argmin ½ vᵀ(MMᵀ + 1e-12 I)v + (Mg)ᵀv subject to v ≥ 1/2, and whether the fallback found it.

    quadprog needs a matrix that is positive definite in floating point, which zero or parallel rows do not give. The
    same v makes ‖Mᵀv + g‖² + 1e-12 ‖v‖² least over v ≥ 1/2, and non-negative least squares finds it for any M.
    """
    import quadprog

    scale = max(float(np.abs(M).max(initial=0.0)), float(np.abs(g).max(initial=0.0)))
    if scale == 0:
        return np.full(len(M), LEAST), True
    M, g = M / scale, g / scale  # the minimum stays where it is
    P = M @ M.T + RIDGE * np.eye(len(M))
    if np.linalg.cond(P) < 1e10:
        try:
            v: Floats = quadprog.solve_qp(P, -(M @ g), np.eye(len(M)), np.full(len(M), LEAST))[0]
            return v, False
        except ValueError:
            pass
    return _by_least_squares(M, g), True


def _by_least_squares(M: Floats, g: Floats) -> Floats:
    """v = 1/2 + u with the u ≥ 0 that comes nearest to solving Mᵀu = −(g + Mᵀ1/2), the ridge's rows below."""
    from scipy.optimize import nnls

    root = math.sqrt(RIDGE)
    tall = np.vstack([M.T, root * np.eye(len(M))])
    target = -np.concatenate([g + LEAST * M.sum(0), np.full(len(M), root * LEAST)])
    R: Any = np.linalg.qr(np.column_stack([tall, target]), mode="r")  # as few rows as columns, the same distances
    v: Floats = LEAST + nnls(R[:, :-1], R[:, -1])[0]
    return v
