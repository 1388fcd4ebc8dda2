"""Random architectures out of all layers that have a formula, with records and a task for each."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pdsl.models.network import Network
from pdsl.tasks import Binary, MultiClass, Regression, Task
from pdsl.utils.inputs import Fields, Inputs

VOCABULARY, WIDTH, CLASSES = 11, 8, 3


@dataclass(frozen=True)
class Example:
    """A network with records and targets."""

    name: str
    network: Network
    inputs: Inputs
    targets: Tensor


class Own(nn.Module):
    """A parameter that is no layer's, and a layer's weight used outside the layer too."""

    def __init__(self, outside: bool):
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Linear(WIDTH, WIDTH)
        self.outside = outside

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x * self.scale))
        return x + 0.1 * nn.functional.linear(x, self.linear.weight) if self.outside else x


class Reused(nn.Module):
    """The same layers run twice, with a residual connection."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x))) + x  # type: ignore[no-any-return]


class Attending(nn.Module):
    """Attention to itself, or to a second sequence, with and without masks and weights."""

    def __init__(self, pick: random.Random):
        super().__init__()
        self.batch_first, self.kind = pick.random() < 0.7, pick.choice(["self", "cross", "values"])
        sizes = {"kdim": 5, "vdim": 6} if self.kind != "self" and pick.random() < 0.4 else {}
        self.attention = nn.MultiheadAttention(
            WIDTH, pick.choice([1, 2, 4]), bias=pick.random() < 0.7, batch_first=self.batch_first, **sizes
        )
        self.key, self.value = nn.Linear(WIDTH, sizes.get("kdim", WIDTH)), nn.Linear(WIDTH, sizes.get("vdim", WIDTH))
        self.options = {"need_weights": pick.random() < 0.5, "average_attn_weights": pick.random() < 0.5}
        self.causal = pick.random() < 0.4

    def forward(self, x: Tensor) -> Tensor:
        if not self.batch_first:
            x = x.transpose(0, 1)
        T = x.shape[1 if self.batch_first else 0]
        key = x if self.kind == "self" else self.key(x)
        value = key if self.kind == "cross" and self.value.out_features == key.shape[-1] else self.value(x)
        value = x if self.kind == "self" else value
        mask = torch.ones(T, T, dtype=torch.bool).triu(1) if self.causal else None
        y = self.attention(x, key, value, attn_mask=mask, **self.options)[0]
        return y if self.batch_first else y.transpose(0, 1)  # type: ignore[no-any-return]


class Recurring(nn.Module):
    """GRU, LSTM or RNN of any direction and depth, with all outputs."""

    def __init__(self, pick: random.Random):
        super().__init__()
        self.batch_first, both = pick.random() < 0.7, pick.random() < 0.3
        kind, more = pick.choice([(nn.GRU, {}), (nn.LSTM, {}), (nn.RNN, {}), (nn.RNN, {"nonlinearity": "relu"})])
        self.layer = kind(
            WIDTH, WIDTH // (2 if both else 1), pick.choice([1, 1, 2]), bidirectional=both, bias=pick.random() < 0.7,
            batch_first=self.batch_first, **more,
        )  # fmt: skip
        self.state = pick.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        out, last = self.layer(x if self.batch_first else x.transpose(0, 1))
        out = out if self.batch_first else out.transpose(0, 1)
        last = last[0] if isinstance(last, tuple) else last
        return out + last.sum((0, 2))[:, None, None] if self.state else out  # type: ignore[no-any-return]


class Encoder(nn.TransformerEncoderLayer):
    """An encoder layer in a module of its own class, with a padding mask."""

    def __init__(self, pick: random.Random):
        super().__init__(WIDTH, 2, 12, batch_first=True, norm_first=pick.random() < 0.5, activation="gelu")


class Text(nn.Module):
    """Token ids or a float sequence, positions, bodies, and a head that may share the embedding's weight."""

    def __init__(self, pick: random.Random, bodies: list[nn.Module], outputs: int, T: int):
        super().__init__()
        padding = pick.choice([None, 0])
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=padding)
        self.positions = nn.Embedding(T, WIDTH) if pick.random() < 0.5 else None
        self.start = nn.Parameter(torch.randn(1, 1, WIDTH)) if pick.random() < 0.3 else None
        self.bodies, self.norm = nn.Sequential(*bodies), nn.LayerNorm(WIDTH)
        self.tied = nn.Linear(WIDTH, VOCABULARY, bias=False) if pick.random() < 0.3 else None
        if self.tied is not None:
            self.tied.weight = self.embedding.weight
        self.head = nn.Linear(WIDTH if self.tied is None else VOCABULARY, outputs)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(x.shape[1]))
        if self.start is not None:
            x = torch.cat([self.start.expand(len(x), -1, -1), x], 1)
        x = self.norm(self.bodies(x)).mean(1)
        return self.head(x if self.tied is None else torch.tanh(self.tied(x)))  # type: ignore[no-any-return]


class Two(nn.Module):
    """Two inputs, each with a branch."""

    def __init__(self, first: nn.Module, second: nn.Module, outputs: int):
        super().__init__()
        self.first, self.second, self.head = first, second, nn.Linear(2 * WIDTH, outputs)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(torch.cat([self.first(a), self.second(b)], 1))  # type: ignore[no-any-return]


def convolutions(pick: random.Random, axes: int, size: int, outputs: int) -> nn.Module:
    """One or two convolutions with norms and pooling, then a linear layer."""
    Conv = [nn.Conv1d, nn.Conv2d, nn.Conv3d][axes - 1]
    Instance = [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d][axes - 1]
    Pool = pick.choice([[nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d], [nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d]])[
        axes - 1
    ]
    layers: list[nn.Module] = []
    channels = pick.choice([1, 2, 4])
    first = channels
    for _ in range(pick.choice([1, 2])):
        groups = pick.choice([g for g in (1, 2, 4) if channels % g == 0])
        padding, mode = pick.choice([(0, "zeros"), (1, "zeros"), ("same", "zeros"), (1, "reflect"), (1, "circular")])
        stride = 1 if padding == "same" else pick.choice([1, 1, 2])
        kernel, dilation = pick.choice([2, 3]), pick.choice([1, 1, 2])
        span = (kernel - 1) * dilation + 1
        after = size if padding == "same" else (size + 2 * int(padding) - span) // stride + 1
        if after < 3:
            kernel, stride, padding, mode, dilation, after = 1, 1, 0, "zeros", 1, size
        layers.append(Conv(channels, 4, kernel, stride, padding, dilation, groups, pick.random() < 0.7, mode))
        size, channels = after, 4
        layers += pick.choice([[], [nn.GroupNorm(2, 4)], [Instance(4, affine=pick.random() < 0.7)]])
        layers.append(pick.choice([nn.Tanh(), nn.SiLU(), nn.ELU(inplace=True)]))
        if size >= 6:
            layers.append(Pool(2))
            size //= 2
    body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * size**axes, outputs))
    body.first = first  # type: ignore[assignment]
    return body


def dense(pick: random.Random, outputs: int) -> nn.Module:
    """Layers over vectors."""
    options = [
        lambda: nn.Linear(WIDTH, WIDTH, bias=pick.random() < 0.7),
        lambda: nn.LayerNorm(WIDTH, bias=pick.random() < 0.7),
        lambda: nn.GroupNorm(2, WIDTH),
        lambda: nn.Tanh(),
        lambda: Own(pick.random() < 0.5),
        lambda: Reused(nn.Linear(WIDTH, WIDTH)),
    ]
    return nn.Sequential(nn.Linear(5, WIDTH), *(pick.choice(options)() for _ in range(3)), nn.Linear(WIDTH, outputs))


def text(pick: random.Random, outputs: int, T: int) -> nn.Module:
    options = [
        lambda: Attending(pick),
        lambda: Recurring(pick),
        lambda: Encoder(pick),
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 12, batch_first=True, norm_first=pick.random() < 0.5),
        lambda: nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)),
        lambda: nn.LayerNorm(WIDTH),
        lambda: Reused(nn.Linear(WIDTH, WIDTH)),
        lambda: Own(pick.random() < 0.5),
    ]
    return Text(pick, [pick.choice(options)() for _ in range(pick.choice([1, 2]))], outputs, T)


def example(seed: int, n: int = 6) -> Example:
    """Architecture, records and task of this seed."""
    pick = random.Random(seed)
    task: Task = pick.choice([MultiClass(outputs=CLASSES), Binary(), Regression(outputs=2)])
    outputs, kind = task.outputs, pick.choice(["images", "images", "vectors", "text", "text", "text", "two"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        T = pick.choice([3, 5, 9])
        ids, vectors = torch.randint(0, VOCABULARY, (n, T)), torch.randn(n, 5)
        inputs: Inputs = vectors
        if kind == "images":
            axes = pick.choice([1, 2, 2, 3])
            size = pick.choice([6, 9] if axes < 3 else [5, 6])
            module = convolutions(pick, axes, size, outputs)
            inputs = torch.randn(n, int(module.first), *[size] * axes)  # type: ignore[call-overload]
        elif kind == "vectors":
            module = dense(pick, outputs)
        elif kind == "text":
            module, inputs = text(pick, outputs, T), ids
        else:
            module, named = Two(text(pick, WIDTH, T), dense(pick, WIDTH), outputs), pick.random() < 0.5
            inputs = Fields([ids, vectors], ["a", "b"] if named else None)
        if pick.random() < 0.3:
            parameters = list(module.parameters())
            for p in pick.sample(parameters, k=len(parameters) // 3):
                p.requires_grad_(False)
        targets = torch.randn(n, 2) if isinstance(task, Regression) else torch.randint(0, max(2, outputs), (n,))
        return Example(f"{seed}: {kind}, {type(task).__name__}", Network(module, task=task), inputs, targets)
