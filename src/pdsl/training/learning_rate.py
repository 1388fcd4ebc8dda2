"""The rule of `learning_rate = "auto"`: a learning rate from noise, batch, rounds and model, all of them public."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pdsl.algorithms.schedule import AUTO, learning_rates
from pdsl.config import Config
from pdsl.models.network import Network, trainable
from pdsl.privacy import Mechanism
from pdsl.tasks import MultiClass, Regression, Task
from pdsl.topology import Graph
from pdsl.utils.inputs import Inputs

MAX_SHIFT = 2.75  # by which the noise of a whole run may move the difference of two classes' scores
MAX_LOGIT_SHIFT = 1.4  # and a single logit, or an output of a custom task
MAX_REGRESSION_SHIFT = 0.35  # standard deviations of the targets
NOISELESS = 8.0  # γ without noise, for a base rate of 1 and in units of the model's scale
DIGITS = 2  # significant digits of the result, so that it is the same on all machines
PROBES, PROBE_RECORDS = 4, 200  # random directions, and records of the public set
MIN_SCALE, MAX_SCALE = 1e-6, 1.0
CURVATURE_RECORDS, CURVATURE_STEPS, MIN_CURVATURE = 500, 30, 1e-4  # of the power iteration
RULE_OF_THREE = 3.0  # n records without an error leave an error rate of up to 3/n, with 95 % confidence


def resolve_learning_rate(
    config: Config,
    graph: Graph,
    network: Network,
    public: tuple[Inputs, Tensor],
    mechanisms: Sequence[Mechanism] | None,
) -> Config:
    """The config with a number for `learning_rate = "auto"`; `public`: the public set."""
    algorithm = config.algorithm
    if algorithm.learning_rate != AUTO:
        return config
    factors = learning_rates(1.0, algorithm.schedule, config.rounds)
    noise, steps = noise_per_step(mechanisms)
    walk = algorithm.noise_gain(graph) * noise * math.sqrt(steps * math.fsum(f * f for f in factors))
    rate = rate_for_walk(config, network, public, walk, algorithm.base_rate)
    return config.model_copy(update={"algorithm": algorithm.model_copy(update={"learning_rate": rate})})


def rate_for_walk(
    config: Config, network: Network, public: tuple[Inputs, Tensor], walk: float, base_rate: float
) -> float:
    """The automatic rate for the noise of a whole run, `walk`, in units of the learning rate."""
    scale = model_scale(network, public)
    if config.public.start != "none":
        scale *= math.sqrt(remaining_loss(network, public))
    noiseless = noiseless_rate(scale, base_rate, config.privacy.max_grad_norm)
    if _layers(network) == 1 and network.task.loss is None:  # a user's loss may have no second derivative
        noiseless = max(noiseless, 2 / curvature(network, public))
    return auto_learning_rate(scale, walk, noiseless)


def auto_learning_rate(scale: float, walk: float, noiseless: float) -> float:
    """γ = s / √((s/γ₀)² + n²), to two digits: the largest step whose noise the model can bear.

    The noise of a run is a random walk of the mean model. Each local step adds γ·a·σ per parameter, so in the end it is
    γ·n with n = a·σ·√(K·Σf²): K local steps per round, f the schedule's factor of each round (for a constant rate
    Σf² = T), σ the noise of the mean message (`noise_per_step`), a the algorithm's `noise_gain`. The best γ lets γ·n
    reach a scale s that depends on the model alone (`model_scale`): this is the optimal step D/(√T·√(G² + σ²d)) of
    noisy SGD for a distance D = s·√d to the optimum. Without noise, the step is γ₀ (`noiseless_rate`).
    """
    rate = scale / math.hypot(scale / noiseless, walk)
    return float(f"{rate:.{DIGITS}g}")


def noiseless_rate(scale: float, base_rate: float, max_grad_norm: float) -> float:
    """γ₀, set by gradients clipped to C and the algorithm's `base_rate` b: 8·b·s/C."""
    return scale * base_rate * NOISELESS / min(max_grad_norm, 1.0)


def curvature(network: Network, public: tuple[Inputs, Tensor]) -> float:
    """Largest eigenvalue L of the Hessian of the mean loss on public records at the initial model.

    Steps below 2/L converge if the model has one layer of weights. Records scaled to norm 1 have a small L, so their
    steps are much larger than clipping alone suggests.
    """
    module = network.to_module(network.initial_parameters()).to(network.device)
    parameters = trainable(module)
    inputs = public[0][:CURVATURE_RECORDS].to(network.device)
    targets = public[1][:CURVATURE_RECORDS].to(network.device)
    loss = network.task.losses(network.forward(module, inputs), targets).mean()
    gradient = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
    generator = torch.Generator().manual_seed(0)
    direction = [torch.randn(p.shape, generator=generator).to(p) for p in parameters]
    largest = 0.0
    for _ in range(CURVATURE_STEPS):
        norm = math.sqrt(math.fsum(float(v.square().sum()) for v in direction))
        if norm == 0:
            break
        direction = [v / norm for v in direction]
        along = torch.stack([(g * v).sum() for g, v in zip(gradient, direction, strict=True)]).sum()
        product = torch.autograd.grad(along, parameters, retain_graph=True, materialize_grads=True)
        largest = math.sqrt(math.fsum(float(v.square().sum()) for v in product))
        direction = [v.detach() for v in product]
    return max(largest, MIN_CURVATURE)


def _layers(network: Network) -> int:
    """Layers with weights."""
    return sum(len(shape) > 1 for _, shape in network.shapes())


def noise_per_step(mechanisms: Sequence[Mechanism] | None) -> tuple[float, int]:
    """Standard deviation of the noise in the mean of all agents' local steps, and the number of local steps per round.

    An agent's k messages on one batch have noise z·√k·Δ each; their mean has z·Δ, which is C·z/B with Poisson batches.
    """
    if not mechanisms:
        return 0.0, 1
    variance = math.fsum((m.noise_multiplier * m.sensitivity) ** 2 for m in mechanisms) / len(mechanisms)
    return math.sqrt(variance / len(mechanisms)), max(m.steps for m in mechanisms)


def model_scale(network: Network, public: tuple[Inputs, Tensor]) -> float:
    """Noise per parameter that the model can bear: the s at which N(0, s²) moves outputs by the maximum, over √layers.

    It is measured at the initial model, on public records. Deeper models bear less than that, because training
    increases the weights by which the noise of other layers is multiplied.
    """
    low, high = MIN_SCALE, MAX_SCALE
    x, inputs, task = network.initial_parameters(), public[0][:PROBE_RECORDS].to(network.device), network.task
    limit = MAX_SHIFT if isinstance(task, MultiClass) else MAX_LOGIT_SHIFT
    if isinstance(task, Regression):
        limit = MAX_REGRESSION_SHIFT * (float(public[1].double().std()) if task.scale is None else 1.0)
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(len(x), generator=generator).to(x) for _ in range(PROBES)]
    before = network.outputs(x, inputs)
    while high / low > 1.001:
        scale = math.sqrt(low * high)
        shifts = [_square_shift(network.outputs(x + scale * n, inputs) - before, task) for n in directions]
        low, high = (scale, high) if math.fsum(shifts) / PROBES <= limit**2 else (low, scale)
    return low / math.sqrt(max(1, _layers(network)))


def remaining_loss(network: Network, public: tuple[Inputs, Tensor]) -> float:
    """Loss of the initial model on public records that it was not trained on, relative to constant outputs; at most 1.

    A model that starts from the public set has less to learn. Near an optimum the excess loss is quadratic in the
    distance, so the distance, and with it the noise that the model can bear, is proportional to the root of the loss.
    A few records may all be easy by chance, so n of them show a remaining loss of at least 3/n.
    """
    inputs, targets = public[0].to(network.device), public[1].to(network.device)
    outputs = network.outputs(network.initial_parameters(), inputs)
    constant = outputs.double().mean(0, keepdim=True).expand_as(outputs)
    loss, trivial = (float(network.task.losses(o.double(), targets).mean()) for o in (outputs, constant))
    return min(1.0, max(RULE_OF_THREE / len(targets), loss / trivial)) if trivial > 0 else 1.0


def _square_shift(moved: Tensor, task: Task) -> float:
    """Mean square of the change of an output [n, ...]; for scores of classes, of the difference of two of them."""
    moved = moved.double().cpu().flatten(1)
    if isinstance(task, MultiClass):
        k = moved.shape[1]
        moved = (moved - moved.mean(1, keepdim=True)) * math.sqrt(2 * k / max(k - 1, 1))
    return float(moved.square().mean())
