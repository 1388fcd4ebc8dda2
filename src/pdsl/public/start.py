"""Training on the public set and its labels alone: the start of all agents' models, and a baseline."""

import math

import torch
from torch import Tensor, nn

from pdsl.models.network import Network, load_vector, main_output, trainable
from pdsl.public.augment import augment
from pdsl.public.cache import cached
from pdsl.utils.inputs import Inputs, call, channels_last, map_inputs, tensors_digest
from pdsl.utils.progress import report_progress
from pdsl.utils.random import Streams
from pdsl.utils.versions import versions

PENALTIES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)  # of the squared distance from the initial parameters
FOLDS = 4  # of the cross-validation that chooses the penalty
ITERATIONS = 200  # of L-BFGS
STEPS, BATCH = 1000, 64  # of AdamW
RATE, DECAY = 2e-3, 0.05
PROBED = 100  # records whose losses identify the loss
FORMAT = 2  # of the recipe: part of the key in the cache


def train_on_public(
    network: Network, inputs: Inputs, targets: Tensor, record: Tensor, augmented: bool, mirror: bool, key: str
) -> Tensor:
    """Parameters [d] after training on public records, from the network's initial parameters; cached.

    One layer of weights: L-BFGS with a penalty chosen by cross-validation over records; `record` tells which rows are
    variants of the same record. Several layers: AdamW, and with `augmented` a new random variant of an image in each
    step. Everything is computed by one thread, so that all processes get the same bits. `key`: digest of the model.

    The losses of two models are part of the key in the cache, because a loss may be any function of the user's, and
    its constants may come from records that are not trained on.
    """
    tensors = tensors_digest([inputs, targets, record, network.initial_parameters(), _losses(network, inputs, targets)])
    found, _ = cached(
        "start",
        f"{FORMAT} {key} {tensors} {augmented} {mirror} {network.device} {versions()['torch']}",
        lambda: {"x": _train(network, inputs, targets, record, augmented, mirror)},
    )
    return found["x"].to(network.device)


def _losses(network: Network, inputs: Inputs, targets: Tensor) -> Tensor:
    """Losses of some records at the initial parameters and near them."""
    x0, some, of_some = network.initial_parameters(), inputs[:PROBED].to(network.device), targets[:PROBED]
    near = x0 + torch.randn(len(x0), generator=torch.Generator().manual_seed(0)).to(x0)
    found = [network.task.losses(network.outputs(x, some).cpu().double(), of_some.cpu()) for x in (x0, near)]
    return torch.cat(found).float()


def _train(network: Network, inputs: Inputs, targets: Tensor, record: Tensor, augmented: bool, mirror: bool) -> Tensor:
    inputs = map_inputs(torch.clone, inputs)  # rounding depends on the alignment of a tensor, and a file's has none
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if sum(len(shape) > 1 for _, shape in network.shapes()) <= 1:
            return _fit_convex(network, inputs, targets, record).cpu()
        return _fit_network(network, inputs, targets, augmented, mirror).cpu()
    finally:
        torch.set_num_threads(threads)


def fit_without_privacy(network: Network, inputs: Inputs, targets: Tensor, steps: int = STEPS) -> Tensor:
    """Parameters [d] trained on any records without privacy, from the initial ones, as a baseline."""
    if sum(len(shape) > 1 for _, shape in network.shapes()) <= 1:
        return _minimise(network, inputs, targets, PENALTIES[0], network.initial_parameters())
    return _fit_network(network, inputs, targets, augmented=False, mirror=False, steps=steps)


def _fit_convex(network: Network, inputs: Inputs, targets: Tensor, record: Tensor) -> Tensor:
    inputs, targets = inputs.to(network.device), targets.to(network.device)
    fold = (record % FOLDS).to(network.device)
    held_out = [torch.nonzero(fold == k)[:, 0] for k in range(FOLDS) if bool((fold == k).any())]
    runs, done = len(held_out) * len(PENALTIES), 0
    losses = dict.fromkeys(PENALTIES, 0.0)
    for rows in held_out if len(held_out) > 1 else []:
        kept = torch.ones(len(targets), dtype=torch.bool, device=targets.device)
        kept[rows] = False
        x = network.initial_parameters()
        for penalty in sorted(PENALTIES, reverse=True):  # each starts from the result of the one before
            x = _minimise(network, inputs[kept], targets[kept], penalty, x)
            outputs = network.outputs(x, inputs[rows])
            losses[penalty] += float(network.task.losses(outputs.double(), targets[rows]).sum())
            report_progress("start from the public set", done := done + 1, runs + 1)
    best = min(PENALTIES, key=lambda penalty: (losses[penalty], -penalty))
    x = _minimise(network, inputs, targets, best, network.initial_parameters())
    report_progress("start from the public set", runs + 1, runs + 1)
    return x


def _minimise(network: Network, inputs: Inputs, targets: Tensor, penalty: float, start: Tensor) -> Tensor:
    """Minimise mean loss + penalty · ‖x - x⁰‖² by L-BFGS."""
    module = network.to_module(start).to(network.device)
    parameters = trainable(module)
    x0 = network.initial_parameters()
    optimiser = torch.optim.LBFGS(parameters, max_iter=ITERATIONS, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> float:
        optimiser.zero_grad()
        moved = nn.utils.parameters_to_vector(parameters) - x0
        loss = _mean_loss(network, module, inputs, targets) + penalty * moved.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    x = nn.utils.parameters_to_vector(parameters).detach()
    return x if bool(torch.isfinite(x).all()) else x0


def _fit_network(
    network: Network, inputs: Inputs, targets: Tensor, augmented: bool, mirror: bool, steps: int = STEPS
) -> Tensor:
    module = network.to_module(network.initial_parameters()).to(network.device)
    optimiser = torch.optim.AdamW(trainable(module), lr=RATE, weight_decay=DECAY)
    generator = Streams(0).generator("public/start")
    inputs, targets = inputs.to(network.device), targets.to(network.device)
    order = torch.zeros(0, dtype=torch.int64)
    for step in range(steps):
        while len(order) < BATCH:  # passes over all records, each in a new order
            order = torch.cat([order, torch.from_numpy(generator.permutation(len(targets)))])
        batch, order = order[:BATCH].to(network.device), order[BATCH:]
        x = inputs[batch]
        if augmented and isinstance(x, Tensor):
            x = augment(x, mirror, generator)
        for group in optimiser.param_groups:
            group["lr"] = RATE * (1 + math.cos(math.pi * step / steps)) / 2
        optimiser.zero_grad()
        _mean_loss(network, module, channels_last(x), targets[batch]).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        if step % 50 == 49:
            report_progress("start from the public set", step + 1, steps)
    return nn.utils.parameters_to_vector(trainable(module)).detach()


def _mean_loss(network: Network, module: nn.Module, inputs: Inputs, targets: Tensor) -> Tensor:
    return network.task.losses(main_output(call(module, inputs)), targets).mean()


def with_start(network: Network, x: Tensor) -> Network:
    """The network with other initial parameters."""
    module = network.to_module(network.initial_parameters())
    load_vector(module, x)
    return Network(module, str(network.device), network.task)
