"""Files of the public data sets: found, checked against their sums, and fetched whole or not at all.

The sums of the real files would refuse small ones, so these tests give the table entries of their own, and serve
what is fetched from this machine.
"""

import dataclasses
import gzip
import hashlib
import io
import struct
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from pdsl.data import data_root, fetch, load, status
from pdsl.data.download import SOURCES, Source, read
from pdsl.settings import DataSettings
from pdsl.utils.random import Streams
from tests.helpers.refusals import refused

IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def contents() -> dict[str, bytes]:
    """A data set of three training and two test images, as unpacked files."""
    generator = np.random.default_rng(0)
    return {
        f"{part}-{kind}-ubyte.gz": idx(generator.integers(0, 10, (n, *shape), dtype=np.uint8))
        for part, n in [("train", 3), ("t10k", 2)]
        for kind, shape in [("images-idx3", (28, 28)), ("labels-idx1", ())]
    }


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path]]:
    """The address of a server on this machine, and the folder it serves."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder = tmp_path / "served"
    folder.mkdir()
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, args=[0.01], daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}/", folder
        running.shutdown()


@pytest.fixture
def mnist(contents: dict[str, bytes], server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> Source:
    """The small data set in the place of MNIST, ready to be fetched."""
    url, folder = server
    packed = {file: gzip.compress(content, mtime=0) for file, content in contents.items()}
    for file, content in packed.items():
        (folder / file).write_bytes(content)
    sums, packed_sums = ({f: md5(c) for f, c in files.items()} for files in (contents, packed))
    source = dataclasses.replace(SOURCES["mnist"], files=sums, url=url, downloads=packed_sums)
    monkeypatch.setitem(SOURCES, "mnist", source)
    return source


@pytest.fixture
def cifar10(server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> Source:
    url, folder = server
    contents = {file: bytes([k]) + bytes([k]) * 3072 for k, file in enumerate(SOURCES["cifar10"].files)}
    archive = folder / "cifar-10-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for path in [*(f"cifar-10-batches-bin/{file}" for file in contents), "../../escaped.bin"]:
            member = tarfile.TarInfo(path)
            content = contents.get(Path(path).name, b"evil")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    source = dataclasses.replace(
        SOURCES["cifar10"],
        files={file: md5(content) for file, content in contents.items()},
        url=url,
        downloads={archive.name: md5(archive.read_bytes())},
    )
    monkeypatch.setitem(SOURCES, "cifar10", source)
    return source


def test_the_root_is_pdsl_data_or_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSL_DATA", str(tmp_path))
    assert data_root() == tmp_path
    monkeypatch.delenv("PDSL_DATA")
    assert data_root().name == "pdsl"


def test_fetched_data_load(
    mnist: Source, contents: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = fetch("mnist", tmp_path)
    assert [path.name for path in paths] == list(mnist.files)
    monkeypatch.setenv("PDSL_DATA", str(tmp_path))
    data = load(DataSettings(name="mnist"), Streams(0))
    assert data.x.shape == (3, 1, 28, 28)
    assert bytes(data.y.tolist()) == contents[LABELS][8:]
    pixels = np.frombuffer(contents[IMAGES][16:], dtype=np.uint8).reshape(3, 1, 28, 28)
    np.testing.assert_allclose(data.x.numpy(), pixels / 255 / 0.3081, rtol=1e-5)


def test_status_tells_what_is_there(mnist: Source, tmp_path: Path) -> None:
    assert {found.name: found.present for found in status(tmp_path)} == {
        "digits": True,
        "mnist": False,
        "fashion-mnist": False,
        "cifar10": False,
    }
    fetch("mnist", tmp_path)
    found = next(found for found in status(tmp_path) if found.name == "mnist")
    assert found.present
    assert Path(found.where) == tmp_path / mnist.folder


def test_right_files_are_kept_and_wrong_ones_replaced(
    mnist: Source, contents: dict[str, bytes], tmp_path: Path
) -> None:
    folder = tmp_path / mnist.folder
    folder.mkdir(parents=True)
    recompressed = gzip.compress(contents[IMAGES], compresslevel=1)
    (folder / IMAGES).write_bytes(recompressed)
    (folder / LABELS).write_bytes(b"wrong")
    unpacked = folder / "t10k-labels-idx1-ubyte"
    unpacked.write_bytes(contents[f"{unpacked.name}.gz"])
    assert unpacked in fetch("mnist", tmp_path)
    assert (folder / IMAGES).read_bytes() == recompressed
    assert not (folder / f"{unpacked.name}.gz").exists()
    for file, content in contents.items():
        assert read("mnist", file, tmp_path) == content


def test_a_tar_is_unpacked_into_its_files_and_nowhere_else(cifar10: Source, tmp_path: Path) -> None:
    root = tmp_path / "deep" / "root"
    fetch("cifar10", root)
    assert {path.name for path in (root / cifar10.folder).iterdir()} == set(cifar10.files)
    assert not list(tmp_path.rglob("escaped.bin"))
    assert read("cifar10", "data_batch_3.bin", root) == bytes([2]) * 3073


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_without_network_the_message_says_what_to_put_where(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as closed:
        url = f"http://127.0.0.1:{closed.server_address[1]}/"
    source = dataclasses.replace(SOURCES[name], url=url)
    monkeypatch.setitem(SOURCES, name, source)
    with refused(name, "could not fetch", url, *source.files, str(tmp_path / source.folder)):
        fetch(name, tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_download_with_a_wrong_sum_is_not_kept(mnist: Source, server: tuple[str, Path], tmp_path: Path) -> None:
    (server[1] / LABELS).write_bytes(b"something else")
    with refused("mnist", mnist.downloads[LABELS], md5(b"something else")):
        fetch("mnist", tmp_path)
    assert not (tmp_path / mnist.folder / LABELS).exists()


def test_an_unwritable_root_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with refused("mnist", "could not fetch", "Not a directory"):
        fetch("mnist", tmp_path / "file")


def test_an_unknown_data_set_is_refused(tmp_path: Path) -> None:
    with refused("'imagenet'", "cifar10"):
        fetch("imagenet", tmp_path)
    assert fetch("digits", tmp_path) == []


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_damaged_files_are_named_with_both_sums(
    name: str, mnist: Source, contents: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = gzip.compress(contents[IMAGES])
    if name == "fashion-mnist":
        monkeypatch.setitem(SOURCES, name, dataclasses.replace(SOURCES[name], files={IMAGES: md5(packed)}))
    path = tmp_path / SOURCES[name].folder / IMAGES
    path.parent.mkdir(parents=True)
    path.write_bytes(packed)
    assert read(name, IMAGES, tmp_path) == contents[IMAGES]
    other = gzip.compress(b"other")
    found = md5(other) if name == "fashion-mnist" else md5(b"other")
    expected = SOURCES[name].files[IMAGES]
    for damaged, part in [
        (other, found),
        (packed[:-20], "cannot be unpacked"),
        (packed[:100] + bytes(50) + packed[150:], "found:"),
        (b"<html>", "cannot be unpacked"),
        (b"", "found:"),
    ]:
        path.write_bytes(damaged)
        with refused(str(path), expected, part, f"pdsl data fetch {name}"):
            read(name, IMAGES, tmp_path)
