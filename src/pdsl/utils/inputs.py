"""Inputs of a model: one tensor with a row per record, or several tensors (`Fields`)."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn


class Fields:
    """Several tensors with a row per record: the positional or named arguments of a model.

    It indexes and moves between devices like one tensor.
    """

    def __init__(self, tensors: Sequence[Tensor], names: Sequence[str] | None = None):
        self.tensors = tuple(tensors)
        self.names = None if names is None else tuple(names)  # None: positional arguments

    @classmethod
    def of(cls, value: "Mapping[str, Tensor] | Sequence[Tensor]") -> "Fields":
        if isinstance(value, Mapping):
            return cls(list(value.values()), list(value))
        return cls(value)

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: "int | slice | Tensor") -> "Fields":
        return self.map(lambda tensor: tensor[index])

    def map(self, function: Callable[[Tensor], Tensor]) -> "Fields":
        """Apply a function to each tensor."""
        return Fields([function(tensor) for tensor in self.tensors], self.names)

    def to(self, device: torch.device | str) -> "Fields":
        return self.map(lambda tensor: tensor.to(device))

    def __repr__(self) -> str:
        return f"Fields({describe_shape(self)})"  # shapes only: records must not be printed


Inputs: TypeAlias = Tensor | Fields


def split(inputs: Inputs, size: int) -> list[Inputs]:
    """Blocks of `size` records; the last may be smaller. No records are one empty block."""
    return [inputs[start : start + size] for start in range(0, max(1, len(inputs)), size)]


def tensors_of(inputs: Inputs) -> tuple[Tensor, ...]:
    return inputs.tensors if isinstance(inputs, Fields) else (inputs,)


def map_inputs(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """Apply a function to each tensor of the inputs."""
    return inputs.map(function) if isinstance(inputs, Fields) else function(inputs)


def concat(parts: Sequence[Inputs]) -> Inputs:
    """Concatenate records."""
    first = parts[0]
    if isinstance(first, Fields):
        columns = zip(*(tensors_of(part) for part in parts), strict=True)
        return Fields([torch.cat(column) for column in columns], first.names)
    return torch.cat([part for part in parts if isinstance(part, Tensor)])


def same(a: Inputs, b: Inputs) -> bool:
    """Whether two inputs are equal, bit for bit."""
    return all(torch.equal(x, y) for x, y in zip(tensors_of(a), tensors_of(b), strict=True))


def negated(inputs: Inputs) -> Inputs:
    """Other records of the same kind: negative floats, and integers in reverse order of records."""
    return map_inputs(lambda t: -t if t.is_floating_point() else t.flip(0), inputs)


def call(module: nn.Module, inputs: Inputs) -> object:
    """Call a module with one tensor, with positional arguments or with named arguments."""
    if isinstance(inputs, Tensor):
        return module(inputs)
    if inputs.names is None:
        return module(*inputs.tensors)
    return module(**dict(zip(inputs.names, inputs.tensors, strict=True)))


def channels_last(inputs: Inputs) -> Inputs:
    """Convert images to the layout (row, column, channel), the fastest on CPUs; other records are not changed.

    `to` also sets the strides of one-channel images, which `contiguous` would not. A convolution chooses the layout of
    its output by them.
    """
    return map_inputs(lambda t: t.to(memory_format=torch.channels_last) if t.ndim == 4 else t, inputs)


def describe_shape(inputs: Inputs) -> str:
    """Shape and type of one record, for messages: (8, 8), or ids (16,) int64 and mask (16,)."""
    if isinstance(inputs, Tensor):
        return _describe(inputs)
    names = inputs.names or tuple(f"argument {n}" for n in range(len(inputs.tensors)))
    return " and ".join(f"{name} {_describe(tensor)}" for name, tensor in zip(names, inputs.tensors, strict=True))


def _describe(tensor: Tensor) -> str:
    kind = "" if tensor.dtype == torch.float32 else f" {str(tensor.dtype).removeprefix('torch.')}"
    return f"{tuple(tensor.shape[1:])}{kind}"
