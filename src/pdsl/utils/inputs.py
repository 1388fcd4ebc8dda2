"""Inputs of a model: one tensor with a row per record, or several tensors (`Fields`)."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
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
FIXED = -1  # in `AugmentedFields.source`: the record has no random transform


class RecordReader(Protocol):
    """Read the inputs of one record of a data set, with all random generators started from a seed."""

    def __call__(self, index: int, seed: int) -> tuple[Tensor, ...]: ...


class AugmentedFields(Fields):
    """Records with random transforms: `at` draws the transforms anew, all other uses see one fixed reading."""

    def __init__(self, fixed: Inputs, readers: Sequence[RecordReader], source: Tensor, index: Tensor):
        super().__init__(tensors_of(fixed), fixed.names if isinstance(fixed, Fields) else None)
        self.fixed = fixed
        self.readers = tuple(readers)
        self.source = source  # [n] reader of each record, or FIXED
        self.index = index  # [n] its place in the data set of that reader
        self._last: tuple[bytes, Inputs] | None = None  # neighbours request gradients on the same batch

    def __getitem__(self, index: "int | slice | Tensor") -> "AugmentedFields":
        return AugmentedFields(self.fixed[index], self.readers, self.source[index], self.index[index])

    def to(self, device: torch.device | str) -> "AugmentedFields":
        return AugmentedFields(self.fixed.to(device), self.readers, self.source, self.index)

    def at(self, batch: Tensor, seeds: NDArray[np.uint64]) -> Inputs:
        """Read the records of a batch; the transforms of record b are a function of seeds[b] only."""
        key = batch.numpy().tobytes() + seeds.tobytes()
        last = self._last
        if last is not None and last[0] == key:
            return last[1]
        columns = [tensor[batch].clone() for tensor in self.tensors]
        for row, (place, seed) in enumerate(zip(batch.tolist(), seeds.tolist(), strict=True)):
            if (source := int(self.source[place])) != FIXED:
                record = self.readers[source](int(self.index[place]), seed)
                for column, value in zip(columns, record, strict=True):
                    column[row] = value.to(column.device)
        read = Fields(columns, self.names) if isinstance(self.fixed, Fields) else columns[0]
        self._last = key, read
        return read


def fixed_reading(inputs: Inputs) -> Inputs:
    """The records themselves; those with random transforms as they were first read."""
    return inputs.fixed if isinstance(inputs, AugmentedFields) else inputs


def split(inputs: Inputs, size: int) -> list[Inputs]:
    """Blocks of `size` records; the last may be smaller. No records are one empty block."""
    return [inputs[start : start + size] for start in range(0, max(1, len(inputs)), size)]


def tensors_of(inputs: Inputs) -> tuple[Tensor, ...]:
    return inputs.tensors if isinstance(inputs, Fields) else (inputs,)


def map_inputs(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """Apply a function to each tensor of the inputs; random transforms are fixed."""
    inputs = fixed_reading(inputs)
    return inputs.map(function) if isinstance(inputs, Fields) else function(inputs)


def concat(parts: Sequence[Inputs]) -> Inputs:
    """Concatenate records."""
    if any(isinstance(part, AugmentedFields) for part in parts):
        return _concat_augmented(parts)
    first = parts[0]
    if isinstance(first, Fields):
        columns = zip(*(tensors_of(part) for part in parts), strict=True)
        return Fields([torch.cat(column) for column in columns], first.names)
    return torch.cat([part for part in parts if isinstance(part, Tensor)])


def _concat_augmented(parts: Sequence[Inputs]) -> Inputs:
    readers: list[RecordReader] = []
    sources, indices = [], []
    for part in parts:
        if isinstance(part, AugmentedFields):
            sources.append(torch.where(part.source == FIXED, FIXED, part.source + len(readers)))
            indices.append(part.index)
            readers += part.readers
        else:
            sources.append(torch.full((len(part),), FIXED))
            indices.append(torch.zeros(len(part), dtype=torch.int64))
    fixed = concat([fixed_reading(part) for part in parts])
    return AugmentedFields(fixed, readers, torch.cat(sources), torch.cat(indices))


def same(a: Inputs, b: Inputs) -> bool:
    """Whether two inputs are equal, bit for bit."""
    return all(torch.equal(x, y) for x, y in zip(tensors_of(a), tensors_of(b), strict=True))


def tensors_digest(tensors: Iterable[Inputs]) -> str:
    """Digest of values, shapes and order."""
    digest = hashlib.sha256()
    for tensor in (tensor for inputs in tensors for tensor in tensors_of(inputs)):
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()


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
