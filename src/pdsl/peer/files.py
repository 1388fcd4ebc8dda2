"""Files that others sent: how they are read."""

import tomllib
from pathlib import Path
from typing import Any

from pdsl.errors import PdslError

MOST_BYTES = 1_000_000  # of a card or a plan


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
