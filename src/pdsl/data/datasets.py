"""What a data set is, the public ones, and the public set Q that is split off for validation."""

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdsl.data import files
from pdsl.errors import PdslError
from pdsl.randomness import Streams
from pdsl.settings import DataSettings

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Data:
    """Records to learn from, and public ones to test on."""

    name: str
    x: Tensor  # [n, ...] float32
    y: Tensor  # [n] int64
    test_x: Tensor
    test_y: Tensor
    classes: int
    owner: Tensor | None = None  # [n] the agent of each record, where the data come with a natural partition
    validation: tuple[Tensor, Tensor] | None = None  # a public Q that came with the data
    note: str | None = None  # something the user must know, shown in the run's summary
    published: int | None = None  # training records of a data set that everybody has; None: their number is private


def load(settings: DataSettings, streams: Streams, agents: int | None = None) -> Data:
    """The data set the settings name. `agents`, if given, is checked against a folder with one file per agent."""
    if settings.name == "npz":
        from pdsl.data.own import load_npz  # here, because `own` builds on Data

        return load_npz(settings, streams, agents)
    return PUBLIC[settings.name]()


def split_public(data: Data, size: int | None, streams: Streams) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(Q, test), disjoint: Q came with the data, or is `size` records drawn at random from the test set.

    Without a size Q is 2000 records, or half of a test set smaller than 4000, or all of the Q that came with the data.
    """
    generator = streams.generator("validation")
    test = (data.test_x, data.test_y)
    if data.validation is not None:
        x, y = data.validation
        chosen = _choose(len(y), len(y) if size is None else size, generator)
        return (x[chosen], y[chosen]), test
    n = len(data.test_y)
    size = min(2000, n // 2) if size is None else size
    if not 0 < size < n:
        raise PdslError(
            f"data.validation: a public set Q of {size} records leaves nothing of a test set of {n} to test on"
            f" (data set {data.name}); try a value from 1 to {n - 1}, or more test records"
        )
    chosen = _choose(n, size, generator)
    return (data.test_x[chosen], data.test_y[chosen]), (data.test_x[~chosen], data.test_y[~chosen])


def parse_idx(content: bytes, where: str) -> Bytes:
    """An array of bytes in the IDX format of MNIST: 0 0 8 d, then d big-endian sizes, then the values."""
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
    """Images and labels of a CIFAR-10 .bin file: per record a label, then the red, green and blue planes."""
    record = 1 + 3 * 32 * 32
    if not content or len(content) % record:
        raise PdslError(f"{where}: {len(content)} bytes are not whole records of {record}; get the original again")
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, record)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def _digits() -> Data:
    """1,797 images of 8 by 8 in 17 greys, shipped with scikit-learn. It has no test set of its own: a third of each
    class, drawn once and for all (not by the run's seed), is the test set."""
    table = _shipped_digits()
    images, labels = table[:, :-1], table[:, -1]
    generator = Streams(0).generator("digits/test")
    test = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        records = np.flatnonzero(labels == label)
        test[generator.choice(records, round(len(records) / 3), replace=False)] = True
    x = _standardised(images.reshape(-1, 1, 8, 8), 16, [0.3053], [0.3760])
    y = _labels(labels)
    return Data("digits", x[~test], y[~test], x[test], y[test], classes=10, published=int((~test).sum()))


def _shipped_digits() -> NDArray[np.int64]:  # [1797, 65]
    """The file alone: importing scikit-learn for it would take a second and sixty megabytes of every process."""
    package = find_spec("sklearn")
    folders = (package and package.submodule_search_locations) or []
    for path in (Path(folder, "datasets", "data", "digits.csv.gz") for folder in folders):
        if path.exists():
            with gzip.open(path) as file:
                return np.loadtxt(file, delimiter=",").astype(np.int64)
    raise PdslError("the embedded digits are scikit-learn's, which is not here whole; pip install scikit-learn")


def _idx_images(name: str, std: float) -> Data:
    """Black stays 0. Most of an image is black: were it another constant, most of a record's gradient would be about
    the background, and clipping would leave less of it for the figure."""
    root = files.data_root()

    def images_and_labels(part: str) -> tuple[Tensor, Tensor]:
        names = (f"{part}-images-idx3-ubyte.gz", f"{part}-labels-idx1-ubyte.gz")
        images, labels = (parse_idx(files.read(name, file, root), f"{name}: {file}") for file in names)
        return _standardised(images[:, None], 255, [0.0], [std]), _labels(labels)

    return Data(name, *images_and_labels("train"), *images_and_labels("t10k"), classes=10, published=60_000)


def _cifar10() -> Data:
    root = files.data_root()

    def images_and_labels(names: list[str]) -> tuple[Tensor, Tensor]:
        parts = [parse_cifar10(files.read("cifar10", file, root), f"cifar10: {file}") for file in names]
        images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        mean, std = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]
        return _standardised(images, 255, mean, std), _labels(labels)

    train = [f"data_batch_{k}.bin" for k in range(1, 6)]
    return Data(
        "cifar10", *images_and_labels(train), *images_and_labels(["test_batch.bin"]), classes=10, published=50_000
    )


# The constants below and above are published ones: computing them from the training records would tell about these.
PUBLIC: dict[str, Callable[[], Data]] = {
    "digits": _digits,
    "mnist": partial(_idx_images, "mnist", 0.3081),
    "fashion-mnist": partial(_idx_images, "fashion-mnist", 0.3530),
    "cifar10": _cifar10,
}


def _standardised(pixels: NDArray[np.number], white: int, mean: list[float], std: list[float]) -> Tensor:
    """Pixels as (pixel / white - mean) / std of their channel."""
    x = torch.from_numpy(pixels.astype(np.float32))  # [n, channels, height, width]
    per_channel = (-1, 1, 1)
    return x.div_(white).sub_(torch.tensor(mean).view(per_channel)).div_(torch.tensor(std).view(per_channel))


def _labels(labels: NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(labels.astype(np.int64))


def _choose(n: int, size: int, generator: np.random.Generator) -> Tensor:  # [n] bool
    """`size` of n, or all n if there are fewer."""
    chosen = torch.zeros(n, dtype=torch.bool)
    chosen[torch.from_numpy(generator.permutation(n)[:size])] = True
    return chosen
