"""Records of map-style data sets, item by item; random transforms are drawn anew whenever a record is read."""

import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pdsl.data.validation import Array, Source, as_array, convert_inputs
from pdsl.settings import DataSettings
from pdsl.utils.errors import PdslError
from pdsl.utils.inputs import AugmentedFields, tensors_of

LABELS = ("label", "labels", "target", "y")  # default names of the target
PROBES = 32  # records read again, to find random transforms; one that acts on a tenth of readings is found in 99.8 %
FIRST = 0  # seed of the fixed reading: the same for all records, so that it depends on the record only
READING = threading.RLock()  # transforms draw from global generators


class Items(Protocol):
    """A map-style data set, such as a torch Dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Start the global generators of torch, numpy and Python from a seed; restore their states afterwards."""
    with READING:
        before = torch.get_rng_state(), np.random.get_state(), random.getstate()
        try:
            torch.default_generator.manual_seed(seed % 2**63)
            np.random.seed(seed % 2**32)
            random.seed(seed)
            yield
        finally:
            torch.set_rng_state(before[0])
            np.random.set_state(before[1])
            random.setstate(before[2])


class ItemReader:
    """Reader of a data set's items as (input, label)."""

    def __init__(self, items: Items, where: str, settings: DataSettings):
        self.items = items
        self.where = where
        self.settings = settings
        self.like: list[tuple[torch.Size, torch.dtype]] = []  # form of the first record

    def item(self, index: int, seed: int) -> tuple[object, object]:
        """Input and label of an item; random transforms follow the seed."""
        with seeded(seed):
            try:
                item = self.items[index]
            except PdslError:
                raise
            except Exception as error:  # a user's code may raise anything
                reason = " ".join(str(error).split()) or type(error).__name__
                raise PdslError(f"{self.where}: item {index} cannot be read: {reason}") from error
        return self._split(item, index)

    def __call__(self, index: int, seed: int) -> tuple[Tensor, ...]:
        """Input tensors of one record, without the dimension of records."""
        arrays, names = _arrays(self.item(index, seed)[0], f"{self.where}: input of item {index}")
        one = _join([array[None] for array in arrays], names)
        tensors = tuple(t[0] for t in tensors_of(convert_inputs(one, self.where, self.settings.pixels).x))
        form = [(tensor.shape, tensor.dtype) for tensor in tensors]
        self.like = self.like or form
        if form != self.like:
            shapes = [list(shape) for shape, _ in form], [list(shape) for shape, _ in self.like]
            raise PdslError(
                f"{self.where}: item {index} changes its shape from {shapes[1]} to {shapes[0]} when it is read again;"
                " end the transforms with a crop or resize to one size"
            )
        return tensors

    def _split(self, item: object, index: int) -> tuple[object, object]:
        if isinstance(item, Mapping):
            target = self.settings.target
            name = target if isinstance(target, str) else next((name for name in LABELS if name in item), None)
            if name is None or name not in item:
                keys = ", ".join(str(key) for key in item)
                raise PdslError(f"{self.where}: item {index} has no {name or 'label'}; name it, target='...' ({keys})")
            wanted = self.settings.columns or [key for key in item if key not in (name, self.settings.owner)]
            inputs = {key: item[key] for key in wanted}
            return (next(iter(inputs.values())) if len(inputs) == 1 else inputs), item[name]
        if not (isinstance(item, tuple | list) and len(item) == 2):
            more = " ((a, b), label) for several inputs" if isinstance(item, tuple | list) and len(item) > 2 else ""
            raise PdslError(
                f"{self.where}: item {index} of the Dataset is not (input, label); wrap it so that it is{more}"
            )
        return item[0], item[1]


def from_items(items: Items, where: str, settings: DataSettings) -> Source:
    """Read all items once. If their transforms are random, the inputs are kept as `AugmentedFields`."""
    n = len(items)
    if n == 0:
        raise PdslError(f"{where}: the Dataset is empty; give at least one record")
    reader = ItemReader(items, where, settings)
    read = [reader.item(i, FIRST) for i in range(n)]
    stacked = stack_inputs([value for value, _ in read], where)
    x, pixels = convert_inputs(stacked, f"{where}: x", settings.pixels)
    pixels = pixels or is_image(read[0][0])
    if _is_random(reader, n):
        reader(0, FIRST)  # sets the form that later readings must have
        source, index = torch.zeros(n, dtype=torch.int64), torch.arange(n)
        x = AugmentedFields(x, [reader], source, index)
    return Source(x, _stack_labels([label for _, label in read]), where, class_names=_class_names(items), pixels=pixels)


def stack_inputs(values: Sequence[object], where: str) -> object:
    """Inputs of all items as an array [n, ...], or as a tuple or mapping of arrays."""
    inputs = [_arrays(value, f"{where}: input of item {i}") for i, value in enumerate(values)]
    first, names = inputs[0]
    for i, (arrays, own) in enumerate(inputs):
        if own != names or [array.shape for array in arrays] != [array.shape for array in first]:
            shapes = f"shape {_describe(arrays)}, item 0 {_describe(first)}"
            raise PdslError(f"{where}: item {i} has {shapes}; bring all inputs to one shape")
    return _join([np.stack(column) for column in zip(*(arrays for arrays, _ in inputs), strict=True)], names)


def _is_random(reader: ItemReader, n: int) -> bool:
    """Whether records change when they are read again with another seed."""
    found = False
    for k in range(PROBES):
        i = k * (n - 1) // (PROBES - 1)
        first, again, other = (reader.item(i, seed) for seed in (FIRST, FIRST, FIRST + k + 1))
        if _fingerprint(first[0]) != _fingerprint(again[0]):
            raise PdslError(
                f"{reader.where}: item {i} changes whenever it is read; its transforms must draw from the global"
                " generator of torch, numpy or random, so that runs can be repeated"
            )
        if _fingerprint(first[1]) != _fingerprint(other[1]):
            raise PdslError(f"{reader.where}: the label of item {i} is random; give every record one label")
        found = found or _fingerprint(first[0]) != _fingerprint(other[0])
    return found


def as_input(value: object, name: str) -> Array:
    """One input as an array; an image becomes [channels, rows, columns], its bytes divided by 255."""
    if is_image(value):
        return image_array(value, name).astype(np.float32) / np.float32(255)
    if isinstance(value, bool | int | float):
        return np.asarray(value)
    return as_array(value, name)


def is_image(value: object) -> bool:
    """Whether a value is an image of the package PIL."""
    return type(value).__module__.startswith("PIL.")


def image_array(image: object, name: str) -> Array:
    """Pixels of an image: [channels, rows, columns] bytes."""
    array = np.asarray(image)
    if array.dtype != np.uint8 or array.ndim not in (2, 3):
        mode = getattr(image, "mode", "?")
        raise PdslError(f"{name} is an image of mode {mode}; convert it first: image.convert('L') or ('RGB')")
    return array[None] if array.ndim == 2 else np.moveaxis(array, -1, 0)


def _arrays(value: object, name: str) -> tuple[list[Array], tuple[str, ...] | None]:
    """Arrays of an input, with their names: None for a tuple or a single array, which has the name ''."""
    if isinstance(value, Mapping):
        return [as_input(item, f"{name}[{key!r}]") for key, item in value.items()], tuple(str(key) for key in value)
    if isinstance(value, tuple):
        return [as_input(item, f"{name}[{k}]") for k, item in enumerate(value)], None
    return [as_input(value, name)], ("",)


def _join(arrays: Sequence[Array], names: tuple[str, ...] | None) -> object:
    """Inverse of `_arrays`."""
    if names is None:
        return tuple(arrays)
    return arrays[0] if names == ("",) else dict(zip(names, arrays, strict=True))


def _describe(arrays: Sequence[Array]) -> str:
    return " and ".join(str(list(array.shape)) for array in arrays)


def _stack_labels(labels: list[object]) -> object:
    """Labels as an array; lists of different lengths stay lists."""
    if all(isinstance(label, Tensor | np.ndarray | np.generic | bool | int | float | str) for label in labels):
        arrays = [np.asarray(label) for label in labels]
        if len({array.shape for array in arrays}) == 1:
            return np.stack(arrays)
    return labels


def _fingerprint(value: object) -> object:
    """Value that is equal for equal inputs or labels."""
    if isinstance(value, Mapping):
        return {key: _fingerprint(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_fingerprint(item) for item in value]
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) or is_image(value):
        array = np.asarray(value)
        return array.shape, array.tobytes()
    return value


def _class_names(items: object) -> tuple[str, ...]:
    """Names of the classes that a data set declares, as those of torchvision do in `classes`."""
    while not hasattr(items, "classes") and hasattr(items, "dataset"):  # a Subset
        items = items.dataset
    names = getattr(items, "classes", None)
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        return tuple(names)
    return ()
