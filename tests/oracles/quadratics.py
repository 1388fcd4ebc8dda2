"""Quadratics whose optimum, and limit under D-PSGD, are a linear solve away; and a loop to run algorithms on them.

f_i(x) = ½ (x − b_i)ᵀ A_i (x − b_i), with A_i and b_i that differ from agent to agent. Gradients are exact, float64.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdsl.algorithms import Algorithm, Metrics, Round
from pdsl.algorithms.base import Objectives
from pdsl.engine import Engine, LocalEngine
from pdsl.privacy import Noise
from pdsl.shapley.valuation import Validation
from pdsl.topology import Graph
from pdsl.utils.random import Streams
from pdsl.utils.workers import Workers


@dataclass(frozen=True)
class Quadratics:
    """The agents' objectives; with a jitter, each (round, local step) has a batch that pulls its gradients aside."""

    A: Tensor  # [M, d, d] symmetric
    b: Tensor  # [M, d]
    jitter: float = 0.0

    def gradients(self, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None) -> Tensor:
        assert teachers is None, "a quadratic has nothing to learn from another model"
        exact = torch.einsum("eij,ej->ei", self.A[agents], x - self.b[agents])
        if self.jitter == 0:
            return exact
        return exact + self.jitter * torch.stack([self._pull(int(agent), t, step) for agent in agents])

    def _pull(self, agent: int, t: int, step: int) -> Tensor:  # [d]
        return torch.from_numpy(np.random.default_rng((agent, t, step)).standard_normal(self.b.shape[1]))

    def gradient(self, agent: int, x: Tensor, t: int = 1, step: int = 0) -> Tensor:  # [d]
        """One agent's, at one model."""
        return self.gradients(t, torch.tensor([agent]), x[None], step)[0]

    def optimum(self) -> Tensor:  # [d]
        """Where Σ_i A_i (x − b_i) = 0."""
        pull = torch.einsum("mij,mj->i", self.A, self.b)
        return cast(Tensor, torch.linalg.solve(self.A.sum(0), pull))

    def stalled(self, W: Tensor, gamma: float) -> Tensor:  # [M, d]
        """Where D-PSGD ends: x = W (x − γ A (x − b)), solved for all agents' models at once."""
        M, d = self.b.shape
        mixing = torch.kron(W, torch.eye(d, dtype=W.dtype))
        A, b = torch.block_diag(*self.A), self.b.reshape(-1)  # type: ignore[no-untyped-call]
        identity = torch.eye(M * d, dtype=W.dtype)
        x = torch.linalg.solve(identity - mixing @ (identity - gamma * A), gamma * mixing @ (A @ b))
        return cast(Tensor, x.reshape(M, d))


def heterogeneous(M: int, d: int, seed: int, jitter: float = 0.0) -> Quadratics:
    """Curvatures between ½ and 3/2 along directions of each agent's own, and optima of its own."""
    rng = np.random.default_rng(seed)
    bases = [np.linalg.qr(rng.standard_normal((d, d)))[0] for _ in range(M)]
    A = np.stack([Q @ np.diag(rng.uniform(0.5, 1.5, d)) @ Q.T for Q in bases])
    return Quadratics(torch.from_numpy(A), torch.from_numpy(rng.standard_normal((M, d)) + 1.0), jitter)


class Flat:
    """No gradients at all."""

    def gradients(self, t: int, agents: Tensor, x: Tensor, step: int = 0, teachers: Tensor | None = None) -> Tensor:
        return torch.zeros_like(x)


def start(M: int, d: int, seed: int = 0) -> Tensor:  # [M, d]
    """Every agent's first model, each another."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((M, d)))


@dataclass(frozen=True)
class Run:
    """What an algorithm did: T + 1 states, the first one before the first round, and T rounds' facts."""

    states: list[Any]
    metadata: list[Metrics]

    @property
    def x(self) -> Tensor:  # [T + 1, M, d]
        return torch.stack([state.x for state in self.states])


def run(
    algorithm: Algorithm,
    objectives: Objectives,
    graph: Graph,
    T: int,
    x0: Tensor,
    tensors: list[int] | None = None,
    validation: Validation | None = None,
    noise_multiplier: float = 0.0,
) -> Run:
    """T rounds without noise on the local engine, from the models x0 [M, d].

    `noise_multiplier` is only what the algorithm hears: x0 may hold the noise already.
    """
    states, facts = [algorithm.init(x0)], []
    if algorithm.learning_rate == "auto":  # for a model and its noise; there are none here
        algorithm = algorithm.model_copy(update={"learning_rate": algorithm.base_rate})
    rates = algorithm.learning_rates(T)
    with Workers(1) as workers:
        r = Round(
            t=0,
            engine=cast(Engine, LocalEngine(graph)),
            local=objectives,
            noise=Noise([0.0] * graph.agents, Streams(0), workers),
            validation=cast(Validation, validation),
            graph=graph,
            streams=Streams(0),
            tensors=tensors or [x0.shape[1]],
            noise_multiplier=noise_multiplier,
            learning_rate=0.0,
            peak_rate=max(rates),
        )
        for t, rate in enumerate(rates, 1):
            state, said = algorithm.step(states[-1], replace(r, t=t, learning_rate=rate))
            states.append(state)
            facts.append(said)
    return Run(states, facts)


def mixing(graph: Graph) -> Tensor:
    """W, as a tensor."""
    return torch.tensor(graph.W)


def polynomial(W: NDArray[np.float64], K: int, omega: float) -> NDArray[np.float64]:
    """P_K(W), dense: P_0 = I, P_1 = W, P_{s+1} = ω W P_s + (1 − ω) P_{s−1}."""
    P = [np.eye(len(W)), W]
    for _ in range(K - 1):
        P.append(omega * W @ P[-1] + (1 - omega) * P[-2])
    return P[K]
