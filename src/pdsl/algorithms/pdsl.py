"""PDSL: privacy-preserved decentralised stochastic learning with heterogeneous data. Algorithm 1 of the paper.

Line numbers are Algorithm 1's (the `end` of its inner loop is line 12); equation numbers are the paper's.
Rows are agents [m, d] or edges [E, d]; an edge e has receiver i and sender j.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from pdsl.algorithms.base import Algorithm, Facts, Round
from pdsl.engine.base import Answers, weighted_sums
from pdsl.graph import Graph
from pdsl.privacy import Release
from pdsl.settings import ShapleySettings
from pdsl.shapley import Valuation, Values, check, shares


@dataclass(frozen=True)
class State:
    x: Tensor  # [m, d] models
    u: Tensor  # [m, d] momenta
    phi: Tensor  # [m, K] float64, what each member's messages have been worth; K members at most, 0 before round 1


class PDSL(Algorithm):
    """Shapley-weighted cross-gradients with momentum and gossip."""

    name: ClassVar[str] = "pdsl"
    paper: ClassVar[str] = "Wang, Yuan, Wang, Li: PDSL, 2025"
    rule: ClassVar[str] = "x_i ← Σ_j ω_ij (x_j − γ û_j),  û_i = α u_i + Σ_j π_ij ĝ_ji,  u_i ← Σ_j ω_ij û_j"

    learning_rate: float = Field(1.0, gt=0, description="γ")
    momentum: float = Field(0.5, ge=0, lt=1, description="α")
    step_scale: Literal["mean", "paper"] = Field(
        "mean", description="mean: the weights of a neighbourhood sum to 1; paper: divided by ω, equation 20"
    )
    shapley: ShapleySettings = Field(ShapleySettings(), exclude=True, description="in a config: the section [shapley]")

    def init(self, x0: Tensor) -> State:
        return State(x=x0, u=torch.zeros_like(x0), phi=torch.zeros(len(x0), 0, dtype=torch.float64))

    def step(self, state: State, r: Round) -> tuple[State, Facts]:
        x, u, engine = state.x, state.u, r.engine
        gamma, alpha = self.learning_rate, self.momentum

        g_bar, phi, told = [], [], []
        for at in r.cross_gradients(x):  # lines 2-13, eq. 9-14: at.v is ĝ_{j,i} = clip(∇F_j(x_i; ξ_j)) + n_{j,i}
            x_ij = at.by_agent(at.asked(x) - self.shapley.probe * gamma * at.v)  # line 14, eq. 15
            valued = r.validation.contributions(r.t, at.agents, x[at.rows], x_ij, self.shapley)  # line 15, eq. 16-18
            averaged, phi_i = self._averaged(state.phi[at.rows], valued, at, r)
            share = [shares(values, self.shapley) for values in phi_i]  # line 16, eq. 19
            omega = engine.omega[at.edges] if self.step_scale == "paper" else 1.0
            pi = torch.from_numpy(np.concatenate(share)) / omega  # line 17, eq. 20
            g_bar.append(weighted_sums(at.v, pi, at.offsets))  # line 18, eq. 21
            checked = r.validation.fidelity(r.t, at.agents, r.graph.agents, x_ij, self.shapley)
            phi.append(averaged)
            told += [_told(v, part, checked) for v, part in zip(valued, share, strict=True)]

        u_hat = alpha * u + torch.cat(g_bar)  # line 19, eq. 22
        x_hat = x - gamma * u_hat  # line 20, eq. 23
        u = engine.mix(u_hat)  # lines 21-23, eq. 24
        x = engine.mix(x_hat)  # lines 21, 22, 24, eq. 25
        return State(x, u, torch.cat(phi)), {"shapley": _facts(engine.gather(told))}

    def _averaged(self, phi: Tensor, valued: list[Valuation], at: Answers, r: Round) -> tuple[Tensor, list[Values]]:
        """φ averaged over rounds: all members' [n, K], and for each agent those who are there in this round.

        A running mean at first, then `shapley.memory` of what was and the rest of what is new; with 0, φ of this round.
        """
        kept = min(self.shapley.memory, (r.t - 1) / r.t)
        if phi.shape[1] == 0:
            phi = torch.zeros(len(phi), int(max(r.graph.degrees)), dtype=torch.float64)
        phi = phi.cpu().clone()
        found = []
        for row, (v, sender) in enumerate(zip(valued, at.by_agent(r.engine.sender[at.edges]), strict=True)):
            place = np.searchsorted(r.graph.neighbourhood(at.agents[row]), sender.cpu().numpy())
            phi[row, place] = kept * phi[row, place] + (1 - kept) * torch.from_numpy(v.phi)
            found.append(phi[row, place].numpy())
        return phi, found

    def check(self, members: int) -> None:
        check(self.shapley, members)

    def sends(self, graph: Graph, noise_multiplier: float) -> int:
        return 4  # x, ĝ, û, x̂

    def releases(self, members: int) -> Release:
        return Release(messages=members)


Told = tuple[str, int, list[float], list[float], dict[str, float] | None]


def _told(valued: Valuation, share: Values, checked: dict[str, float] | None) -> Told:
    """What one agent has to say about its round, as JSON."""
    return valued.estimator, valued.coalitions, valued.phi.tolist(), share.tolist(), checked


def _facts(told: list[Told]) -> Facts:
    """What all messages of the round were worth, edge by edge, and how that was found."""
    facts: Facts = {
        "estimator": "+".join(sorted({estimator for estimator, *_ in told})),
        "coalitions": sum(coalitions for _, coalitions, *_ in told),
        "spread": float(np.mean([max(phi) - min(phi) for _, _, phi, *_ in told])),
        "phi": [value for _, _, phi, *_ in told for value in phi],
        "share": [value for *_, shares, _ in told for value in shares],
    }
    if (fidelity := next((found for *_, found in told if found), None)) is not None:
        facts["fidelity"] = fidelity
    return facts
