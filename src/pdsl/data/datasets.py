"""The `Data` container, the built-in data sets, and the split of the public set Q from the test set."""

import gzip
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdsl.data import download
from pdsl.data.scaling import Scaling, measure_scaling
from pdsl.settings import DataSettings
from pdsl.utils.errors import PdslError
from pdsl.utils.inputs import Inputs, describe_shape
from pdsl.utils.random import Streams

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Data:
    """Training records, and public test records."""

    name: str
    x: Inputs = field(repr=False)  # [n, ...]
    y: Tensor = field(repr=False)  # [n] int64 classes, [n, labels] int64, or float32 targets of regression
    test_x: Inputs = field(repr=False)
    test_y: Tensor = field(repr=False)
    classes: int  # number of classes or labels; 0 if the targets are numbers
    owner: Tensor | None = field(default=None, repr=False)  # [n] agent of each record, if the data has them
    validation: tuple[Inputs, Tensor] | None = field(default=None, repr=False)  # a public set Q given with the data
    note: str | None = None  # a warning for the user, printed in the run's summary
    public_size: int | None = None  # size of the public set Q, unless the settings give one
    published: int | None = None  # number of training records of a published data set; None if the number is private
    agent_names: tuple[str, ...] = ()  # in the order of agents; empty: agents have numbers
    class_names: tuple[str, ...] = ()  # in the order of classes or labels; empty: they have numbers
    features: tuple[str, ...] = ()  # names of the inputs [n, features] of a table
    scaling: Scaling | None = None  # constants by which raw inputs were scaled
    standardised: bool = False  # inputs were scaled by mean and deviation of the public set
    schema: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # input columns with their declared categories

    @property
    def agents(self) -> int | None:
        """Number of agents that own the records; None if they are pooled."""
        return None if self.owner is None else len(self.agent_names) or int(self.owner.max()) + 1

    def __repr__(self) -> str:  # records must not be printed
        return f"Data({self.name!r}, records of shape {describe_shape(self.x)}, {self.classes} classes)"


def load(
    settings: DataSettings, streams: Streams, agents: int | None = None, task: str = "auto", private: bool = False
) -> Data:
    """Load the data set of the settings; a folder with one file per agent must have `agents` files, if given.

    `task` and `private` decide how the targets of custom data are converted; see `targets.convert_targets`.
    """
    if settings.name in LOADERS:
        _check_built_in(settings)
        return _load_once(settings.name)
    from pdsl.data.files import load_files  # here, because `files` imports Data

    return load_files(settings, streams, agents, task, private)


@lru_cache(maxsize=1)
def _load_once(name: str) -> Data:
    """A built-in data set. Runs of a sweep in one process share its tensors, which are never changed in place."""
    return LOADERS[name]()


def _check_built_in(settings: DataSettings) -> None:
    """Raise PdslError if settings of the user's own data would be ignored."""
    for name in ("path", "test_path", "target", "owner", "columns", "categories"):
        if getattr(settings, name) is not None:
            raise PdslError(
                f"data.{name}: it is for your own data, but data.name is {settings.name}; set data.name to npz, csv or"
                f" parquet with data.path, or leave data.{name} out"
            )


def split_public(data: Data, size: int | None, streams: Streams) -> tuple[tuple[Inputs, Tensor], tuple[Inputs, Tensor]]:
    """Return (Q, test), disjoint. Q is given with the data, or `size` records drawn at random from the test set.

    Without a size, Q is all of the given Q, or 2000 test records (digits: 100), at most half of the test set.
    """
    generator = streams.generator("validation")
    test = (data.test_x, data.test_y)
    if data.validation is not None:
        x, y = data.validation
        chosen = _choose(len(y), len(y) if size is None else size, generator)
        return (x[chosen], y[chosen]), test
    n = len(data.test_y)
    size = min(data.public_size or 2000, n // 2) if size is None else size
    if not 0 < size < n:
        raise PdslError(
            f"data.validation: a public set Q of {size} records leaves no test records in a test set of {n}"
            f" (data set {data.name}); try a value from 1 to {n - 1}, or more test records"
        )
    chosen = _choose(n, size, generator)
    return (data.test_x[chosen], data.test_y[chosen]), (data.test_x[~chosen], data.test_y[~chosen])


Records = tuple[Inputs, Tensor]


def standardise(data: Data, q: Records, test: Records, settings: DataSettings) -> tuple[Data, Records, Records]:
    """Scale data, public set Q and test set by mean and deviation of Q, which costs no privacy.

    This is the default for tables; `data.scale` changes it. Data that are standardised already are not changed, except
    that `data.scale=public` replaces the published constants of a built-in data set.
    """
    scale = settings.scale or ("public" if data.features else "none")
    if scale == "none" or data.standardised:
        return data, q, test
    if data.published is None and data.scaling is not None and bool((data.scaling.deviation != 1).any()):
        return data, q, test
    again = measure_scaling(q[0])
    scaling = again if data.scaling is None else data.scaling.then(again)

    def scaled(x: Inputs) -> Inputs:
        if not isinstance(x, Tensor):
            raise PdslError("data.scale=public: the data set has random transforms; scale the inputs in them instead")
        return again.apply(x)

    given = None if data.validation is None else (scaled(data.validation[0]), data.validation[1])
    data = replace(
        data, x=scaled(data.x), test_x=scaled(data.test_x), validation=given, scaling=scaling, standardised=True
    )
    return data, (scaled(q[0]), q[1]), (scaled(test[0]), test[1])


def parse_idx(content: bytes, where: str) -> Bytes:
    """Parse a byte array in the IDX format of MNIST: 0 0 8 d, then d big-endian sizes, then the values."""
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise PdslError(f"{where}: not an IDX file of unsigned bytes; get the original again")
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise PdslError(f"{where}: its header is cut off after {len(content)} bytes; get the original again")
    shape = np.frombuffer(content[4:start], dtype=">u4").tolist()
    expected = start + int(np.prod(shape, dtype=object))
    if len(content) != expected:
        raise PdslError(f"{where}: {len(content)} bytes, but its header says {expected}; get the original again")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def parse_cifar10(content: bytes, where: str) -> tuple[Bytes, Bytes]:  # [n, 3, 32, 32], [n]
    """Parse images and labels of a CIFAR-10 .bin file: per record a label, then the red, green and blue planes."""
    record = 1 + 3 * 32 * 32
    if not content or len(content) % record:
        raise PdslError(f"{where}: {len(content)} bytes are not whole records of {record}; get the original again")
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, record)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def _load_digits() -> Data:
    """1,797 images of 8 by 8 pixels in 17 greys, shipped with scikit-learn.

    The data set has no test set. A third of each class, the same in every run, is the test set.
    """
    table = _read_digits()
    images, labels = table[:, :-1], table[:, -1]
    generator = Streams(0).generator("digits/test")
    test = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        records = np.flatnonzero(labels == label)
        test[generator.choice(records, round(len(records) / 3), replace=False)] = True
    scaling = _scaling(16, [0.3053], [0.3760])
    x, y = _to_floats(images.reshape(-1, 1, 8, 8), scaling), _to_labels(labels)
    size = int((~test).sum())
    train, held_out = (x[~test], y[~test]), (x[test], y[test])
    return Data("digits", *train, *held_out, classes=10, published=size, scaling=scaling, public_size=100)


def _read_digits() -> NDArray[np.int64]:  # [1797, 65]
    """Read scikit-learn's file without importing it, because the import takes a second and sixty megabytes."""
    package = find_spec("sklearn")
    folders = (package and package.submodule_search_locations) or []
    for path in (Path(folder, "datasets", "data", "digits.csv.gz") for folder in folders):
        if path.exists():
            return _read_table(path)
    raise PdslError(
        "the digits data set is part of scikit-learn, which is not fully installed; pip install scikit-learn"
    )


@lru_cache(maxsize=1)
def _read_table(path: Path) -> NDArray[np.int64]:
    """Integers of a compressed CSV file. Do not change them in place, because they are cached."""
    with gzip.open(path) as file:
        return np.loadtxt(file, delimiter=",").astype(np.int64)


def _load_idx(name: str, std: float) -> Data:
    """Images scaled by their standard deviation only, so that black stays 0.

    Most of an image is black. With any other constant, most of a record's clipped gradient would be about the
    background.
    """
    root, scaling = download.data_root(), _scaling(255, [0.0], [std])

    def images_and_labels(part: str) -> tuple[Tensor, Tensor]:
        names = (f"{part}-images-idx3-ubyte.gz", f"{part}-labels-idx1-ubyte.gz")
        images, labels = (parse_idx(download.read(name, file, root), f"{name}: {file}") for file in names)
        return _to_floats(images[:, None], scaling), _to_labels(labels)

    train, test = images_and_labels("train"), images_and_labels("t10k")
    return Data(name, *train, *test, classes=10, published=60_000, scaling=scaling)


def _load_cifar10() -> Data:
    root, scaling = download.data_root(), _scaling(255, [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616])

    def images_and_labels(names: list[str]) -> tuple[Tensor, Tensor]:
        parts = [parse_cifar10(download.read("cifar10", file, root), f"cifar10: {file}") for file in names]
        images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return _to_floats(images, scaling), _to_labels(labels)

    train = images_and_labels([f"data_batch_{k}.bin" for k in range(1, 6)])
    test = images_and_labels(["test_batch.bin"])
    return Data("cifar10", *train, *test, classes=10, published=50_000, scaling=scaling)


# Means and standard deviations are published constants: computing them from the training records would leak them.
LOADERS: dict[str, Callable[[], Data]] = {
    "digits": _load_digits,
    "mnist": partial(_load_idx, "mnist", 0.3081),
    "fashion-mnist": partial(_load_idx, "fashion-mnist", 0.3530),
    "cifar10": _load_cifar10,
}


def _scaling(white: int, mean: list[float], std: list[float]) -> Scaling:
    """Constants per channel."""
    per_channel = (-1, 1, 1)
    return Scaling(torch.tensor(mean).view(per_channel), torch.tensor(std).view(per_channel), float(white))


def _to_floats(pixels: NDArray[np.number], scaling: Scaling) -> Tensor:
    x = torch.from_numpy(pixels.astype(np.float32))  # [n, channels, height, width]
    return x.div_(scaling.white).sub_(scaling.mean).div_(scaling.deviation)


def _to_labels(labels: NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(labels.astype(np.int64))


def _choose(n: int, size: int, generator: np.random.Generator) -> Tensor:  # [n] bool
    """Choose `size` of n at random, or all n if there are fewer."""
    chosen = torch.zeros(n, dtype=torch.bool)
    chosen[torch.from_numpy(generator.permutation(n)[:size])] = True
    return chosen
