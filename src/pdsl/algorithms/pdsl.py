"""PDSL: privacy-preserved decentralised stochastic learning with heterogeneous data. Algorithm 1 of the paper.

Line numbers are Algorithm 1's (the `end` of its inner loop is line 12); equation numbers are the paper's.
Rows are agents [m, d] or edges [E, d]; an edge e has receiver i and sender j.
"""

from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from pdsl.algorithms.base import Algorithm, Facts, Round
from pdsl.algorithms.states import ModelsAndMomenta as State
from pdsl.engine import Engine
from pdsl.engine.base import weighted_sums
from pdsl.graph import Graph
from pdsl.privacy import Release
from pdsl.settings import ShapleySettings
from pdsl.shapley import Valuation, check, shares


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
        return State(x=x0, u=torch.zeros_like(x0))

    def step(self, state: State, r: Round) -> tuple[State, Facts]:
        x, u, engine = state.x, state.u, r.engine
        gamma, alpha = self.learning_rate, self.momentum

        x_j = engine.deliver(x)  # lines 5, 7: x_j, at i
        g_hat_ij = r.noisy_gradients(x_j)  # lines 2-4, 8-10: ĝ_{i,j} = clip(∇F_i(x_j; ξ_i)) + n_{i,j}, eq. 9-14
        g_hat_ji = engine.reply(g_hat_ij)  # lines 11, 13: ĝ_{j,i}, at i

        i = engine.receiver - engine.agents.start
        x_ij = x[i] - gamma * g_hat_ji  # line 14, eq. 15
        by_agent = [x_ij[a:b] for a, b in pairwise(engine.offsets)]
        valued = r.validation.contributions(r.t, engine.agents, x, by_agent, self.shapley)  # line 15, eq. 16-18
        share = torch.from_numpy(np.concatenate([shares(v.phi, self.shapley) for v in valued]))  # line 16, eq. 19
        pi = share / engine.omega if self.step_scale == "paper" else share  # line 17, eq. 20

        g_bar = weighted_sums(g_hat_ji, pi, engine.offsets)  # line 18, eq. 21
        u_hat = alpha * u + g_bar  # line 19, eq. 22
        x_hat = x - gamma * u_hat  # line 20, eq. 23
        u = engine.mix(u_hat)  # lines 21-23, eq. 24
        x = engine.mix(x_hat)  # lines 21, 22, 24, eq. 25

        checked = r.validation.fidelity(r.t, engine.agents, r.graph.agents, by_agent, self.shapley)
        return State(x, u), {"shapley": _facts(engine, valued, share, checked)}

    def check(self, members: int) -> None:
        check(self.shapley, members)

    def sends(self, graph: Graph, noise_multiplier: float) -> int:
        return 4  # x, ĝ, û, x̂

    def releases(self, members: int) -> Release:
        return Release(messages=members)


def _facts(engine: Engine, valued: list[Valuation], share: Tensor, checked: dict[str, float] | None) -> Facts:
    """What all messages of the round were worth, edge by edge, and how that was found."""
    weighed = zip(valued, torch.split(share, [len(v.phi) for v in valued]), strict=True)
    told = engine.gather([(v.estimator, v.coalitions, v.phi.tolist(), part.tolist(), checked) for v, part in weighed])
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
