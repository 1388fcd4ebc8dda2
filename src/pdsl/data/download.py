"""Files of the built-in data sets: location, checksums and download."""

import gzip
import hashlib
import os
import tarfile
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from pdsl.utils.errors import PdslError


@dataclass(frozen=True)
class Source:
    """Files of a data set with their md5 sums, and the downloads that contain them."""

    folder: str  # below the data root
    files: dict[str, str]
    sum_of: Literal[
        "file", "content"
    ]  # md5 of the stored or of the unpacked file; the latter may also be stored unpacked
    url: str
    downloads: dict[str, str]  # names below url and md5 sums: the files, or a tar that has them in `folder`


FASHION = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}

SOURCES = {
    "mnist": Source(
        folder="MNIST/raw",
        # Sums of the content, because copies are often recompressed or unpacked.
        files={
            "train-images-idx3-ubyte.gz": "6bbc9ace898e44ae57da46a324031adb",
            "train-labels-idx1-ubyte.gz": "a25bea736e30d166cdddb491f175f624",
            "t10k-images-idx3-ubyte.gz": "2646ac647ad5339dbf082846283269ea",
            "t10k-labels-idx1-ubyte.gz": "27ae3e4e09519cfbb04c329615203637",
        },
        sum_of="content",
        url="https://ossci-datasets.s3.amazonaws.com/mnist/",
        downloads={
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    "fashion-mnist": Source(
        folder="FashionMNIST/raw",
        files=FASHION,
        sum_of="file",
        url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        downloads=FASHION,
    ),
    "cifar10": Source(
        folder="cifar-10-batches-bin",
        files={
            "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
            "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
            "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
            "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
            "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
            "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
        },
        sum_of="file",
        url="https://www.cs.toronto.edu/~kriz/",
        downloads={"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
    ),
}


class Status(NamedTuple):
    name: str
    present: bool  # all its files exist; checksums are verified on reading
    where: str


def data_root() -> Path:
    """Folder of all data sets: PDSL_DATA, or the user's cache directory."""
    if given := os.environ.get("PDSL_DATA"):
        return Path(given).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("pdsl"))


def status(root: Path) -> list[Status]:
    """Status of each built-in data set, without reading its files."""
    found = [
        Status(name, all(_find(source, file, root) for file in source.files), str(root / source.folder))
        for name, source in SOURCES.items()
    ]
    return [Status("digits", True, "scikit-learn"), *found]


def read(name: str, file: str, root: Path) -> bytes:
    """Unpacked content of one file of a data set, after verifying its checksum."""
    source = SOURCES[name]
    path = _find(source, file, root)
    if path is None:
        raise PdslError(
            f"{name}: no {file} in {root / source.folder}; run 'pdsl data fetch {name}', or put"
            f" {', '.join(source.files)} there, or set PDSL_DATA to the folder that has {source.folder}"
        )
    try:
        stored = path.read_bytes()
    except OSError as error:
        raise PdslError(
            f"{name}: cannot read {path} ({_reason(error)}); check that it is a file and its permissions"
        ) from error
    try:
        content = gzip.decompress(stored) if path.suffix == ".gz" else stored
        found = _md5(stored if source.sum_of == "file" else content)
    except (OSError, EOFError, zlib.error):
        content, found = b"", "none, it cannot be unpacked"
    if found != source.files[file]:
        raise PdslError(
            f"{name}: {path} is damaged or not the original (md5 expected: {source.files[file]}, found: {found});"
            f" run 'pdsl data fetch {name}' to replace it"
        )
    return content


def fetch(name: str, root: Path) -> list[Path]:
    """Download the missing or damaged files of a data set; return the paths of all its files.

    A file appears under its name only when it is complete and its checksum is right.
    """
    if name == "digits":
        return []  # part of scikit-learn
    if name not in SOURCES:
        raise PdslError(f"no data set {name!r} to fetch; try one of digits, {', '.join(SOURCES)}")
    source = SOURCES[name]
    folder = root / source.folder
    wanted = [file for file in source.files if not _is_valid(name, file, root)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if source.files.keys() == source.downloads.keys():
            for file in wanted:
                _download(source, file, folder)
        elif wanted:
            with tempfile.TemporaryDirectory(dir=folder) as aside:
                for archive in source.downloads:
                    unpack(_download(source, archive, Path(aside)), source, wanted, folder)
    except (OSError, ValueError) as error:  # no network, no space, no write permission; unexpected content
        raise PdslError(
            f"{name}: could not fetch {', '.join(source.downloads)} from {source.url} ({_reason(error)}); try again"
            f" later, or put {', '.join(wanted)} in {folder} yourself"
        ) from error
    return [path for file in source.files if (path := _find(source, file, root))]


def unpack(archive: Path, source: Source, wanted: list[str], folder: Path) -> None:
    """Extract the wanted files of a tar. No path from the tar is used, so it cannot write anywhere else."""
    with tarfile.open(archive) as tar:
        for file in wanted:
            member = tar.extractfile(f"{source.folder}/{file}")
            if member is None:
                raise ValueError(f"{file} is not a file in {archive.name}")
            aside = archive.parent / file
            aside.write_bytes(member.read())
            aside.replace(folder / file)


def _download(source: Source, file: str, folder: Path) -> Path:
    import pooch

    # pooch downloads to a temporary file and renames it after verifying the checksum.
    known_hash = f"md5:{source.downloads[file]}"
    return Path(pooch.retrieve(source.url + file, known_hash, fname=file, path=folder, progressbar=True))


def _find(source: Source, file: str, root: Path) -> Path | None:
    path = root / source.folder / file
    if path.exists():
        return path
    unpacked = path.with_suffix("")
    return unpacked if source.sum_of == "content" and unpacked.exists() else None


def _is_valid(name: str, file: str, root: Path) -> bool:
    try:
        read(name, file, root)
    except PdslError:
        return False
    return True


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _reason(error: Exception) -> str:
    """Shorten an error to one line, because messages of requests and pooch are long."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return " ".join(str(error).split())
