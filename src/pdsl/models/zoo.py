"""Built-in networks (convolutional, softmax regression, multi-layer perceptron) and their layers."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from pdsl.models.architecture import build as build_layers
from pdsl.models.architecture import has_frozen, parse, takes_integers, trace
from pdsl.models.weights import load_weights
from pdsl.settings import LAYERS, ModelSettings
from pdsl.utils.errors import PdslError
from pdsl.utils.imports import import_object
from pdsl.utils.inputs import Inputs, describe_shape
from pdsl.utils.random import Streams

MIXES_RECORDS = nn.modules.batchnorm._BatchNorm
ALIGNMENT = 16  # float32 numbers: 64 bytes


class MaxPool(nn.Module):
    """2×2 max pooling, channels last: the same result as nn.MaxPool2d(2), many times faster on a CPU.

    Without gradients, the index of the largest of the four values is not needed.
    """

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        if torch.is_grad_enabled():
            return nn.functional.max_pool2d(x, 2)
        x = x[:, :, : x.shape[2] // 2 * 2, : x.shape[3] // 2 * 2]
        rows = torch.maximum(x[:, :, ::2], x[:, :, 1::2])
        return torch.maximum(rows[:, :, :, ::2], rows[:, :, :, 1::2])


class AlignedLinear(nn.Linear):
    """Linear layer padded with zeros to widths that are multiples of 16.

    If rows are not aligned, the rounding of a matrix product may depend on a row's position in the batch. With padding,
    a record is rounded the same way in any batch.
    """

    @classmethod
    def replace(cls, layer: nn.Module) -> None:
        """Turn a plain linear layer of unaligned width into an aligned one, with the same parameters."""
        if type(layer) is nn.Linear and (layer.in_features % ALIGNMENT or layer.out_features % ALIGNMENT):
            layer.__class__ = cls

    def forward(self, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled():  # evaluation on public records needs no fixed rounding
            return super().forward(input)
        return aligned_linear(input, self.weight, self.bias)


def aligned_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b, with x and W padded with zeros to widths that are multiples of 16."""
    outputs, inputs = weight.shape
    columns, rows = -inputs % ALIGNMENT, -outputs % ALIGNMENT
    if not columns and not rows:
        return nn.functional.linear(x, weight, bias)
    padded = nn.functional.pad(weight, (0, columns, 0, rows))
    if bias is not None and rows:
        bias = nn.functional.pad(bias, (0, rows))
    return nn.functional.linear(nn.functional.pad(x, (0, columns)) if columns else x, padded, bias)[..., :outputs]


class RMSNorm(nn.Module):
    """Divide a record's features by their root mean square. No parameters, and records do not mix.

    Per-record gradients then have similar norms, so clipping removes less.
    """

    def forward(self, x: Tensor) -> Tensor:
        mean_square = x.square().mean(dim=tuple(range(1, x.ndim)), keepdim=True)
        return x * torch.rsqrt(mean_square + 1e-5)


class Centred(RMSNorm):
    """Subtract the mean of each feature map (or of the features) of a record, then apply RMSNorm.

    The mean of a map carries little information, but would be the largest part of a record's gradient.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(dim=(2, 3) if x.ndim == 4 else 1, keepdim=True))


class Flatten(nn.Module):
    """Flatten a record in the order (row, column, channel), the memory order of feature maps, so nothing is copied."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.permute(0, 2, 3, 1) if x.ndim == 4 else x).flatten(1)


class Tanh(nn.Module):
    """tanh as 2/(1 + e^−2x) − 1: equal to torch.tanh up to one rounding, and three times faster."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(2 * x) * 2 - 1 if torch.is_grad_enabled() else (2 * x).sigmoid_().mul_(2).sub_(1)


ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": Tanh}
NORMS: dict[
    str, tuple[list[type[nn.Module]], list[type[nn.Module]]]
] = {  # layers after feature maps; layers after flattening
    "none": ([], []),
    "rms": ([RMSNorm], []),
    "centred": ([Centred], [Centred]),
}


def _convolutions(shape: torch.Size, channels: tuple[int, int], kernel: int, s: ModelSettings) -> list[nn.Module]:
    """Two same-size convolutions, each followed by 2×2 max pooling.

    Pooling comes before the norm, if any, and before the activation. Both activations are increasing, so the result is
    the same as in the paper's order, at a quarter of the cost.
    """
    act = _activation(s)
    norm, final_norm = ([kind() for kind in kinds] for kinds in NORMS[s.norm])
    first, second = channels
    return [
        _zero_bias(nn.Conv2d(shape[0], first, kernel, padding=kernel // 2)),
        MaxPool(),
        *norm,
        act(),
        _zero_bias(nn.Conv2d(first, second, kernel, padding=kernel // 2)),
        MaxPool(),
        *norm,
        act(),
        Flatten(),
        *final_norm,
    ]


def _activation(s: ModelSettings) -> type[nn.Module]:
    """tanh is less sensitive to noise than relu; with normalised feature maps relu learns faster."""
    return ACTIVATIONS[s.activation or ("tanh" if s.norm == "none" else "relu")]


def _zero_bias(layer: nn.Conv2d) -> nn.Conv2d:
    """Set the bias to zero, so that a black image initially has zero features."""
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


def _classifier(features: int, classes: int) -> nn.Linear:
    """Last layer, initialised to zero: all classes are equally likely, so there is nothing to unlearn."""
    layer = nn.Linear(features, classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def mnist_cnn(shape: torch.Size, classes: int, s: ModelSettings) -> nn.Module:
    """Paper, Section VI-A: two 3×3 convolutions, each with 2×2 max pooling, then one fully connected layer."""
    channels = s.channels or (16, 32)
    features = channels[1] * (shape[1] // 4) * (shape[2] // 4)
    return nn.Sequential(*_convolutions(shape, channels, 3, s), _classifier(features, classes))


def cifar10_cnn(shape: torch.Size, classes: int, s: ModelSettings) -> nn.Module:
    """Paper, Section VI-A: two 5×5 convolutions, each with 2×2 max pooling, then two fully connected layers."""
    channels, hidden = s.channels or (32, 64), s.hidden or 128
    features = channels[1] * (shape[1] // 4) * (shape[2] // 4)
    return nn.Sequential(
        *_convolutions(shape, channels, 5, s),
        nn.Linear(features, hidden),
        _activation(s)(),
        _classifier(hidden, classes),
    )


def digits_cnn(shape: torch.Size, classes: int, s: ModelSettings) -> nn.Module:
    """The MNIST network with fewer channels, for 8×8 images."""
    return mnist_cnn(shape, classes, s.model_copy(update={"channels": s.channels or (8, 16)}))


def softmax(shape: torch.Size, classes: int, s: ModelSettings) -> nn.Module:
    """Softmax regression, which is convex."""
    return nn.Sequential(Flatten(), _classifier(shape.numel(), classes))


def linear(shape: torch.Size, classes: int, s: ModelSettings) -> nn.Module:
    """Softmax regression without bias, for features of norm 1: a bias would have by far the largest gradient."""
    layer = nn.Linear(shape.numel(), classes, bias=False)
    nn.init.zeros_(layer.weight)
    return nn.Sequential(Flatten(), layer)


def mlp(shape: torch.Size, classes: int, s: ModelSettings) -> nn.Module:
    """One hidden layer."""
    hidden = s.hidden or 64
    return nn.Sequential(
        Flatten(), nn.Linear(shape.numel(), hidden), ACTIVATIONS[s.activation or "tanh"](), _classifier(hidden, classes)
    )


MODELS: dict[str, Callable[[torch.Size, int, ModelSettings], nn.Module]] = {
    "mnist-cnn": mnist_cnn,
    "cifar10-cnn": cifar10_cnn,
    "digits-cnn": digits_cnn,
    "softmax": softmax,
    "linear": linear,
    "mlp": mlp,
}
DEFAULT_MODEL = {"digits": "softmax", "mnist": "mnist-cnn", "fashion-mnist": "mnist-cnn", "cifar10": "cifar10-cnn"}


def default_model(data: str) -> str:
    """Model of model.name=auto for a data set."""
    return DEFAULT_MODEL.get(data, "mlp")


def build(settings: ModelSettings, data: str, inputs: Inputs, outputs: int, streams: Streams) -> nn.Module:
    """Create the module of the settings for records like `inputs`, initialised from the run's seed or a file."""
    module = build_random(settings, data, inputs, outputs, streams)
    if settings.weights_path is not None:
        load_weights(module, Path(settings.weights_path).expanduser(), settings.weights_sha256)
    elif settings.weights_sha256 is not None:
        raise PdslError("model.weights_sha256 is set, but model.weights_path is not; give the path of that file")
    elif settings.layers is not None and has_frozen(parse(settings.layers)):
        raise PdslError("model.layers has frozen layers, but their weights are not given; set model.weights_path")
    return module


def build_random(settings: ModelSettings, data: str, inputs: Inputs, outputs: int, streams: Streams) -> nn.Module:
    """Create the module of the settings, initialised from the run's seed only."""
    name = default_model(data) if settings.name == "auto" else settings.name
    seed = int(streams.generator("init").integers(2**63))
    with torch.random.fork_rng(devices=[]):
        # the import of a user's file may seed or use the generator
        factory = import_object(name, "model.name") if ":" in name else None
        torch.manual_seed(seed)
        if factory is not None:
            return create_module(name, factory, "model.name")
        shape = torch.Size()
        if name in MODELS:
            shape = _check_built_in(name, inputs, outputs)
        elif settings.layers is not None:
            shape = _check_inputs(settings.layers, inputs)
        return build_architecture(settings.model_copy(update={"name": name}), shape, outputs)


def build_architecture(settings: ModelSettings, shape: torch.Size, outputs: int) -> nn.Module:
    """Create the named module for records of a shape, initialised from torch's global generator."""
    name = settings.name
    if ":" in name:
        return create_module(name, import_object(name, "model.name"), "model.name")
    if settings.layers is not None:
        layers = parse(settings.layers)
        trace(layers, shape)
        return build_layers(layers)
    if name not in MODELS:
        raise PdslError(
            f"model.name: no model '{name}'; choose {', '.join(MODELS)}, {LAYERS} with model.layers, or give"
            " package.module:callable"
        )
    if "cnn" in name and (len(shape) != 3 or min(shape[1:]) < 4):
        raise PdslError(
            f"model.name={name} needs images of at least 4×4 pixels with channels, not records of shape"
            f" {tuple(shape)}; try model.name=mlp"
        )
    return MODELS[name](shape, outputs, settings)


def _check_built_in(name: str, inputs: Inputs, outputs: int) -> torch.Size:
    """Shape of a record; PdslError if a built-in model cannot take the records or serve the task."""
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        raise PdslError(
            f"model.name={name} takes one tensor of floats per record, not {describe_shape(inputs)};"
            " give floats, x.float(), or your own model"
        )
    if outputs == 0:
        raise PdslError(f"model.name={name} does not know how many outputs a custom loss needs; give your own model")
    return inputs.shape[1:]


def _check_inputs(layers: object, inputs: Inputs) -> torch.Size:
    """Shape of a record; PdslError unless the records are floats, or integers for an embedding."""
    wanted = "integers" if takes_integers(parse(layers)) else "floats"
    if not isinstance(inputs, Tensor) or inputs.is_floating_point() != (wanted == "floats"):
        raise PdslError(f"model.layers takes one tensor of {wanted} per record, not {describe_shape(inputs)}")
    return inputs.shape[1:]


def create_module(path: str, factory: object, setting: str) -> nn.Module:
    """The module that a function or class at an import path creates."""
    if not callable(factory):
        raise PdslError(f"{setting}={path}: it is not callable; give a function or class that creates the module")
    try:
        module = factory()
    except TypeError as e:
        raise PdslError(f"{setting}={path}: calling it without arguments failed: {e}") from e
    if not isinstance(module, nn.Module):
        raise PdslError(f"{setting}={path} returned a {type(module).__name__}, not a torch.nn.Module")
    return module
