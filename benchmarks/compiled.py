"""Does torch.compile pay for itself? The gradient of the MNIST CNN on 125 images, one thread, eager and compiled.

python benchmarks/compiled.py
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import conv2d, cross_entropy, linear, max_pool2d

IMAGES = 125
SHAPES = ((16, 1, 3, 3), (16,), (32, 16, 3, 3), (32,), (10, 32 * 7 * 7), (10,))


def loss(parameters: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
    w1, b1, w2, b2, w3, b3 = parameters
    h = torch.tanh(max_pool2d(conv2d(x, w1, b1, padding=1), 2))
    h = torch.tanh(max_pool2d(conv2d(h, w2, b2, padding=1), 2))
    return cross_entropy(linear(h.permute(0, 2, 3, 1).flatten(1), w3, b3), y, reduction="sum")


def eager(parameters: list[Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    leaves = [p.detach().requires_grad_() for p in parameters]
    return torch.autograd.grad(loss(leaves, x, y), leaves)


def microseconds(work: Callable[[], object], turns: int = 15) -> float:
    """CPU time an image, the best of several turns."""
    work()
    times = []
    for _ in range(turns):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return min(times) / IMAGES * 1e6


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    parameters = [0.1 * torch.randn(shape) for shape in SHAPES]
    x = torch.randn(IMAGES, 1, 28, 28).to(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (IMAGES,))
    compiled = torch.compile(torch.func.grad(loss), fullgraph=True, dynamic=False)
    start = time.perf_counter()
    found = compiled(parameters, x, y)
    print(f"compiling took {time.perf_counter() - start:.0f} s")
    right = eager(parameters, x, y)
    apart = max(float((f - r).norm() / r.norm()) for f, r in zip(found, right, strict=True))
    print(f"eager {microseconds(lambda: eager(parameters, x, y)):.0f} µs an image")
    print(f"compiled {microseconds(lambda: compiled(parameters, x, y)):.0f} µs an image, {apart:.1e} apart")


if __name__ == "__main__":
    main()
