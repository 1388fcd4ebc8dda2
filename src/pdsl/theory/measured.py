"""What Theorem 2 speaks of, measured on a run: ‖∇F(x̄)‖² at the models that are kept, and L, ζ, κ at these models.

Gradients are full and not clipped: f_i is the mean loss of agent i's training records, F the mean of the f_i. L, ζ and
κ must hold for all x; what is measured holds at some, so it is an estimate from below.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from pdsl.algorithms import PDSL
from pdsl.errors import PdslError
from pdsl.gradients import summed_gradient
from pdsl.models import Network, channels_last
from pdsl.runner import take_up
from pdsl.theory.theorem2 import Setting, Step
from pdsl.train import Experiment, first_state

BATCHES = 20  # of each agent, those of the first rounds, to estimate ζ
BLOCK = 250  # records per backward pass
CURVATURE_RECORDS = 500  # of each agent, at most, to estimate L: a product with the Hessian costs three gradients
Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Point:
    """The mean model after a round, and what was measured there."""

    round: int
    squared_gradient: float  # ‖∇F(x̄)‖²
    loss: float  # F(x̄)
    kappa: float  # max over agents of ‖∇f_i − ∇F‖
    zeta: float  # max over agents of the root of the mean over batches of ‖∇F_i(ξ) − ∇f_i‖²
    L: float  # max over agents of the Hessian's spectral norm


@dataclass(frozen=True)
class MeasuredRun:
    """A run's points, the first model's first, and the theorem's constants with what was measured in them."""

    points: list[Point]
    step: Step
    setting: Setting
    complaints: list[str]


def measure_run(path: Path, tell: Callable[[str], None] = lambda what: None) -> MeasuredRun:
    """Measure the first model and every checkpoint of the run in a directory."""
    e, run = take_up(path, [])
    algorithm = e.config.algorithm
    if not isinstance(algorithm, PDSL):
        raise PdslError(f"{path} is a run of {algorithm.name}; Theorem 2 is about pdsl alone")
    if e.network.mixes_records:
        raise PdslError(
            f"the model's {e.network.mixes_records} mixes records, so an agent's loss is not a mean over them"
        )
    checkpoints, complaints = run.kept()
    if not checkpoints:
        raise PdslError(f"{path} has no checkpoint yet; continue it with pdsl run --resume {path}")
    means = [(0, first_state(e).x.mean(0)), *((c.round, c.tensors["x"].mean(0)) for c in checkpoints)]
    points = []
    for t, x in means:
        tell(f"measuring the model after round {t}")
        points.append(measure(e, t, x.to(e.network.device)))
    L, zeta, kappa = (max(getattr(point, name) for point in points) for name in ("L", "zeta", "kappa"))
    setting = Setting(
        C=e.config.privacy.max_grad_norm,
        sigma=e.largest_sigma,
        d=e.network.d,
        zeta=zeta,
        kappa=kappa,
        omega_min=float(e.graph.omega.min()),
        agents=e.graph.agents,
        rounds=points[-1].round,
        excess=points[0].loss,  # cross-entropy is never below 0, so F* is not either
    )
    step = Step(algorithm.learning_rate, algorithm.momentum, L, (1 - e.graph.spectral_gap) ** 2)
    return MeasuredRun(points, step, setting, complaints)


def measure(e: Experiment, t: int, x: Tensor) -> Point:
    """Everything about one model x [d]."""
    device = e.network.device
    records = [(channels_last(e.data.x[part]).to(device), e.data.y[part].to(device)) for part in e.parts]
    own = torch.stack([mean_gradient(e.network, x, inputs, labels) for inputs, labels in records])  # ∇f_i, [M, d]
    mean = own.mean(0)
    deviations = []
    for agent, (inputs, labels) in enumerate(records):
        batches = (e.batches.draw(agent, s) for s in range(1, BATCHES + 1))
        drawn = (_sum(e.network, x, inputs[b], labels[b]) / e.batches.divisor(agent) for b in batches)
        deviations.append(float(torch.stack([(g - own[agent]).square().sum() for g in drawn]).mean()))
    losses = [cross_entropy(e.network.logits(x, inputs).double(), labels).item() for inputs, labels in records]
    return Point(
        round=t,
        squared_gradient=float(mean.square().sum()),
        loss=sum(losses) / len(losses),
        kappa=float((own - mean).norm(dim=1).max()),
        zeta=max(deviations) ** 0.5,
        L=max(spectral_norm(_hessian(e.network, x, *_some(inputs, labels)), e.network.d) for inputs, labels in records),
    )


def mean_gradient(network: Network, x: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
    """∇f(x) [d] in float64: the gradient of the mean loss of the records."""
    return _sum(network, x, inputs, labels) / len(labels)


def _sum(network: Network, x: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
    total = torch.zeros_like(x, dtype=torch.float64)
    for a, b in _blocks(inputs, labels):
        total += summed_gradient(network, x, a, b)
    return total


def _blocks(inputs: Tensor, labels: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    if len(labels) == 0:
        return ()
    return zip(torch.split(inputs, BLOCK), torch.split(labels, BLOCK), strict=True)


def _some(inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """All records, or as many as CURVATURE_RECORDS, evenly spaced."""
    apart = -(-len(labels) // CURVATURE_RECORDS)
    return inputs[::apart], labels[::apart]


def _hessian(network: Network, x: Tensor, inputs: Tensor, labels: Tensor) -> Product:
    """v ↦ ∇²f(x) v, by differentiating ⟨∇f(x), v⟩."""

    def times(v: Tensor) -> Tensor:
        replica = network.replica()
        module = replica.load(x)
        total = torch.zeros_like(x, dtype=torch.float64)
        for a, b in _blocks(inputs, labels):
            loss = cross_entropy(module(a), b, reduction="sum")
            first = torch.autograd.grad(loss, replica.parameters, create_graph=True, materialize_grads=True)
            along = torch.cat([p.reshape(-1) for p in first]) @ v.to(x)
            second = torch.autograd.grad(along, replica.parameters, materialize_grads=True)
            total += torch.cat([p.reshape(-1) for p in second])
        return total / len(labels)

    return times


def spectral_norm(times: Product, d: int) -> float:
    """The largest |eigenvalue| of a symmetric [d, d] matrix that is known by its products, to about 1 %, by Lanczos."""
    from scipy.sparse.linalg import LinearOperator, eigsh

    def product(v: NDArray[np.float64]) -> NDArray[np.float64]:
        return times(torch.from_numpy(v.reshape(-1)).float()).cpu().numpy()

    start = np.random.default_rng(0).standard_normal(d)  # any that is not orthogonal to the eigenvector
    if d == 1:
        return float(abs(product(np.ones(1))[0]))
    return float(abs(eigsh(LinearOperator((d, d), product), k=1, v0=start, tol=0.01, return_eigenvectors=False)[0]))
