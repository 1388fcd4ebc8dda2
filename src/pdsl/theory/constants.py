"""Constants of Theorem 2, measured on a run: ‖∇F(x̄)‖², L, ζ and κ at the models of its checkpoints.

f_i is the mean loss of agent i's training records, F the mean of the f_i. Gradients are full and not clipped. The
theorem needs L, ζ and κ for all x; measured at some x, they are estimates from below.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdsl.algorithms import PDSL
from pdsl.gradients.clipping import sum_gradients
from pdsl.models.network import Network
from pdsl.runs.runner import resume
from pdsl.theory.theorem2 import Setting, Step
from pdsl.topology import Schedule
from pdsl.training.experiment import Experiment
from pdsl.training.trainer import initial_state
from pdsl.utils.errors import PdslError
from pdsl.utils.inputs import Inputs, channels_last, split

BATCHES = 20  # batches per agent to estimate ζ, those of the first rounds
BLOCK = 250  # records per backward pass
MAX_CURVATURE_RECORDS = 500  # records per agent to estimate L: a Hessian product costs three gradients
Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Point:
    """Measurements at the mean model after a round."""

    round: int
    squared_gradient: float  # ‖∇F(x̄)‖²
    loss: float  # F(x̄)
    kappa: float  # max over agents of ‖∇f_i − ∇F‖
    zeta: float  # max over agents of the root of the mean over batches of ‖∇F_i(ξ) − ∇f_i‖²
    L: float  # max over agents of the Hessian's spectral norm


@dataclass(frozen=True)
class MeasuredRun:
    """Measurements of a run, from the initial model to the last checkpoint, and the theorem's constants."""

    points: list[Point]
    step: Step
    setting: Setting
    complaints: list[str]


def measure_run(path: Path, progress: Callable[[str], None] = lambda message: None) -> MeasuredRun:
    """Measure the initial model and every checkpoint of a run."""
    e, run = resume(path)
    algorithm = e.config.algorithm
    if not isinstance(algorithm, PDSL):
        raise PdslError(f"{path} is a run of {algorithm.name}; Theorem 2 is about pdsl only")
    if isinstance(e.graph, Schedule):
        raise PdslError(f"{path}: the graph changes from round to round, and Theorem 2 is about one graph; try --rho")
    if e.network.mixes_records:
        raise PdslError(
            f"the model's {e.network.mixes_records} mixes records, so an agent's loss is not a mean over records"
        )
    checkpoints, complaints = run.kept()
    if not checkpoints:
        raise PdslError(f"{path} has no checkpoint yet; continue it with pdsl run --resume {path}")
    means = [(0, initial_state(e).x.mean(0)), *((c.round, c.tensors["x"].mean(0)) for c in checkpoints)]
    points = []
    for t, x in means:
        progress(f"measuring the model after round {t}")
        points.append(measure(e, t, x.to(e.network.device)))
    L, zeta, kappa = (max(getattr(point, name) for point in points) for name in ("L", "zeta", "kappa"))
    setting = Setting(
        C=e.config.privacy.max_grad_norm,
        sigma=e.largest_sigma,
        d=e.network.num_parameters,
        zeta=zeta,
        kappa=kappa,
        omega_min=float(e.graph.omega.min()),
        agents=e.graph.agents,
        rounds=points[-1].round,
        excess=points[0].loss,  # built-in losses are at least 0, and so is F*
    )
    if len(set(e.learning_rates)) > 1:
        complaints.append("Theorem 2 is about a constant learning rate; the largest of this run is used")
    step = Step(max(e.learning_rates), algorithm.momentum, L, (1 - e.graph.spectral_gap) ** 2)
    return MeasuredRun(points, step, setting, complaints)


def measure(e: Experiment, t: int, x: Tensor) -> Point:
    """Measure one model x [d]."""
    device = e.network.device
    records = [(channels_last(e.data.x[part]).to(device), e.data.y[part].to(device)) for part in e.parts]
    own = torch.stack([mean_gradient(e.network, x, inputs, labels) for inputs, labels in records])  # ∇f_i, [M, d]
    mean = own.mean(0)
    deviations = []
    for agent, (inputs, labels) in enumerate(records):
        batches = (e.batches.draw(agent, s) for s in range(1, BATCHES + 1))
        drawn = (_sum(e.network, x, inputs[b], labels[b]) / e.batches.divisor(agent) for b in batches)
        deviations.append(float(torch.stack([(g - own[agent]).square().sum() for g in drawn]).mean()))
    losses = [e.task.losses(e.network.outputs(x, inputs).double(), labels).mean().item() for inputs, labels in records]
    return Point(
        round=t,
        squared_gradient=float(mean.square().sum()),
        loss=sum(losses) / len(losses),
        kappa=float((own - mean).norm(dim=1).max()),
        zeta=max(deviations) ** 0.5,
        L=max(
            spectral_norm(_hessian(e.network, x, *_subsample(inputs, labels)), e.network.num_parameters)
            for inputs, labels in records
        ),
    )


def mean_gradient(network: Network, x: Tensor, inputs: Inputs, labels: Tensor) -> Tensor:
    """∇f(x) [d] in float64, the gradient of the mean loss of the records."""
    return _sum(network, x, inputs, labels) / len(labels)


def _sum(network: Network, x: Tensor, inputs: Inputs, labels: Tensor) -> Tensor:
    total = torch.zeros_like(x, dtype=torch.float64)
    for a, b in _blocks(inputs, labels):
        total += sum_gradients(network, x, a, b)
    return total


def _blocks(inputs: Inputs, labels: Tensor) -> Iterable[tuple[Inputs, Tensor]]:
    if len(labels) == 0:
        return ()
    return zip(split(inputs, BLOCK), torch.split(labels, BLOCK), strict=True)


def _subsample(inputs: Inputs, labels: Tensor) -> tuple[Inputs, Tensor]:
    """At most MAX_CURVATURE_RECORDS records, evenly spaced."""
    every = -(-len(labels) // MAX_CURVATURE_RECORDS)
    return inputs[::every], labels[::every]


def _hessian(network: Network, x: Tensor, inputs: Inputs, labels: Tensor) -> Product:
    """Hessian product v ↦ ∇²f(x) v, by differentiating ⟨∇f(x), v⟩."""

    def times(v: Tensor) -> Tensor:
        replica = network.replica()
        module = replica.load(x)
        total = torch.zeros_like(x, dtype=torch.float64)
        for a, b in _blocks(inputs, labels):
            loss = network.losses(module, a, b).sum()
            first = torch.autograd.grad(loss, replica.parameters, create_graph=True, materialize_grads=True)
            along = torch.cat([p.reshape(-1) for p in first]) @ v.to(x)
            second = torch.autograd.grad(along, replica.parameters, materialize_grads=True)
            total += torch.cat([p.reshape(-1) for p in second])
        return total / len(labels)

    return times


def spectral_norm(times: Product, d: int) -> float:
    """Largest |eigenvalue| of a symmetric [d, d] matrix given by its products, to about 1 %, by Lanczos."""
    from scipy.sparse.linalg import LinearOperator, eigsh

    def product(v: NDArray[np.float64]) -> NDArray[np.float64]:
        return times(torch.from_numpy(v.reshape(-1)).float()).cpu().numpy()

    start = np.random.default_rng(0).standard_normal(d)  # any vector that is not orthogonal to the eigenvector
    if d == 1:
        return float(abs(product(np.ones(1))[0]))
    return float(abs(eigsh(LinearOperator((d, d), product), k=1, v0=start, tol=0.01, return_eigenvectors=False)[0]))
