"""How a file comes to be on disk: whole, or not at all."""

import os
from pathlib import Path

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
