"""Is our per-record clipping faster than Opacus's? One thread, batches of 250 records, clipped sums without noise.

Both sides compute the same: the sum of the records' gradients, each clipped to norm C. Opacus runs with hooks
(`GradSampleModule` and `DPOptimizer`) and with ghost clipping (`GradSampleModuleFastGradientClipping` and
`DPOptimizerFastGradientClipping`), with its own GRU and attention layers. Times are medians of the process's CPU time
over alternating repetitions, so that other processes on the machine affect the ratios little. The sums are compared,
except for the Transformer block: with batch_first=True, Opacus's attention merges its heads in another order.

    python -m benchmarks.opacus [--repetitions 15] [--models MLP GRU]
"""

import argparse
import time
import warnings
from collections.abc import Callable
from statistics import median

import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.layers import DPGRU, DPMultiheadAttention
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn

from pdsl.gradients.clipping import clip_per_sample
from pdsl.gradients.independence import choose_kernel
from pdsl.models.network import Network
from pdsl.utils.inputs import channels_last
from pdsl.utils.workers import keep_freed_memory

BATCH, C, CLASSES = 250, 1.0, 10
VOCABULARY, T, WIDTH, HEADS = 5000, 32, 64, 4
AGREEMENT = 1e-4  # relative difference of the sums' norms

Step = Callable[[], Tensor]  # computes the clipped sum [d]


class Text(nn.Module):
    """Embedding, body, mean over positions, linear head."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(VOCABULARY, WIDTH), body, nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(ids)).mean(1))  # type: ignore[no-any-return]


class LastState(nn.Module):
    """Embedding, GRU, linear head on the last output."""

    def __init__(self, gru: nn.Module):
        super().__init__()
        self.embedding, self.gru, self.head = nn.Embedding(VOCABULARY, WIDTH), gru, nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.gru(self.embedding(ids))[0][:, -1])  # type: ignore[no-any-return]


class Block(nn.Module):
    """Transformer block (post-norm) with the given attention layer."""

    def __init__(self, attention: nn.Module):
        super().__init__()
        self.attention, self.first, self.second = attention, nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x + self.attention(x, x, x, need_weights=False)[0])
        return self.second(x + self.outer(torch.relu(self.inner(x))))  # type: ignore[no-any-return]


def cnn(*norms: nn.Module) -> nn.Module:
    first, second = ([norms[0]], [norms[1]]) if norms else ([], [])
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), *first, nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), *second, nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 49, CLASSES),
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, CLASSES))


def grouped() -> nn.Module:
    return cnn(nn.GroupNorm(4, 16), nn.GroupNorm(8, 32))


# name: (our model, Opacus's model, records are token ids)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], bool]] = {
    "MLP 784-256-10": (mlp, mlp, False),
    "CNN 16/32": (cnn, cnn, False),
    "CNN 16/32 + GroupNorm": (grouped, grouped, False),
    "embedding + LayerNorm": (lambda: Text(nn.LayerNorm(WIDTH)), lambda: Text(nn.LayerNorm(WIDTH)), True),
    "Transformer block": (
        lambda: Text(Block(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))),
        lambda: Text(Block(DPMultiheadAttention(WIDTH, HEADS, batch_first=True))),
        True,
    ),
    "GRU": (
        lambda: LastState(nn.GRU(WIDTH, WIDTH, batch_first=True)),
        lambda: LastState(DPGRU(WIDTH, WIDTH, batch_first=True)),
        True,
    ),
}


def ours(module: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[Step, str]:
    network = Network(module)
    kernel, x = choose_kernel(network, inputs[:64], labels[:64]), network.initial_parameters()
    images = channels_last(inputs)  # as in training
    return lambda: clip_per_sample(network, x, images, labels, C, 1.0, kernel), kernel.name


def hooks(module: nn.Module, inputs: Tensor, labels: Tensor) -> Step:
    wrapped = GradSampleModule(module, loss_reduction="sum")
    inner = torch.optim.SGD(wrapped.parameters(), lr=0.0)
    optimiser = DPOptimizer(inner, noise_multiplier=0.0, max_grad_norm=C, expected_batch_size=1, loss_reduction="sum")
    loss = nn.CrossEntropyLoss(reduction="sum")

    def step() -> Tensor:
        optimiser.zero_grad()
        loss(wrapped(inputs), labels).backward()
        optimiser.step()
        return _gradient(module)

    return step


def ghost(module: nn.Module, inputs: Tensor, labels: Tensor) -> Step:
    wrapped = GradSampleModuleFastGradientClipping(
        module, loss_reduction="sum", max_grad_norm=C, use_ghost_clipping=True
    )
    inner = torch.optim.SGD(wrapped.parameters(), lr=0.0)
    optimiser = DPOptimizerFastGradientClipping(
        inner, noise_multiplier=0.0, max_grad_norm=C, expected_batch_size=1, loss_reduction="sum"
    )
    loss = DPLossFastGradientClipping(wrapped, optimiser, nn.CrossEntropyLoss(reduction="sum"), "sum")

    def step() -> Tensor:
        optimiser.zero_grad()
        loss(wrapped(inputs), labels).backward()
        optimiser.step()
        return _gradient(module)

    return step


def _gradient(module: nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None])


def copy_parameters(model: nn.Module, theirs: nn.Module) -> None:
    """Give Opacus's model our parameters. Its attention layer converts torch's when loaded by itself."""
    theirs.load_state_dict(model.state_dict(), strict=False)
    for name, layer in theirs.named_modules():
        if isinstance(layer, DPMultiheadAttention):
            layer.load_state_dict(model.get_submodule(name).state_dict())


def measure(name: str, repetitions: int) -> None:
    make, make_theirs, tokens = MODELS[name]
    generator = torch.Generator().manual_seed(1)
    if tokens:
        inputs = torch.randint(0, VOCABULARY, (BATCH, T), generator=generator)
    else:
        inputs = torch.randn(BATCH, 1, 28, 28, generator=generator)
    labels = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    torch.manual_seed(0)
    model = make()
    own, kernel = ours(model, inputs, labels)
    steps: dict[str, Step] = {"ours": own}
    for way, wrap in (("hooks", hooks), ("ghost", ghost)):
        theirs = make_theirs()
        copy_parameters(model, theirs)
        steps[way] = wrap(theirs, inputs, labels)
    norms = {way: float(step().double().norm()) for way, step in steps.items()}
    if not any(isinstance(layer, DPMultiheadAttention) for layer in theirs.modules()) and max(norms.values()) > (
        1 + AGREEMENT
    ) * min(norms.values()):
        raise SystemExit(f"{name}: the sums differ: {norms}")
    seconds: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(repetitions):
        for way, step in steps.items():
            start = time.process_time()
            step()
            seconds[way].append(time.process_time() - start)
    ms = {way: 1e3 * median(found) for way, found in seconds.items()}
    ratio = min(ms["hooks"], ms["ghost"]) / ms["ours"]
    print(f"| {name} | {kernel} | {ms['ours']:.1f} | {ms['hooks']:.1f} | {ms['ghost']:.1f} | {ratio:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--models", nargs="*", default=[""], help="parts of names")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as in training; Opacus profits too
    warnings.simplefilter("ignore")
    print("| model | kernel | ours, ms | Opacus hooks, ms | Opacus ghost, ms | times faster than the faster of both |")
    print("|---|---|---|---|---|---|")
    for name in MODELS:
        if any(part in name for part in args.models):
            measure(name, args.repetitions)


if __name__ == "__main__":
    main()
