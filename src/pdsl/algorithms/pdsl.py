"""PDSL: privacy-preserved decentralised stochastic learning with heterogeneous data. Algorithm 1 of the paper.

Line numbers are Algorithm 1's (the `end` of its inner loop is line 12); equation numbers are the paper's.
Rows are agents [m, d] or edges [E, d]; an edge e has receiver i and sender j.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from pdsl.algorithms.base import Algorithm, Facts, Round
from pdsl.algorithms.gossip import accelerated, best_omega, enough_gossip
from pdsl.engine.base import Answers, weighted_sums
from pdsl.graph import Graph
from pdsl.privacy import Release, by_weight
from pdsl.settings import ShapleySettings
from pdsl.shapley import EVIDENCE, Valuation, Values, check, remembered, shares

MOST_GOSSIP = 10  # steps by default: on a long ring agents never agree in one round


@dataclass(frozen=True)
class State:
    x: Tensor  # [m, d] models
    u: Tensor  # [m, d] momenta
    evidence: Tensor  # [m, K, EVIDENCE] float64, on each member's worth (`shapley.remembered`); K members at most


class PDSL(Algorithm):
    """Shapley-weighted cross-gradients with momentum and gossip."""

    name: ClassVar[str] = "pdsl"
    paper: ClassVar[str] = "Wang, Yuan, Wang, Li: PDSL, 2025"
    rule: ClassVar[str] = "x ← P_K(W) (x − γ û),  û_i = α u_i + Σ_j π_ij ĝ_ji,  u ← W û"

    learning_rate: float = Field(1.0, gt=0, description="γ")
    momentum: float = Field(0.5, ge=0, lt=1, description="α")
    step_scale: Literal["graph", "mean", "paper"] = Field(
        "graph", description="graph: shares times ω, so that all agents count alike; mean: shares; paper: shares over ω"
    )
    gossip_steps: PositiveInt | Literal["auto"] = Field(
        "auto", description=f"K, rounds of gossip; auto: until models agree, {MOST_GOSSIP} at most; the paper has 1"
    )
    noise: Literal["graph", "equal"] = Field(
        "graph",
        description="graph, with step_scale graph: σ² of messages as 1/ω, less noise on what counts more, same ε;"
        " equal: one σ",
    )
    shapley: ShapleySettings = Field(ShapleySettings(), exclude=True, description="in a config: the section [shapley]")

    def init(self, x0: Tensor) -> State:
        return State(x=x0, u=torch.zeros_like(x0), evidence=torch.zeros(len(x0), 0, EVIDENCE, dtype=torch.float64))

    def step(self, state: State, r: Round) -> tuple[State, Facts]:
        x, u, engine = state.x, state.u, r.engine
        gamma, alpha = self.learning_rate, self.momentum

        g_bar, evidence, told = [], [], []
        for at in r.cross_gradients(x):  # lines 2-13, eq. 9-14: at.v is ĝ_{j,i} = clip(∇F_j(x_i; ξ_j)) + n_{j,i}
            x_ij = at.by_agent(at.asked(x) - self.shapley.probe * gamma * at.v)  # line 14, eq. 15
            valued = r.validation.contributions(r.t, at.agents, x[at.rows], x_ij, self.shapley)  # line 15, eq. 16-18
            known, here = self._remembered(state.evidence[at.rows], valued, at, r)
            share = self._shares(valued, here, at, r)  # line 16, eq. 19
            omega = engine.omega[at.edges] if self.step_scale == "paper" else 1.0
            pi = torch.from_numpy(np.concatenate(share)) / omega  # line 17, eq. 20
            g_bar.append(weighted_sums(at.v, pi, at.offsets))  # line 18, eq. 21
            checked = r.validation.fidelity(r.t, at.agents, r.graph.agents, x_ij, self.shapley)
            evidence.append(known)
            told += [_told(v, part, checked) for v, part in zip(valued, share, strict=True)]

        u_hat = alpha * u + torch.cat(g_bar)  # line 19, eq. 22
        x_hat = x - gamma * u_hat  # line 20, eq. 23
        u = engine.mix(u_hat)  # lines 21-23, eq. 24
        K = self._rounds_of_gossip(r.graph)
        x = accelerated(engine, x_hat, K, best_omega(r.graph, K))  # lines 21, 22, 24, eq. 25; K = 1 is W x̂
        return State(x, u, torch.cat(evidence)), {"shapley": _facts(engine.gather(told))}

    def _remembered(self, known: Tensor, valued: list[Valuation], at: Answers, r: Round) -> tuple[Tensor, list[Values]]:
        """The evidence with this round's: on all members [n, K, …], and for each agent on those who are there."""
        if known.shape[1] == 0 or known.shape[2] != EVIDENCE:  # of an older version's run there is none either
            known = torch.zeros(len(known), int(max(r.graph.degrees)), EVIDENCE, dtype=torch.float64)
        evidence = known.cpu().clone()
        here = []
        for row, (v, sender) in enumerate(zip(valued, at.by_agent(r.engine.sender[at.edges]), strict=True)):
            place = np.searchsorted(r.graph.neighbourhood(at.agents[row]), sender.cpu().numpy())
            here.append(remembered(evidence[row, place].numpy(), v.phi, self.shapley.memory))
            evidence[row, place] = torch.from_numpy(here[-1])
        return evidence, here

    def _shares(self, valued: list[Valuation], evidence: list[Values], at: Answers, r: Round) -> list[Values]:
        """Each agent's members' parts of its step; they sum to 1.

        By what they are worth alone, a hub of the graph would be heard by everybody, and its records count more than
        others'. Times ω, members of equal worth have ω itself: of all that is learned, every agent has the same part.
        """
        share = [shares(v.phi, self.shapley, e) for v, e in zip(valued, evidence, strict=True)]
        if self.step_scale != "graph":
            return share
        omega = [w.cpu().numpy() for w in at.by_agent(r.engine.omega[at.edges])]
        return [part * w / (part @ w) for part, w in zip(share, omega, strict=True)]

    def check(self, members: int) -> None:
        check(self.shapley, members)

    def sends(self, graph: Graph, noise_multiplier: float) -> int:
        return 3 + self._rounds_of_gossip(graph)  # x, ĝ, û, and x̂ as often as it is mixed

    def _rounds_of_gossip(self, graph: Graph) -> int:
        return min(MOST_GOSSIP, enough_gossip(graph)) if self.gossip_steps == "auto" else self.gossip_steps

    def releases(self, members: int) -> Release:
        return Release(messages=members)

    def releases_in(self, graph: Graph, agent: int) -> Release:
        release = super().releases_in(graph, agent)
        if self.noise == "equal" or self.step_scale != "graph":  # then it is not by ω that messages count
            return release
        return release._replace(stretch=by_weight(graph.omega[graph.offsets[agent] : graph.offsets[agent + 1]]))


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
