"""Files of an organisation's folder: who may have read them, and how those that others sent are read."""

import tomllib
from pathlib import Path
from typing import Any

from pdsl.errors import PdslError

MOST_BYTES = 1_000_000  # of a card or a plan


def read_private(path: Path, advice: str = "restore it from a copy") -> bytes:
    """A secret's bytes. Refused if anybody but its owner could have read or changed it."""
    try:
        mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            raise PdslError(f"{path} is open to others (mode {mode:04o}); if none has read it: chmod 600 {path}")
        return path.read_bytes()
    except OSError as e:
        raise PdslError(f"{path}: {e.strerror}; {advice}") from e


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The values of a TOML file from outside."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as e:
        raise PdslError(f"{path}: {e.strerror}; give the path of a {what}") from e
    return parse_toml(content, str(path), what)


def parse_toml(content: bytes, where: str, what: str) -> dict[str, Any]:
    """The values of TOML from outside: bounded in size and depth, or PdslError."""
    if len(content) > MOST_BYTES:
        raise PdslError(f"{where}: more than {MOST_BYTES:,} bytes, which no {what} has; ask for it again")
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as e:
        reason = " ".join(str(e).split())[:200]
        raise PdslError(f"{where}: not a {what} ({reason}); ask for it again") from e
