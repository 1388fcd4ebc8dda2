"""Canaries: a lower bound on ε from one training run.

Records that are in one agent's data or not by the toss of a coin, and an adversary who sees every message of that agent
and guesses.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdsl.data.batches import Batches
from pdsl.gradients import Owners
from pdsl.parallel import Workers
from pdsl.privacy.mechanism import Noise
from pdsl.privacy.transcript import Message, Recorder
from pdsl.train import Experiment, apparatus, first_models

CONFIDENCE = 0.95  # of the lower bound
KNOWN = 200  # other records of the agent that the adversary takes into account
Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Canaries:
    """What an adversary who sees all of one agent's messages finds out about who is in its data."""

    agent: int
    count: int
    epsilon: float  # lower bound at CONFIDENCE
    null: float  # the same for coins that were not used: should be 0
    positive: float  # the same with the noise off: should be large


def canaries(e: Experiment, agent: int, count: int, rounds: int | None = None) -> Canaries:
    """Lower bounds on ε from one training run (Steinke, Nasr and Jagielski, 2023).

    `count` records of pure noise with any labels are among the agent's records or not, by a coin each. The adversary,
    all neighbours together, knows them and sees the messages; a canary's score is how far the messages go along the
    direction in which it shows best, summed over the rounds.
    """
    assert e.mechanisms is not None
    if rounds is None:  # enough for nearly every canary to be drawn
        rounds = min(e.config.rounds, math.ceil(3 / (e.batches.rate or 0.1)))
    rng = np.random.default_rng(20240501)
    coins = rng.random((2, count)) < 0.5
    inputs = torch.from_numpy(rng.standard_normal((count, *e.data.x.shape[1:]), dtype=np.float32)) * e.data.x.std()
    labels = torch.arange(count) % e.data.classes
    silent = [0.0 if i == agent else sigma for i, sigma in enumerate(e.sigma)]
    private = _scores(e, agent, inputs, labels, coins[0], rounds, e.sigma)
    clear = _scores(e, agent, inputs, labels, coins[0], rounds, silent)
    bounds = (lower_bound(private, coins[0]), lower_bound(private, coins[1]), lower_bound(clear, coins[0]))
    return Canaries(agent, count, *bounds)


def _scores(
    e: Experiment,
    agent: int,
    inputs: Tensor,
    labels: Tensor,
    coins: NDArray[np.bool_],
    rounds: int,
    sigmas: list[float],
) -> Scores:
    """Train with the canaries whose coin says so; how well each canary explains the agent's messages."""
    n = len(e.data.y)
    data = replace(e.data, x=torch.cat([e.data.x, inputs]), y=torch.cat([e.data.y, labels]))
    joined = torch.cat([e.parts[agent], n + torch.from_numpy(np.flatnonzero(coins))])
    parts = [joined if i == agent else part for i, part in enumerate(e.parts)]
    altered = replace(e, data=data, parts=parts, batches=_with_sizes(e.batches, parts))
    known = torch.cat([inputs, e.data.x[e.parts[agent][:KNOWN]]]), torch.cat([labels, e.data.y[e.parts[agent][:KNOWN]]])
    scores = np.zeros(len(labels))
    with Workers(e.config.engine.workers) as workers:
        tools = apparatus(altered, workers)
        seen: list[Message] = []
        noise = Recorder.watching(Noise(sigmas, e.streams, workers, stretch=e.stretch), seen)
        state = e.config.algorithm.init(first_models(e))
        for t in range(1, rounds + 1):
            seen.clear()
            x = state.x
            state, _ = e.config.algorithm.step(state, tools.round(t, noise))
            for m in seen:
                if m.maker == agent:
                    noise_of_sum = noise.sigma_of(agent, m.peer) * tools.owners.batches.divisor(agent)
                    directions = _directions(
                        tools.owners, x[m.peer], known[0], known[1], len(labels), noise_of_sum, workers
                    )
                    scores += (directions @ (m.clipped.double() + m.noise)).numpy()
    return scores


def _with_sizes(batches: Batches, parts: Sequence[Tensor]) -> Batches:
    """Batches of altered parts, at the rate and with the divisor of the original ones."""
    mean = sum(batches.sizes) / len(batches.sizes)
    return replace(batches, sizes=[len(part) for part in parts], mean_size=mean)


def _directions(
    owners: Owners, x: Tensor, inputs: Tensor, labels: Tensor, count: int, noise: float, workers: Workers
) -> Tensor:
    """Along which direction each of the first `count` records, the canaries, shows best: [count, d].

    A message is the sum of the gradients in the batch, and noise. As far as the noise allows, a canary's direction
    avoids the gradients of the others, canaries and records of the agent that the adversary knows: ridge regression,
    from plain alignment where there is much noise to the pseudo-inverse where there is none.
    """

    def one(n: int) -> Tensor:
        return owners.on(x, inputs[n : n + 1], labels[n : n + 1], 1.0)

    g = torch.stack(workers.map(one, range(len(labels)))).double()
    ridge = max(noise**2, 1e-6) * torch.eye(len(g), dtype=g.dtype)
    directions: Tensor = torch.linalg.solve(g @ g.T + ridge, g)[:count]
    return directions


def lower_bound(scores: Scores, coins: NDArray[np.bool_]) -> float:
    """The largest ε that the number of right guesses refutes at CONFIDENCE.

    The highest third is guessed in, the lowest third out. Under ε-DP each guess is right with probability at most
    e^ε/(1+e^ε), whatever the others are; δ adds less than count·δ.
    """
    from scipy import stats

    guesses = max(1, len(scores) // 3)
    order = np.argsort(scores)
    right = int(coins[order[-guesses:]].sum() + (~coins[order[:guesses]]).sum())
    epsilons = np.arange(0, 12, 0.01)
    refuted = stats.binom.sf(right - 1, 2 * guesses, 1 / (1 + np.exp(-epsilons))) < 1 - CONFIDENCE
    return float(epsilons[refuted].max(initial=0.0))
