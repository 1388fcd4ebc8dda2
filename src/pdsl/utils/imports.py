"""Import of objects by path: `package.module:name`."""

import importlib
import sys
from pathlib import Path

from pdsl.utils.errors import PdslError


def import_path(value: object) -> str | None:
    """`package.module:name` of a function or class, if importing it elsewhere gives this very object; else None."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module in (None, "__main__") or not name or "." in name:
        return None
    try:
        found = getattr(importlib.import_module(str(module)), name, None)
    except ImportError:
        return None
    return f"{module}:{name}" if found is value else None


def import_object(path: str, setting: str) -> object:
    """Import `package.module:name`, also from the working directory; PdslError if it does not exist."""
    module_name, _, attribute = path.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        found: object = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as e:  # the last two: '.name' and an empty name
        raise PdslError(f"{setting}={path}: {e}; try package.module:name, importable from here") from e
    return found
