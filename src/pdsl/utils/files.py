"""Atomic writing of files, checks of paths, and reading of files that may come from outside."""

import errno
import os
import stat
from pathlib import Path
from tempfile import TemporaryFile

from pdsl.utils.errors import PdslError

PART = ".part"  # suffix of a file that is being written
PUBLIC, PRIVATE = 0o644, 0o600  # file modes


def write_whole(path: Path, content: bytes, mode: int = PUBLIC) -> None:
    """Write atomically: write a temporary file, sync and rename, so a reader sees the old file or the new one."""
    temporary = path.with_name(path.name + PART)
    flag = os.O_TRUNC
    if mode != PUBLIC:
        temporary.unlink(missing_ok=True)  # a file left by a crash would keep its mode
        flag = os.O_EXCL  # do not write to a file that another process has created meanwhile
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | flag, mode), "wb") as file:  # noqa: PTH123
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_file(path: Path, limit: int = -1) -> bytes:
    """Read a file, at most `limit` bytes; OSError if it is a named pipe, a device or a folder: a pipe would block."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a file", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit)
    finally:
        os.close(descriptor)


def read_private(path: Path, advice: str = "restore it from a copy") -> bytes:
    """Read a private file; PdslError if others than its owner can read or change it."""
    try:
        mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            raise PdslError(f"{path} is open to others (mode {mode:04o}); if it was not read, run chmod 600 {path}")
        return read_file(path)
    except OSError as e:
        raise PdslError(f"{path}: {e.strerror}; {advice}") from e


def check_folder(folder: Path, option: str) -> None:
    """Raise PdslError if the folder cannot be written to or created; nothing is created now."""
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with TemporaryFile(dir=existing):
            pass
    except OSError as e:
        raise PdslError(f"cannot write to {folder}: {e.strerror}; choose another {option}") from e


def check_file(file: Path, option: str) -> None:
    """Raise PdslError if the file cannot be written; its folder must exist."""
    if file.is_dir() or not file.parent.is_dir():
        why = "it is a folder" if file.is_dir() else f"there is no folder {file.parent}"
        raise PdslError(f"cannot write {file}: {why}; choose another {option}")
    check_folder(file.parent, option)
