"""PDSL: privacy-preserved decentralised stochastic learning with heterogeneous data. Algorithm 1 of the paper.

Line numbers are those of Algorithm 1, where the `end` of the inner loop is line 12. Equation numbers are the paper's.
A tensor has a row per agent i [m, d] or a row per edge [E, d]. Edge (i, j) has receiver i and sender j.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor

from pdsl.algorithms.base import Algorithm, Metrics, Round
from pdsl.algorithms.mixing import accelerated_gossip, best_omega, gossip_steps_to_agree
from pdsl.engine.base import Replies, weighted_sums
from pdsl.privacy import Release, by_weight
from pdsl.settings import ShapleySettings
from pdsl.shapley.coalitions import Values, check_size
from pdsl.shapley.masses import Basis, add_round, empty_sums, estimate_signals, is_anchor
from pdsl.shapley.trust import EVIDENCE_FIELDS, model_trust, shares, update_evidence
from pdsl.shapley.valuation import Valuation
from pdsl.topology import Graph, Schedule

MAX_GOSSIP_STEPS = 10  # of gossip_steps = "auto": on a long ring agents never agree within one round


@dataclass(frozen=True)
class State:
    x: Tensor  # [m, d] models
    u: Tensor  # [m, d] momenta
    evidence: Tensor  # [m, K, EVIDENCE_FIELDS] float64, on each of at most K members (`shapley.trust`)
    anchor: Tensor  # [m, d] models at the last anchor, at which gradients of public records are computed
    sums: Tensor  # [m, BLOCKS, K, G + 1, G] float64, for the masses of each member's records (`shapley.masses`)


class PDSL(Algorithm[State]):
    """Shapley-weighted cross-gradients with momentum and gossip."""

    name: ClassVar[str] = "pdsl"
    paper: ClassVar[str] = "Wang, Yuan, Wang, Li: PDSL, 2025"
    rule: ClassVar[str] = "x ← P_K(W) (x − γ û),  û_i = α u_i + Σ_j π_ij ĝ_ji,  u ← W û"

    momentum: float = Field(0.5, ge=0, lt=1, description="α")
    step_scale: Literal["graph", "mean", "paper"] = Field(
        "graph",
        description="weights π: graph: shares times ω, so that all agents count alike; mean: shares; paper: shares/ω",
    )
    gossip_steps: PositiveInt | Literal["auto"] = Field(
        "auto",
        description=f"gossip steps K per round; auto: until models agree, at most {MAX_GOSSIP_STEPS}, or 1 if the graph"
        " changes every round; the paper: 1",
    )
    noise: Literal["graph", "equal"] = Field(
        "graph",
        description="graph: σ² of a message ∝ 1/ω, so that messages with more weight have less noise, at the same ε"
        " (only with step_scale=graph); equal: one σ",
    )
    shapley: ShapleySettings = ShapleySettings()

    def init(self, x0: Tensor) -> State:
        no_evidence = torch.zeros(len(x0), 0, EVIDENCE_FIELDS, dtype=torch.float64)
        no_sums = empty_sums(len(x0), 0, 0)
        return State(x=x0, u=torch.zeros_like(x0), evidence=no_evidence, anchor=x0, sums=no_sums)

    def step(self, state: State, r: Round) -> tuple[State, Metrics]:
        x, u, engine = state.x, state.u, r.engine
        gamma, alpha = r.learning_rate, self.momentum
        probe = self.shapley.step_fraction * r.peak_rate  # the same in all rounds, so that their values compare
        anchor = x if is_anchor(r.t) else state.anchor
        basis = [] if r.public_gradients is None else r.public_gradients.at(anchor)

        g_bar, evidence, sums, reports = [], [], [], []
        trust: list[Values] = []  # in the models of each agent's members, for robust mixing
        for at in r.cross_gradients(x):  # chunks of agents i
            g_hat = at.values  # lines 2-13, eq. 9-14: ĝ_ji = clip(∇F_j(x_i; ξ_j)) + n_ji
            x_ij = at.split_by_agent(at.own_rows(x) - probe * g_hat)  # line 14, eq. 15
            phi = r.validation.contributions(r.t, at.agents, x[at.rows], x_ij, self.shapley)  # line 15, eq. 16-18
            evidence.append(self._update_evidence(state.evidence[at.rows], phi, at, r))
            sums.append(self._update_sums(state.sums[at.rows], basis[at.rows], at, r))
            share = self._shares(phi, evidence[-1], sums[-1], at, r)  # line 16, eq. 19
            trust += [model_trust(evidence[-1][row, who].numpy()) for row, who in enumerate(self._members(at, r))]
            omega = engine.omega[at.edges] if self.step_scale == "paper" else 1.0
            pi = torch.from_numpy(np.concatenate(share)) / omega  # line 17, eq. 20
            g_bar.append(weighted_sums(g_hat, pi, at.offsets))  # line 18, eq. 21
            fidelity = r.validation.fidelity(r.t, at.agents, r.graph.agents, x_ij, self.shapley)
            reports += _reports(phi, share, fidelity, self._places(at, r))

        if r.robust is not None and self.shapley.weighting in ("contribution", "evidence"):
            r.robust.trust(torch.from_numpy(np.concatenate(trust)))
        u_hat = alpha * u + torch.cat(g_bar)  # line 19, eq. 22
        x_hat = x - gamma * u_hat  # line 20, eq. 23
        u = engine.mix(u_hat)  # lines 21-23, eq. 24
        K = self._gossip_steps(r.graph)
        x = accelerated_gossip(engine, x_hat, K, best_omega(r.graph, K))  # lines 21, 22, 24, eq. 25; K = 1 is W x̂
        metrics = {"shapley": _metrics(engine.gather(reports))}
        return State(x, u, torch.cat(evidence), anchor, torch.cat(sums)), metrics

    def _update_evidence(self, evidence: Tensor, phi: list[Valuation], at: Replies, r: Round) -> Tensor:
        """Add this round's values to the evidence of a chunk of agents on their members, [n, K, EVIDENCE_FIELDS]."""
        if evidence.shape[1] == 0:  # round 1
            evidence = torch.zeros(len(evidence), int(max(r.graph.degrees)), EVIDENCE_FIELDS, dtype=torch.float64)
        evidence = evidence.cpu().clone()
        for row, (v, members) in enumerate(zip(phi, self._members(at, r), strict=True)):
            updated = update_evidence(evidence[row, members].numpy(), v.phi, v.alone, self.shapley.memory)
            evidence[row, members] = torch.from_numpy(updated)
        return evidence

    def _update_sums(self, sums: Tensor, basis: list[Basis], at: Replies, r: Round) -> Tensor:
        """Add this round's messages to the sums of a chunk of agents, [n, BLOCKS, K, G + 1, G]."""
        if not basis:
            return sums
        if sums.shape[2] == 0:  # round 1
            sums = empty_sums(len(sums), int(max(r.graph.degrees)), len(basis[0].gram))
        sums = sums.cpu().clone()
        for row, (messages, members) in enumerate(zip(at.split_by_agent(at.values), self._members(at, r), strict=True)):
            add_round(sums[row], r.t, basis[row], messages, members)
        return sums

    def _members(self, at: Replies, r: Round) -> list[NDArray[np.intp]]:
        """Positions of each agent's present members in its neighbourhood over all rounds.

        A peer may be absent for a round, and on a schedule a member is a neighbour in some rounds only. Evidence on
        absent members stays as it is.
        """
        present = at.split_by_agent(r.engine.sender[at.edges])
        return [
            np.searchsorted(r.graph.neighbourhood(agent), senders.cpu().numpy())
            for agent, senders in zip(at.agents, present, strict=True)
        ]

    def _places(self, at: Replies, r: Round) -> list[tuple[int, list[int]]]:
        """Places of the members' values among all edges of each agent: their number, and positions of the present.

        Peers and fixed graphs list the present members; a schedule lists the union of all rounds.
        """
        if not isinstance(r.graph, Schedule):
            return [(b - a, list(range(b - a))) for a, b in pairwise(at.offsets)]
        members = self._members(at, r)
        return [(int(r.graph.degrees[i]), places.tolist()) for i, places in zip(at.agents, members, strict=True)]

    def _shares(self, phi: list[Valuation], evidence: Tensor, sums: Tensor, at: Replies, r: Round) -> list[Values]:
        """Each member's share of its agent's step. The shares of an agent sum to 1, or less if no member is trusted.

        With step_scale=graph shares are multiplied by ω. Members of equal value then get ω itself, and because W is
        doubly stochastic every agent's records count the same. Without ω, a hub of the graph would count more.
        """
        members = self._members(at, r)
        known = [evidence[row, places].numpy() for row, places in enumerate(members)]
        signals = [self._signals(sums[row], places) for row, places in enumerate(members)]
        share = [shares(v.phi, self.shapley, e, m) for v, e, m in zip(phi, known, signals, strict=True)]
        if self.step_scale != "graph":
            return share
        omega = [w.cpu().numpy() for w in at.split_by_agent(r.engine.omega[at.edges])]
        return [s * w * s.sum() / (s @ w) if s.any() else s for s, w in zip(share, omega, strict=True)]

    def _signals(self, sums: Tensor, members: NDArray[np.intp]) -> tuple[Values, Values] | None:
        """Signals of one agent's members and their standard errors; None if they do not affect the shares."""
        if self.shapley.weighting != "contribution" or sums.numel() == 0:
            return None
        return estimate_signals(sums[:, members].numpy())

    def noise_gain(self, graph: Graph) -> float:
        weights = float(graph.degrees.mean()) if self.step_scale == "paper" else 1.0  # sum of π
        return weights / (1 - self.momentum)

    def check(self, members: int) -> None:
        check_size(self.shapley, members)

    def sends(self, graph: Graph, noise_multiplier: float) -> int:
        return 3 + self._gossip_steps(graph)  # x, ĝ, û, and x̂ once per gossip step

    def _gossip_steps(self, graph: Graph) -> int:
        return min(MAX_GOSSIP_STEPS, gossip_steps_to_agree(graph)) if self.gossip_steps == "auto" else self.gossip_steps

    def releases(self, members: int) -> Release:
        return Release(messages=members)

    def releases_in(self, graph: Graph, agent: int) -> Release:
        release = super().releases_in(graph, agent)
        if self.noise == "equal" or self.step_scale != "graph":  # only step_scale=graph weighs messages by ω
            return release
        return release._replace(sigma_scale=by_weight(graph.omega[graph.offsets[agent] : graph.offsets[agent + 1]]))


class _Report(NamedTuple):
    """Shapley values of one agent's members in one round."""

    estimator: str
    coalitions: int
    phi: list[float | None]  # None for members that are no neighbours in this round
    share: list[float | None]
    fidelity: dict[str, float] | None

    @classmethod
    def of(
        cls, valued: Valuation, share: Values, fidelity: dict[str, float] | None, places: tuple[int, list[int]]
    ) -> "_Report":
        phi, spread_share = (_spread(values, *places) for values in (valued.phi, share))
        return cls(valued.estimator, valued.coalitions, phi, spread_share, fidelity)

    @property
    def spread(self) -> float:
        present = [value for value in self.phi if value is not None]
        return max(present) - min(present)


def _reports(
    phi: list[Valuation], share: list[Values], fidelity: dict[str, float] | None, places: list[tuple[int, list[int]]]
) -> list[_Report]:
    return [_Report.of(v, s, fidelity, of_agent) for v, s, of_agent in zip(phi, share, places, strict=True)]


def _spread(values: Values, size: int, places: list[int]) -> list[float | None]:
    """Put values at their places in a list; None elsewhere."""
    row: list[float | None] = [None] * size
    for place, value in zip(places, values.tolist(), strict=True):
        row[place] = value
    return row


def _metrics(reports: list[_Report]) -> Metrics:
    """Shapley values and shares of all agents' members, edge by edge, and how they were estimated."""
    metrics: Metrics = {
        "estimator": "+".join(sorted({report.estimator for report in reports})),
        "coalitions": sum(report.coalitions for report in reports),
        "spread": float(np.mean([report.spread for report in reports])),
        "phi": [value for report in reports for value in report.phi],
        "share": [value for report in reports for value in report.share],
    }
    if fidelity := next((report.fidelity for report in reports if report.fidelity), None):
        metrics["fidelity"] = fidelity
    return metrics
