"""How a file comes to be on disk: whole, or not at all; and who may have read a secret one."""

import os
from pathlib import Path

from pdsl.errors import PdslError

PART = ".part"  # ends the name of a file that is being written
PUBLIC, PRIVATE = 0o644, 0o600


def write_whole(path: Path, content: bytes, mode: int = PUBLIC) -> None:
    """Write aside, make it last, rename: a reader finds the old file or the new one, never a part."""
    aside = path.with_name(path.name + PART)
    how = os.O_TRUNC
    if mode != PUBLIC:
        aside.unlink(missing_ok=True)  # what a crash left there would keep its own mode
        how = os.O_EXCL  # and what somebody else put there meanwhile is not written to
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | how, mode), "wb") as file:  # noqa: PTH123
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_private(path: Path, advice: str = "restore it from a copy") -> bytes:
    """A secret's bytes. Refused if anybody but its owner could have read or changed it."""
    try:
        mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            raise PdslError(f"{path} is open to others (mode {mode:04o}); if none has read it: chmod 600 {path}")
        return path.read_bytes()
    except OSError as e:
        raise PdslError(f"{path}: {e.strerror}; {advice}") from e
