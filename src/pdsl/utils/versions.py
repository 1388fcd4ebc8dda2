"""Versions of the software that produced a file."""

import platform
from importlib.metadata import version


def versions() -> dict[str, str]:
    """Versions of pdsl, torch and Python."""
    return {"pdsl": version("pdsl"), "torch": version("torch"), "python": platform.python_version()}
