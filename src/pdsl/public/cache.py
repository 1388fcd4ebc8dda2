"""Results of public computations on disk, named by a digest of their inputs.

A file is written aside and renamed, and carries a digest of its content: a damaged one is computed again. Names of
files are keyed with a secret of this machine's user, because features of private records may be kept here too, and a
plain digest would let others test whether they know a record. Files can be read by their owner only.
"""

import hashlib
import hmac
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from pdsl.utils.errors import PdslError, warn_user
from pdsl.utils.files import PRIVATE, write_whole
from pdsl.utils.inputs import tensors_digest
from pdsl.utils.random import KEY_BYTES

KEY = "cache.key"
CHECKSUM = "sha256"  # of the tensors, in the metadata of a file
Tensors = dict[str, Tensor]
_off: ContextVar[bool] = ContextVar("off", default=False)


def cache_folder() -> Path:
    """Folder of the cache: PDSL_CACHE, or the user's cache directory."""
    if given := os.environ.get("PDSL_CACHE"):
        return Path(given).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("pdsl")) / "public"


@contextmanager
def without_cache() -> Iterator[None]:
    """Compute everything anew in this block, and keep nothing: an audit must not trust what a run has left."""
    token = _off.set(True)
    try:
        yield
    finally:
        _off.reset(token)


def is_off() -> bool:
    return _off.get()


def cached(kind: str, key: str, compute: Callable[[], Tensors], mode: int = PRIVATE) -> tuple[Tensors, Path]:
    """The tensors of a file in the cache, and its path. They are computed if the file is missing or damaged.

    `key`: digest of everything that determines them. One process computes, others wait for it.
    """
    folder = cache_folder()
    if is_off():
        return compute(), folder / "none"
    with _refusing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{kind}-{_name(folder, kind, key)}.safetensors"
        lock = FileLock(path.with_suffix(".lock"), mode=PRIVATE).acquire()
    with lock:  # released at the end of this block
        with _refusing(folder):
            found = _read(path)
        if found is None:
            found = compute()
            content = save({n: t.contiguous() for n, t in found.items()}, {CHECKSUM: _checksum(found)})
            with _refusing(folder):
                write_whole(path, content, mode)
    return found, path


class CacheError(PdslError):
    """Files of the cache cannot be read or written."""


@contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    """Raise CacheError if files of the cache cannot be read or written."""
    try:
        yield
    except OSError as e:
        raise CacheError(f"cannot use the cache {folder}: {e.strerror}; set PDSL_CACHE to another folder") from e


def _read(path: Path) -> Tensors | None:
    """Tensors of a file; None if it is missing, or damaged; the user is warned about damage."""
    try:
        with safe_open(path, framework="pt") as file:
            # copies are aligned in memory like computed tensors, so that both are rounded alike
            found = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  not a dict
            if (file.metadata() or {}).get(CHECKSUM) == _checksum(found):
                return found
    except FileNotFoundError:
        return None
    except (SafetensorError, OSError):
        pass
    warn_user(f"{path} is damaged; it is computed again")
    return None


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    return tensors_digest([tensors[name] for name in sorted(tensors)])


def _name(folder: Path, kind: str, key: str) -> str:
    return hmac.digest(_secret(folder), f"{kind} {key}".encode(), hashlib.sha256).hex()[:32]


def _secret(folder: Path) -> bytes:
    """Key of the file names; created with the cache."""
    path = folder / KEY
    with FileLock(folder / f"{KEY}.lock", mode=PRIVATE):
        if not path.exists() or len(path.read_bytes()) != KEY_BYTES:
            write_whole(path, secrets.token_bytes(KEY_BYTES), PRIVATE)
        return path.read_bytes()
