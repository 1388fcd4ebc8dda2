"""Networks, plain and awkward, on which gradients per record could go wrong, and the way that is right for each."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, relu_

from pdsl.gradients.per_example import LAYERS, RECORDS, VMAPPED, Kernel
from pdsl.models.zoo import MODELS
from pdsl.settings import ModelSettings

CLASSES = 3
WAYS = [LAYERS, VMAPPED, RECORDS]
SMALL = ModelSettings(channels=(3, 4), hidden=5)


def named(name: str, shape: tuple[int, ...], **more: object) -> Callable[[], nn.Module]:
    made = ModelSettings.model_validate({**SMALL.model_dump(), **more})
    return lambda: MODELS[name](torch.Size(shape), CLASSES, made)


class LayerNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, CLASSES)
        nn.init.normal_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.norm(self.inner(x))))


class Twice(nn.Module):
    """Runs one layer twice. With a last layer of zeros nothing of that shows in the gradient at the start."""

    def __init__(self, zero: bool = False) -> None:
        super().__init__()
        self.inner, self.shared, self.outer = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)
        if zero:
            nn.init.zeros_(self.outer.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        return self.outer(torch.tanh(self.shared(torch.tanh(self.shared(h)))))


class Tied(nn.Module):
    """Two layers, one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.outer = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, CLASSES)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.b(torch.tanh(self.a(x)))))


class UsedOutside(nn.Module):
    """A layer's weight does a little more than its layer; the rest of the gradient is large.

    With a last layer of zeros, the rest is all there is at the start.
    """

    def __init__(self, zero: bool = False) -> None:
        super().__init__()
        self.shared, self.outer = nn.Linear(5, 5), nn.Linear(5, CLASSES)
        if zero:
            nn.init.zeros_(self.outer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(10 * x + 0.01 * self.shared(x) + 0.01 * torch.tanh(linear(x.flip(1), self.shared.weight)))


class OwnParameter(nn.Module):
    """A parameter that is no layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.outer = nn.Parameter(torch.rand(5) + 0.5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(x * self.scale))


class InPlace(nn.Module):
    """Overwrites a layer's output. Where all of it is `above` zero that makes no difference, until later it does."""

    def __init__(self, above: float = 0.0, first: bool = False) -> None:
        super().__init__()
        self.inner, self.middle, self.outer = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)
        self.first = first
        with torch.no_grad():
            self.middle.bias += above

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        h = relu_(h) if self.first else torch.tanh(h)
        return self.outer(relu_(self.middle(h)))


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.outer = nn.LayerNorm(5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.norm(x)) * (2.0 if x.abs().max().item() < 1e30 else 1.0)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(5, CLASSES), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(input=x)


class PositionsAsRecords(nn.Module):
    """All layers see the positions of all records in one long batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.outer(torch.tanh(self.inner(x.reshape(-1, 3))))
        return rows.reshape(x.shape[0], -1, CLASSES).mean(1)


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    chosen: Kernel

    @property
    def ways(self) -> list[Kernel]:
        """Those that must be right: what is chosen and all that are slower; vmap knows no channels-last pooling."""
        slower = WAYS[WAYS.index(self.chosen) :]
        return [way for way in slower if "cnn" not in self.name or way is not VMAPPED]


VECTOR, IMAGE, COLOUR = (5,), (1, 8, 8), (3, 9, 11)
CASES = [
    Case("mnist-cnn", named("mnist-cnn", IMAGE), IMAGE, LAYERS),
    Case("mnist-cnn, tanh", named("mnist-cnn", IMAGE, activation="tanh"), IMAGE, LAYERS),
    Case("mnist-cnn, rms", named("mnist-cnn", IMAGE, norm="rms"), IMAGE, LAYERS),
    Case("mnist-cnn, no norm", named("mnist-cnn", IMAGE, norm="none"), IMAGE, LAYERS),
    Case("cifar10-cnn", named("cifar10-cnn", COLOUR), COLOUR, LAYERS),
    Case("mlp", named("mlp", IMAGE), IMAGE, LAYERS),
    Case("softmax", named("softmax", VECTOR), VECTOR, LAYERS),
    Case(
        "strides and dilation, no bias",
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), bias=False),
            nn.Tanh(),
            nn.Conv2d(4, 5, 2, stride=2),
            nn.Flatten(),
            nn.Linear(5 * 2 * 4, CLASSES, bias=False),
        ),
        COLOUR,
        LAYERS,
    ),
    Case(
        "linear over a sequence",
        lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2, bias=False), nn.Flatten(), nn.Linear(8, 3)),
        (4, 3),
        LAYERS,
    ),
    Case(
        "linear over a grid",
        lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Flatten(), nn.Linear(20, CLASSES)),
        (2, 2, 3),
        LAYERS,
    ),
    Case(
        "in-place modules",
        lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, CLASSES), nn.ELU(inplace=True)),
        VECTOR,
        LAYERS,
    ),
    Case("layer norm", LayerNormed, VECTOR, VMAPPED),
    Case(
        "group norm",
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4 * 36, CLASSES)),
        IMAGE,
        LAYERS,
    ),
    Case(
        "grouped convolution, padding by name and by reflection",
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3, groups=3, padding="same"),
            nn.Tanh(),
            nn.Conv2d(6, 2, 3, padding=1, padding_mode="reflect"),
            nn.Flatten(),
            nn.Linear(2 * 99, CLASSES),
        ),
        COLOUR,
        LAYERS,
    ),
    Case("a layer run twice", Twice, VECTOR, VMAPPED),
    Case("a layer run twice under zeros", lambda: Twice(zero=True), VECTOR, VMAPPED),
    Case("a tied weight", Tied, VECTOR, VMAPPED),
    Case("a weight used outside its layer too", UsedOutside, VECTOR, VMAPPED),
    Case("a weight used outside under zeros", lambda: UsedOutside(zero=True), VECTOR, VMAPPED),
    Case("a parameter outside layers", OwnParameter, VECTOR, VMAPPED),
    Case("relu_ in forward", InPlace, VECTOR, VMAPPED),
    Case("relu_ that changes nothing yet", lambda: InPlace(above=9.0), VECTOR, VMAPPED),
    Case("relu_ on the first layer", lambda: InPlace(first=True), VECTOR, VMAPPED),
    Case("a layer that is not used", Unused, VECTOR, VMAPPED),
    Case("a layer called by keyword", ByKeyword, VECTOR, VMAPPED),
    Case("positions in the place of records", PositionsAsRecords, (4, 3), VMAPPED),
    Case("what torch.func cannot trace", Untraceable, VECTOR, RECORDS),
]
cases = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
